"""`honest-ages`: is the age bound a bound, and are the versions behind it true? From archive and weights alone.

1. At ages 0, 1, 2, 4: no trained token in the archive is older than the bound.
2. A run that keeps every version's weights: each recorded behaviour logprob is the one under the version it is stamped
   with, the keys and values of earlier tokens replayed under the versions that made them.
3. At age 0 the learner's own forward gives the same: the importance ratio is 1.

Controls: under a neighbouring version the logprobs must not fit; and runs at k >= 1 must contain tokens older than
k - 1, else nothing shows that the check could fail.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from asyncrl.benchmarks.frame import Measured, Row, Say, Target
from asyncrl.benchmarks.runs import train
from asyncrl.buffers.archive import Archive
from asyncrl.telemetry.metrics import read_metrics

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOLERANCE = 1e-4  # nats; float32 forwards of different batch shapes differ by some 1e-6
AGES = (0, 1, 2, 4)
STEPS = 10
KEPT_VERSIONS = 1000  # more than there are steps: every version's weights stay
SLOTS = 16  # two groups at once, so that weights change while answers are being written

Kv = Literal["keep", "recompute"]


@dataclass(frozen=True, slots=True)
class Sequence:
    """One archived trajectory."""

    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]  # -1 on the prompt
    prompt_length: int

    @property
    def spans(self) -> int:
        return len(np.unique(self.versions[self.prompt_length :]))


def measure(*, quick: bool, say: Say) -> Measured:
    """Rows: one per age, and one per way of treating keys and values (quick: age 1, `keep`)."""
    from transformers.utils.logging import disable_progress_bar

    ages: tuple[int, ...] = (1,) if quick else AGES
    ways: tuple[Kv, ...] = ("keep",) if quick else ("keep", "recompute")
    rows: list[Row] = []
    targets: list[Target] = []
    disable_progress_bar()  # type: ignore[no-untyped-call]  # one bar a version says nothing
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as parent:
        for k in ages:
            folder = _run(Path(parent), f"ages-{k}", {"buffer.max_trajectory_age": k})
            oldest = Archive(folder / "archive").trained().max_age
            rows.append({"kind": "bound", "max_trajectory_age": k, "oldest_trained": oldest})
            say(f"max_trajectory_age {k}: the oldest trained token in the archive is of age {oldest}")
            targets.append(Target(f"oldest trained token at max_trajectory_age {k}", oldest, k, "lower"))
            if k > 0:
                targets.append(Target(f"control: some token at {k} is older than {k - 1}", oldest, k, "higher"))
            if k == 0:
                ratio = largest_ratio_error(folder)
                rows.append({"kind": "ratio", "max_trajectory_age": 0, "largest_ratio_error": ratio})
                say(f"max_trajectory_age 0: largest |ratio - 1| by the learner's forward is {ratio:.2g}")
                targets.append(Target("largest |learner / engine ratio - 1| at age 0", ratio, TOLERANCE, "lower"))
        for kv in ways:
            settings = {"buffer.max_trajectory_age": 2, "weights.update": kv, "collector.engine.slots": SLOTS}
            row = replay_run(_run(Path(parent), f"replay-{kv}", settings), kv)
            rows.append(row)
            say(
                f"{kv}: {row['tokens']} tokens of {row['trajectories']} trajectories, {row['several_spans']} of them "
                f"with several spans: off by {row['stamped_error']:.2g}; with every stamp moved by one, by at least "
                f"{row['neighbour_error']:.2g}"
            )
            targets += [
                Target(
                    f"largest logprob error under the stamped version, {kv}", row["stamped_error"], TOLERANCE, "lower"
                ),
                Target(f"trajectories with several version spans, {kv}", row["several_spans"], 1, "higher"),
                Target(
                    f"control: least over versions of the largest error under a neighbour, {kv}",
                    row["neighbour_error"],
                    10 * TOLERANCE,
                    "higher",
                ),
            ]
    return Measured(rows=rows, targets=targets)


def _run(parent: Path, name: str, settings: Mapping[str, Any]) -> Path:
    """A short run that keeps every version's weights."""
    folder = parent / name
    train(
        folder,
        {
            "run.name": f"bench-{name}",
            "run.max_steps": STEPS,
            **settings,
            "learner.checkpoint.every_steps": 1,
            "learner.checkpoint.keep_last": KEPT_VERSIONS,
            "eval.at_start": False,
            "eval.at_end": False,
        },
    )
    return folder


