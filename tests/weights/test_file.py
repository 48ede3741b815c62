"""Transport `file`: what is in the folder, what is read back, what is refused, what is removed."""

from __future__ import annotations

import json
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from safetensors import safe_open

from asyncrl.staleness import Weights
from asyncrl.weights import file
from asyncrl.weights.base import WeightsError, WeightsGone, WeightsLate
from asyncrl.weights.depot import LocalDepot, open_depot
from asyncrl.weights.file import FileReceiver, FileSender
from asyncrl.weights.manifest import DTYPES, Manifest, describe, tensor_bytes
from asyncrl.weights.shards import index, shards
from asyncrl.weights.stored import removable
from tests.weights.folders import Learner, offered, recipient

TENSORS = [
    ("a", torch.randn(30, 7).bfloat16()),
    ("mask", torch.tensor([True, False, True])),
    ("scale", torch.tensor(-0.0)),
    ("empty", torch.empty(0, 4)),
    ("b", torch.arange(33, dtype=torch.int64)),
    ("last", torch.empty(0)),
]


def sender(url: object, run: str = "r") -> FileSender:
    return FileSender(run, str(url), deadline_s=30, changed=lambda: None)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Learner]]:
    """A learner whose versions go to a URL; closed at the end."""
    learners: list[Learner] = []

    def start(url: object = tmp_path / "url", run: str = "r") -> Learner:
        segments = tmp_path / f"segments{len(learners)}"
        segments.mkdir()
        learners.append(Learner(segments, sender(url, run)))
        return learners[-1]

    yield start
    for learner in learners:
        learner.close()
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def stage(offer: Any, **options: Any) -> Any:
    return FileReceiver().stage(offer, deadline_s=30, **options)


@pytest.mark.parametrize("hashed", [True, False])
@pytest.mark.parametrize("where", ["local", "memory://weights"])
def test_what_is_staged_is_what_was_published(
    where: str, hashed: bool, start: Callable[..., Learner], tmp_path: Path
) -> None:
    learner = start(tmp_path / "url" if where == "local" else where)
    for version in range(3):
        offer = json.loads(json.dumps(learner.publish(Weights(1, version), TENSORS, tied={"head": "a"}, hashed=hashed)))
        for verify in (True, False):
            staged = stage(offer, verify=verify)
            assert list(staged.tensors) == [name for name, _ in TENSORS]
            for name, tensor in TENSORS:
                assert staged.tensors[name].dtype == tensor.dtype
                assert staged.tensors[name].shape == tensor.shape
                assert tensor_bytes(name, staged.tensors[name]) == tensor_bytes(name, tensor)
            assert (staged.weights, staged.tied, staged.mapped) == (Weights(1, version), {"head": "a"}, False)
            assert learner.image is not None
            assert staged.checksum == learner.image.manifest.checksum
            assert bool(staged.checksum) == hashed


def test_the_file_is_one_that_the_safetensors_package_reads(start: Callable[..., Learner], tmp_path: Path) -> None:
    start().publish(Weights(1, 4), TENSORS)
    with safe_open(tmp_path / "url" / "r" / "1-4" / "model.safetensors", framework="pt") as opened:
        assert sorted(opened.keys()) == sorted(name for name, _ in TENSORS)
        for name, tensor in TENSORS:
            assert torch.equal(opened.get_tensor(name), tensor)
        assert opened.metadata()["weights"] == "1-4"
    assert (tmp_path / "url" / "r" / "LATEST").read_text() == "1-4\n"


def test_every_type_that_can_be_published_has_a_name_in_the_format(start: Callable[..., Learner]) -> None:
    tensors = [(name, torch.ones(3).to(dtype)) for name, dtype in DTYPES.items()]
    staged = stage(start().publish(Weights(1, 0), tensors))
    assert {name: tensor.dtype for name, tensor in staged.tensors.items()} == DTYPES


