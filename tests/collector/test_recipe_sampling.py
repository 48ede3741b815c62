"""The recipe's sampling is what an engine is asked for, all of it."""

from __future__ import annotations

import msgspec

from asyncrl.collectors.rollout import sampling_of
from asyncrl.config.recipe import Collector, Recipe, SamplingConfig


def test_every_key_of_the_recipes_sampling_reaches_the_engine() -> None:
    config = SamplingConfig(
        temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, max_tokens=20, min_tokens=3, stop=["a", "b"]
    )
    assert all(getattr(config, name) != getattr(SamplingConfig(), name) for name in config.__struct_fields__)
    sampling = sampling_of(Recipe(collector=Collector(sampling=config)), (4,))
    asked = {name: getattr(sampling, name) for name in config.__struct_fields__}
    assert asked == {**msgspec.structs.asdict(config), "stop": ("a", "b")}
    assert sampling.stop_token_ids == (4,)
