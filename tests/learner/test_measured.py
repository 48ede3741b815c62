"""Every number by age and by length, computed again from archive and checkpoints in plain NumPy and PyTorch: unpacked,
one sequence at a time, from the formulas. Nothing of the learner's code is asked but what it has written."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.buffers.memory import MemoryBuffer
from asyncrl.config.objective import DppoTv, Objective
from asyncrl.config.recipe import Buffer, Checkpoint, Collector, Eval, Learner, Recipe, Run, SamplingConfig
from asyncrl.learners.limits import limits_of
from asyncrl.learners.service import learn
from asyncrl.telemetry.metrics import read_metrics, surviving_steps

STEPS = 4
THRESHOLD, LOW, HIGH = 0.03, 0.8, 1.28
WHOLE = {
    "ratio_mean": "ratio/mean",
    "ess_sequence": "ess/sequence",
    "log_ratio_max": "log_ratio/max",
    "log_ratio_p999": "log_ratio/p999",
    "clip_fraction_positive": "clip_fraction/positive",
    "clip_fraction_negative": "clip_fraction/negative",
    "mask_fraction_positive": "mask_fraction/positive",
    "mask_fraction_negative": "mask_fraction/negative",
    **{key: key for key in ("tokens", "ess", "kl", "clip_fraction", "mask_fraction", "token_grad")},
}
"""Key of a bucket -> name of the same over the whole step."""


@pytest.fixture(scope="module")
def run_dir(
    tmp_path_factory: pytest.TempPathFactory,
    model_path: Path,
    draw: Callable[..., Any],
    make_row: Callable[..., Any],
    make_group: Callable[..., Any],
    scripted: Any,
) -> Path:
    """Four steps with tokens of age 0 to 2 and answers of 3 and 4 tokens, a rate at which clip and mask have work to
    do, and all checkpoints kept."""
    recipe = Recipe(
        run=Run(name="measured", max_steps=STEPS),
        buffer=Buffer(max_trajectory_age=2),
        collector=Collector(group_size=4, sampling=SamplingConfig(temperature=1.0)),
        learner=Learner(
            groups_per_step=6,
            learning_rate=2e-2,
            warmup_steps=0,
            max_tokens_per_microbatch=20,
            checkpoint=Checkpoint(every_steps=1, keep_last=STEPS),
        ),
        objective=Objective(preset="grpo", mask=[DppoTv(threshold=THRESHOLD)]),
        eval=Eval(at_start=False, at_end=False),
    )
    run_dir = tmp_path_factory.mktemp("measured")
    buffer = MemoryBuffer(recipe.run.name, limits_of(recipe, max_length=64))
    worker = scripted.ScriptedCollector(
        buffer, model_path, sample=draw, make_row=make_row, make_group=make_group, lag=1
    )

    async def together() -> None:
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            group.create_task(
                learn(recipe, buffer, run_dir=run_dir, model_path=model_path, resume=None, stop=asyncio.Event())
            )
            group.create_task(worker.run())

    asyncio.run(together())
    return run_dir


def again(run_dir: Path, step: int, *, masks: bool = True) -> list[dict[str, float]]:
    """What there is to know of each sampled token of the step that starts from version `step`. masks: to be turned off,
    which must change it."""
    model = AutoModelForCausalLM.from_pretrained(run_dir / "checkpoints" / f"version-{step:06d}").eval()
    rows = pq.read_table(sorted((run_dir / "archive").glob(f"step-*-{step:06d}.parquet"))[-1]).to_pylist()
    tokens: list[dict[str, float]] = []
    leaves = []
    loss = torch.zeros(())
    for answer, row in enumerate(rows):
        rewards = [other["reward"] for other in rows if other["ticket"] == row["ticket"]]
        advantage = (row["reward"] - np.mean(rewards)) / (np.std(rewards, ddof=1) + 1e-4)
        with torch.no_grad():
            logits = model(torch.tensor([row["token_ids"]])).logits[0]
        logits.requires_grad_()
        places = [t for t in range(1, len(row["token_ids"])) if row["loss_mask"][t]]
        for t in places:
            logp = torch.log_softmax(logits[t - 1], -1)[row["token_ids"][t]]
            ratio = torch.exp(logp - row["logprobs"][t])
            moved = math.exp(logp.detach()) - math.exp(row["logprobs"][t])
            masked = masks and ((advantage > 0 and moved > THRESHOLD) or (advantage < 0 and moved < -THRESHOLD))
            worse = torch.clamp(ratio, LOW, HIGH) * advantage
            if not masked:
                loss = loss - torch.minimum(ratio * advantage, worse)
            tokens.append(
                {
                    "answer": answer,
                    "age": step - row["versions"][t],
                    "length": len(places),
                    "advantage": advantage,
                    "log_ratio": float(logp.detach()) - row["logprobs"][t],
                    "masked": masked,
                    "clipped": not masked and bool(worse < ratio * advantage),
                }
            )
            leaves.append((logits, t - 1))
    loss.backward()
    kept = sum(not token["masked"] for token in tokens)
    for token, (logits, place) in zip(tokens, leaves, strict=True):
        slope = torch.zeros(1) if logits.grad is None else logits.grad[place]  # None: every token of it is masked
        token["pull"] = float(slope.norm()) / kept
    return tokens


def numbers(tokens: list[dict[str, float]], answers: list[list[dict[str, float]]], pulls: float) -> dict[str, Any]:
    """By formula. answers: of the bucket, each with all of its tokens; pulls: of the whole step."""

    def column(name: str, among: list[dict[str, float]]) -> np.ndarray:
        return np.array([token[name] for token in among], np.float64)

    def share(name: str, among: list[dict[str, float]]) -> float | None:
        return float(column(name, among).mean()) if among else None

    def kish(log_weights: np.ndarray) -> float:
        w = np.exp(log_weights)
        return float(w.sum() ** 2 / (len(w) * (w**2).sum()))

    trained = [token for token in tokens if not token["masked"]]
    log_ratio = column("log_ratio", tokens)
    far = np.sort(np.abs(log_ratio))
    return {
        "tokens": len(trained),
        "answers": len(answers),
        "ratio_mean": float(np.exp(column("log_ratio", trained)).mean()),
        "ess": kish(log_ratio),
        "ess_sequence": kish(np.array([column("log_ratio", answer).sum() for answer in answers])) if answers else None,
        "kl": float((np.exp(log_ratio) - 1 - log_ratio).mean()),
        "log_ratio_max": far[-1],
        "log_ratio_p999": far[math.ceil(0.999 * len(far)) - 1],
        "clip_fraction": share("clipped", trained),
        "clip_fraction_positive": share("clipped", [token for token in trained if token["advantage"] > 0]),
        "clip_fraction_negative": share("clipped", [token for token in trained if token["advantage"] < 0]),
        "mask_fraction": share("masked", tokens),
        "mask_fraction_positive": share("masked", [token for token in tokens if token["advantage"] > 0]),
        "mask_fraction_negative": share("masked", [token for token in tokens if token["advantage"] < 0]),
        "token_grad": column("pull", trained).sum(),
        "token_grad_share": column("pull", trained).sum() / pulls,
    }


def test_every_number_follows_from_archive_and_checkpoints_and_buckets_add_up(run_dir: Path) -> None:
    steps = {step["step"] - 1: step for step in surviving_steps(read_metrics(run_dir / "metrics.jsonl"))}
    seen: set[str] = set()
    clipped = masked = 0.0
    for version in range(1, STEPS):
        record, tokens = steps[version], again(run_dir, version)
        answers = [[token for token in tokens if token["answer"] == n] for n in sorted({t["answer"] for t in tokens})]
        pulls = sum(token["pull"] for token in tokens if not token["masked"])
        names = {"2-3": (2, 3), "4-7": (4, 7)}
        expected = {
            "by_age": {
                str(age): (
                    [token for token in tokens if token["age"] == age],
                    [answer for answer in answers if max(token["age"] for token in answer) == age],
                )
                for age in {int(token["age"]) for token in tokens}
            },
            "by_length": {
                name: (
                    [token for token in tokens if low <= token["length"] <= high],
                    [answer for answer in answers if low <= len(answer) <= high],
                )
                for name, (low, high) in names.items()
            },
        }
        close = {"rel": 2e-4, "abs": 2e-6}  # float32 against itself, in another order
        for kind, buckets in expected.items():
            assert record[kind].keys() == buckets.keys()
            for name, (own, among) in buckets.items():
                for key, value in numbers(own, among, pulls).items():
                    assert record[kind][name][key] == (None if value is None else pytest.approx(value, **close)), (
                        f"step {version + 1}, {kind} {name}: {key}"
                    )
            for key in ("tokens", "token_grad"):
                total = sum(bucket[key] for bucket in record[kind].values())
                assert total == pytest.approx(record[key], rel=1e-9), (kind, key)
            assert sum(bucket["token_grad_share"] for bucket in record[kind].values()) == pytest.approx(1)
            assert sum(bucket["answers"] for bucket in record[kind].values()) == len(answers)
        whole = numbers(tokens, answers, pulls)
        for key, name in WHOLE.items():
            assert record[name] == pytest.approx(whole[key], **close), f"step {version + 1}: {name}"
        fresh = [abs(token["log_ratio"]) for token in tokens if token["age"] == 0]
        assert record["mismatch/age0_error"] == (pytest.approx(np.exp(fresh).mean(), abs=1e-5) if fresh else None)
        seen |= record["by_age"].keys()
        clipped, masked = clipped + record["clip_fraction"], masked + record["mask_fraction"]
    assert len(seen) > 1, "all tokens had one age: the test would not see a wrong bucket"
    assert clipped > 0, "no token was clipped: the test would not see a wrong count"
    assert masked > 0, "no token was masked: the test would not see a wrong count"


def test_the_same_numbers_can_tell_a_step_without_its_mask_and_a_token_in_another_bucket(run_dir: Path) -> None:
    """Negative controls, in a step that masked some tokens."""
    steps = surviving_steps(read_metrics(run_dir / "metrics.jsonl"))
    record = next(step for step in steps[1:] if step["mask_fraction"] > 0)
    right, wrong = (again(run_dir, record["step"] - 1, masks=masks) for masks in (True, False))
    found = [sum(token["pull"] for token in tokens if not token["masked"]) for tokens in (right, wrong)]
    assert found[0] == pytest.approx(record["token_grad"], rel=2e-4)
    assert abs(found[1] / record["token_grad"] - 1) > 1e-2

    bucket = record["by_length"]["4-7"]
    all_but_one = [token for token in right if token["length"] == 4][1:]
    assert numbers(all_but_one, [], 1.0)["kl"] != pytest.approx(bucket["kl"], rel=2e-4, abs=2e-6)
