"""The collector with a real model, real weights over shared memory and real verifier processes."""

from __future__ import annotations

import asyncio
import itertools
import math

import numpy as np
import pytest
import torch

from asyncrl.buffers.base import State
from asyncrl.schema import pack
from tests.collector.real import MAX_LENGTH, check_logprobs, versions_of

pytestmark = pytest.mark.asyncio
torch.set_num_threads(1)

TASK = """
from asyncrl.tasks.base import Row

FAULTS = ["raise", "nan", "none", "hang", "fine", "mixed", "long", "no row"]


class Rows:
    def __len__(self):
        return len(FAULTS)

    def __getitem__(self, index):
        fault = FAULTS[index % len(FAULTS)]
        if fault == "no row":
            raise KeyError("the file has no such line")
        return Row(id=f"row-{index}", prompt="x" * (60 if fault == "long" else 3), answer=fault)


class Faulty:
    def rows(self, split):
        return Rows()

    def score(self, row, answer):
        fault = row.answer
        if fault == "mixed":
            fault = "raise" if answer.token_ids[0] % 2 else "fine"
        if fault == "raise":
            raise ZeroDivisionError("in the verifier")
        while fault == "hang":
            pass
        return {"raise": 0, "nan": float("nan"), "none": None, "fine": 0.5}[fault]
"""


def real(kit, **collector):
    return kit.recipe(
        collector={
            "engine": {"type": "transformers"},
            "sampling": {"max_tokens": 6},
            "score_timeout_s": 0.5,
            **collector,
        },
        model={"max_length": MAX_LENGTH},
    )


async def test_groups_of_a_real_model_are_whole_and_their_logprobs_are_those_of_their_weights(
    kit, model_path, publisher
):
    recipe = real(kit)
    buffer = kit.buffer(recipe)
    kept, publish = versions_of(model_path, publisher)
    learner = kit.learner(buffer, publish)
    async with kit.collecting(recipe, buffer, model_path=model_path) as task:
        await learner.start()
        await buffer.request_evaluation({"id": "eval-1-0", "weights": [1, 0], "prompts": 5, "samples": 1})
        result = None
        async with asyncio.timeout(kit.limit_s):
            while result is None:
                assert not task.done()
                result = await buffer.evaluation("eval-1-0", wait_s=0.1)
        for _ in range(4):
            await learner.step()
    assert (result["n"], result["unscored"]) == (5, 0)
    assert all(a["prompt"].split()[1][::-1] == a["expected"] for a in result["answers"])
    seen = set()
    for batches in learner.batches.values():
        packed = pack(batches)
        seen |= check_logprobs(packed, kept)
        table = packed.table
        assert set(table["task"].to_pylist()) == {"reverse"}
        assert set(table["finish_reason"].to_pylist()) <= {"stop", "length"}
        assert not np.isnan(packed.rewards).any()
        assert [dict(parts)["exact"] for parts in table["reward_parts"].to_pylist()] == packed.rewards.tolist()
        times = [table[name].to_numpy() for name in ("issued", "first_token", "done", "scored", "put")]
        assert all((early <= late + 0.01).all() for early, late in itertools.pairwise(times))
    assert len(seen) > 1


async def test_bad_rows_and_bad_verifiers_are_counted_by_name_and_the_run_goes_on(
    kit, model_path, publisher, tmp_path, monkeypatch
):
    (tmp_path / "faulty_task_of_a_test.py").write_text(TASK)
    monkeypatch.syspath_prepend(tmp_path)
    recipe = kit.recipe(
        run={"max_steps": 2},
        collector={
            "engine": {"type": "transformers"},
            "sampling": {"max_tokens": 6},
            "score_timeout_s": 0.5,
            "group_size": 6,
            "max_unscored": None,
        },
        learner={"groups_per_step": 2},
        model={"max_length": MAX_LENGTH},
        task={"type": "faulty_task_of_a_test:Faulty"},
    )
    buffer = kit.buffer(recipe)
    _, publish = versions_of(model_path, publisher)
    learner = kit.learner(buffer, publish)
    async with kit.collecting(recipe, buffer, model_path=model_path):
        await learner.start()
        for _ in range(2):
            await learner.step()
        reasons = dict((await buffer.stats()).reasons)
    failed = {name: count for name, count in reasons.items() if name.startswith(State.FAILED)}
    assert set(failed) <= {
        *(f"failed/unscored/verifier_{kind}" for kind in ("raised", "nan", "none", "timeout")),
        "failed/row_error",
        "failed/prompt_too_long",
    }
    assert len(failed) >= 4  # four good groups of eight rows: most kinds came by
    for batches in learner.batches.values():
        for batch in batches:
            kinds = set(zip(batch.column("reward").to_pylist(), batch.column("failure").to_pylist(), strict=True))
            assert all((reward == 0.5) != bool(failure) for reward, failure in kinds)
            assert all(math.isnan(reward) == bool(failure) for reward, failure in kinds)
            assert {failure for _, failure in kinds} <= {"", "verifier_raised"}
