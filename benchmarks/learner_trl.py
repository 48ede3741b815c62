"""One optimisation step against one of TRL's GRPOTrainer: same model, batch, update and threads.

TRL runs unmodified in the environment that `vs-trl` makes for it, and is handed the batch (`learner_trl_side.py`): no
side generates or scores. Groups of eight answers, log-normal lengths (cv 1, cut at four times the mean), every group
teaches; behaviour log-probs are apart from the model's, so that ratios are clipped on both sides. A step of asyncrl's
goes from the groups as they are leased to changed weights and the step's metrics. Steps take turns; medians.

The gradients of the first steps must agree, or the sides would not do the same thing.

Control: asyncrl's step on the same rows, filled up to the longest as TRL fills them up. It must miss the target, or it
would say nothing about padding.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pyarrow as pa
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from asyncrl.benchmarks.frame import Measured, Row, Say, Target
from asyncrl.benchmarks.learner_batch import Answer, answer_lengths, as_collected, draw, sampled_by
from asyncrl.benchmarks.memory import MEDIUM, random_llama
from asyncrl.benchmarks.runs import RunError
from asyncrl.benchmarks.vs_trl import trl_python
from asyncrl.config.cache_folder import cache_root
from asyncrl.config.loading import load_recipe
from asyncrl.learners.diagnostics import step_metrics
from asyncrl.learners.trainer import Trainer

SPEED_UP = 1.5
COSINE = 0.999
NORM = 1e-3

GROUP_SIZE, PROMPT = 8, 32
CV = 1.0
CUT = 4  # x mean: max_tokens
LIMIT_S = 300.0  # for a step of TRL's, or for it to load, on a machine that is busy

SETTINGS: dict[str, Any] = {
    "learner.learning_rate": 1e-6,  # weights move, and hardly: each step is as the first
    "learner.warmup_steps": 0,
    "learner.max_grad_norm": 1e6,  # both compute the norm; clipping would hide how long the gradients are
    "objective.preset": "grpo",
}

GRADIENT = "gradient.pt"

Gradient = Mapping[str, Tensor]


class Took(NamedTuple):
    """A step. cpu_seconds: of all threads; with one thread a busy machine does not stretch them."""

    seconds: float
    cpu_seconds: float


@dataclass(frozen=True, slots=True)
class Problem:
    """A model and the batch of a step."""

    model: Mapping[str, Any]
    groups: int
    mean: int  # tokens of an answer

    @property
    def longest(self) -> int:
        return CUT * self.mean


FULL = Problem(MEDIUM, groups=4, mean=48)
QUICK = Problem({**MEDIUM, "num_hidden_layers": 2}, groups=2, mean=48)


def measure(*, quick: bool, say: Say, full: bool = False) -> Measured:
    """A row for each number of threads: one; full: also two."""
    if quick:
        return compare(QUICK, threads=(1,), turns=3, say=say)
    return compare(FULL, threads=(1, 2) if full else (1,), turns=3, say=say)


def compare(problem: Problem, *, threads: Sequence[int], turns: int, say: Say) -> Measured:
    """`turns` steps of each side and of the control for each number of threads, after one that is not counted. Raises
    RunError."""
    before = torch.get_num_threads()
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as name:
        folder = Path(name)
        random_llama(folder / "model", dict(problem.model))
        python = trl_python(cache_root(), say)
        try:
            trainer, groups = load(folder / "model", problem)
            rows, padded = as_collected(groups), as_collected(groups, padded_to=longest(groups))
            job = job_of(trainer, groups, rows, steps=1 + turns * len(threads))
            with trl_steps(python, folder, job) as trl_step:
                ours = first_gradient(trainer, rows)
                trl_step(threads[0])
                agreement = agree(ours, torch.load(folder / GRADIENT, weights_only=True))
                found = []
                for count in threads:
                    sides: dict[str, Callable[[], Took]] = {
                        "asyncrl": partial(step, trainer, rows, count),
                        "trl": partial(trl_step, count),
                        "padded": partial(step, trainer, padded, count),
                    }
                    row = _row(trainer, groups, count, _in_turns(sides, turns))
                    found.append(row)
                    say(
                        f"step, {row['parameters'] / 1e6:.1f} M parameters, torch threads {count}: asyncrl "
                        f"{row['asyncrl_tokens_s']:.0f} tokens/s, TRL {row['trl_tokens_s']:.0f}, asyncrl padded "
                        f"{row['padded_tokens_s']:.0f}"
                    )
        finally:
            torch.set_num_threads(before)
    return Measured(found, targets(found, agreement))


def _in_turns(sides: Mapping[str, Callable[[], Took]], turns: int) -> dict[str, Took]:
    """Medians of each side. Who is first is last in the next turn."""
    times: dict[str, list[Took]] = {side: [] for side in sides}
    for turn in range(turns):
        for side in list(sides)[:: 1 if turn % 2 == 0 else -1]:
            times[side].append(sides[side]())
    return {side: Took(*map(median, zip(*found, strict=True))) for side, found in times.items()}


def _row(trainer: Trainer, groups: Sequence[Sequence[Answer]], threads: int, took: Mapping[str, Took]) -> Row:
    answers = [answer for members in groups for answer in members]
    trained = sum(len(answer.completion) for answer in answers)
    prompts = len(answers) * PROMPT
    return {
        "part": "step",
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "threads": threads,
        "groups": len(groups),
        "group_size": GROUP_SIZE,
        "prompt": PROMPT,
        "tokens": trained,
        "padding": (prompts + len(answers) * longest(groups)) / (prompts + trained),
        **{f"{side}_s": found.seconds for side, found in took.items()},
        **{f"{side}_cpu_s": found.cpu_seconds for side, found in took.items()},
        **{f"{side}_tokens_s": trained / found.seconds for side, found in took.items()},
        "ratio": took["trl"].seconds / took["asyncrl"].seconds,
        "ratio_padded": took["trl"].seconds / took["padded"].seconds,
    }


@dataclass(frozen=True, slots=True)
class Agreement:
    """Of two gradients: cosine of the angle between them, and how far the ratio of their lengths is from 1."""

    cosine: float
    norms: float


def agree(ours: Gradient, theirs: Gradient) -> Agreement:
    """Raises RunError where they are not of the same parameters.

    >>> agree({"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([6.0, 8.0])})
    Agreement(cosine=1.0, norms=0.5)
    """
    if ours.keys() != theirs.keys():
        raise RunError(f"the sides train different parameters: {sorted(ours.keys() ^ theirs.keys())}")
    one, other = (torch.cat([side[name].flatten().double() for name in sorted(ours)]) for side in (ours, theirs))
    lengths = float(one.norm()), float(other.norm())
    return Agreement(cosine=float(one @ other) / (lengths[0] * lengths[1]), norms=abs(lengths[0] / lengths[1] - 1))


def targets(rows: Sequence[Row], agreement: Agreement) -> list[Target]:
    """The number of threads that is worse for asyncrl counts, for the control the one that is better."""
    worst = min(row["ratio"] for row in rows)
    padded = max(row["ratio_padded"] for row in rows)
    return [
        Target("a step: tokens/s over TRL's", worst, SPEED_UP, "higher"),
        Target("a step: cosine of both gradients", agreement.cosine, COSINE, "higher"),
        Target("a step: how far the gradients' norms are apart", agreement.norms, NORM, "lower"),
        Target("control: tokens/s of padded rows over TRL's", padded, SPEED_UP, "lower"),
    ]


def load(model: Path, problem: Problem) -> tuple[Trainer, list[list[Answer]]]:
    """What trains, and the groups of a step. model: a folder."""
    overrides = [f"{key}={value}" for key, value in SETTINGS.items()]
    sizes = {"model.path": model, "learner.groups_per_step": problem.groups, "collector.group_size": GROUP_SIZE}
    recipe = load_recipe("tiny-reverse", overrides=[*overrides, *(f"{key}={v}" for key, v in sizes.items())]).recipe
    trainer = Trainer.load(recipe, model, None)
    lengths = answer_lengths(problem.groups, GROUP_SIZE, mean=problem.mean, longest=problem.longest, cv=CV)
    vocabulary = problem.model["vocab_size"]
    return trainer, sampled_by(trainer.model, draw(lengths, prompt=PROMPT, vocabulary=vocabulary))


def longest(groups: Sequence[Sequence[Answer]]) -> int:
    """Tokens of the longest answer."""
    return max(len(answer.completion) for members in groups for answer in members)


def step(trainer: Trainer, groups: Sequence[pa.RecordBatch], threads: int) -> Took:
    """A step of asyncrl's. Raises RunError if it changed nothing."""
    torch.set_num_threads(threads)
    began, began_cpu = time.perf_counter(), time.process_time()
    ready = trainer.prepare(groups, version=0)
    seen, updates = trainer.train(ready)
    step_metrics(ready.packed, ready.batch, ready.worth, seen, first=ready.first, update=trainer.recipe.weights.update)
    took = Took(time.perf_counter() - began, time.process_time() - began_cpu)
    if updates.skipped:
        raise RunError(f"asyncrl's step was skipped: {updates.skipped}")
    return took


def first_gradient(trainer: Trainer, groups: Sequence[pa.RecordBatch]) -> dict[str, Tensor]:
    """What the optimizer gets in a step, which is made: the gradient of the loss of the whole batch, by parameter."""
    found: dict[str, Tensor] = {}

    def keep(*_: Any) -> None:
        for name, parameter in trainer.model.named_parameters():
            if parameter.grad is not None:
                found[name] = parameter.grad.clone()

    handle = register_optimizer_step_pre_hook(keep)
    try:
        step(trainer, groups, torch.get_num_threads())
    finally:
        handle.remove()
    return found


# --- TRL's side -------------------------------------------------------------------------------------------------------


def job_of(
    trainer: Trainer, groups: Sequence[Sequence[Answer]], rows: Sequence[pa.RecordBatch], *, steps: int
) -> dict[str, Any]:
    """All that TRL needs for the same steps; advantages are those that asyncrl trains by."""
    learner, objective = trainer.recipe.learner, trainer.recipe.objective
    answers = [answer for members in groups for answer in members]
    worth = trainer.prepare(rows, version=0).worth.values
    return {
        "model": trainer.recipe.model.path,
        "steps": steps,
        "rows_per_microbatch": GROUP_SIZE,
        "learning_rate": learner.learning_rate,
        "betas": learner.betas,
        "weight_decay": learner.weight_decay,
        "max_grad_norm": learner.max_grad_norm,
        "epsilon": objective.epsilon,
        "epsilon_high": objective.epsilon_high,
        "rows": [
            {
                "prompt": answer.prompt.tolist(),
                "completion": answer.completion.tolist(),
                "logprobs": answer.logprobs.tolist(),
                "advantage": advantage,
            }
            for answer, advantage in zip(answers, worth.tolist(), strict=True)
        ],
    }


@contextmanager
def trl_steps(python: Path, folder: Path, job: Mapping[str, Any]) -> Iterator[Callable[[int], Took]]:
    """A process of TRL's that makes a step with so many threads whenever it is asked. Writes its first gradient to
    GRADIENT in `folder`. Raises RunError with the end of what it said."""
    (folder / "job.json").write_text(json.dumps(job))
    script = str(Path(__file__).with_name("learner_trl_side.py"))
    here, there = Pipe()
    with here, (folder / "said").open("w+") as said:
        with there:
            arguments = [script, str(folder / "job.json"), str(folder / GRADIENT), str(there.fileno())]
            process = subprocess.Popen(
                [str(python), *arguments],
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())},
            )

        def failed(why: str) -> RunError:
            said.seek(0)
            last = "\n".join(said.read().strip().splitlines()[-5:])
            return RunError(f"TRL's side {why}:\n{last}")

        def once(threads: int) -> Took:
            try:
                here.send(threads)
                if not here.poll(LIMIT_S):
                    raise failed(f"made no step within {LIMIT_S:.0f} s")
                return Took(*here.recv())
            except (EOFError, ConnectionError):
                raise failed(f"ended with code {process.wait(LIMIT_S)}") from None

        try:
            yield once
        finally:
            process.kill()
            process.wait(LIMIT_S)
