"""Part of `weights`: what transport delta saves, and what it takes to encode and apply.

1. Weights of bfloat16 as models have them, a share of which moved by one step of their type: bytes against changes that
   are counted another way, bits against the original, encode and apply against a copy of the same bytes, turn by turn.
2. With --full: SmolLM2-135M, all weights trained in bfloat16 at a learning rate of 1e-6: the share of elements that a
   real optimizer step changes, and the bytes.

Controls: applied to another base a delta must not give the same bits; weights that all changed must not become a delta.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np
import torch

from asyncrl.benchmarks.frame import Measured, Row, Say, Target
from asyncrl.benchmarks.runs import train
from asyncrl.learners.cache import BuiltinModelError
from asyncrl.learners.smollm2 import ensure_smollm2
from asyncrl.telemetry.metrics import read_metrics
from asyncrl.weights.delta_codec import CHUNK, DENSE_SHARE, HEAD, RECORD, Bytes, Delta, Extent, apply, encode

DENSITIES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
OVERHEAD = 1.1  # of four bytes a change and the headers

RECIPE = "smollm2-uppercase"
STEPS = 6
REAL = {
    "run.name": "bench-weights-delta",
    "run.max_steps": STEPS,
    "model.dtype": "bfloat16",
    "model.lora": "null",
    "learner.learning_rate": 1e-6,
    "learner.warmup_steps": 0,
    "learner.groups_per_step": 2,
    "eval.at_start": "false",
    "eval.at_end": "false",
    "weights.transport": "delta",
}


def measure(*, quick: bool, say: Say, full: bool = False) -> Measured:
    """Rows: one per density; with `full` one per version of a real run, which takes minutes."""
    elements = 20_000_000 if quick else 100_000_000
    old, rows = _weights(elements), list[Row]()
    for share in DENSITIES:
        row = _density(old, _moved(old, share), turns=3 if quick else 5)
        rows.append(row)
        say(
            f"delta, {row['density']:.1%} of {row['mb']:.0f} MB changed: {row['saving']:.1f} times smaller, encoded at "
            f"{row['encode_gb_s']:.2f} GB/s, applied at {row['apply_gb_s']:.2f}, a copy {row['copy_gb_s']:.2f}"
        )
    another, all_changed = _controls()
    worst = max(row["overhead"] for row in rows)
    targets = [
        Target("delta: bytes per (4 x changes + headers), the worst", worst, OVERHEAD, "lower"),
        Target("delta: share of densities with equal bits", sum(r["equal"] for r in rows) / len(rows), 1.0, "higher"),
        Target("control: another base gives equal bits", float(another), 0.0, "lower"),
        Target("control: weights that all changed are a delta", float(all_changed), 0.0, "lower"),
    ]
    return Measured(rows=[*rows, *(_real(say) if full else [])], targets=targets)


def _density(old: Bytes, new: Bytes, *, turns: int) -> Row:
    """GB/s are of the whole image, however little of it changed."""
    elements = old.size // 2
    extents = [Extent(0, old.size, 2)]
    delta = _encoded(old, new, extents)
    content, image = b"".join(delta.parts), old.copy()
    seconds: dict[str, list[float]] = {"encode": [], "apply": [], "copy": []}
    for _ in range(turns):
        seconds["encode"].append(_seconds(lambda: encode(old, new, extents)))
        seconds["copy"].append(_seconds(lambda: np.copyto(image, old)))
        seconds["apply"].append(_seconds(lambda: apply(content, image)))
    rate = {name: old.size / 1e9 / median(found) for name, found in seconds.items()}
    changed = int((torch.from_numpy(old).view(torch.int16) != torch.from_numpy(new).view(torch.int16)).sum())
    headers = HEAD.size + -(-elements // CHUNK) * RECORD.itemsize
    return {
        "kind": "delta",
        "density": changed / elements,
        "mb": old.size / 1e6,
        "bytes": delta.nbytes,
        "saving": old.size / delta.nbytes,
        "overhead": delta.nbytes / (4 * changed + headers),
        "equal": int(np.array_equal(image, new)),
        **{f"{name}_gb_s": value for name, value in rate.items()},
        "encode_to_copy": rate["encode"] / rate["copy"],
        "apply_to_copy": rate["apply"] / rate["copy"],
    }


def _weights(elements: int) -> Bytes:
    """The bytes of bfloat16 of standard deviation 0.02."""
    normal = np.random.default_rng(0).standard_normal(elements, np.float32)
    return torch.from_numpy(normal).mul_(0.02).bfloat16().view(torch.uint8).numpy()


def _moved(old: Bytes, share: float) -> Bytes:
    """The same with this share of them one step of bfloat16 up or down."""
    random = np.random.default_rng(1)
    new = old.copy()
    where = np.flatnonzero(random.random(old.size // 2, np.float32) < share)
    new.view(np.int16)[where] += random.choice(np.array([-1, 1], np.int16), where.size)
    return new


def _encoded(old: Bytes, new: Bytes, extents: list[Extent]) -> Delta:
    delta = encode(old, new, extents)
    if delta is None:
        raise AssertionError(f"more than {DENSE_SHARE:.0%} changed")
    return delta


def _controls() -> tuple[bool, bool]:
    """Whether another base gives the same bits; whether weights that all changed became a delta."""
    old = _weights(100_000)
    new = _moved(old, 0.01)
    other = old.copy()
    unchanged = int(np.flatnonzero(old == new)[0])
    other[unchanged] ^= 1
    apply(b"".join(_encoded(old, new, [Extent(0, old.size, 2)]).parts), other)
    return np.array_equal(other, new), encode(old, ~old, [Extent(0, old.size, 2)]) is not None


def _real(say: Say) -> list[Row]:
    """A row per version that a run of a few steps says it wrote; none without the model's package."""
    try:
        ensure_smollm2()
    except BuiltinModelError as error:
        say(str(error))
        return []
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as parent:
        folder = Path(parent) / "run"
        train(folder, {**REAL, "weights.url": Path(parent) / "weights"}, recipe=RECIPE)
        found = [record["weights/sent"]["delta"] for record in read_metrics(folder / "metrics.jsonl") if _has(record)]
        manifest = json.loads(next((Path(parent) / "weights").glob("*/*/manifest.json")).read_bytes())["manifest"]
        whole = sum(tensor["nbytes"] for tensor in manifest["tensors"])
    rows: list[Row] = []
    for before, after in pairwise(found):
        written = after["deltas"] - before["deltas"] + after["whole"] - before["whole"]
        if written:
            rows.append(
                {
                    "kind": "delta, SmolLM2-135M at 1e-6",
                    "versions": written,
                    "density": after["density"],
                    "bytes": after["bytes"] - before["bytes"],
                    "saving": whole * written / (after["bytes"] - before["bytes"]),
                    "seconds": after["seconds"] - before["seconds"],
                    "encode_s": after["encode_seconds"],
                    "whole": after["whole"] - before["whole"],
                }
            )
            say(
                f"SmolLM2 at 1e-6: {rows[-1]['density']:.2%} changed, {rows[-1]['bytes'] / 1e6:.1f} MB written, "
                f"{rows[-1]['saving']:.0f} times smaller"
            )
    return rows


def _has(record: Row) -> bool:
    return "delta" in record.get("weights/sent", {})


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
