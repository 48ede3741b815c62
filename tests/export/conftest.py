"""Run folders as trainings leave them, around a small random model with a chat template."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from asyncrl.config.loading import load_recipe
from asyncrl.config.recipe import Lora
from asyncrl.learners.lora import attach
from asyncrl.learners.model import load_model
from asyncrl.learners.tiny import tiny_config
from asyncrl.learners.tiny_tokenizer import build_tokenizer
from asyncrl.learners.writing import save
from asyncrl.runtime import folder as folders
from asyncrl.staleness import Weights

torch.set_num_threads(1)

LORA = Lora(r=4, alpha=8.0)


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the built-in model before any training, its weights large enough for answers to differ."""
    folder = tmp_path_factory.mktemp("export") / "base"
    tokenizer = build_tokenizer(48)
    torch.manual_seed(0)
    config = tiny_config(tokenizer)
    config.initializer_range = 0.3
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config.update(eos_token_id=tokenizer.eos_token_id, do_sample=True, temperature=0.7, top_k=0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def adapted(base: Path) -> PreTrainedModel:
    """The same with an adapter that changes every layer, as after training."""
    model = load_model(base, "float32", "auto")
    attach(model, LORA, seed=0, base=str(base))
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    return model


MakeRun = Callable[..., Path]


@pytest.fixture
def make_run(tmp_path: Path, base: Path) -> MakeRun:
    """A run's folder with a checkpoint of each of `versions`, all of the same `model` (left out: the base model)."""

    def make(*overrides: str, versions: tuple[int, ...] = (7,), model: PreTrainedModel | None = None) -> Path:
        recipe = tmp_path / "mine.yaml"
        recipe.write_text(f"extends: tiny-reverse\nmodel: {{path: {base}}}\ntask: {{digits: [2, 4]}}\n")
        folder = tmp_path / "runs" / "tiny-reverse-20260101-1"
        folder.mkdir(parents=True)
        folders.describe(folder, load_recipe(str(recipe), overrides=overrides))
        for version in versions:
            save(
                folder / "checkpoints",
                model=model or AutoModelForCausalLM.from_pretrained(base),
                tokenizer=AutoTokenizer.from_pretrained(base),
                training={"optimizer": {}},
                weights=Weights(1, version),
                forks={1: (0, 0)},
                trained=[],
                tokens=4096,
            )
        return folder

    return make
