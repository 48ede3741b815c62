"""What is planned where activations are computed again and weights lie in host memory."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.config.recipe import Learner, Model, Recipe
from asyncrl.learners.memory import Part, activation_bytes, rank_parts
from asyncrl.learners.shapes import SMOLLM2, Shapes, shapes_of


@pytest.fixture(scope="module")
def shapes() -> Shapes:
    found = shapes_of("builtin:smollm2-135m", None)
    assert isinstance(found, Shapes)
    return found


def parts_of(shapes: Shapes, dtype: Any = "float32", **keys: Any) -> dict[str, Part]:
    recipe = Recipe(model=Model(path="m", dtype=dtype), learner=Learner(**keys))
    return {part.what: part for part in rank_parts(recipe, shapes)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_computed_again_each_layer_keeps_its_input_and_one_of_them_all(shapes: Shapes, dtype: str) -> None:
    whole, again = (activation_bytes(shapes, dtype, 1000, 600, again=again) for again in (False, True))
    inputs = SMOLLM2["num_hidden_layers"] * 600 * SMOLLM2["hidden_size"] * 4
    assert again - inputs == pytest.approx(2 * whole / (shapes.layers + 1), rel=0.2)
    assert again < whole / 5


def test_the_plan_says_what_the_key_saves_and_names_it_until_it_is_set(shapes: Shapes) -> None:
    whole, lean = parts_of(shapes), parts_of(shapes, gradient_checkpointing=True)
    (what,) = [what for what in whole if what.startswith("activations")]
    assert lean[what].most < whole[what].most / 5
    assert "learner.gradient_checkpointing" in whole[what].keys
    assert "learner.gradient_checkpointing" not in lean[what].keys
    assert {**whole, what: lean[what]} == lean


@pytest.mark.parametrize("ranks", [1, 2])
def test_offloaded_parts_are_not_on_the_gpu_where_gathered_layers_and_activations_are(
    shapes: Shapes, ranks: int
) -> None:
    parts = parts_of(shapes, cpu_offload=True, ranks=ranks)
    there = {what.split()[0] for what, part in parts.items() if part.on_gpu}
    assert there == {"gathered", "activations", "their"}
    # A copy of all weights is certain beside the parts of several ranks; one rank has it only if there is a GPU.
    assert parts["whole weights"].certain is (ranks > 1)
    assert parts["whole weights"].span()[0] == (4 * shapes.parameters if ranks > 1 else 0)
    plain = parts_of(shapes, ranks=ranks)
    assert {"weights, float32", "gradients", "AdamW's moments"} <= {what for what, part in plain.items() if part.on_gpu}
