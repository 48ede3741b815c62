"""Who takes part in a collective transfer, and who is late: without a network."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.staleness import Weights
from asyncrl.weights.base import Recipient
from asyncrl.weights.roster import MEETING, Knock, Meeting, Report, Roster, blame, form, lacking, waited_for

names = st.text("abcdef", min_size=1, max_size=3)
versions = st.builds(Weights, st.integers(1, 2), st.integers(0, 3))


def knock(member: str, device: str = "cpu", group: int = 0) -> Knock:
    return Knock(member=member, device=device, group=group)


def recipient(incarnation: str, serving: Weights | None = None, **more: object) -> Recipient:
    return Recipient(f"name-{incarnation}", incarnation, None, "collective", serving, **more)  # type: ignore[arg-type]


@given(st.sets(names), st.integers(1, 99))
def test_the_roster_is_exactly_who_knocked_and_everyone_has_a_rank_of_its_own(members: set[str], epoch: int) -> None:
    roster = form(epoch, {member: knock(member) for member in members}, None, device="cpu", limit_s=1)
    assert set(roster.members) == members
    assert sorted(rank for member in members if (rank := roster.rank(member))) == list(range(1, len(members) + 1))
    assert roster.rank("nobody") is None


@given(st.sets(names, min_size=1), st.sets(names, min_size=1), st.sets(names))
def test_a_group_is_kept_exactly_while_its_members_are_the_same_and_all_have_it(
    before: set[str], now: set[str], lost: set[str]
) -> None:
    last = form(3, {member: knock(member) for member in before}, None, device="cpu", limit_s=1)
    knocks = {member: knock(member, group=0 if member in lost else 3) for member in now}
    roster = form(7, knocks, last, device="cpu", limit_s=1)
    assert roster.group == (3 if now == before and not now & lost else 7)


def test_nccl_needs_a_gpu_of_its_own_for_everybody() -> None:
    def backend(*devices: str) -> str:
        knocks = {str(i): knock(str(i), device) for i, device in enumerate(devices[1:])}
        return form(1, knocks, None, device=devices[0], limit_s=1).backend

    assert backend("GPU-0", "GPU-1", "GPU-2") == "nccl"
    assert backend("GPU-0", "GPU-1", "GPU-1") == "gloo"
    assert backend("GPU-0", "GPU-0") == "gloo"
    assert backend("GPU-0", "GPU-1", "cpu") == "gloo"
    assert backend("cpu", "GPU-1") == "gloo"


def test_a_group_is_not_kept_for_another_backend() -> None:
    last = Roster(3, ("a",), 3, "gloo", 1.0)
    assert form(7, {"a": knock("a", "GPU-1", 3)}, last, device="GPU-0", limit_s=1).group == 7


@given(
    st.one_of(st.none(), st.floats(0, 100)),
    st.sets(names),
    st.booleans(),
    st.booleans(),
    st.floats(0, 200),
)
def test_no_member_that_is_there_waits_longer_than_the_meeting(
    first: float | None, missing: set[str], news: bool, wanted: bool, elapsed: float
) -> None:
    meeting = Meeting(Weights(1, 1), opened=0.0, deadline_s=40)
    now = elapsed if first is None else first + elapsed
    step = meeting.decide(now, first=first, missing=missing, newest=Weights(1, 2 if news else 1), wanted=wanted)
    if first is not None:
        assert step == ("wait" if missing and now - first < MEETING * 40 else "close")
    else:
        assert step in ("wait", "renew", "cancel")
        assert (step == "cancel") == (not wanted)
        # An offer that somebody may be on its way to is not withdrawn early; one that nobody needs, at once.
        assert (step == "renew") == (wanted and news and (not missing or now >= MEETING * 40))


@given(versions, st.lists(st.tuples(names, st.none() | versions), unique_by=lambda one: one[0]), st.data())
def test_who_has_these_weights_or_newer_ones_lacks_nothing(
    weights: Weights, served: list[tuple[str, Weights | None]], data: st.DataObject
) -> None:
    delivered = data.draw(st.dictionaries(names, versions))
    found = lacking([recipient(name, serving) for name, serving in served], weights, delivered)
    for name, serving in served:
        has = [version for version in (serving, delivered.get(name)) if version is not None and version >= weights]
        assert (name in found) == (not has)


def test_nobody_waits_for_who_did_not_come_last_time_or_has_weights_that_wait_for_something_else() -> None:
    evaluating = recipient("evaluating", weights=Weights(1, 1), phase=None)
    staging = recipient("staging", weights=Weights(1, 1), phase="stage")
    all_of_them = [evaluating, staging, recipient("frozen"), recipient("there")]
    everyone = lacking(all_of_them, Weights(1, 2), {})
    assert everyone == {"evaluating", "staging", "frozen", "there"}
    assert waited_for(all_of_them, everyone, {"frozen"}) == {"staging", "there"}


def report(member: str, received: int, error: str = "broken") -> Report:
    return Report(member=member, received=received, error=error)


def test_who_does_not_even_report_is_late() -> None:
    reports = {"a": report("a", 5), "c": report("c", 9)}
    assert blame(["a", "b", "c"], reports, expired=True) == ["b"]
    assert blame(["a", "b", "c"], reports, expired=False) == ["b"]


def test_if_all_report_and_the_time_is_up_who_had_received_least_is_late() -> None:
    reports = {"a": report("a", 9), "b": report("b", 2), "c": report("c", 10, "")}
    assert blame(["a", "b", "c"], reports, expired=True) == ["b"]


def test_if_all_report_in_time_nobody_is_late() -> None:
    assert blame(["a", "b"], {"a": report("a", 0), "b": report("b", 9)}, expired=False) == []
