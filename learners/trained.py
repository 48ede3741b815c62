"""The model that a learner trains, the same on every rank: with its adapters, from the start or from a checkpoint."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel

from asyncrl.config.recipe import Model
from asyncrl.learners.checkpoint import Checkpoint
from asyncrl.learners.lora import attach, load_adapter
from asyncrl.learners.model import load_model


def load_trained(config: Model, model_path: Path, checkpoint: Checkpoint | None, *, seed: int) -> PreTrainedModel:
    """The weights of `checkpoint`, or the initial ones of `model_path`, on the CPU. seed: of new adapters. Raises
    ModelError."""
    lora = config.lora
    # Adapters are trained on the model they began with, not on the merged one of a checkpoint.
    source = model_path if checkpoint is None or lora is not None else checkpoint.folder
    model = load_model(
        source,
        config.dtype,
        config.attn_implementation,
        trust_remote_code=config.trust_remote_code,
    )
    if lora is not None:
        attach(model, lora, seed=seed, base=config.path)
        if checkpoint is not None:
            load_adapter(model, checkpoint.folder)
    return model
