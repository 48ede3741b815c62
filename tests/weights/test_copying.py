"""Copies by several threads: every byte once, the checksum that of the source, an error the caller's."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.weights import copying
from asyncrl.weights.copying import Copier, copy


@pytest.fixture(params=[1, 3])
def copier(request: pytest.FixtureRequest) -> Iterator[Copier]:
    copier = Copier(request.param)
    yield copier
    copier.close()


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "CHUNK", 1 << 10)


@pytest.mark.parametrize("hashed", [True, False])
def test_everything_is_copied_and_the_checksums_are_the_sources(copier: Copier, hashed: bool) -> None:
    sizes = [0, 1, 1023, 1024, 1025, 100_000]
    sources = [np.random.default_rng(size).integers(256, size=size, dtype=np.uint8) for size in sizes]
    targets = [np.full(size + 8, 7, np.uint8) for size in sizes]
    begun = [
        copier.begin(into[:size], source, hashed=hashed)
        for into, source, size in zip(targets, sources, sizes, strict=True)
    ]
    for into, source, size, found in zip(targets, sources, sizes, begun, strict=True):
        assert found.result(60) == (xxhash.xxh3_64_hexdigest(source.tobytes()) if hashed else "")
        assert np.array_equal(into[:size], source)
        assert into[size:].tolist() == [7] * 8


@given(content=st.binary(max_size=5_000))
@settings(max_examples=50, deadline=None)
def test_what_is_hashed_is_the_copy(content: bytes) -> None:
    source = np.frombuffer(content, np.uint8)
    into = np.zeros(len(source), np.uint8)
    found = copy(into, source, hashed=True)
    assert found == xxhash.xxh3_64_hexdigest(into.tobytes()) == xxhash.xxh3_64_hexdigest(content)


def test_a_threads_error_is_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(into: np.ndarray, source: np.ndarray, *, hashed: bool) -> str:
        raise MemoryError("a thread's")

    monkeypatch.setattr(copying, "copy", failing)
    copier = Copier(1)
    with pytest.raises(MemoryError, match="a thread's"):
        copier.begin(np.zeros(5_000, np.uint8), np.zeros(5_000, np.uint8), hashed=True).result(60)
    copier.close()
