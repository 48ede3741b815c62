"""A small random model, and the `asyncrl` command called as its console script calls it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.cli.main import main
from asyncrl.learners.tiny import tiny_config
from asyncrl.learners.tiny_tokenizer import build_tokenizer

torch.set_num_threads(1)


class Ended(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


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
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """Run `asyncrl ARGUMENTS` in the test's folder, in this process: importing torch again would take most of the
    time."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def run(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["asyncrl", *arguments])
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capfd.readouterr()
        assert isinstance(end.value.code, int)
        return Ended(end.value.code, out, err)

    return run
