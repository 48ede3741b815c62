"""The plan against what a real run takes, and a run that cannot fit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrl.config.loading import load_recipe
from asyncrl.learners.memory import image_parts, rank_parts
from asyncrl.learners.shapes import Shapes, shapes_of
from asyncrl.learners.tiny_tokenizer import build_tokenizer

LIMIT_S = 240.0


def peak_bytes(pid: int) -> int:
    """Largest resident size so far; 0 of a process that is gone."""
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


@pytest.mark.slow
def test_the_learners_measured_peak_is_what_was_planned(tmp_path: Path, start, eventually) -> None:
    """20 M parameters, a step of one micro-batch of about 2,048 tokens; with a reference, so that every group teaches,
    although a random model earns no reward."""
    tokenizer = build_tokenizer(512)
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=384,
            intermediate_size=1024,
            num_hidden_layers=12,
            num_attention_heads=6,
            num_key_value_heads=2,
            max_position_embeddings=512,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
        )
    ).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "recipe.yaml").write_text(
        json.dumps(
            {
                "extends": "tiny-reverse",
                "run": {"max_steps": 2},
                "model": {"path": str(tmp_path / "model"), "max_length": 64},
                "collector": {"sampling": {"max_tokens": 48, "min_tokens": 47}},
                "learner": {"groups_per_step": 4},
                "objective": {"beta": 1e-3},
                "eval": {"at_start": False, "at_end": False},
            }
        )
    )
    recipe = load_recipe(str(tmp_path / "recipe.yaml")).recipe
    shapes = shapes_of(recipe.model.path, Path(recipe.model.path))
    assert isinstance(shapes, Shapes)
    parts = [*rank_parts(recipe, shapes), *image_parts(recipe, shapes)]  # it maps the images that it writes
    least, most = (sum(sizes) for sizes in zip(*(part.span() for part in parts), strict=True))

    run = start("-P", "-m", "asyncrl.cli.main", "run", "recipe.yaml", cwd=tmp_path, OMP_NUM_THREADS="1")
    peak = 0

    def ended() -> bool:
        nonlocal peak
        with suppress(psutil.Error):  # one of them has just ended
            for child in psutil.Process(run.pid).children():
                if "learner" in child.cmdline():
                    peak = max(peak, peak_bytes(child.pid))
        return run.poll() is not None

    assert eventually(LIMIT_S, ended)
    assert run.returncode == 0, run.communicate()
    assert 0.75 * least < peak < 1.25 * most, (least, peak, most)
    # The activations are what makes the difference: without them the plan is far off.
    without = sum(part.span()[1] for part in parts if not part.what.startswith("activations"))
    assert not peak < 1.25 * without, (peak, without)


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_what_cannot_fit_ends_before_anything_starts(tmp_path: Path, cli: Callable[..., object], dry) -> None:
    model = tmp_path / "model"
    build_tokenizer(512).save_pretrained(model)
    config = {"hidden_size": 1 << 20, "intermediate_size": 1 << 22, "num_hidden_layers": 1000}
    heads = {"num_attention_heads": 1 << 13, "vocab_size": 1 << 17}
    (model / "config.json").write_text(json.dumps({"model_type": "llama", **config, **heads}))
    (model / "model.safetensors").write_bytes(b"never read")
    done = cli("run", "--set", f"model.path={model}", *dry)
    assert done.returncode == 2, done
    assert done.stderr.startswith("Error: this run does not fit: it needs "), done.stderr
    assert "model.lora" in done.stderr
    assert len(done.stderr.splitlines()) == 2
    assert not (tmp_path / "runs").exists()
    assert ("# learner" in done.stdout) == bool(dry)
