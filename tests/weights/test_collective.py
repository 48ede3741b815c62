"""The collective transport within one process: what arrives, groups that are kept, and who is told what."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.staleness import Weights
from asyncrl.weights import group
from asyncrl.weights.base import StagedWeights, WeightsError, WeightsGone, WeightsLate
from asyncrl.weights.collective import CollectiveSender
from asyncrl.weights.collective_receiver import CollectiveReceiver
from asyncrl.weights.image import Images
from asyncrl.weights.manifest import DTYPES, combined_checksum, tensor_bytes
from asyncrl.weights.meeting import own_address
from tests.weights.members import BUCKET, Learner, recipient

Outcome = StagedWeights | BaseException


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "BUCKET", BUCKET)


@pytest.fixture
def learner(tmp_path: Path) -> Iterator[Learner]:
    learner = Learner(Images("test", folder=tmp_path), deadline_s=40)
    yield learner
    learner.close()


@pytest.fixture
def receivers() -> Iterator[dict[str, CollectiveReceiver]]:
    receivers = {name: CollectiveReceiver(f"incarnation-{name}") for name in ("a", "b", "c")}
    yield receivers
    for receiver in receivers.values():
        receiver.close()


class Staging(threading.Thread):
    """`stage` in a thread of its own."""

    def __init__(self, receiver: CollectiveReceiver, offer: Mapping[str, Any], *, deadline_s: float = 40) -> None:
        super().__init__(daemon=True)
        self._stage = lambda: receiver.stage(json.loads(json.dumps(offer)), deadline_s=deadline_s)
        self.found: Outcome | None = None
        self.start()

    def run(self) -> None:
        try:
            self.found = self._stage()
        except BaseException as error:
            self.found = error

    def outcome(self) -> Outcome:
        self.join(60)
        assert self.found is not None
        return self.found


def take(learner: Learner, version: int, *receivers: CollectiveReceiver, after: int = 0) -> list[Outcome]:
    offer = learner.offer(version, after=after)
    stagings = [Staging(receiver, offer) for receiver in receivers]
    return [staging.outcome() for staging in stagings]


def group_of(receiver: CollectiveReceiver) -> int:
    assert receiver._session is not None
    assert receiver._session.group is not None
    return receiver._session.group.id


def staged(outcome: Outcome) -> StagedWeights:
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


@st.composite
def state_dicts(draw: st.DrawFn) -> list[tuple[str, torch.Tensor]]:
    """Tensors of any type and shape with any bits; now and then one that fills buckets."""
    tensors = []
    for i in range(draw(st.integers(0, 5))):
        dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        if draw(st.integers(0, 4)) == 0:
            shape = (BUCKET // dtype.itemsize + draw(st.integers(-1, 1)),)
        count = torch.Size(shape).numel() * dtype.itemsize
        raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8)
        tensors.append((f"t{i}", raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)))
    return tensors


@given(state_dicts(), st.booleans())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_state_dict_arrives_bit_for_bit(
    learner: Learner,
    receivers: dict[str, CollectiveReceiver],
    tensors: list[tuple[str, torch.Tensor]],
    hashed: bool,
) -> None:
    version = 0 if learner.image is None else learner.image.weights.version + 1
    learner.serving = {"a": None}
    learner.image = learner.images.write(Weights(1, version), tensors, tied={"alias": "source"}, hashed=hashed)
    learner.look()
    found = staged(take(learner, version, receivers["a"])[0])
    assert found.weights == Weights(1, version)
    assert list(found.tensors) == [name for name, _ in tensors]
    for name, tensor in tensors:
        copy = found.tensors[name]
        assert (copy.dtype, copy.shape) == (tensor.dtype, tensor.shape)
        assert tensor_bytes(name, copy) == tensor_bytes(name, tensor)
    assert found.tied == {"alias": "source"}
    assert found.checksum == (combined_checksum(tensors) if hashed else "")
    assert not found.mapped


def test_a_group_is_kept_while_nobody_comes_or_goes(learner: Learner, receivers: dict[str, CollectiveReceiver]) -> None:
    groups = []
    for version, present in enumerate((["a", "b"], ["a", "b"], ["a", "b", "c"], ["a", "b", "c"], ["b"])):
        learner.serving = dict.fromkeys(present)
        checksum = learner.publish(version)
        members = [receivers[name] for name in present]
        assert [staged(found).checksum for found in take(learner, version, *members)] == [checksum] * len(present)
        assert len({group_of(member) for member in members}) == 1
        groups.append(group_of(receivers["b"]))
    assert groups == [1, 1, 3, 3, 5]
    assert learner.sender.late() == []


def test_what_was_staged_is_good_while_it_is_used_and_its_memory_is_used_again_afterwards(
    learner: Learner, receivers: dict[str, CollectiveReceiver]
) -> None:
    learner.serving = {"a": None}
    learner.publish(0)
    first = staged(take(learner, 0, receivers["a"])[0])
    learner.publish(1)
    second = staged(take(learner, 1, receivers["a"])[0])
    assert (float(first.tensors["t0"][0]), float(second.tensors["t0"][0])) == (0, 1)
    place = first.tensors["t0"].data_ptr()
    del first
    learner.publish(2)
    assert staged(take(learner, 2, receivers["a"])[0]).tensors["t0"].data_ptr() == place


def test_who_comes_after_the_roster_was_closed_gets_the_next_epoch(
    learner: Learner, receivers: dict[str, CollectiveReceiver]
) -> None:
    learner.serving = {"a": None}
    checksum = learner.publish(0)
    offer = learner.offer(0)
    staged(Staging(receivers["a"], offer).outcome())
    assert isinstance(Staging(receivers["b"], offer).outcome(), WeightsGone)
    (found,) = take(learner, 0, receivers["b"], after=offer["epoch"])
    assert staged(found).checksum == checksum


def test_who_lost_what_it_had_received_gets_it_again(
    learner: Learner, receivers: dict[str, CollectiveReceiver]
) -> None:
    learner.serving = {"a": None}
    checksum = learner.publish(0)
    offer = learner.offer(0)
    staged(Staging(receivers["a"], offer).outcome())
    again = CollectiveReceiver("incarnation-a")
    assert isinstance(Staging(again, offer).outcome(), WeightsGone)
    (found,) = take(learner, 0, again, after=offer["epoch"])
    assert staged(found).checksum == checksum
    again.close()


def test_versions_skip_to_the_newest_once_somebody_has_come(
    learner: Learner, receivers: dict[str, CollectiveReceiver]
) -> None:
    learner.serving = {"a": None, "b": None}
    learner.publish(0)
    offer = learner.offer(0)
    waiting = Staging(receivers["a"], offer)  # for b
    learner.publish(1)
    checksum = learner.publish(2)
    came = Staging(receivers["b"], offer)
    found = [waiting.outcome(), came.outcome()]
    assert [staged(outcome).weights for outcome in found] == [Weights(1, 0)] * 2  # one version, never a mixture
    found = take(learner, 2, receivers["a"], receivers["b"], after=offer["epoch"])
    assert [staged(outcome).checksum for outcome in found] == [checksum] * 2


def test_an_offer_that_nobody_needs_gives_way_to_a_newer_one_at_once(
    learner: Learner, receivers: dict[str, CollectiveReceiver]
) -> None:
    learner.serving = {"a": None}
    learner.publish(0)
    staged(take(learner, 0, receivers["a"])[0])
    learner.serving = {"a": Weights(1, 0)}
    learner.publish(1)
    assert learner.offer(1)["epoch"] == 2


def test_nothing_is_offered_while_nobody_wants_it(learner: Learner) -> None:
    learner.publish(0)
    learner.sender.close()
    assert learner.sender.offer() is None
    assert learner.sender.measured() == {"bytes": 0, "seconds": 0}


def test_bytes_that_were_changed_on_the_way_are_refused_by_name(
    learner: Learner, receivers: dict[str, CollectiveReceiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    change_a_byte(monkeypatch)
    learner.serving = {"a": None}
    learner.publish(0)
    (found,) = take(learner, 0, receivers["a"])
    assert isinstance(found, WeightsError)
    assert "1 of 4 tensors differ: t1 (expected xxh3" in str(found)


def test_without_checksums_the_same_bytes_would_be_served(
    learner: Learner, receivers: dict[str, CollectiveReceiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    change_a_byte(monkeypatch)
    learner.serving = {"a": None}
    learner.publish(0)
    staged(receivers["a"].stage(learner.offer(0), deadline_s=40, verify=False))


def change_a_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    send = group.Group.send

    def changed(self: group.Group, epoch: int, weights: Weights, data: Any, **limits: Any) -> None:
        data = data.copy()
        data[3 * BUCKET] ^= 1
        send(self, epoch, weights, data, **limits)

    monkeypatch.setattr(group.Group, "send", changed)


def test_a_group_that_is_out_of_step_is_found_by_the_header(
    learner: Learner, receivers: dict[str, CollectiveReceiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    send = group.Group.send
    monkeypatch.setattr(
        group.Group, "send", lambda self, epoch, weights, data, **limits: send(self, epoch - 1, weights, data, **limits)
    )
    learner.serving = {"a": None}
    learner.publish(0)
    (found,) = take(learner, 0, receivers["a"])
    assert isinstance(found, WeightsError)
    assert not isinstance(found, WeightsGone)
    assert "the group is out of step" in str(found)


def test_a_member_that_does_not_come_is_named_and_not_waited_for_again(
    tmp_path: Path, receivers: dict[str, CollectiveReceiver]
) -> None:
    learner = Learner(Images("test", folder=tmp_path), deadline_s=4)
    learner.serving = {"a": None, "absent": None}
    for version in range(2):
        checksum = learner.publish(version)
        (found,) = take(learner, version, receivers["a"])
        assert staged(found).checksum == checksum
        assert [(one.member, one.phase) for one in learner.sender.late()] == [("absent", "announce")][version:]
        learner.serving["a"] = Weights(1, version)
    learner.close()


def test_closing_calls_off_what_members_wait_for(learner: Learner, receivers: dict[str, CollectiveReceiver]) -> None:
    learner.serving = {"a": None, "absent": None}
    learner.publish(0)
    waiting = Staging(receivers["a"], learner.offer(0))
    point = learner.sender._point.connection()
    while not point.check(["1/knocks"]):
        time.sleep(0.01)
    learner.sender.close()
    assert isinstance(waiting.outcome(), WeightsError)


def test_a_learner_that_has_gone_is_an_error_at_once(
    learner: Learner, receivers: dict[str, CollectiveReceiver]
) -> None:
    learner.serving = {"a": None}
    learner.publish(0)
    offer = dict(learner.offer(0))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        offer["port"] = listener.getsockname()[1]  # free, once this is closed
    with pytest.raises(WeightsError, match=r"cannot be reached on 127.0.0.1, port \d+: Connection refused"):
        receivers["a"].stage(offer, deadline_s=40)


def test_a_learner_that_does_not_answer_is_late_and_said_to_be(
    learner: Learner, receivers: dict[str, CollectiveReceiver]
) -> None:
    learner.serving = {"a": None}
    learner.publish(0)
    offer = dict(learner.offer(0))
    with socket.create_server(("127.0.0.1", 0)) as listener:  # accepts, as a stopped process's kernel does
        offer["port"] = listener.getsockname()[1]
        with pytest.raises(WeightsLate, match=r"late after .* s of connecting. The learner, or"):
            receivers["a"].stage(offer, deadline_s=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"transport": "shm"}, "no offer of transport collective, but of 'shm'"),
        ({"epoch": "soon"}, "no offer of transport collective: Expected `int`"),
        ({"manifest": {"tensors": [], "tied": {}, "checksum": "00"}}, "combined checksum 00 announced"),
    ],
)
def test_an_offer_that_contradicts_itself_is_refused(
    learner: Learner, receivers: dict[str, CollectiveReceiver], change: dict[str, Any], message: str
) -> None:
    learner.serving = {"a": None}
    learner.publish(0)
    with pytest.raises(WeightsError, match=message):
        receivers["a"].stage({**learner.offer(0), **change}, deadline_s=40)


def test_a_port_that_is_taken_is_an_error_that_says_what_to_set() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(WeightsError, match=rf"port {port}: Address already in use.*Set weights.port"):
            CollectiveSender(deadline_s=1, toward="127.0.0.1", port=port)


def test_the_learner_listens_where_it_is_told_or_where_it_reaches_the_store() -> None:
    assert own_address("lo", "ignored") == "127.0.0.1"
    assert own_address(None, "127.0.0.1") == "127.0.0.1"
    with pytest.raises(WeightsError, match=r"weights.interface 'nonesuch0' has no address"):
        own_address("nonesuch0", "127.0.0.1")
    with pytest.raises(WeightsError, match=r"no address of this host reaches .*Set weights.interface"):
        own_address(None, "no-such-host.invalid")


def test_a_recipient_is_named_as_people_know_it() -> None:
    assert recipient("a").incarnation == "incarnation-a"
