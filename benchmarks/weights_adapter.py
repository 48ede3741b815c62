"""Part of `weights`: with LoRA, what travels and how long it takes if engines are given the sum, or A and B alone.

A model of SmolLM2-135M's shape (`quick`: a third of its layers), random weights in bfloat16, an adapter of rank 16 on
all linear layers. From the learner's tensors to an engine that serves them over shared memory, its check of the live
tensors included: publish, stage, activate. The turns of both ways are interleaved; bytes are those of the files.

Control: an adapter whose sum is not the published one (its scale differs by a thousandth) must not be served.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from asyncrl.benchmarks.frame import Measured, Row, Say, Target
from asyncrl.collectors.engines.live import LiveModel, load_base, load_model
from asyncrl.config.recipe import Lora
from asyncrl.learners.lora import attach, in_dtype, served_weights
from asyncrl.learners.model import ModelError
from asyncrl.learners.model import load_model as load_trained
from asyncrl.staleness import Weights
from asyncrl.weights.base import WeightsError
from asyncrl.weights.image import Image, Images
from asyncrl.weights.manifest import combined_checksum
from asyncrl.weights.shm import ShmReceiver, shm_offer

TURNS, QUICK_TURNS = 5, 3
DTYPE, RANK = "bfloat16", 16
SHAPE: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
QUICK_LAYERS = 10
OVERHEAD = 1.05
"""Of the bytes, over those of A and B: segments are written in whole pages, tensors begin at multiples of 64."""

LIMIT_S = 60.0


def measure(*, quick: bool, say: Say) -> Measured:
    """A row for each way, with checksums and without, and the control."""
    shape = {**SHAPE, "num_hidden_layers": QUICK_LAYERS} if quick else SHAPE
    rows: list[Row] = []
    try:
        with bench(shape) as one:
            rows = compared(one, turns=QUICK_TURNS if quick else TURNS, say=say)
            rows.append(control(one, say=say))
    except ModelError as error:  # the extra `lora` is not there
        say(str(error))
    return Measured(rows, targets(rows))


def targets(rows: list[Row]) -> list[Target]:
    """The bytes against an independent count, the learner's wait against merged weights', and the control. No rows: not
    measured. With checksums the learner adds up either way: that row has no target."""
    found = {(row["way"], row["hashed"]): row for row in rows}
    nbytes = wait = served = None
    if rows:
        alone, merged = found["adapter", False], found["merged", False]
        nbytes, wait = alone["bytes"] / alone["factors"], alone["publish_ms"] / merged["publish_ms"]
        served = rows[-1]["served"]
    return [
        Target("adapter alone: bytes / bytes of A and B", nbytes, OVERHEAD, "lower"),
        Target("adapter alone, unhashed: seconds of a publication / those of merged weights", wait, 0.1, "lower"),
        Target("control: sums that differ and are served", served, 0, "lower"),
    ]


@dataclass(slots=True)
class Bench:
    """A learner's model with an adapter, and an engine for each way."""

    model: Any
    images: dict[str, Images]
    engines: dict[str, LiveModel]
    receiver: ShmReceiver
    version: int = 0

    def publish(self, way: str, *, hashed: bool, **other: object) -> Image:
        """What the learner waits for (`Outlet.publish`)."""
        self.version += 1
        weights, served = Weights(1, self.version), served_weights(self.model, DTYPE)
        if way == "merged":
            return self.images[way].write(weights, in_dtype(served, DTYPE), tied=served.tied, hashed=hashed)
        assert served.adapter is not None
        proved = combined_checksum(in_dtype(served, DTYPE)) if hashed else ""
        adapter = msgspec.structs.replace(served.adapter, served=proved, **other)
        return self.images[way].write(weights, served.factors.items(), tied=served.tied, hashed=hashed, adapter=adapter)

    def train(self) -> None:
        """Another adapter."""
        generator = torch.Generator().manual_seed(self.version)
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.data.normal_(0, 0.02, generator=generator)


