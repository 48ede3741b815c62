"""asyncrl's own processes as the controls of `bench resume` run them: with one thing left out that the bits need.

`python -m asyncrl.benchmarks.resume_child run ...` is `asyncrl run ...`, and starts its children in the same way.
"""

from __future__ import annotations

import os
import runpy
import sys
from functools import partialmethod
from typing import Any

MODULE = "asyncrl.benchmarks.resume_child"
LEFT_OUT = "ASYNCRL_LEFT_OUT"

MOMENTS, DRAWS = "moments", "draws"
"""What can be left out: the optimizer's moments where a learner goes on; that a ticket which is tried again draws as
the first time."""


def leave_out_moments() -> None:
    from asyncrl.learners.optimize import Optimizer

    load = Optimizer.load_state_dict

    def without(self: Optimizer, state: Any) -> None:
        load(self, {**state, "adam": {**state["adam"], "state": {}}})

    setattr(Optimizer, "load_state_dict", without)  # noqa: B010  # as an assignment it would be a type error


def leave_out_draws() -> None:
    from asyncrl.collectors import service
    from asyncrl.collectors.episode import episodes

    def with_others(*args: Any, **named: Any) -> Any:
        return episodes(*args, **{**named, "same_draws": False})

    setattr(service, "episodes", with_others)  # noqa: B010


def main() -> None:
    from asyncrl.runtime.children import Child

    setattr(Child, "__init__", partialmethod(Child.__init__, module=MODULE))  # noqa: B010
    role, left_out = sys.argv[1], os.environ[LEFT_OUT]
    if (role, left_out) == ("learner", MOMENTS):
        leave_out_moments()
    elif (role, left_out) == ("collector", DRAWS):
        leave_out_draws()
    runpy.run_module("asyncrl.cli.main", run_name="__main__")


if __name__ == "__main__":
    main()
