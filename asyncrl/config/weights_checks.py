"""What a recipe may ask of the way that weights take: a place for it, a fallback, an adapter alone."""

from __future__ import annotations

from asyncrl.config.errors import RecipeError, quoted
from asyncrl.config.recipe import Recipe, TransformersEngine
from asyncrl.config.secrets import masked
from asyncrl.config.weights import WeightsConfig


def check_weights(recipe: Recipe) -> None:
    """Raise RecipeError for a section `weights` that contradicts itself, or the model and the engine."""
    _check_transport(recipe.weights)
    _check_adapter(recipe)


def _check_transport(weights: WeightsConfig) -> None:
    transport, fallback = weights.transport, weights.fallback
    if transport in ("file", "delta") and weights.url is None:
        raise RecipeError(
            f"weights.transport is {transport}, but weights.url does not say where: write a folder that the hosts of "
            "learner and collectors see, such as /nfs/asyncrl/weights, or a URL that fsspec knows, such as s3://bucket/"
        )
    if transport not in ("file", "delta") and weights.url is not None:
        raise RecipeError(
            f"weights.url is {quoted(weights.url)}, but weights.transport {transport} does not use it. Write "
            "weights.transport: file (or delta), or give it as weights.fallback: {transport: file, url: ...}"
        )
    if fallback is not None and transport == fallback.transport:
        raise RecipeError(
            "weights.fallback is the transport that it should stand in for (weights.transport file). Leave it out"
        )
    for key, url in (("weights.url", weights.url), ("weights.fallback.url", fallback and fallback.url)):
        if url is not None and masked(url) != url:
            raise RecipeError(
                f"{key} is {quoted(masked(url))}; it goes to the store, where others read it. Give the storage's "
                "package its password through the environment or its own configuration, on every host"
            )
    if fallback is not None and weights.url == fallback.url:
        raise RecipeError(
            f"weights.url and weights.fallback.url are both {quoted(fallback.url)}. Give each a place of its own"
        )
    if transport == "delta" and weights.verify_every > 1:
        raise RecipeError(
            f"weights.verify_every is {weights.verify_every}, but weights.transport delta rebuilds each version from "
            "others, which nothing but its checksums can prove. Use 1"
        )


def _check_adapter(recipe: Recipe) -> None:
    engine = recipe.collector.engine
    if recipe.weights.lora == "merged":
        return
    if recipe.model.lora is None:
        raise RecipeError(
            "weights.lora is adapter, but model.lora is null: all weights are trained, there is no adapter to send. "
            "Write model.lora: {r: 16}, or leave weights.lora out"
        )
    if not isinstance(engine, TransformersEngine):
        raise RecipeError(
            f"weights.lora is adapter, but collector.engine.type {engine.type} keeps no base model to add it to in the "
            "way the learner does. Leave weights.lora out: merged weights are served by every engine"
        )
