"""Who is to get weights, by which way, and who is late: decisions without a process."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.buffers.base import MemberStats
from asyncrl.config.weights import Fallback, WeightsConfig
from asyncrl.learners.recipients import Lateness, by_transport, document, recipients
from asyncrl.staleness import Weights
from asyncrl.weights.base import Late, Recipient
from asyncrl.weights.reach import Place

HERE = Place(host="a", memory="17", device="cpu")
THERE = Place(host="b", memory="9", device="cpu")
DEADLINE_S = 10.0


def member(name: str, *, alive: bool = True, **told: Any) -> MemberStats:
    return MemberStats(
        name=name,
        incarnation=f"{name}-1",
        serving=Weights(1, 3),
        checksum="",
        alive=alive,
        beat_age_s=0.1,
        issued=0,
        progress=told,
    )


def one(name: str = "c", **values: Any) -> Recipient:
    known: dict[str, Any] = {"place": HERE, "transport": None, "serving": Weights(1, 3), **values}
    return Recipient(name=name, incarnation=f"{name}-1", **known)


def test_a_recipient_is_what_its_last_beat_said() -> None:
    told = {
        "place": msgspec.to_builtins(THERE),
        "weights": {
            "transport": "collective",
            "why": "x",
            "phase": "stage",
            "weights": [1, 4],
            "since": 5.5,
            "error": "",
        },
        "tokens": 17,
    }
    assert recipients([member("c", **told)]) == [
        one(place=THERE, transport="collective", weights=Weights(1, 4), phase="stage", since=5.5)
    ]


@pytest.mark.parametrize(
    "told",
    [{}, {"place": 5}, {"weights": {"transport": "pigeon"}}, {"weights": {"phase": "sleep"}}, {"weights": None}],
    ids=str,
)
def test_who_says_nothing_that_is_understood_is_alive_all_the_same(told: dict[str, Any]) -> None:
    assert recipients([member("c", **told)]) == [one(place=None)]


def test_the_dead_get_nothing() -> None:
    assert recipients([member("c", alive=False)]) == []


def test_a_way_is_served_once_somebody_has_chosen_it_or_will() -> None:
    config = WeightsConfig()
    near, far, fallen = one("near"), one("far", place=THERE), one("fallen", transport="file", place=THERE)
    assert by_transport([near], config, learner=HERE) == {}
    assert by_transport([near, far, fallen, one("silent", place=None)], config, learner=HERE) == {
        "collective": [far],
        "file": [fallen],
    }


def test_a_transport_that_the_recipe_names_is_there_from_the_start() -> None:
    config = WeightsConfig(transport="file", url="/w")
    assert by_transport([], config, learner=HERE) == {"file": []}
    assert by_transport([one("near")], config, learner=HERE) == {"file": [one("near")]}
    assert by_transport([one("near")], WeightsConfig(transport="shm"), learner=HERE) == {}


def test_no_collective_transfer_waits_for_who_is_late_and_files_lie_there_for_all() -> None:
    config = WeightsConfig(fallback=Fallback(url="/w"))
    found = [one("quick", place=THERE), one("slow", place=THERE), one("fallen", transport="file")]
    ways = by_transport(found, config, learner=HERE, left_out=frozenset({"slow", "fallen"}))
    assert {way: [r.name for r in those] for way, those in ways.items()} == {
        "collective": ["quick"],
        "file": ["fallen"],
    }


def test_the_document_names_what_there_is() -> None:
    offer = {"transport": "shm", "lineage": 2, "version": 7}
    said = document(Weights(2, 7), fork=Weights(1, 5), place=HERE, checksums={"2/7": "ab"}, offers=[offer, None])
    assert said == {
        "lineage": 2,
        "version": 7,
        "fork": {"parent": 1, "version": 5},
        "place": {"host": "a", "memory": "17", "device": "cpu"},
        "checksums": {"2/7": "ab"},
        "offers": [offer],
    }
    assert msgspec.json.decode(msgspec.json.encode(said)) == said


@pytest.mark.parametrize("phase", ["announce", "stage", "activate", "verify", None])
def test_who_stays_in_a_phase_beyond_the_deadline_is_named_once_with_it(phase: Any) -> None:
    lateness, newest = Lateness(DEADLINE_S), Weights(1, 4)
    stuck = [one("stuck", phase=phase, weights=phase and newest), one("served", serving=newest)]
    assert lateness.look(stuck, newest, now=100.0) == []
    assert lateness.look(stuck, newest, now=110.0) == []
    (late,) = lateness.look(stuck, newest, now=110.1)
    assert (late.member, late.weights, late.phase) == ("stuck", newest, phase or "announce")
    assert lateness.look(stuck, newest, now=300.0) == []
    # What is waited for in the announce phase may be the very transfer that would leave it out.
    assert lateness.left_out == (set() if phase in (None, "announce") else {"stuck"})


@pytest.mark.parametrize(
    "moved",
    [
        one("c", phase="activate", weights=Weights(1, 4)),
        one("c", phase="stage", weights=Weights(1, 5)),
        one("c", serving=Weights(1, 4), phase="stage", weights=Weights(1, 5)),
        Recipient(name="c", incarnation="c-2", place=HERE, transport=None, serving=None),
    ],
    ids=["phase", "weights", "serving", "incarnation"],
)
def test_who_moves_on_is_late_no_more(moved: Recipient) -> None:
    lateness, newest = Lateness(DEADLINE_S), Weights(1, 5)
    stuck = one("c", phase="stage", weights=Weights(1, 4))
    lateness.look([stuck], newest, now=0.0)
    assert len(lateness.look([stuck], newest, now=11.0)) == 1
    assert lateness.look([moved], newest, now=12.0) == []
    assert lateness.left_out == frozenset()


def test_weights_that_wait_for_requests_to_end_are_not_late() -> None:
    lateness = Lateness(DEADLINE_S)
    holding = [one("c", phase=None, weights=Weights(1, 4))]
    assert [lateness.look(holding, Weights(1, 4), now=now) for now in (0.0, 100.0, 200.0)] == [[], [], []]


def test_a_collectors_clock_decides_nothing() -> None:
    lateness = Lateness(DEADLINE_S)
    for n in range(40):  # says each time that it has just begun
        lateness.look([one(phase="stage", weights=Weights(1, 4), since=float(n))], Weights(1, 4), now=float(n))
    assert lateness.left_out == {"c"}


def test_who_a_sender_has_named_is_late_until_it_moves_on() -> None:
    lateness, newest = Lateness(DEADLINE_S), Weights(1, 4)
    stuck = [one("c", phase="stage", weights=newest), one("d", phase="stage", weights=newest)]
    lateness.look(stuck, newest, now=0.0)
    lateness.mark([Late("c", newest, "stage", 0.0)], stuck, now=1.0)
    assert lateness.left_out == {"c"}
    assert lateness.look(stuck, newest, now=2.0) == []
    assert lateness.left_out == {"c"}
    lateness.look([one("c", serving=newest), stuck[1]], newest, now=3.0)
    assert lateness.left_out == frozenset()


@given(
    st.lists(
        st.tuples(st.floats(0.01, 30.0), st.sampled_from([None, "announce", "stage", "activate"]), st.integers(0, 3)),
        max_size=40,
    )
)
def test_nobody_is_named_before_the_deadline_of_one_stay_and_nobody_twice_for_it(stays: list[Any]) -> None:
    lateness, now, since, last, named = Lateness(DEADLINE_S), 0.0, 0.0, None, False
    for pause, phase, version in stays:
        now += pause
        where = (phase, version)
        if where != last:
            last, since, named = where, now, False
        found = [one(phase=phase, serving=Weights(1, version))]
        late = lateness.look(found, Weights(1, 3), now=now)
        served = phase is None and version == 3
        assert bool(late) == (not served and not named and now - since > DEADLINE_S)
        named = named or bool(late)
