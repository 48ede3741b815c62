"""asyncrl's own processes as `bench soak` runs them: at a point that was armed, they end themselves with SIGKILL.

`python -m asyncrl.benchmarks.soak_child run ...` is `asyncrl run ...`, and starts its children through this module too.
A point is armed by a file of its name in the folder ASYNCRL_SOAK; who reaches it takes the file away, which only one
process can, and dies there. So a kill is in the phase it is named after, not near it, and the product knows of nothing.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partialmethod, wraps
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any

from asyncrl.buffers import store
from asyncrl.buffers.base import Waiting
from asyncrl.buffers.remote import RedisBuffer

MODULE = "asyncrl.benchmarks.soak_child"
FOLDER = "ASYNCRL_SOAK"

POINTS: Mapping[str, tuple[str, ...]] = {
    "ticket": ("tickets.after",),  # granted, but the collector never learns of it
    "generating": ("progress.after",),  # some tokens of an unfinished answer are sampled
    "put": ("put.before", "put.after"),
    "activate": ("activate.before", "activate.after"),
    "leased": ("lease.after",),
    "optimizer": ("optimizer.before", "optimizer.after"),  # after: the weights have changed, nothing is written
    "commit": ("commit.before", "commit.after"),  # before: the archive has the step, the ledger does not
    "publish": ("publish.during", "publish.after"),  # during: one tensor is copied; after: not announced
    "checkpoint": ("gather.before", "checkpointed.before"),  # the second: written, and the store does not know of it
    # Rank 1: around its optimizer, on its way to the next command, and to what it gives to be published or saved.
    "rank": ("rank.before", "rank.after", "told.before", "give.before", "rank-gather.before"),
}
"""Phase -> its points, of processes that end themselves."""

GUARD = "is_ancestor(u[1], u[2] + 1)"
"""In the scripts, where a new lineage asks of each use of a group whether the weights it made survive."""

SABOTAGE: Mapping[str, str] = {"undo-nothing": "true", "undo-everything": "false"}
"""Negative controls: what replaces that question, whose answer is by (lineage, step)."""


def reach(point: str) -> None:
    """Die here if the point is armed."""
    try:
        os.rename(Path(os.environ[FOLDER]) / point, Path(os.environ[FOLDER]) / f"{point}.struck")
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def around(owner: type, name: str, point: str) -> None:
    """Make `point`.before and `point`.after points of a method; an answer that says "not yet" is no after."""
    method: Callable[..., Any] = getattr(owner, name)

    def leave(answer: Any) -> Any:
        if answer and not isinstance(answer, Waiting):
            reach(f"{point}.after")
        return answer

    @wraps(method)
    async def awaited(*args: Any, **kwargs: Any) -> Any:
        reach(f"{point}.before")
        return leave(await method(*args, **kwargs))

    @wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        reach(f"{point}.before")
        return leave(method(*args, **kwargs))

    setattr(owner, name, awaited if iscoroutinefunction(method) else called)


def arm_collector() -> None:
    from asyncrl.collectors.engines.simulated import SimulatedEngine

    around(RedisBuffer, "tickets", "tickets")
    around(RedisBuffer, "put", "put")
    around(SimulatedEngine, "progress", "progress")
    around(SimulatedEngine, "activate", "activate")


def arm_rank() -> None:
    from asyncrl.learners.optimize import Optimizer
    from asyncrl.learners.parallel import Sharded

    around(Optimizer, "update", "rank")
    around(Sharded, "told", "told")
    around(Sharded, "give", "give")
    around(Sharded, "gather", "rank-gather")


def arm_learner() -> None:
    from asyncrl.learners.optimize import Optimizer
    from asyncrl.learners.parallel import Sharded
    from asyncrl.weights.image import Images

    around(RedisBuffer, "lease", "lease")
    around(RedisBuffer, "commit", "commit")
    around(RedisBuffer, "checkpointed", "checkpointed")
    around(Optimizer, "update", "optimizer")
    around(Sharded, "gather", "gather")
    write = Images.write

    def writing(self: Images, weights: Any, source: Iterable[Any], **rest: Any) -> Any:
        def watched() -> Iterator[Any]:
            for number, tensor in enumerate(source):
                if number == 1:
                    reach("publish.during")
                yield tensor

        return write(self, weights, watched(), **rest)

    setattr(Images, "write", writing)  # noqa: B010  # as an assignment it would be a type error
    around(Images, "write", "publish")


def sabotage(how: str) -> None:
    """Take the guard out of the server's scripts. Raises ValueError if it is not there to be taken."""
    text = store.script_text()
    if text.count(GUARD) != 1:
        raise ValueError(f"the scripts have {text.count(GUARD)} times {GUARD!r}: name the guard as it is now")
    store.script_text = lambda: text.replace(GUARD, SABOTAGE[how])


def main() -> None:
    from asyncrl.runtime.children import Child

    setattr(Child, "__init__", partialmethod(Child.__init__, module=MODULE))  # noqa: B010
    for how in SABOTAGE:
        if (Path(os.environ[FOLDER]) / how).exists():
            sabotage(how)
    role = sys.argv[1]
    if role == "collector":
        arm_collector()
    elif role == "learner":
        arm_rank() if "--rank" in sys.argv else arm_learner()
    runpy.run_module("asyncrl.cli.main", run_name="__main__")


if __name__ == "__main__":
    main()
