from __future__ import annotations

import json
import random
from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from asyncrl.config.recipe import ReverseTask
from asyncrl.learners import tiny
from asyncrl.learners.model import load_model
from asyncrl.learners.sft import Example
from asyncrl.tasks.base import Answer
from asyncrl.tasks.build import build_task
from asyncrl.tasks.chat import end_token_ids, render

SHORT = (2, 2)


def answered_rightly(folder: Path, *, prompts: int, **how: object) -> float:
    """Share of held-out rows that the saved model, as anyone loads it, answers rightly under `generate`."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    task = build_task(ReverseTask(digits=SHORT), seed=0)
    rows = [task.rows("heldout")[index % len(task.rows("heldout"))] for index in range(prompts)]
    ids = torch.tensor([render(tokenizer, task.messages(row)) for row in rows])
    torch.manual_seed(0)
    answers = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, **how)[:, ids.shape[1] :]
    right = 0.0
    for row, answer in zip(rows, answers.tolist(), strict=True):
        stopped = tokenizer.eos_token_id in answer
        text = tokenizer.decode(answer[: answer.index(tokenizer.eos_token_id)] if stopped else answer)
        score = task.score(row, Answer(text, tuple(answer), "stop" if stopped else "length"))
        right += score.parts["exact"]
    return right / prompts


def test_the_default_has_exactly_140224_parameters() -> None:
    tokenizer = tiny.build_tokenizer(512)
    model = tiny.Qwen3ForCausalLM(tiny.tiny_config(tokenizer))
    assert sum(parameter.numel() for parameter in model.parameters()) == tiny.PARAMETERS == 140_224
    assert model.lm_head.weight is model.model.embed_tokens.weight
    inverse_frequency = model.model.rotary_emb.inv_freq
    assert inverse_frequency[1] == pytest.approx(1e4 ** (-1 / 16))  # rope theta 1e4, head_dim 32


def test_the_saved_folder_loads_as_any_model_does(short_tiny: Path) -> None:
    model = load_model(short_tiny, "float32", "auto")
    assert model.num_parameters() == tiny.PARAMETERS
    tokenizer = AutoTokenizer.from_pretrained(short_tiny)
    generation = GenerationConfig.from_pretrained(short_tiny)
    assert end_token_ids(tokenizer, generation) == (tokenizer.eos_token_id,)
    assert generation.do_sample
    assert not generation.top_k


def test_it_knows_its_task_and_often_answers_wrongly(short_tiny: Path) -> None:
    start = json.loads((short_tiny / "warm_start.json").read_text())
    sampled = answered_rightly(short_tiny, prompts=512)
    greedy = answered_rightly(short_tiny, prompts=10, do_sample=False)  # every held-out row there is, once
    assert tiny.SAMPLED[0] <= sampled <= tiny.SAMPLED[1]
    assert abs(sampled - start["sampled"]) < 0.12  # other rows: the ten held-out ones
    assert greedy >= 0.6
    assert start["greedy"] >= tiny.MIN_GREEDY


def test_the_warm_start_sees_no_held_out_row(short_tiny: Path) -> None:
    task = build_task(ReverseTask(digits=SHORT), seed=0)
    tokenizer = AutoTokenizer.from_pretrained(short_tiny)
    heldout = {tuple(render(tokenizer, task.messages(row))) for row in task.rows("heldout")}
    examples = islice(tiny._examples(task, tokenizer, random.Random(0), str), 2000)
    seen = {tuple(e.token_ids[: list(e.trained).index(1)]) for e in examples}
    assert len(seen) == 90
    assert not seen & heldout


def test_expected_success_is_what_sampling_and_greedy_decoding_give(short_tiny: Path) -> None:
    model = load_model(short_tiny, "float32", "auto")
    tokenizer = AutoTokenizer.from_pretrained(short_tiny)
    task = build_task(ReverseTask(digits=SHORT), seed=0)
    examples = [
        Example.of(
            render(tokenizer, task.messages(row)),
            [*tokenizer.encode(row.answer), tokenizer.eos_token_id],
        )
        for row in task.rows("heldout")[:10]
    ]
    sampled = answered_rightly(short_tiny, prompts=4000)
    assert abs(tiny.success(model, examples) - sampled) < 0.04  # five standard errors
    greedy = answered_rightly(short_tiny, prompts=10, do_sample=False)
    assert tiny.success(model, examples, temperature=tiny.GREEDY) == pytest.approx(greedy)


def test_spoiled_answers_are_wrong_in_the_four_ways() -> None:
    rng = random.Random(0)
    spoilt = [tiny.spoil("1234", rng) for _ in range(4000)]
    kinds = {"4321", "123", "=1234"}
    right = spoilt.count("1234")
    one_digit = [s for s in spoilt if len(s) == 4 and sum(a != b for a, b in zip(s, "1234", strict=True)) == 1]
    assert abs(right / 4000 - 0.4) < 0.05
    assert right + len(one_digit) + sum(spoilt.count(kind) for kind in kinds) == 4000
    assert min(len(one_digit), *(spoilt.count(kind) for kind in kinds)) > 400
