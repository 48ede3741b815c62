"""The bookkeeping of weights on their way: phases, deadlines, fallback."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.collectors.course import MOST_PAUSE_S, Course, offer_of, shown_offers
from asyncrl.staleness import Weights
from asyncrl.weights.base import WeightsError, WeightsLate
from asyncrl.weights.reach import Choice

DEADLINE_S = 10.0
NETWORK = Choice("collective", "another host")


def course(fallback: str | None = None) -> Course:
    made = Course(deadline_s=DEADLINE_S, fallback=fallback)  # type: ignore[arg-type]
    made.first = NETWORK
    return made


def test_each_phase_is_told_with_its_weights_and_the_time_it_began() -> None:
    one = course()
    one.announced(Weights(1, 7), 100.0)
    told = one.told(now=103.0, unix=1003.0)
    assert told == {
        "transport": "collective",
        "why": "another host",
        "phase": "announce",
        "weights": [1, 7],
        "since": 1000.0,
        "error": "",
    }
    one.fetching(Weights(1, 6), 104.0)
    assert (one.phase, one.weights, one.since) == ("stage", Weights(1, 6), 104.0)
    for at, phase in enumerate(("activate", "verify"), start=105):
        one.enter(phase, float(at))  # type: ignore[arg-type]
        one.enter(phase, at + 0.5)  # type: ignore[arg-type]
        assert (one.phase, one.weights, one.since) == (phase, Weights(1, 6), float(at))
    one.arrived()
    assert (one.phase, one.weights, one.told(0.0, 0.0)["since"]) == (None, None, 0.0)


def test_an_announcement_that_is_followed_by_others_is_as_late_as_the_first() -> None:
    one = course()
    for second in range(int(DEADLINE_S)):
        one.looked()
        one.announced(Weights(1, second), float(second))
        one.check(float(second), "shm 1/3")
    assert one.look_in_s(DEADLINE_S - 1) == 1.0
    with pytest.raises(WeightsLate, match=r"\(1, 9\) are announced for 10 s .* over collective; offered are shm 1/3"):
        one.check(DEADLINE_S, "shm 1/3")


def test_what_failed_gives_way_to_the_fallback_until_something_arrived() -> None:
    one = course("file")
    one.announced(Weights(1, 1), 0.0)
    one.failed("cut off", 1.0)
    assert one.choice is not None
    assert (one.choice.transport, one.choice.why) == ("file", "weights.fallback, until collective has its turn again")
    assert (one.error, one.failed_at, one.phase) == ("cut off", 1.0, None)
    one.looked()
    one.announced(Weights(1, 2), 2.0)
    assert one.since == 2.0, "the fallback has the whole deadline"
    one.fetching(Weights(1, 2), 2.0)
    assert one.error == "cut off", "it is not over before something arrived"
    one.arrived()
    assert (one.choice, one.error) == (NETWORK, "")


def test_what_reaches_as_well_comes_before_the_fallback() -> None:
    one = course(fallback="file")
    one.first = Choice("cuda-ipc", "one GPU", instead="shm")
    one.announced(Weights(1, 1), 0.0)
    one.failed("the GPU said no", 1.0)
    assert one.choice == Choice("shm", "reaches as well, until cuda-ipc has its turn again")
    one.arrived()
    assert one.choice == one.first


def test_a_fallback_that_fails_as_well_gives_the_first_choice_its_turn() -> None:
    one = course("file")
    found = []
    for at in range(4):
        one.announced(Weights(1, 1), float(at))
        one.failed("no", float(at))
        assert one.choice is not None
        found.append(one.choice.transport)
    assert found == ["file", "collective", "file", "collective"]


def test_without_a_fallback_the_pauses_grow_to_a_limit() -> None:
    one = course()
    pauses = []
    for _ in range(10):
        one.announced(Weights(1, 1), 0.0)
        one.failed("no", 0.0)
        pauses.append(one.look_in_s(0.0))
    assert pauses[:3] == [0.5, 1.0, 2.0]
    assert pauses[-1] == MOST_PAUSE_S
    one.arrived()
    one.announced(Weights(1, 2), 0.0)
    one.failed("no", 0.0)
    assert one.look_in_s(0.0) == 0.5


def test_what_is_gone_again_and_again_is_late_in_the_end() -> None:
    one = course()
    for second in range(11):
        one.looked()
        one.announced(Weights(1, second), float(second))
        one.fetching(Weights(1, second), float(second))
        one.gone(float(second))
    assert (one.phase, one.since) == ("announce", 0.0)
    with pytest.raises(WeightsLate):
        one.check(DEADLINE_S, "none")


def test_an_engine_that_did_not_take_them_is_no_transports_fault() -> None:
    one = course("file")
    one.announced(Weights(1, 1), 0.0)
    one.engine_failed("did not activate", 1.0)
    assert (one.choice, one.error, one.look_in_s(1.0)) == (NETWORK, "did not activate", None)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["announced", "fetching", "activate", "verify", "arrived", "gone", "failed", "engine", "looked"]
        ),
        st.floats(0.0, 3 * DEADLINE_S),
    ),
    max_size=30,
)


@given(events=EVENTS, fallback=st.sampled_from([None, "file"]))
def test_whatever_happens_nothing_waits_without_a_limit(events: list[tuple[str, float]], fallback: str | None) -> None:
    """What is behind looks again by itself, within the deadline or the longest pause; what is told goes into a beat."""
    one = course(fallback)
    now, behind = 0.0, False
    for event, passed in events:
        now += passed
        weights = Weights(1, int(now))
        match event:
            case "announced" | "fetching":
                behind = True
                one.announced(weights, now)
                if event == "fetching":
                    one.fetching(weights, now)
            case "activate" | "verify":
                one.enter(event, now)
            case "gone" if one.weights is not None:
                one.gone(now)
            case "failed":
                one.failed("no", now)
            case "engine":
                one.engine_failed("no", now)
                behind = False  # its engine's restart is news
            case "arrived":
                one.arrived()
                behind = False
            case "looked" if behind:
                one.looked()
                one.announced(weights, now)
        look = one.look_in_s(now)
        if behind and one.phase in (None, "announce") and event != "engine":
            assert look is not None
            assert look <= max(DEADLINE_S, MOST_PAUSE_S)
        told = msgspec.json.decode(msgspec.json.encode(one.told(now, 1e9 + now)))
        assert told["since"] <= 1e9 + now + 0.001
        assert fallback or one.choice == NETWORK


def test_the_offer_of_a_transport_may_lag_and_one_without_a_name_is_an_error() -> None:
    shm, file = {"transport": "shm", "lineage": 1, "version": 7}, {"transport": "file", "lineage": 1, "version": 5}
    document = {"offers": [shm, file]}
    assert offer_of(document, "file") == (Weights(1, 5), file)
    assert offer_of(document, "delta") is None
    assert offer_of({}, "shm") is None
    assert shown_offers(document) == "shm 1/7, file 1/5"
    with pytest.raises(WeightsError, match="names no weights"):
        offer_of({"offers": [{"transport": "shm", "lineage": "1"}]}, "shm")
