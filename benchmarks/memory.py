"""The plan of a run's memory against what its learner took: the largest resident size of real runs of two steps.

Models are random ones of three sizes, whose answers are of one length, so that rows are as long as the plan takes them
to be; a reference makes every group teach, though nothing is rewarded. What is resident includes the images, which the
learner maps.

Control: the plan without activations, of the model whose memory is mostly these. The peak must be further above it than
the target allows, or the target would say nothing about what is hardest to plan.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrl.benchmarks.frame import Measured, Row, Say, Target
from asyncrl.benchmarks.runs import RUN_LIMIT_S, RunError
from asyncrl.config.loading import load_recipe
from asyncrl.learners.memory import image_parts, rank_parts
from asyncrl.learners.shapes import SMOLLM2, Shapes, shapes_of
from asyncrl.learners.tiny_tokenizer import build_tokenizer

ROOM = 1.25
"""How far the peak may be above the most that is planned, and below the least."""

LOOK_S = 0.05

SETTINGS: dict[str, Any] = {
    "run.max_steps": 2,
    "model.max_length": 64,
    "collector.sampling.max_tokens": 48,
    "collector.sampling.min_tokens": 47,
    "learner.groups_per_step": 4,  # x 8 answers x 64 tokens: one micro-batch
    "objective.beta": 1e-3,
    "learner.checkpoint.async_save": False,  # a snapshot is made when a step's activations, its peak, are gone
    "eval.at_start": False,
    "eval.at_end": False,
}

MEDIUM = {
    "vocab_size": 264,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "132 K": {**MEDIUM, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4},
    "19 M": MEDIUM,
    "135 M": {key: value for key, value in SMOLLM2.items() if key != "model_type"},
}
WAYS = (("float32", False), ("bfloat16", False), ("float32", True))
"""Types, and whether activations are computed again (`learner.gradient_checkpointing`)."""


@dataclass(frozen=True, slots=True)
class Compared:
    """Bytes. least, most: planned for the learner and the images. without: the most but for activations. peak:
    measured."""

    parameters: int
    least: int
    most: int
    without: int
    peak: int


def measure(*, quick: bool, say: Say) -> Measured:
    """A row for each size and type, and one with activation checkpointing; quick: none of 135 M."""
    rows: list[Row] = []
    found: list[Compared] = []
    control = None
    for name in MODELS:
        if quick and name == "135 M":
            continue
        for dtype, again in WAYS if name == "19 M" else WAYS[:1]:
            settings = {**SETTINGS, "model.dtype": dtype, "learner.gradient_checkpointing": again}
            with tempfile.TemporaryDirectory(prefix="asyncrl-memory-") as folder:
                one = compare(Path(folder), MODELS[name], settings)
            found.append(one)
            if name == "19 M" and (dtype, again) == WAYS[0]:
                control = one.peak / one.without
            mib = {key: round(getattr(one, key) / 2**20) for key in ("least", "most", "without", "peak")}
            way = {"dtype": dtype, "gradient_checkpointing": again}
            rows.append({"model": name, **way, "parameters": one.parameters, **mib})
            said = f"{name} {dtype}{', checkpointing' if again else ''}"
            say(f"{said}: {mib['least']} to {mib['most']} MiB planned, {mib['peak']} MiB at the peak")
    return Measured(
        rows,
        [
            Target("peak / the most planned, largest", max(one.peak / one.most for one in found), ROOM, "lower"),
            Target(
                "peak / the least planned, smallest", min(one.peak / one.least for one in found), 1 / ROOM, "higher"
            ),
            Target(
                "control: peak / planned without activations, 19 M float32",
                control,
                ROOM,
                "higher",
            ),
        ],
    )


def compare(folder: Path, config: dict[str, Any], settings: dict[str, Any]) -> Compared:
    """A run in `folder` of a random Llama of this configuration. Raises RunError."""
    model = folder / "model"
    random_llama(model, config)
    overrides = [f"{key}={value}" for key, value in {**settings, "model.path": model}.items()]
    recipe = load_recipe("tiny-reverse", overrides=overrides).recipe
    shapes = shapes_of(recipe.model.path, model)
    assert isinstance(shapes, Shapes), shapes
    parts = [*rank_parts(recipe, shapes), *image_parts(recipe, shapes)]
    spans = {part.what: part.span() for part in parts}
    most = sum(span[1] for span in spans.values())
    return Compared(
        parameters=shapes.parameters,
        least=sum(span[0] for span in spans.values()),
        most=most,
        without=most - sum(span[1] for what, span in spans.items() if what.startswith("activations")),
        peak=_peak(folder, overrides),
    )


def random_llama(folder: Path, config: dict[str, Any]) -> None:
    """A Llama of this configuration with random weights, and the tokenizer of the tiny model."""
    tokenizer = build_tokenizer(512)
    torch.manual_seed(0)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    LlamaForCausalLM(LlamaConfig(**{"max_position_embeddings": 512, **config, **ends})).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _peak(folder: Path, overrides: list[str]) -> int:
    """The learner's largest resident size in `asyncrl run`, bytes."""
    command = [sys.executable, "-P", "-m", "asyncrl.cli.main", "run", *(f"--set={text}" for text in overrides)]
    peak, deadline = 0, time.monotonic() + RUN_LIMIT_S
    with (folder / "said").open("w+") as said:
        run = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        try:
            while run.poll() is None and time.monotonic() < deadline:
                with suppress(psutil.Error, OSError):  # the run, or its learner, has just ended
                    for child in psutil.Process(run.pid).children():  # type: ignore[no-untyped-call]
                        if "learner" in child.cmdline():
                            peak = max(peak, _resident(child.pid))
                time.sleep(LOOK_S)
        finally:
            run.terminate()
            code = run.wait(60.0)
        said.seek(0)
        if code != 0:
            last = "\n".join(said.read().strip().splitlines()[-5:])
            raise RunError(f"{' '.join(command)} ended with code {code}:\n{last}")
    return peak


def _resident(pid: int) -> int:
    """The largest so far."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) * 1024 if found else 0
