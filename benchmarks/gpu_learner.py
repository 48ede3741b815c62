"""Steps of the learner on one GPU, from random weights: `python benchmarks/gpu_learner.py`.

A script, not part of `asyncrl bench`, whose targets are for machines without a GPU. Unattended, within five minutes: a
model of the shape of Qwen2.5-0.5B (494 million parameters, `--shape 1b`: Llama 3.2's of 1.24 billion) in bfloat16 over
float32 weights, groups of eight answers of log-normal lengths (cv 1), packed, prompts shared. A step goes from groups
as they are leased to changed weights. A row as it is, one with `learner.gradient_checkpointing`, one with
`learner.compile`.

MFU, the share of the GPU's peak that useful operations take (PaLM, arXiv 2204.02311): those of the tokens that must
pass through the layers, attention included, and of trained tokens through the head, forward and backward
(`learner_flops.by_formula`). What is computed again is not useful. The peak is the data sheet's, bfloat16, dense,
though the head's products are float32; of a GPU that is not in `PEAKS` there is no MFU.

`--quick` has a model of 116 thousand parameters, and takes the CPU where there is no GPU, where it does not compile: it
shows that the script works.
"""

from __future__ import annotations

import gc
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import click
import pyarrow as pa
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from asyncrl.benchmarks.frame import Measured, Result, Row, Say, Target, end_script, machine
from asyncrl.benchmarks.learner_batch import answer_lengths, as_collected, draw, sampled_by
from asyncrl.benchmarks.learner_flops import by_formula, pairs_of
from asyncrl.config.loading import load_recipe
from asyncrl.learners.shrinking import OutOfMemory
from asyncrl.learners.trainer import Trainer
from asyncrl.runtime.folder import versions

NO_GPU = 2
LIMIT_S = 300.0

STEPS, UNCOUNTED = 5, 2  # in the first ones memory is given out and kernels are chosen
CV = 1.0

PEAKS = {
    r"\bH100 PCIe\b": 756e12,
    r"\bH100 NVL\b": 835e12,
    r"\bH[12]00\b": 989e12,
    r"\bA100\b": 312e12,
    r"\bL4\b": 121e12,
    r"\bRTX 4090$": 165e12,
}
"""A GPU's name, the first that fits -> operations a second, bfloat16 with float32 sums, dense; NVIDIA's data sheets."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's configuration, and the batch of a step: `groups` of `size` answers, `mean` tokens each."""

    config: Mapping[str, Any]
    groups: int
    size: int
    prompt: int
    mean: int
    longest: int
    microbatch: int  # tokens


SHAPES = {
    "0.5b": Shape(
        {
            "model_type": "qwen2",
            "vocab_size": 151_936,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "max_position_embeddings": 32_768,
            "tie_word_embeddings": True,
        },
        groups=16,
        size=8,
        prompt=256,
        mean=512,
        longest=2048,
        microbatch=16_384,
    ),
    "1b": Shape(
        {
            "model_type": "llama",
            "vocab_size": 128_256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131_072,
            "tie_word_embeddings": True,
        },
        groups=16,
        size=8,
        prompt=256,
        mean=512,
        longest=2048,
        microbatch=16_384,
    ),
}
QUICK = Shape(
    {
        "model_type": "qwen2",
        "vocab_size": 264,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": True,
    },
    groups=4,
    size=8,
    prompt=16,
    mean=24,
    longest=96,
    microbatch=4096,
)
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gradient_checkpointing": {"learner.gradient_checkpointing": "true"},
    "compile": {"learner.compile": "true"},
}
GPU_ONLY = "compile"  # on a CPU it compiles C++ for longer than the rest takes


@click.command()
@click.option("--shape", type=click.Choice([*SHAPES]), default="0.5b", show_default=True, help="Of the model.")
@click.option("--quick", is_flag=True, help="A tiny model; on the CPU where there is no GPU.")
@click.option("--json", "file", type=click.Path(path_type=Path, dir_okay=False), help="Write rows and targets to FILE.")
def main(shape: str, quick: bool, file: Path | None) -> None:
    """Measure steps of the learner on a GPU."""
    there = torch.cuda.is_available()
    if not there and not quick:
        click.echo(f"needs a GPU that torch {torch.__version__} can use; --quick tries the script on the CPU", err=True)
        sys.exit(NO_GPU)
    measured = measure(QUICK if quick else SHAPES[shape], say=click.echo)
    result = Result(
        name="gpu-learner",
        machine={**machine(), **({"gpus": torch.cuda.get_device_name()} if there else {})},
        versions=versions(),
        command=" ".join(sys.argv),
        rows=measured.rows,
        targets=measured.targets,
    )
    end_script(result, file)