def sequences(folder: Path) -> Iterator[Sequence]:
    """Every archived trajectory of a run, in the order trained."""
    columns = ["token_ids", "logprobs", "versions", "prompt_length"]
    table = Archive(folder / "archive").table(columns=columns)
    for row in table.to_pylist():
        yield Sequence(
            np.array(row["token_ids"], np.int64),
            np.array(row["logprobs"], np.float32),
            np.array(row["versions"], np.int32),
            row["prompt_length"],
        )


def replay_run(folder: Path, kv: Kv) -> Row:
    """Recompute recorded logprobs under the stamped versions and, as control, with every stamp moved by one."""
    chosen = list(sequences(folder))
    last = max(int(path.name.rpartition("-")[2]) for path in (folder / "checkpoints").glob("version-*"))
    stamped, tokens = 0.0, 0
    neighbours: dict[int, float] = {}  # version -> largest error of its tokens under version - 1 or version + 1
    for s in chosen:
        sampled = s.versions[s.prompt_length :]
        recorded = s.logprobs[s.prompt_length :]
        stamped = max(stamped, float(np.abs(replay(folder, s, sampled, kv) - recorded).max()))
        tokens += len(sampled)
        for shift in (-1, 1):
            moved = np.clip(sampled + shift, 0, last)
            errors = np.abs(replay(folder, s, moved, kv) - recorded)
            for version in np.unique(sampled[moved != sampled]):
                error = float(errors[sampled == version].max())
                neighbours[int(version)] = max(neighbours.get(int(version), 0.0), error)
    return {
        "kind": "replay",
        "kv": kv,
        "trajectories": len(chosen),
        "several_spans": sum(s.spans > 1 for s in chosen),
        "tokens": tokens,
        "versions": len(neighbours),
        "stamped_error": stamped,
        "neighbour_error": min(neighbours.values()),
    }


@lru_cache(maxsize=4 * STEPS)
def model_of(folder: Path, version: int) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(weights_of(folder, version))
    return model.eval()  # type: ignore[no-any-return]


def weights_of(folder: Path, version: int) -> Path:
    """The model folder of a version: its checkpoint, or for version 0 the model that the run started from."""
    if version > 0:
        return folder / "checkpoints" / f"version-{version:06d}"
    records = read_metrics(folder / "metrics.jsonl")
    return Path(next(record["model"] for record in records if record.get("event") == "start"))


def replay(folder: Path, s: Sequence, versions: NDArray[np.int32], kv: Kv) -> NDArray[np.float32]:
    """Logprobs of the sampled tokens [T] if token i was sampled by `versions[i]`, in the engine's own order.

    A position's keys and values are made when it is fed, which is by the version that samples the next token. With
    `recompute` a new version makes those of all earlier positions again.
    """
    import torch
    from transformers import DynamicCache

    ids = torch.from_numpy(s.token_ids)
    found = []
    cache, done = DynamicCache(), 0
    for i, version in enumerate(versions):
        position = s.prompt_length + i  # of the token that is sampled; everything before it has been fed by then
        if kv == "recompute" and i > 0 and version != versions[i - 1]:
            cache, done = DynamicCache(), 0
        with torch.inference_mode():
            out = model_of(folder, int(version))(
                input_ids=ids[None, done:position],
                cache=cache,
                cache_position=torch.arange(done, position),
                use_cache=True,
            )
        done = position
        found.append(torch.log_softmax(out.logits[0, -1].float(), -1)[ids[position]].item())
    return np.array(found, np.float32)


def largest_ratio_error(folder: Path) -> float:
    """|exp(learner - behaviour) - 1|, the largest over every trained token of a run at age 0, by the learner's packed
    forward of the version that trained it."""
    import torch

    from asyncrl.learners.forward import token_logprobs
    from asyncrl.learners.model import load_model

    columns = ["token_ids", "logprobs", "loss_mask", "trained_version"]
    table = Archive(folder / "archive").table(columns=columns)
    largest = 0.0
    for version in np.unique(table["trained_version"].to_numpy()):
        rows = table.filter(np.asarray(table["trained_version"]) == version).combine_chunks()
        ids = torch.from_numpy(rows["token_ids"].chunk(0).flatten().to_numpy().astype(np.int64))
        recorded = rows["logprobs"].chunk(0).flatten().to_numpy()
        mask = rows["loss_mask"].chunk(0).flatten().to_numpy() == 1
        lengths = np.array([len(x) for x in rows["token_ids"].chunk(0)])
        cu_seqlens = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
        model = load_model(weights_of(folder, int(version)), "float32", "auto", trust_remote_code=False)
        with torch.inference_mode():
            current = token_logprobs(model, ids, cu_seqlens).numpy()
        largest = max(largest, float(np.abs(np.exp(current - recorded)[mask] - 1).max()))
    return largest
