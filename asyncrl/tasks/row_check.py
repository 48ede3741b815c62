"""Whether the recipe's verifiers can score the task's rows: before a run, not row by row while it trains.

In a verifier process, like the scores: a verifier may load anything, and may hang over a row.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from asyncrl.config import recipe
from asyncrl.config.convert import convert
from asyncrl.config.rewards import Part, part_name
from asyncrl.config.sizes import size_bytes
from asyncrl.rewards.base import BadRow, Finding, Remarking, Verifier
from asyncrl.rewards.build import REMOTE, verifier
from asyncrl.rewards.pool import VerifierError, VerifierPool
from asyncrl.tasks.base import NotInstalled, Row, Split, Task, TaskError
from asyncrl.tasks.build import LOOKED_AT, construct
from asyncrl.tasks.own_functions import check_functions
from asyncrl.tasks.scorer import replaced

logger = logging.getLogger(__name__)

LIMIT_S = 120.0
"""For reading a task's rows and looking at the first of each split, by one part."""

SHOWN = 2  # rows in the message, of at most so many characters each
SHOWN_CHARACTERS = 240

LACKING = "lacking"
UNUSABLE = "unusable"
UNSCORABLE = "unscorable"


async def check_rows(config: recipe.Task, collector: recipe.Collector, *, seed: int) -> None:
    """Build every verifier of the recipe, and have each look at the first rows of both splits.

    Raises NotInstalled if a library of one is not here, TaskError if one cannot be built, calls a function that there
    is not, or if there are rows that it could never score. Rows behind the first LOOKED_AT are unscored when they come
    (`bad_row`). What is odd, but may be meant, is logged.
    """
    parts = [(key, name) for key, task in recipe.tasks_by_key(config).items() for name in checked(task)]
    if not parts:
        return
    limit = collector.score_memory_limit
    pool = VerifierPool(
        "asyncrl.tasks.row_check:Checker",
        {"task": recipe.to_builtins(config), "seed": seed, "max_tokens": collector.sampling.max_tokens},
        workers=1,
        memory_bytes=None if limit is None else size_bytes(limit),
    )
    try:
        await pool.start()
        for key, name in parts:
            for split in ("train", "heldout"):
                asked = {"task": key, "part": name, "split": split}
                verdict = (await pool.verdict(asked, {}, timeout_s=LIMIT_S)).verdict
                where = f"{key}.rewards"
                if verdict.wrong == LACKING:
                    raise NotInstalled(f"{where}: {verdict.detail}")
                if verdict.wrong == UNUSABLE:
                    raise TaskError(verdict.detail)
                if verdict.wrong == UNSCORABLE:
                    bad, looked_at = verdict.parts["bad"], verdict.parts["looked_at"]
                    raise TaskError(
                        f"{where}: {bad:g} of the first {looked_at:g} {split} rows cannot be scored by `{name}`; "
                        f"correct them, or use a part that fits (docs/rewards.md):\n{verdict.detail}"
                    )
                if verdict.failure:
                    raise TaskError(f"{where}: `{name}` failed over the {split} rows: {verdict.detail}")
                if verdict.detail and split == "train":
                    logger.warning("%s: `%s`: %s", where, name, verdict.detail)
    except VerifierError as error:
        raise TaskError(f"task.rewards: {error}") from None
    finally:
        await pool.close()


def checked(task: recipe.SingleTask) -> dict[str, Part]:
    """The parts, by name, that need something of a row: not those that are asked elsewhere, nor those that an agent's
    own reward may replace, whose rows need no answer."""
    named = {part_name(part): part for part in task.rewards if not isinstance(part, REMOTE)}
    return {name: part for name, part in named.items() if name not in replaced(task)}


class Checker:
    """What the process computes; as a `rewards.worker.Scorer`, whose rows say what is to be checked."""

    def __init__(self, task: dict[str, Any], seed: int, max_tokens: int) -> None:
        self._configs = recipe.tasks_by_key(convert({"task": task}).task)
        self._tasks: dict[str, Task] = {key: construct(one, seed=seed) for key, one in self._configs.items()}
        self._max_tokens = max_tokens
        self._built: dict[tuple[str, str], Verifier] = {}

    def score(self, row: dict[str, Any], answer: dict[str, Any]) -> Finding:
        """The rows of `row["split"]` of the task `row["task"]`, by the part `row["part"]`."""
        task, name = row["task"], row["part"]
        if (task, name) not in self._built:
            part = checked(self._configs[task])[name]
            at = [part_name(one) for one in self._configs[task].rewards].index(name)
            try:
                check_functions(part, f"{task}.rewards[{at}]")
                self._built[task, name] = verifier(part, max_tokens=self._max_tokens)
            except TaskError as error:
                return Finding({"bad": 0.0, "looked_at": 0.0}, UNUSABLE, str(error))
            except ModuleNotFoundError as error:
                if error.name is not None:  # Python's own: a module of the user's. A part's names the package instead
                    raise
                return Finding({"bad": 0.0, "looked_at": 0.0}, LACKING, str(error))
        return look(self._tasks[task], row["split"], self._built[task, name])

    def verify(self, part: str, row: dict[str, Any], answer: dict[str, Any]) -> object:
        """Never called: no part has a limit of its own here."""
        raise NotImplementedError(part)

    def part_weights(self) -> dict[str, float]:
        return {}


def look(task: Task, split: Split, built: Verifier) -> Finding:
    """How many of the first rows a verifier refuses, and what it says of the first of those, or of all together."""
    rows = task.rows(split)
    looked_at, complaints, good = min(len(rows), LOOKED_AT), [], []
    for n in range(looked_at):
        try:
            row: Row = rows[n]
        except Exception:  # a row that cannot be read fails its own tickets, by name, and ends no run
            continue
        try:
            built.check(as_sent := msgspec.to_builtins(row))
            good.append(as_sent)
        except BadRow as error:
            complaints.append(f"  {error!s:.{SHOWN_CHARACTERS}}")
    parts = {"bad": float(len(complaints)), "looked_at": float(looked_at)}
    if complaints:
        return Finding(parts, UNSCORABLE, "\n".join(complaints[:SHOWN]))
    return Finding(parts, detail=built.remark(good) if isinstance(built, Remarking) else "")