@contextmanager
def bench(shape: dict[str, Any]) -> Iterator[Bench]:
    """Weights are made, and go with it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    images = {way: Images("bench-adapter") for way in ("merged", "adapter")}
    try:
        with TemporaryDirectory(prefix="asyncrl-bench-") as folder, torch.random.fork_rng():
            torch.manual_seed(0)
            base: Any = Qwen3ForCausalLM(Qwen3Config(**shape))
            base.to(torch.bfloat16).save_pretrained(folder)
            path = Path(folder)
            known: dict[str, Any] = {"attn": "auto", "trust_remote_code": False}
            model = load_trained(path, DTYPE, "auto")
            attach(model, Lora(r=RANK, alpha=2 * RANK), seed=0, base="bench")
            engines = {
                "merged": LiveModel(load_model(path, dtype=DTYPE, **known)),
                "adapter": LiveModel(load_model(path, dtype=DTYPE, **known), load_base(path, **known)),
            }
            yield Bench(model, images, engines, ShmReceiver(mapped=True))
    finally:
        for one in images.values():
            one.close()
        torch.set_num_threads(threads)


def compared(one: Bench, *, turns: int, say: Say) -> list[Row]:
    """Both ways, hashed and not, in turns; both engines must end with the same bits."""
    kinds = [(way, hashed) for hashed in (True, False) for way in ("merged", "adapter")]
    times: dict[tuple[str, bool], list[tuple[float, float, float]]] = {kind: [] for kind in kinds}
    nbytes: dict[str, int] = {}
    for turn in range(turns + 1):  # in the first, memory is given out
        one.train()
        for way, hashed in kinds:
            began = time.perf_counter()
            image = one.publish(way, hashed=hashed)
            published = time.perf_counter()
            one.engines[way].stage(one.receiver.stage(shm_offer(image), deadline_s=LIMIT_S))
            staged = time.perf_counter()
            one.engines[way].activate()
            if turn:
                times[way, hashed].append((published - began, staged - published, time.perf_counter() - staged))
            nbytes[way] = image.path.stat().st_size if turn else 0
        if len({engine.verify()[1] for engine in one.engines.values()}) != 1:
            raise RuntimeError("the two engines serve different weights")
    factors = sum(p.numel() * 4 for p in one.model.parameters() if p.requires_grad)
    rows: list[Row] = []
    for (way, hashed), found in times.items():
        publish, stage, activate = (1e3 * median(part) for part in zip(*found, strict=True))
        total = 1e3 * median(map(sum, found))
        row: Row = {
            "kind": "adapter",
            "way": way,
            "hashed": hashed,
            "turns": turns,
            "bytes": nbytes[way],
            "factors": factors,
            "publish_ms": publish,
            "stage_ms": stage,
            "activate_ms": activate,
            "ms": total,
            "of_merged": total / rows[-1]["ms"] if way == "adapter" else 1.0,  # merged comes right before
        }
        rows.append(row)
        say(
            f"adapter, {way}, {'hashed' if hashed else 'unhashed'}: {row['bytes'] / 1e6:.1f} MB, publish {publish:.0f} "
            f"ms, stage {stage:.0f} ms, activate {activate:.0f} ms: {row['of_merged']:.2f} of merged"
        )
    return rows


def control(one: Bench, *, say: Say) -> Row:
    """How many of one wrong sum are served."""
    served = served_weights(one.model)
    assert served.adapter is not None
    engine = one.engines["adapter"]
    one.train()
    image = one.publish("adapter", hashed=True, scale=served.adapter.scale * 1.001)
    engine.stage(one.receiver.stage(shm_offer(image), deadline_s=LIMIT_S))
    try:
        engine.activate()
    except WeightsError:
        count = 0
    else:
        count = 1
    say(f"adapter, control: of one sum that is not the published one, {count} is served")
    return {"kind": "adapter", "way": "control", "hashed": True, "served": count}
