"""Peak memory of log-probs with their gradients at the vocabulary of a small model, against plain logits: 8,192 tokens,
a vocabulary of 49,152. The sides are those of `bench loss`, each in a process of its own.

Control: the learner's own way for few logits, all of which exist at once. It must need more than the share that is the
target, or it would say nothing about blocks.
"""

from __future__ import annotations

from asyncrl.benchmarks.frame import Measured, Row, Say, Target
from asyncrl.benchmarks.loss import Problem, side

SHARE = 0.35
SIDES = {
    "plain": "log_softmax of all logits",
    "spread": "by blocks, with entropy",
    "at-once": "the learner's way for few logits",
}

FULL = Problem(8192, 64, vocabulary=49_152)  # hidden states of SmolLM2's width change nothing but the time: 0.34 too
QUICK = Problem(4096, 64, vocabulary=49_152)


def measure(*, quick: bool, say: Say) -> Measured:
    """A row for each side. quick: half of the tokens."""
    return compare(QUICK if quick else FULL, say=say)


def compare(problem: Problem, *, say: Say) -> Measured:
    """One pass of each side, one after the other: two at once may not fit into the machine."""
    rows: list[Row] = []
    for name, what in SIDES.items():
        with side(name, problem) as once:
            gib = once().bytes / 2**30
        rows.append(
            {
                "part": "memory",
                "side": name,
                "tokens": problem.tokens,
                "width": problem.width,
                "vocabulary": problem.vocabulary,
                "gib": gib,
            }
        )
        say(f"memory, {problem.tokens:,} tokens x {problem.vocabulary:,}: {gib:.2f} GiB, {what}")
    return Measured(rows, targets(rows))


def targets(rows: list[Row]) -> list[Target]:
    peak = {row["side"]: row["gib"] for row in rows}
    return [
        Target("peak memory of log-probs over that of plain logits", peak["spread"] / peak["plain"], SHARE, "lower"),
        Target("control: the same with all of them at once", peak["at-once"] / peak["plain"], SHARE, "higher"),
    ]
