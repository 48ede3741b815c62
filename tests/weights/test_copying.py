"""Copies by several threads: every byte once, the checksum that of the source, whoever is faster."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.weights import copying
from asyncrl.weights.copying import Copier, copy_and_hash


@pytest.fixture(params=[0, 1, 3])
def copier(request: pytest.FixtureRequest) -> Iterator[Copier]:
    copier = Copier(request.param)
    yield copier
    copier.close()


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "CHUNK", 1 << 10)


@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 1025, 100_000])
@pytest.mark.parametrize("hashed", [True, False])
def test_everything_is_copied_and_the_checksum_is_the_sources(copier: Copier, size: int, hashed: bool) -> None:
    source = np.random.default_rng(size).integers(256, size=size, dtype=np.uint8)
    into = np.full(size + 8, 7, np.uint8)
    found = copier.copy(into[:size], source, hashed=hashed)
    assert np.array_equal(into[:size], source)
    assert into[size:].tolist() == [7] * 8
    assert found == (xxhash.xxh3_64_hexdigest(source.tobytes()) if hashed else "")


@given(content=st.binary(max_size=5_000))
@settings(max_examples=50, deadline=None)
def test_a_reader_hashes_its_copy(content: bytes) -> None:
    source = np.frombuffer(content, np.uint8)
    into = np.zeros(len(source), np.uint8)
    assert copy_and_hash(into, source) == xxhash.xxh3_64_hexdigest(into.tobytes()) == xxhash.xxh3_64_hexdigest(content)


def test_nobody_waits_for_a_helper_that_gets_no_core() -> None:
    copier, busy, go_on = Copier(1), threading.Event(), threading.Event()
    copier._pool.submit(lambda: (busy.set(), go_on.wait(60)))
    assert busy.wait(60)
    source = np.arange(50_000, dtype=np.uint8)
    into = np.zeros_like(source)
    assert copier.copy(into, source, hashed=True) == xxhash.xxh3_64_hexdigest(source.tobytes())
    assert np.array_equal(into, source)
    assert not go_on.is_set()
    go_on.set()
    copier.close()


def test_a_helpers_error_is_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    caller, helped = threading.current_thread(), threading.Event()
    copy = copying._copy_chunk

    def failing(into: np.ndarray, source: np.ndarray, start: int) -> None:
        if threading.current_thread() is not caller:
            helped.set()
            raise MemoryError("a helper's")
        assert helped.wait(60)
        copy(into, source, start)

    monkeypatch.setattr(copying, "_copy_chunk", failing)
    copier = Copier(1)
    with pytest.raises(MemoryError, match="a helper's"):
        copier.copy(np.zeros(5_000, np.uint8), np.zeros(5_000, np.uint8), hashed=True)
    copier.close()
