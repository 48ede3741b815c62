"""Which checkpoints stay: for any course of saves, failures, evaluations and rewinds."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.learners.retention import Kept, kept
from asyncrl.staleness import Lineages, Weights


def of(*versions: int, **options: object) -> Kept:
    names = [Weights(1, version) for version in versions]
    return kept(names, lineages=Lineages({1: (0, 0)}), current=1, **options)  # type: ignore[arg-type]


def versions(names: tuple[Weights, ...]) -> list[int]:
    return [name.version for name in names]


def test_the_best_stay_although_the_newest_are_worse() -> None:
    success = {Weights(1, version): 1 / version for version in (10, 20, 30, 40)}
    found = of(10, 20, 30, 40, keep_last=1, keep_best=2, success=success)
    assert (versions(found.newest), versions(found.beside)) == ([40], [20, 10])


def test_a_version_that_was_not_evaluated_or_not_scored_is_not_among_the_best() -> None:
    success = {Weights(1, 10): None, Weights(1, 20): float("nan"), Weights(1, 30): 0.0}
    assert versions(of(5, 10, 20, 30, 40, keep_last=1, keep_best=3, success=success).beside) == [30]


def test_of_equally_good_ones_the_newer_stays() -> None:
    success = {Weights(1, version): 0.5 for version in (10, 20, 30)}
    assert versions(of(10, 20, 30, 40, keep_last=1, keep_best=1, success=success).beside) == [30]


def test_a_best_of_a_rewound_branch_goes() -> None:
    tree = Lineages({1: (0, 0), 2: (1, 20)})
    names = [Weights(1, 20), Weights(1, 30), Weights(2, 30)]
    success = {Weights(1, 30): 1.0, Weights(1, 20): 0.1}
    found = kept(names, lineages=tree, current=2, keep_last=1, keep_best=1, keep_every=30, success=success)
    assert (found.newest, found.beside) == ((Weights(2, 30),), (Weights(1, 20),))


def test_a_learner_that_was_replaced_removes_nothing_of_the_one_that_took_over() -> None:
    names = [Weights(1, 40), Weights(1, 60), Weights(2, 50)]  # (2, 50) goes on from (1, 40), which this one cannot know
    found = kept(names, lineages=Lineages({1: (0, 0)}), current=1, keep_last=1)
    assert (found.newest, found.beside) == ((Weights(1, 60),), (Weights(2, 50),))


@dataclass
class Disk:
    """What a learner that saves, fails, is evaluated and resumed has on its disk, by `kept` or by a broken rule."""

    keep_last: int
    keep_best: int
    keep_every: int | None
    rule: object = kept
    forks: dict[int, tuple[int, int]] = field(default_factory=lambda: {1: (0, 0)})
    folders: set[Weights] = field(default_factory=set)
    success: dict[Weights, float | None] = field(default_factory=dict)
    now: Weights = field(default_factory=lambda: Weights(1, 0))
    newest: tuple[Weights, ...] = ()

    @property
    def tree(self) -> Lineages:
        return Lineages(self.forks)

    def saves(self, works: bool) -> None:
        self.now = Weights(self.now.lineage, self.now.version + 1)
        if not works:
            return  # nothing is there, so nothing is removed
        self.folders = {name for name in self.folders if name.version != self.now.version} | {self.now}
        found = self.rule(  # type: ignore[operator]
            self.folders,
            lineages=self.tree,
            current=self.now.lineage,
            keep_last=self.keep_last,
            keep_best=self.keep_best,
            keep_every=self.keep_every,
            success=self.success,
        )
        self.folders, self.newest = {name for name in self.folders if name in found}, found.newest

    def resumes(self, back: int) -> None:
        """From the newest or, as if that were damaged, from an older one of those that a learner goes on from."""
        if self.newest:
            parent = self.newest[min(back, len(self.newest) - 1)]
            lineage = max(self.forks) + 1
            self.forks[lineage] = tuple(parent)
            self.now = Weights(lineage, parent.version)


ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("save"), st.booleans()),
        st.tuples(st.just("evaluate"), st.sampled_from([None, 0.0, 0.3, 0.9, float("nan")])),
        st.tuples(st.just("resume"), st.integers(0, 3)),
    ),
    max_size=40,
)
POLICIES = st.tuples(st.integers(1, 3), st.integers(0, 2), st.none() | st.integers(1, 4))


def check(disk: Disk, acts: list[tuple[str, object]]) -> None:
    last_good: Weights | None = None
    for act, how in acts:
        before = set(disk.folders)
        if act == "save":
            disk.saves(bool(how))
            last_good = disk.now if how else last_good
        elif act == "evaluate":
            disk.success[disk.now] = how  # type: ignore[assignment]
        else:
            disk.resumes(int(how))  # type: ignore[call-overload]
            last_good = Weights(*disk.forks[disk.now.lineage]) if disk.newest else last_good
        if act != "save" or not how:
            assert disk.folders == before, "only a checkpoint that was written takes others away"
            assert last_good is None or last_good in disk.folders
            continue
        branch = {name for name in before | {disk.now} if disk.tree.is_ancestor(name, disk.now.lineage)}
        branch = {name for name in branch if name == disk.now or name.version != disk.now.version}
        assert disk.now in disk.folders, "the newest sound one is never removed"
        assert disk.newest == tuple(sorted(branch, reverse=True)[: disk.keep_last])
        assert disk.folders <= branch, "of rewound branches nothing stays"
        if disk.keep_every is not None:
            assert {name for name in branch if name.version % disk.keep_every == 0} <= disk.folders
        known = {name: disk.success[name] for name in branch if name in disk.success}
        scores = sorted((score for score in known.values() if score is not None and score == score), reverse=True)
        for score in scores[: disk.keep_best]:  # as good as any is kept of each rank of the best
            assert any(known.get(name) == score for name in disk.folders)
        extra = {name for name in disk.folders if disk.keep_every is None or name.version % disk.keep_every}
        assert len(extra) <= disk.keep_last + disk.keep_best


@settings(max_examples=300, deadline=None)
@given(POLICIES, ACTS)
def test_the_newest_the_best_and_every_nth_survive_whatever_happens(
    policy: tuple[int, int, int | None], acts: list[tuple[str, object]]
) -> None:
    check(Disk(*policy), acts)


def test_a_rule_that_counts_the_best_among_the_newest_would_lose_the_newest() -> None:
    """Negative control: what a checkpoint manager does that keeps "the best n"."""

    def best_only(saved: set[Weights], **options: object) -> Kept:
        success = options["success"]
        ranked = sorted(saved, key=lambda name: (success.get(name) or 0.0, name), reverse=True)  # type: ignore[attr-defined]
        return Kept(tuple(ranked[: int(options["keep_last"])]))  # type: ignore[call-overload]

    acts: list[tuple[str, object]] = [("save", True), ("evaluate", 0.9), ("save", True), ("evaluate", 0.3)]
    with pytest.raises(AssertionError, match="the newest sound one"):
        check(Disk(1, 0, None, rule=best_only), acts)
