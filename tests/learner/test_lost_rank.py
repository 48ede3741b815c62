"""What a learner leaves behind that lost a rank, beside what one leaves that failed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from asyncrl.buffers.memory import MemoryBuffer
from asyncrl.config.recipe import Collector, Eval, Learner, Objective, Recipe, Run
from asyncrl.learners import phase as phases
from asyncrl.learners.limits import limits_of
from asyncrl.learners.lost import RankLost
from asyncrl.learners.parallel import Alone
from asyncrl.learners.phase import Phase
from asyncrl.learners.service import learn

RECIPE = Recipe(
    run=Run(name="lost-rank", max_steps=2),
    collector=Collector(group_size=4),
    learner=Learner(groups_per_step=3),
    objective=Objective(preset="grpo"),
    eval=Eval(at_start=False, at_end=False),
)


class Failing(Alone):
    """Before the first batch it is found that `error` has happened."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def check(self) -> None:
        raise self.error


@pytest.mark.parametrize("error", [RankLost("rank 1 was killed"), ValueError("no such group")], ids=repr)
@pytest.mark.asyncio
async def test_only_a_learner_that_fails_ends_the_run(tmp_path: Path, model_path: Path, error: Exception) -> None:
    buffer = MemoryBuffer("lost-rank", limits_of(RECIPE, max_length=64))
    with pytest.raises(type(error), match=str(error)):
        await learn(
            RECIPE,
            buffer,
            run_dir=tmp_path,
            model_path=model_path,
            resume=None,
            stop=asyncio.Event(),
            ranks=Failing(error),
        )
    stats, said = await buffer.stats(), phases.read(tmp_path)
    assert said is not None
    if isinstance(error, RankLost):
        assert (stats.phase, stats.error) == ("running", None), "collectors wait for the next learner"
        assert said.phase is not Phase.ENDED
    else:
        assert (stats.phase, stats.error) == ("ended", "ValueError: no such group")
        assert said.phase is Phase.ENDED
