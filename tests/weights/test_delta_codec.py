"""The codec alone: what comes out is what went in, bit for bit, and its size is what the changes cost."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.weights.delta_codec import CHUNK, DENSE_SHARE, HEAD, RECORD, Bytes, Delta, Extent, apply, encode

ITEMSIZES = (1, 2, 4, 8)


def images(seed: int, extents: list[Extent], density: float) -> tuple[Bytes, Bytes]:
    """Two images that differ in about this share of the extents' elements, with gaps between the extents."""
    random = np.random.default_rng(seed)
    size = max((extent.offset + extent.nbytes for extent in extents), default=0)
    old = random.integers(0, 256, size, dtype=np.uint8)
    new = old.copy()
    for offset, nbytes, itemsize in extents:
        words = new[offset : offset + nbytes].view(f"u{itemsize}")
        changed = random.random(words.size) < density
        words[changed] = ~words[changed]
    return old, new


def content(delta: Delta) -> bytes:
    return b"".join(delta.parts)


@st.composite
def layouts(draw: st.DrawFn) -> list[Extent]:
    at, extents = 0, []
    for elements in draw(st.lists(st.integers(0, 3000), max_size=6)):
        itemsize = draw(st.sampled_from(ITEMSIZES))
        extents.append(Extent(at, elements * itemsize, itemsize))
        at = -(-(at + elements * itemsize) // 64) * 64
    return extents


@settings(deadline=None)
@given(layouts(), st.sampled_from([0.0, 0.001, 0.01, 0.03, 0.0625, 0.1, 0.3, 1.0]), st.integers(0, 2**32))
def test_applying_a_delta_gives_the_new_image_whatever_type_and_density(
    extents: list[Extent], density: float, seed: int
) -> None:
    old, new = images(seed, extents, density)
    delta = encode(old, new, extents, dense_share=1.0)
    assert delta is not None
    result = old.copy()
    assert apply(content(delta), result) == delta.changed
    assert np.array_equal(result, new)
    assert len(content(delta)) == delta.nbytes
    apply(content(delta), result)  # overwrites: again makes no difference
    assert np.array_equal(result, new)


@pytest.mark.parametrize("itemsize", ITEMSIZES)
@pytest.mark.parametrize("changes", [[0], [65534], [65535], [65536], [0, 65536, 200_000], [CHUNK - 1, CHUNK]])
def test_gaps_beyond_what_two_bytes_hold_and_changes_at_the_edges_of_chunks(itemsize: int, changes: list[int]) -> None:
    elements = CHUNK + 131_072
    old = np.zeros(elements * itemsize, np.uint8)
    new = old.copy()
    new.view(f"u{itemsize}")[changes] = 1
    delta = encode(old, new, [Extent(0, old.size, itemsize)])
    assert delta is not None
    assert delta.changed == len(changes)
    result = old.copy()
    apply(content(delta), result)
    assert np.array_equal(result, new)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16, torch.int8, torch.bool, torch.float64])
def test_negative_zero_and_the_payload_of_a_nan_are_changes_like_all_others(dtype: torch.dtype) -> None:
    old = torch.zeros(100).to(dtype)
    new = old.clone()
    bits = new.view(torch.uint8)
    bits[-1] = 0x80 if dtype.is_floating_point else 1  # little-endian: the sign of the last element
    if dtype.is_floating_point:
        old[0] = float("nan")
        new[0] = float("nan")
        bits[0] ^= 1  # another NaN
    before, after = old.view(torch.uint8).numpy(), bits.numpy()
    delta = encode(before, after, [Extent(0, before.size, dtype.itemsize)])
    assert delta is not None
    assert delta.changed == (2 if dtype.is_floating_point else 1)
    result = before.copy()
    apply(content(delta), result)
    assert np.array_equal(result, after)


def test_of_empty_tensors_and_of_equal_images_nothing_is_written() -> None:
    old = np.arange(64, dtype=np.uint8)
    delta = encode(old, old.copy(), [Extent(0, 0, 8), Extent(0, 64, 2), Extent(64, 0, 4)])
    assert delta is not None
    assert (delta.changed, delta.elements, delta.nbytes) == (0, 32, HEAD.size)


def bfloat16_step(elements: int, density: float, seed: int = 0) -> tuple[Bytes, Bytes]:
    """Weights as models have them, and the same with this share of them one step of bfloat16 further."""
    random = np.random.default_rng(seed)
    old = torch.from_numpy(random.normal(0, 0.02, elements).astype(np.float32)).bfloat16()
    bits = old.view(torch.int16).numpy().copy()
    changed = random.random(elements) < density
    bits[changed] += random.choice(np.array([-1, 1], np.int16), int(changed.sum()))
    return old.view(torch.uint8).numpy(), bits.view(np.uint8)


@pytest.mark.parametrize("density", [0.0001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2])
def test_a_delta_of_bfloat16_has_at_most_a_tenth_more_than_four_bytes_a_change(density: float) -> None:
    elements = 1_300_000
    old, new = bfloat16_step(elements, density)
    delta = encode(old, new, [Extent(0, 2 * elements, 2)])
    assert delta is not None
    changed = sum(a != b for a, b in zip(_pairs(old), _pairs(new), strict=True))  # counted another way
    records = -(-elements // CHUNK)
    assert delta.changed == changed
    assert delta.nbytes <= 1.1 * (4 * changed + HEAD.size + records * RECORD.itemsize)


def _pairs(image: Bytes) -> memoryview:
    return memoryview(image.tobytes()).cast("H")


def test_what_is_mostly_another_is_better_written_whole() -> None:
    old, new = bfloat16_step(100_000, DENSE_SHARE + 0.02)
    assert encode(old, new, [Extent(0, old.size, 2)]) is None
    old, new = bfloat16_step(100_000, DENSE_SHARE - 0.02)
    assert encode(old, new, [Extent(0, old.size, 2)]) is not None


def test_images_and_extents_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="images of 4 and 8 bytes"):
        encode(np.zeros(4, np.uint8), np.zeros(8, np.uint8), [])
    for extent in (Extent(1, 2, 2), Extent(0, 3, 2), Extent(0, 8, 2), Extent(0, 3, 3)):
        with pytest.raises(ValueError, match="does not lie"):
            encode(np.zeros(4, np.uint8), np.zeros(4, np.uint8), [extent])


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_damaged_bytes_are_an_error_or_change_only_the_image(data: st.DataObject) -> None:
    old, new = bfloat16_step(5_000, 0.02, seed=1)
    delta = encode(old, new, [Extent(0, old.size, 2)])
    assert delta is not None
    damaged = bytearray(content(delta))
    if data.draw(st.booleans()):
        del damaged[data.draw(st.integers(0, len(damaged) - 1)) :]
    else:
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        apply(bytes(damaged), old.copy())
    except ValueError:
        return  # what is not found here is by the checksums


def test_a_delta_for_another_image_is_refused() -> None:
    old, new = bfloat16_step(100, 0.1)
    delta = encode(old, new, [Extent(0, old.size, 2)])
    assert delta is not None
    with pytest.raises(ValueError, match="for an image of 200 bytes; expected format 1, 202 bytes"):
        apply(content(delta), np.zeros(202, np.uint8))
    with pytest.raises(ValueError, match="no delta: it starts with"):
        apply(b"something else entirely", old.copy())
