"""Chains of versions: which base a delta has, and that every receiver ends with the right bits whatever it missed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.staleness import Weights
from asyncrl.weights.base import WeightsError
from asyncrl.weights.delta_chain import Chain, Link, verified, way_to
from asyncrl.weights.delta_codec import Extent, apply, encode
from tests.weights.folders import recipient


def link(version: int, base: int | None = None, *, whole: int = 0, delta: int = 10) -> Link:
    return Link(
        lineage=1,
        version=version,
        manifest_checksum=f"{version}",
        whole_bytes=whole,
        base=None if base is None else Weights(1, base),
        delta_bytes=0 if base is None else delta,
    )


def serving(*versions: int | None) -> list:
    return [recipient(f"c{i}", None if version is None else Weights(1, version)) for i, version in enumerate(versions)]


def test_the_baseline_moves_to_what_all_have_verified_and_no_further() -> None:
    chain = Chain(anchor_every=10)
    assert chain.anchor_is_due
    chain.published(link(0, whole=100))
    chain.published(link(1, 0))
    assert chain.advance(serving(1, 0)) is None
    assert chain.advance(serving(1, None)) is None
    assert chain.advance([]) is None
    chain.published(link(2, 0))
    chain.published(link(3, 0))
    assert chain.advance(serving(3, 2)) == link(2, 0)
    assert chain.published(link(4, 2)) == (link(0, whole=100), link(2, 0), link(4, 2))


def test_staged_and_verified_counts_and_on_its_way_does_not() -> None:
    on_the_way = recipient("c", Weights(1, 1), weights=Weights(1, 2), phase="stage")
    assert verified(on_the_way) == Weights(1, 1)
    assert verified(recipient("c", Weights(1, 1), weights=Weights(1, 2), phase="activate")) == Weights(1, 2)


def test_every_so_many_versions_are_whole_and_the_chain_goes_back_to_the_last_anchor_but_one() -> None:
    chain, wholes, versions = Chain(anchor_every=4), [], []
    base: int | None = None
    for version in range(14):
        whole = chain.anchor_is_due
        wholes += [version] if whole else []
        versions = [found.version for found in chain.published(link(version, base, whole=100 if whole else 0))]
        chain.advance(serving(version))
        assert chain.baseline is not None
        base = chain.baseline.version
    assert wholes == [0, 4, 8, 12]
    assert versions == [8, 9, 10, 11, 12, 13]


def test_the_way_of_fewest_bytes_is_taken() -> None:
    chain = [link(0, whole=100), link(1, 0), link(2, 1, whole=100), link(3, 2)]
    assert way_to(chain, None) == (chain[2], (chain[3],))
    assert way_to(chain, chain[0]) == (None, (chain[1], chain[2], chain[3]))
    assert way_to(chain, chain[3]) == (None, ())
    dear = [link(0, whole=100), link(1, 0, delta=60), link(2, 1, whole=100, delta=60), link(3, 2)]
    assert way_to(dear, dear[0]) == (dear[2], (dear[3],))


def test_what_is_kept_but_not_in_the_chain_is_no_beginning() -> None:
    chain = [link(4, whole=100), link(5, 4)]
    for kept in (link(3, 2), link(4, 2), Link(lineage=1, version=4, manifest_checksum="other", whole_bytes=100)):
        assert way_to(chain, kept) == (chain[0], (chain[1],))


def test_a_chain_that_leads_nowhere_is_an_error() -> None:
    for chain in ([link(5, 4)], [link(5, 6), link(6, 5)]):
        with pytest.raises(WeightsError, match="no whole version leads to"):
            way_to(chain, None)


class Receiver:
    """Follows a chain on arrays as `DeltaReceiver` does on files."""

    def __init__(self) -> None:
        self.kept: tuple[Link, np.ndarray] | None = None
        self.serving: Weights | None = None

    def stage(self, chain: tuple[Link, ...], wholes: dict, deltas: dict) -> np.ndarray:
        way = way_to(chain, self.kept[0] if self.kept else None)
        if way.whole is not None:
            self.kept = (way.whole, wholes[way.whole.version].copy())
        assert self.kept is not None
        for step in way.deltas[:-1]:
            image = self.kept[1]
            apply(deltas[step.version], image)
            self.kept = (step, image)
        result = self.kept[1].copy()
        for step in way.deltas[-1:]:
            apply(deltas[step.version], result)
        return result


@settings(max_examples=100, deadline=None)
@given(
    st.data(),
    st.integers(2, 6),
    st.lists(st.sampled_from(["publish", "stage", "stage", "restart", "lose"]), min_size=5, max_size=40),
)
def test_versions_with_lost_recipients_and_retries_end_with_the_published_bits(
    data: st.DataObject, anchor_every: int, events: list[str]
) -> None:
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    chain, receivers = Chain(anchor_every), {name: Receiver() for name in "abc"}
    base = image = np.zeros(512, np.uint8)
    wholes: dict[int, np.ndarray] = {}
    deltas: dict[int, bytes] = {}
    offer: tuple[Link, ...] = ()
    published: dict[int, np.ndarray] = {}
    for event in ["publish", *events]:
        if event == "publish":
            version = len(published)
            if advanced := chain.advance([recipient(n, r.serving) for n, r in receivers.items()]):
                apply(deltas[advanced.version], base)
                assert np.array_equal(base, published[advanced.version])
            image = image.copy()  # elements change, change back, or stay
            image[random.integers(0, 512, 20)] = random.integers(0, 2, 20)
            published[version] = image
            baseline, whole = chain.baseline, chain.anchor_is_due
            delta = encode(base, image, [Extent(0, 512, 2)], dense_share=1.0) if baseline else None
            if delta is not None:
                deltas[version] = b"".join(delta.parts)
            if whole:
                wholes[version], base = image, image.copy()
            offer = chain.published(
                link(
                    version,
                    baseline.version if baseline else None,
                    whole=512 if whole else 0,
                    delta=delta.nbytes if delta else 0,
                )
            )
            continue
        name = data.draw(st.sampled_from(sorted(receivers)))
        if event == "stage":
            staged = receivers[name].stage(offer, wholes, deltas)
            assert np.array_equal(staged, published[offer[-1].version])
            receivers[name].serving = offer[-1].weights
        elif event == "restart":
            receivers[name] = Receiver()
        elif len(receivers) > 1:
            del receivers[name]