def test_large_versions_are_several_files_and_an_index(
    start: Callable[..., Learner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.weights.shards.shards.__kwdefaults__", {"shard_bytes": 300})
    staged = stage(start().publish(Weights(1, 0), TENSORS))
    assert all(torch.equal(staged.tensors[name], tensor) for name, tensor in TENSORS)
    folder = tmp_path / "url" / "r" / "1-0"
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", *names, "model.safetensors.index.json"]
    places = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    for name, tensor in TENSORS:
        with safe_open(folder / places[name], framework="pt") as opened:
            assert torch.equal(opened.get_tensor(name), tensor)


def test_a_tensor_larger_than_a_file_should_be_has_one_of_its_own() -> None:
    specs = [describe(name, torch.zeros(size), offset=0, checksum="") for name, size in (("a", 1), ("b", 99), ("c", 1))]
    found = shards(Manifest(tuple(specs), {}, ""), {}, shard_bytes=100)
    assert [[spec.name for spec in shard.tensors] for shard in found] == [["a"], ["b"], ["c"]]
    assert json.loads(index(found))["metadata"] == {"total_size": 404}


def damage(path: Path, content: bytes, at: int) -> None:
    with open(path, "r+b") as opened:
        opened.seek(at, 0 if at >= 0 else 2)
        opened.write(content)


def test_truncated_corrupt_foreign_and_missing_files_are_errors_that_name_them(
    start: Callable[..., Learner], tmp_path: Path
) -> None:
    learner = start()
    offer = learner.publish(Weights(1, 0), TENSORS)
    folder = tmp_path / "url" / "r" / "1-0"
    whole = (folder / "model.safetensors").read_bytes()
    manifest = (folder / "manifest.json").read_bytes()

    damage(folder / "model.safetensors", b"\x7f", -1)  # the last byte of the last tensor in the file
    with pytest.raises(WeightsError, match=r"1-0/model\.safetensors: 1 of 6 tensors differ: mask \(expected xxh3 \w+,"):
        stage(offer)
    (folder / "model.safetensors").write_bytes(whole[:-5])
    with pytest.raises(WeightsError, match=rf"/model\.safetensors has {len(whole) - 5} bytes, expected {len(whole)}:"):
        stage(offer, verify=False)
    (folder / "model.safetensors").write_bytes(bytes(len(whole)))
    with pytest.raises(WeightsError, match=r"1-0/model\.safetensors is not the file that was written for these"):
        stage(offer, verify=False)
    (folder / "model.safetensors").unlink()
    with pytest.raises(WeightsGone, match=r"1-0/model\.safetensors has been removed"):
        stage(offer)
    (folder / "model.safetensors").write_bytes(whole)
    assert stage(offer).weights == Weights(1, 0)

    damage(folder / "manifest.json", b" ", 0)
    with pytest.raises(WeightsError, match=r"1-0/manifest\.json: expected xxh3 \w+, found \w+: it is damaged, or"):
        stage(offer)
    (folder / "manifest.json").write_bytes(manifest[:-1])
    with pytest.raises(WeightsError, match=r"1-0/manifest\.json: expected xxh3"):
        stage(offer)
    shutil.rmtree(folder)
    with pytest.raises(WeightsGone, match="has been removed"):
        stage(offer)


def test_without_verification_corrupt_bytes_are_served(
    start: Callable[..., Learner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer = start().publish(Weights(1, 0), TENSORS)
    damage(tmp_path / "url" / "r" / "1-0" / "model.safetensors", b"\x7f", -1)
    monkeypatch.setattr(file, "compare", lambda *_, **__: None)
    assert not torch.equal(stage(offer).tensors["mask"].view(torch.uint8), TENSORS[1][1].view(torch.uint8))


def test_an_offer_that_is_none_is_refused() -> None:
    for offer in ({"transport": "file"}, {"transport": "carrier pigeon"}):
        with pytest.raises(WeightsError, match=f"this is no offer of transport {offer['transport']}"):
            stage(offer)


def test_a_url_that_fsspec_does_not_know_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"'nope://x': Protocol not known: nope"):
        open_depot("nope://x")
    (tmp_path / "occupied").touch()
    with pytest.raises(WeightsError, match="weights cannot be written there: "):
        sender(tmp_path / "occupied")


def test_three_versions_stay_and_those_that_collectors_serve_or_stage(
    start: Callable[..., Learner], tmp_path: Path, eventually: Callable[..., bool]
) -> None:
    learner = start()
    recipients = [
        recipient("a", Weights(1, 1)),
        recipient("b", Weights(1, 1), weights=Weights(1, 3), phase="stage"),
    ]
    for version in range(9):
        learner.publish(Weights(1, version), TENSORS, recipients=recipients)
    kept = ["1-1", "1-3", "1-6", "1-7", "1-8", "LATEST"]
    assert eventually(20, lambda: sorted(path.name for path in (tmp_path / "url" / "r").iterdir()) == kept)


def test_what_a_crashed_run_left_goes_and_what_others_put_there_stays(
    start: Callable[..., Learner], tmp_path: Path, eventually: Callable[..., bool]
) -> None:
    root = tmp_path / "url" / "r"
    for name in ("writing-dead", "1-30", "3-1", "4-0", "notes"):
        (root / name).mkdir(parents=True)
        (root / name / "model.safetensors").touch()
    (root / "2-7").mkdir()
    (root / "2-7" / "mine.txt").touch()
    (root / "writing-dead.LATEST").touch()
    start().publish(Weights(3, 0), TENSORS)
    kept = ["2-7", "3-0", "4-0", "LATEST", "notes"]  # 4-0: a newer learner's
    assert eventually(20, lambda: sorted(path.name for path in root.iterdir()) == kept)
    assert (root / "2-7" / "mine.txt").exists()


def test_a_learner_that_was_replaced_leaves_the_new_one_alone(start: Callable[..., Learner], tmp_path: Path) -> None:
    old, new = start(), start()
    old.publish(Weights(1, 5), TENSORS)
    offer = new.publish(Weights(2, 3), TENSORS)
    for version in range(6, 10):
        old.publish(Weights(1, version), TENSORS)
    assert (tmp_path / "url" / "r" / "LATEST").read_text() == "2-3\n"
    assert stage(offer).weights == Weights(2, 3)


def test_two_runs_of_one_name_in_one_folder_are_told(
    start: Callable[..., Learner], caplog: pytest.LogCaptureFixture, eventually: Callable[..., bool]
) -> None:
    one, other = start(), start()
    offer = one.publish(Weights(1, 0), TENSORS)
    other.publish(Weights(1, 0), TENSORS)
    with pytest.raises(WeightsError, match=r"another learner writes there; runs of one name need a weights\.url each"):
        stage(offer)
    other.publish(Weights(1, 5), TENSORS)
    one.publish(Weights(1, 1), TENSORS)
    assert eventually(20, lambda: "another learner writes lineage 1 of a run of this name there: 1-5" in caplog.text)


def test_nothing_is_removed_but_versions() -> None:
    names = ["LATEST", "1-x", "-1-0", "1-0", "1-1", "1-2", "2-0"]
    assert removable(names, [Weights(1, 2)], [recipient("a", Weights(1, 1))], ()) == ["1-0"]
    assert removable(names, [Weights(1, 2)], [], {Weights(1, 0)}) == ["1-1"]


def test_the_newest_image_wins_while_one_is_written(start: Callable[..., Learner]) -> None:
    learner = start()
    for version in range(50):
        learner.image = learner.images.write(Weights(1, version), TENSORS, tied={})
        learner.sender.serve(learner.image, [recipient()])
    assert stage(offered(learner.sender, Weights(1, 49))).weights == Weights(1, 49)


def test_without_collectors_nothing_is_written(start: Callable[..., Learner], tmp_path: Path) -> None:
    learner = start()
    learner.image = learner.images.write(Weights(1, 0), TENSORS, tied={})
    learner.sender.serve(learner.image, [])
    learner.sender.close()
    assert list((tmp_path / "url" / "r").iterdir()) == []


def test_a_full_disk_is_named_late_and_overcome(
    start: Callable[..., Learner],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    eventually: Callable[..., bool],
) -> None:
    monkeypatch.setattr("asyncrl.weights.newest_sender.RETRY_S", 0.0)
    learner = start()
    first = learner.publish(Weights(1, 0), TENSORS)
    image = learner.images.write(Weights(1, 1), TENSORS, tied={})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400, hard))  # a real write that really fails; Python ignores the signal
    try:
        learner.sender.serve(image, [recipient()])
        assert eventually(20, lambda: "it is full: three versions and the one that is written must fit" in caplog.text)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(path.name for path in (tmp_path / "url" / "r").iterdir()) == ["1-0", "LATEST"]
    assert learner.sender.offer() == first
    assert stage(first).weights == Weights(1, 0)
    assert learner.sender.late() == ()
    learner.sender._deadline_s = 0.0
    (late,) = learner.sender.late()
    assert (late.member, late.weights, late.phase) == ("learner", Weights(1, 1), "announce")
    assert learner.sender.late() == ()  # once
    learner.sender.serve(image, [recipient()])
    assert stage(offered(learner.sender, Weights(1, 1))).weights == Weights(1, 1)


def test_what_is_removed_while_it_is_read_is_gone(
    start: Callable[..., Learner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer = start().publish(Weights(1, 0), TENSORS)
    read = LocalDepot.read

    def remove_after(self: LocalDepot, name: str, start: int, into: memoryview) -> int:
        found = read(self, name, start, into)
        shutil.rmtree(tmp_path / "url" / "r" / "1-0", ignore_errors=True)
        return found

    monkeypatch.setattr(LocalDepot, "read", remove_after)
    with pytest.raises(WeightsGone, match=r"model\.safetensors has been removed"):
        stage(offer)


class OtherSystem(MemoryFileSystem):
    """What `memory://` holds under another protocol, with faults."""

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(MemoryFileSystem._strip_protocol(path.removeprefix(f"{cls.protocol}://")))


SLOW_S = 3.0  # a busy machine asks for the first part in less


class SlowSystem(OtherSystem):
    """An object store that needs longer for a part of an object than a test gives it."""

    protocol = "slow"

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **more: Any) -> bytes:
        if start is not None:
            time.sleep(SLOW_S + 0.1)
        return bytes(super().cat_file(path, start=start, end=end, **more))


class BrokenSystem(OtherSystem):
    """An object store that answers nothing but errors of its own."""

    protocol = "broken"

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **more: Any) -> bytes:
        raise RuntimeError("503 slow down")


@pytest.fixture
def _systems() -> None:
    fsspec.register_implementation("slow", SlowSystem, clobber=True)
    fsspec.register_implementation("broken", BrokenSystem, clobber=True)


@pytest.mark.usefixtures("_systems")
def test_a_reader_that_does_not_keep_the_deadline_says_which_tensor_it_was_at(start: Callable[..., Learner]) -> None:
    offer = start("memory://weights").publish(Weights(1, 0), [(f"t{i}", torch.ones(4)) for i in range(1000)])
    with pytest.raises(WeightsLate, match=r"not read within 3 s, next was .*model\.safetensors, t0\."):
        FileReceiver().stage({**offer, "url": offer["url"].replace("memory", "slow")}, deadline_s=SLOW_S)


@pytest.mark.usefixtures("_systems")
def test_what_a_store_says_of_its_trouble_is_an_error_of_weights(start: Callable[..., Learner]) -> None:
    offer = start("memory://weights").publish(Weights(1, 0), TENSORS)
    with pytest.raises(WeightsError, match=r"1-0/manifest\.json cannot be read: RuntimeError: 503 slow down"):
        stage({**offer, "url": offer["url"].replace("memory", "broken")})


def test_small_tensors_are_not_fetched_one_by_one(
    start: Callable[..., Learner], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = [(f"t{i}", torch.full((4,), i)) for i in range(100)] + [("large", torch.arange(300_000))]
    offer = start("memory://weights").publish(Weights(1, 0), tensors)
    requests: list[str] = []
    read = MemoryFileSystem.cat_file

    def count(self: MemoryFileSystem, path: str, **more: Any) -> Any:
        requests.append(path)
        return read(self, path, **more)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", count)
    monkeypatch.setattr("asyncrl.weights.depot.PIECE", 1_000_000)
    found = stage(offer).tensors
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors)
    assert len([path for path in requests if "safetensors" in path]) == 3  # of 2.4 MB


def test_a_fault_in_the_thread_reaches_the_learner(
    start: Callable[..., Learner], monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., bool]
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a fault of this code")

    learner = start()
    monkeypatch.setattr(learner.sender, "_publish", fail)
    learner.image = learner.images.write(Weights(1, 0), TENSORS, tied={})
    learner.sender.serve(learner.image, [recipient()])
    assert eventually(20, lambda: not learner.sender._thread.is_alive())
    with pytest.raises(ZeroDivisionError):
        learner.sender.serve(learner.image, [recipient()])
