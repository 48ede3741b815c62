"""A group whose members share their prompt, computed once, against the same rows as if they shared nothing: both
packed, forward and backward, with log-probs and entropies of the answers.

The model has the shape of SmolLM2-135M and random weights: 8 members, 1,024 tokens of prompt, 256 of answer. Of its 30
layers there is a part, and as much of its vocabulary: layers and head have the shares of a pass that they have in the
whole. What sharing can bring is the ratio of what must be computed (`learner_flops.by_formula`); beside it stands what
torch counts, which knows the calls and not what they are for. One thread, CPU seconds, in turns.

Control: the same rows in the place of the shared ones, with nothing shared.
"""

from __future__ import annotations

import copy
from functools import partial

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from asyncrl.benchmarks.frame import Measured, Row, Say, Target
from asyncrl.benchmarks.learner_flops import by_formula, counted, pairs_of
from asyncrl.benchmarks.learner_turns import cpu_seconds
from asyncrl.learners.forward import pack_attention, token_predictions
from asyncrl.learners.head import Head
from asyncrl.learners.shapes import SMOLLM2

TARGET = 0.75
"""Of the ratio of operations."""

MEMBERS, PROMPT, ANSWER = 8, 1024, 256


def measure(*, quick: bool, say: Say, full: bool = False) -> Measured:
    """Rows: `shared`, `unshared`, and the control. A fifth of the model; quick: a fifteenth, one turn; full: all of it,
    which takes 16 GB."""
    return compare(smollm2(1 if full else 15 if quick else 5), turns=1 if quick else 2, say=say)


def smollm2(share: int) -> LlamaConfig:
    """1 / share of its layers and of its vocabulary."""
    settings = {key: value for key, value in SMOLLM2.items() if key != "model_type"}
    for key in ("num_hidden_layers", "vocab_size"):
        settings[key] = round(settings[key] / share)
    return LlamaConfig(**settings)


def compare(
    config: LlamaConfig,
    *,
    turns: int,
    say: Say,
    members: int = MEMBERS,
    prompt: int = PROMPT,
    answer: int = ANSWER,
) -> Measured:
    """What `measure` measures, of a group of this shape."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(copy.deepcopy(config)).train(False)
    model.logprob_head = Head(softcap=None)
    reason = pack_attention(model)
    assert reason is None, reason
    shared = torch.randint(0, config.vocab_size, (prompt,))
    ids = torch.cat([torch.cat([shared, torch.randint(0, config.vocab_size, (answer,))]) for _ in range(members)])
    row, rows = prompt + answer, [prompt + answer] * members
    predicted = members * answer
    counts: dict[str, int] = {}

    def side(name: str, *, share: bool) -> None:
        """Counted as it runs: that takes microseconds a call, of seconds."""
        counts[name] = counted(partial(gradient, model, ids, row, prompt, share=share))

    sides = {name: partial(side, name, share=name == "shared") for name in ("shared", "unshared", "control")}
    took = cpu_seconds(sides, turns=turns)
    formula = {
        "shared": by_formula(
            config,
            computed=prompt + predicted,
            pairs=pairs_of(rows, [row] + [answer] * (members - 1)),
            predicted=predicted,
        ),
        "unshared": by_formula(config, computed=len(ids), pairs=pairs_of(rows), predicted=predicted),
    }
    formula["control"] = formula["unshared"]
    table: list[Row] = [
        {
            "part": "shared",
            "side": name,
            "layers": config.num_hidden_layers,
            "vocabulary": config.vocab_size,
            "members": members,
            "prompt": prompt,
            "answer": answer,
            "cpu_s": round(seconds, 3),
            "tflop": round(formula[name] / 1e12, 4),
            "tflop_counted": round(counts[name] / 1e12, 4),
        }
        for name, seconds in took.items()
    ]
    bound, bound_counted = (of["unshared"] / of["shared"] for of in (formula, counts))
    faster = took["unshared"] / took["shared"]
    say(
        f"shared prompt, {members} x ({prompt} + {answer}) tokens, {config.num_hidden_layers} layers: "
        f"{took['shared']:.2f} s against {took['unshared']:.2f} s, {faster:.2f} times as fast; "
        f"{bound:.2f} times fewer operations ({bound_counted:.2f} by torch's count)"
    )
    return Measured(
        table,
        [
            Target(
                f"shared: speed over unshared's, of the operations' ({bound:.2f})", faster / bound, TARGET, "higher"
            ),
            Target(
                "control: unshared over unshared, of the bound",
                took["unshared"] / took["control"] / bound,
                TARGET,
                "lower",
            ),
        ],
    )


def gradient(model: PreTrainedModel, ids: Tensor, row: int, prompt: int, *, share: bool) -> None:
    """Of the sum of the answers' log-probs; rows of `row` tokens, of which `prompt` are the prompt's."""
    model.zero_grad()
    found = token_predictions(
        model,
        ids,
        torch.arange(0, len(ids) + 1, row),
        share_prefixes=share,
        spread=True,
        asked=torch.arange(len(ids)) % row >= prompt,
    )
    torch.autograd.backward(found.logprobs.sum())
