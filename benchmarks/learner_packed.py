"""Packed sequences against padded ones: the same rows, the same weights, forward and backward.

What padding wastes is known beforehand: tokens of the padded batches / tokens of the rows. Packing should be faster by
nearly that. Padded is the model as transformers has it, with an attention mask; a micro-batch takes rows in the order
in which they come, as many as fit into the budget, all as long as its longest. Lengths are log-normal (cv 1). Every
token is predicted, of a small vocabulary: nothing but padding differs. One thread, CPU seconds, in turns.

Control: padded in the place of packed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from asyncrl.benchmarks.frame import Measured, Row, Say, Target
from asyncrl.benchmarks.learner_flops import by_formula, pairs_of
from asyncrl.benchmarks.learner_turns import cpu_seconds
from asyncrl.benchmarks.memory import MEDIUM
from asyncrl.collectors.engines.simulated import relative_length
from asyncrl.learners.batch import split_rows
from asyncrl.learners.forward import pack_attention, token_logprobs

TARGET = 0.9
"""Of the waste."""

APART = 1e-4
"""Of gradients, relative: float32 sums in another order."""

ROWS, MEAN, LONGEST, BUDGET = 32, 96, 1024, 4096


def measure(*, quick: bool, say: Say, full: bool = False) -> Measured:
    """Rows: `packed`, `padded`, and the control. 6 of the model's 12 layers; quick: 2 of them, one turn; full: all."""
    layers = 12 if full else 2 if quick else 6
    settings: dict[str, Any] = {**MEDIUM, "num_hidden_layers": layers, "max_position_embeddings": LONGEST}
    config = LlamaConfig(**settings)
    return compare(config, lengths(ROWS, MEAN), budget=BUDGET, turns=1 if quick else 3 if full else 2, say=say)


def lengths(rows: int, mean: int) -> list[int]:
    """Tokens of each row, log-normal."""
    return [min(LONGEST, max(2, round(mean * relative_length(0, row, 0, 1.0)))) for row in range(rows)]


def compare(config: LlamaConfig, lengths: Sequence[int], *, budget: int, turns: int, say: Say) -> Measured:
    """What `measure` measures, of rows of these lengths."""
    torch.manual_seed(0)
    plain, packing = (LlamaForCausalLM(copy.deepcopy(config)).train(False) for _ in range(2))
    packing.load_state_dict(plain.state_dict())
    reason = pack_attention(packing)
    assert reason is None, reason
    rows = torch.split(torch.randint(0, config.vocab_size, (sum(lengths),)), list(lengths))
    waste = sum(len(batch) * max(map(len, batch)) for batch in padded_batches(rows, budget)) / sum(lengths)
    gradients: dict[str, Tensor] = {}

    def side(name: str, model: PreTrainedModel, work: Callable[[PreTrainedModel, Sequence[Tensor], int], None]) -> None:
        model.zero_grad()
        work(model, rows, budget)
        gradients[name] = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    sides = {
        "packed": partial(side, "packed", packing, packed),
        "padded": partial(side, "padded", plain, padded),
        "control": partial(side, "control", plain, padded),
    }
    took = cpu_seconds(sides, turns=turns)
    flops = by_formula(config, computed=sum(lengths), pairs=pairs_of(lengths), predicted=sum(lengths))
    table: list[Row] = [
        {
            "part": "packed",
            "side": name,
            "layers": config.num_hidden_layers,
            "rows": len(rows),
            "tokens": sum(lengths),
            "padded_tokens": round(waste * sum(lengths)),
            "cpu_s": round(took[name], 3),
            "tokens_per_s": round(sum(lengths) / took[name], 1),
            "gflops": round(flops / took[name] / 1e9, 1),
        }
        for name in sides
    ]
    faster, control = took["padded"] / took["packed"], took["padded"] / took["control"]
    apart = float((gradients["packed"] - gradients["padded"]).norm() / gradients["padded"].norm())
    say(
        f"packed, {len(rows)} rows, {sum(lengths)} tokens, {config.num_hidden_layers} layers: "
        f"{took['packed']:.2f} s against {took['padded']:.2f} s padded, {faster:.2f} times as fast; waste {waste:.2f}"
    )
    return Measured(
        table,
        [
            Target(f"packed: speed over padded's, of the waste ({waste:.2f})", faster / waste, TARGET, "higher"),
            Target("packed: gradients apart, relative", apart, APART, "lower"),
            Target("control: padded over padded, of the waste", control / waste, TARGET, "lower"),
        ],
    )


def packed(model: PreTrainedModel, rows: Sequence[Tensor], budget: int) -> None:
    """The gradient of the sum of all log-probs, in micro-batches of up to `budget` tokens."""
    for portion in split_rows([len(row) for row in rows], budget):
        batch = [rows[row] for row in portion]
        cu_seqlens = torch.tensor([0, *(len(row) for row in batch)]).cumsum(0)
        torch.autograd.backward(token_logprobs(model, torch.cat(batch), cu_seqlens).sum())


def padded_batches(rows: Sequence[Tensor], budget: int) -> list[list[Tensor]]:
    """In order, as many as fit when all are as long as the longest of them; a longer row goes alone."""
    batches: list[list[Tensor]] = []
    for row in rows:
        if not batches or (len(batches[-1]) + 1) * max(len(row), *map(len, batches[-1])) > budget:
            batches.append([])
        batches[-1].append(row)
    return batches


def padded(model: PreTrainedModel, rows: Sequence[Tensor], budget: int) -> None:
    """The same, filled up on the right."""
    for batch in padded_batches(rows, budget):
        ids: Any = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)
        lengths = torch.tensor([len(row) for row in batch])
        there = torch.arange(ids.shape[1]) < lengths[:, None]
        logits = model(input_ids=ids, attention_mask=there.long(), use_cache=False).logits[:, :-1]
        logprobs = torch.log_softmax(logits, dim=-1).gather(-1, ids[:, 1:, None])[..., 0]
        torch.autograd.backward(logprobs[there[:, 1:]].sum())