def measure(shape: Shape, *, say: Say) -> Measured:
    """A row for each of WAYS; a way that does not fit into memory says so, and has no numbers."""
    began = time.perf_counter()
    ways = {name: keys for name, keys in WAYS.items() if name != GPU_ONLY or torch.cuda.is_available()}
    rows = []
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as name:
        torch.manual_seed(0)
        settings = dict(shape.config)
        config: PretrainedConfig = AutoConfig.for_model(settings.pop("model_type"), **settings)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):  # random numbers: a CPU takes a minute
            AutoModelForCausalLM.from_config(config).save_pretrained(name)  # type: ignore[no-untyped-call]
        for way, keys in ways.items():
            rows.append(_row(way, Path(name), config, shape, keys))
            gc.collect()  # before the next model is loaded
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            say(_said(rows[-1]))
    changed = sum(row.get("changed", 0) for row in rows) / (STEPS * len(rows))
    return Measured(
        rows,
        [
            Target("steps that changed the weights, share", changed, 1.0, "higher"),
            Target("seconds of the whole script", time.perf_counter() - began, LIMIT_S, "lower"),
        ],
    )


def peak_of(gpu: str) -> float | None:
    """Operations a second of a GPU by its name; None: not known.

    >>> peak_of("NVIDIA H100 80GB HBM3"), peak_of("NVIDIA L4"), peak_of("NVIDIA L40S")
    (989000000000000.0, 121000000000000.0, None)
    """
    return next((peak for name, peak in PEAKS.items() if re.search(name, gpu)), None)


def useful(config: Any, lengths: Sequence[Sequence[int]], prompt: int) -> int:
    """Operations of a step of groups with answers of these `lengths` [groups][members] after a shared prompt.

    The prompt passes once, and what looks at it and at itself are the answers' own tokens. Each trained token needs a
    row of logits; the first ones of a group share one.
    """
    answers = [length for members in lengths for length in members]
    # The last token of an answer predicts nothing, but passes all the same.
    pairs = len(lengths) * pairs_of([prompt]) + pairs_of([prompt + length for length in answers], answers)
    predicted = sum(answers) - len(answers) + len(lengths)
    return by_formula(config, computed=len(lengths) * prompt + sum(answers), pairs=pairs, predicted=predicted)


def _row(way: str, model: Path, config: PretrainedConfig, shape: Shape, settings: Mapping[str, Any]) -> Row:
    recipe = load_recipe(
        "tiny-reverse",
        overrides=[
            f"{key}={value}"
            for key, value in {
                "model.path": model,
                "model.dtype": "bfloat16",
                "collector.group_size": shape.size,
                "learner.groups_per_step": shape.groups,
                "learner.max_tokens_per_microbatch": shape.microbatch,
                "learner.learning_rate": 1e-6,
                "learner.warmup_steps": 0,
                "objective.preset": "grpo",
                **settings,
            }.items()
        ],
    ).recipe
    lengths = answer_lengths(shape.groups, shape.size, mean=shape.mean, longest=shape.longest, cv=CV)
    row: Row = {"way": way, "dtype": "bfloat16", "steps": STEPS}
    try:
        trainer = Trainer.load(recipe, model, None)
        row["parameters"] = sum(parameter.numel() for parameter in trainer.model.parameters())
        groups = as_collected(
            sampled_by(trainer.model, draw(lengths, prompt=shape.prompt, vocabulary=shape.config["vocab_size"]))
        )
        seconds, changed, peak_bytes = _steps(trainer, groups)
    except (OutOfMemory, torch.OutOfMemoryError) as error:
        return {**row, "why": f"out of memory: {str(error).splitlines()[0]}"}
    trained = sum(map(sum, lengths))
    flops = useful(config, lengths, shape.prompt)
    row |= {
        "tokens": trained,
        "step_s": median(seconds),
        "tokens_per_s": trained / median(seconds),
        "tflops": flops / median(seconds) / 1e12,
        "changed": changed,
    }
    if torch.cuda.is_available():
        row["peak_gib"] = peak_bytes / 2**30
        if (peak := peak_of(torch.cuda.get_device_name())) is not None:
            row["mfu"] = flops / median(seconds) / peak
    return row


def _steps(trainer: Trainer, groups: Sequence[pa.RecordBatch]) -> tuple[list[float], int, int]:
    """Seconds of each counted step, how many of them changed the weights, and the most bytes that torch held."""
    ends, changed = [], 0
    on_gpu = torch.cuda.is_available()
    for number in range(UNCOUNTED + STEPS + 1):
        if number >= UNCOUNTED:
            ends.append(time.perf_counter())
        if number == UNCOUNTED + STEPS:
            break
        if on_gpu and number == UNCOUNTED:
            torch.cuda.reset_peak_memory_stats()
        _, updates = trainer.train(trainer.prepare(groups, version=0))
        if on_gpu:
            torch.cuda.synchronize()
        changed += number >= UNCOUNTED and not updates.skipped
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    return [later - earlier for earlier, later in pairwise(ends)], changed, peak


def _said(row: Row) -> str:
    if "why" in row:
        return f"{row['way']}: {row['why']}"
    mfu = f", MFU {100 * row['mfu']:.0f} %" if "mfu" in row else ""
    peak = f", {row['peak_gib']:.1f} GiB" if "peak_gib" in row else ""
    return (
        f"{row['way']}: {row['step_s']:.2f} s a step, {row['tokens_per_s']:.0f} trained tokens/s, "
        f"{row['tflops']:.2f} TFLOP/s{mfu}{peak}"
    )


if __name__ == "__main__":
    main()
