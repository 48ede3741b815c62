"""The model that a learner trains, the same on every rank: with its adapters, from the start or from a checkpoint."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel

from asyncrl.config.recipe import Recipe
from asyncrl.learners.checkpoint import Checkpoint
from asyncrl.learners.lora import attach, load_adapter
from asyncrl.learners.model import load_model


def load_trained(recipe: Recipe, model_path: Path, checkpoint: Checkpoint | None) -> PreTrainedModel:
    """The weights of `checkpoint`, or the initial ones of `model_path`, on the CPU. Raises ModelError."""
    lora = recipe.model.lora
    # Adapters are trained on the model they began with, not on the merged one of a checkpoint.
    source = model_path if checkpoint is None or lora is not None else checkpoint.folder
    model = load_model(
        source,
        recipe.model.dtype,
        recipe.model.attn_implementation,
        trust_remote_code=recipe.model.trust_remote_code,
    )
    if lora is not None:
        attach(model, lora, seed=recipe.run.seed, base=recipe.model.path)
        if checkpoint is not None:
            load_adapter(model, checkpoint.folder)
    return model
