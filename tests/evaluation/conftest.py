"""A small random model, and the command in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.learners.tiny import tiny_config
from asyncrl.learners.tiny_tokenizer import build_tokenizer
from tests.commands import Ended

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the built-in model before any training, with weights large enough for answers to differ."""
    folder = tmp_path_factory.mktemp("evaluation") / "model"
    tokenizer = build_tokenizer(48)
    torch.manual_seed(0)
    config = tiny_config(tokenizer)
    config.initializer_range = 0.3
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def cli(called: Callable[..., Ended]) -> Callable[..., Ended]:
    """In this process: importing torch again would take most of the time."""
    return called
