"""`vs-trl`: asyncrl against TRL's GRPOTrainer: the same warm-started model, prompts, order, update and two cores.

TRL runs unmodified in a virtual environment of its own, made on the first call in asyncrl's cache folder; torch and
transformers come from this environment (a `.pth` line saves gigabytes), so that both sides compute with the same
libraries. TRL has one or two torch threads, whichever is faster here; asyncrl has a process that samples and one that
trains, with one each. All three take turns, each turn begun by another one, so that whatever the machine does slowly
meets all alike. Medians over the turns are compared; TRL's is the better of its two. How far the turns agree is in the
rows.

Counted are tokens that were sampled and trained, prompts never. The clock of TRL runs from the start of its first step
to the end of its last, that of asyncrl from its first ticket to the end of its last step: imports, loading and the
start of processes are in neither, filling asyncrl's pipeline is in. Neither evaluates or writes checkpoints meanwhile;
asyncrl does archive every trajectory.

Controls: TRL must learn, or the comparison means nothing; and asyncrl with an engine that decodes one group at a time
must miss the target.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
import transformers

from asyncrl.benchmarks.frame import Measured, Row, Say, Target
from asyncrl.benchmarks.runs import RUN_LIMIT_S, WINDOW, RunError, train
from asyncrl.buffers.archive import Archive
from asyncrl.collectors.rollout import TaskPrompts
from asyncrl.config.cache_folder import cache_root
from asyncrl.config.loading import load_recipe
from asyncrl.config.recipe import Recipe
from asyncrl.learners.model import load_tokenizer
from asyncrl.learners.tiny import ensure_tiny
from asyncrl.telemetry.metrics import read_metrics, surviving_steps

TRL = "1.16.0"
INSTALL_LIMIT_S = 900.0

SEED = 0
STEPS, QUICK_STEPS = 60, 40
TURNS = 5
CORES = 2
THREADS = (1, 2)  # of TRL's torch
RESAMPLES = 10_000

REWARD = 0.8
DECAY = 0.8  # of the moving average
SPEED_UP = 1.5
LEARNT = 0.85  # what a TRL that really trains ends with
SLOW_SLOTS = 8  # one group


@dataclass(frozen=True, slots=True)
class Trace:
    """A run as both sides report it. One entry per step; times are seconds since its clock started."""

    ended: Sequence[float]
    rewards: Sequence[float]  # mean over the step's answers
    tokens: Sequence[int]  # sampled and trained

    def row(self, side: str, turn: int, threads: int) -> Row:
        """As it is written down."""
        return {
            "side": side,
            "turn": turn,
            "threads": threads,  # of torch, in each process that computes
            "steps": len(self.ended),
            "step_s": median(step_seconds(self.ended)),
            "tokens_per_s": sum(self.tokens) / self.ended[-1],
            "seconds": self.ended[-1],
            "seconds_to_reward": seconds_to(REWARD, self.ended, self.rewards),
            "reward_end": fmean(self.rewards[-WINDOW:]),
        }


def step_seconds(ended: Sequence[float]) -> list[float]:
    """From each end to the next; the first step is left out, since it fills a pipeline.

    >>> step_seconds([3.0, 4.0, 6.0])
    [1.0, 2.0]
    """
    return [later - earlier for earlier, later in pairwise(ended)]


def seconds_to(reward: float, ended: Sequence[float], rewards: Sequence[float]) -> float | None:
    """When the moving average of the rewards first reached `reward`, None if it never did.

    The average starts with the first step's reward and forgets with DECAY per step.

    >>> seconds_to(0.4, [1.0, 2.0, 3.0, 4.0], [0.0, 1.0, 1.0, 1.0])
    4.0
    """
    average: float | None = None
    for end, found in zip(ended, rewards, strict=True):
        average = found if average is None else DECAY * average + (1 - DECAY) * found
        if average >= reward - 1e-12:  # a sum that is one in theory only
            return end
    return None


def measure(*, quick: bool, say: Say) -> Measured:
    """Rows: every run, in the order of the turns (quick: one turn); the slow control; how far the turns agree."""
    steps, turns = (QUICK_STEPS, 1) if quick else (STEPS, TURNS)
    python = trl_python(cache_root(), say)
    recipe = load_recipe("tiny-reverse").recipe
    model = ensure_tiny(SEED)
    prompts = prompts_of(recipe, model, steps * recipe.learner.groups_per_step)
    rows: list[Row] = []

    def add(trace: Trace, side: str, turn: int, threads: int) -> None:
        row = trace.row(side, turn, threads)
        rows.append(row)
        say(f"{side}, threads {threads}: {row['step_s']:.3f} s a step, {row['tokens_per_s']:.0f} tokens/s")

    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as name, on_cores(CORES):
        folder = Path(name)

        def trl(threads: int) -> Trace:
            return train_trl(python, folder, {**job_of(recipe, model, steps), "threads": threads, "prompts": prompts})

        def own(name: str, **settings: object) -> Trace:
            fixed = {"run.name": name, "run.seed": SEED, "run.max_steps": steps}
            unmeasured = {"eval.at_start": False, "eval.at_end": False, "learner.checkpoint.every_steps": steps}
            train(folder / name, {**fixed, **unmeasured, **settings})
            return read_own(folder / name)

        for turn in range(1, turns + 1):
            for side, threads in order(turn):
                trace = trl(threads) if side == "trl" else own(f"bench-trl-{turn}")
                add(trace, side, turn, threads)
        slow = {"collector.engine.type": "transformers", "collector.engine.slots": SLOW_SLOTS}
        add(own("bench-trl-slow", **slow), "control", 1, 1)
    met = targets(rows)
    return Measured(rows=[*rows, *agreement(rows)], targets=met)


def order(turn: int) -> list[tuple[str, int]]:
    """Who runs in a turn, one after the other: (side, threads).

    >>> order(1), order(2)
    ([('trl', 1), ('trl', 2), ('asyncrl', 1)], [('trl', 2), ('asyncrl', 1), ('trl', 1)])
    """
    sides = [*(("trl", threads) for threads in THREADS), ("asyncrl", 1)]
    first = (turn - 1) % len(sides)
    return sides[first:] + sides[:first]


def targets(rows: Sequence[Row]) -> list[Target]:
    """Medians over the turns, asyncrl's over TRL's. TRL's is that of the number of threads with the better median, for
    each target anew; that it learns is asked of both."""

    def of(side: str, key: str, threads: int = 1) -> float | None:
        values = [row[key] for row in rows if (row["side"], row["threads"]) == (side, threads)]
        return None if None in values else median(values)

    def ratio(
        own: float | None, peers: Sequence[float | None], *, best: Callable[[list[float]], float]
    ) -> float | None:
        known = [peer for peer in peers if peer is not None]
        return own / best(known) if own is not None and known else None

    speeds, arrivals, learnt = (
        [of("trl", key, threads) for threads in THREADS] for key in ("tokens_per_s", "seconds_to_reward", "reward_end")
    )
    speed = ratio(of("asyncrl", "tokens_per_s"), speeds, best=max)
    arrival = ratio(of("asyncrl", "seconds_to_reward"), arrivals, best=min)
    slow = ratio(of("control", "tokens_per_s"), speeds, best=max)
    return [
        Target("trained tokens/s, asyncrl / TRL", speed, SPEED_UP, "higher"),
        Target(f"seconds to a reward of {REWARD}, asyncrl / TRL", arrival, 1.0, "lower"),
        Target(
            f"control: TRL's reward of the last {WINDOW} steps",
            min(r for r in learnt if r is not None),
            LEARNT,
            "higher",
        ),
        Target(f"control: tokens/s with {SLOW_SLOTS} slots, asyncrl / TRL", slow, SPEED_UP, "lower"),
    ]


def agreement(rows: Sequence[Row]) -> list[Row]:
    """How steady the ratio of tokens/s is: one row a turn, the ratio to the better of TRL's two runs in it; and one of
    all turns, with the interval of `steadiness` and each side's spread, (largest - smallest) / median."""
    turns = sorted({row["turn"] for row in rows if row["side"] == "asyncrl"})
    speeds = {
        (row["side"], row["threads"], row["turn"]): row["tokens_per_s"] for row in rows if row["side"] != "control"
    }
    own = [speeds["asyncrl", 1, turn] for turn in turns]
    peers = {threads: [speeds["trl", threads, turn] for turn in turns] for threads in THREADS}
    best = [max(both) for both in zip(*peers.values(), strict=True)]
    each = [ours / theirs for ours, theirs in zip(own, best, strict=True)]
    low, high = steadiness(own, peers)
    whole: Row = {
        "side": "agreement",
        "turns": len(turns),
        "turns_met": sum(ratio >= SPEED_UP for ratio in each),
        "ratio_low": low,
        "ratio_high": high,
        "trl_threads": max(peers, key=lambda threads: median(peers[threads])),
        "spread_asyncrl": spread(own),
        **{f"spread_trl_{threads}": spread(values) for threads, values in peers.items()},
    }
    return [
        *({"side": "ratio", "turn": turn, "tokens_per_s": ratio} for turn, ratio in zip(turns, each, strict=True)),
        whole,
    ]


def spread(values: Sequence[float]) -> float:
    """
    >>> spread([9.0, 10.0, 12.0])
    0.3
    """
    return (max(values) - min(values)) / median(values)


def steadiness(own: Sequence[float], peers: Mapping[int, Sequence[float]]) -> tuple[float, float]:
    """5th and 95th percentile of the target's ratio when the turns are drawn anew, with replacement: the percentile
    bootstrap (Efron, 1979). own, and peers by threads: one value a turn; a turn is drawn as a whole.

    >>> steadiness([3.0, 6.0], {1: [1.0, 2.0], 2: [1.5, 3.0]})
    (2.0, 2.0)
    """
    drawn = np.random.default_rng(SEED).integers(len(own), size=(RESAMPLES, len(own)))
    medians = [np.median(np.asarray(values)[drawn], axis=1) for values in peers.values()]
    ratios = np.median(np.asarray(own)[drawn], axis=1) / np.max(medians, axis=0)
    low, high = np.quantile(ratios, [0.05, 0.95]).tolist()
    return low, high


# --- the two sides ----------------------------------------------------------------------------------------------------


def prompts_of(recipe: Recipe, model: Path, count: int) -> list[dict[str, Any]]:
    """The prompts of the first `count` tickets, in their order, as the text that both sides feed the model."""
    found = TaskPrompts.load(recipe, model)
    tokenizer = load_tokenizer(model)
    prompts = []
    for ordinal in range(count):
        prompt = found.train(ordinal)
        text = tokenizer.decode(prompt.token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        prompts.append({"prompt": text, "token_ids": list(prompt.token_ids), "answer": prompt.row.answer})
    return prompts


def job_of(recipe: Recipe, model: Path, steps: int) -> dict[str, Any]:
    """All that decides what is trained, from the recipe asyncrl runs."""
    learner, sampling = recipe.learner, recipe.collector.sampling
    return {
        "model": str(model),
        "seed": SEED,
        "steps": steps,
        "groups_per_step": learner.groups_per_step,
        "group_size": recipe.collector.group_size,
        "learning_rate": learner.learning_rate,
        "warmup_steps": learner.warmup_steps,
        "betas": learner.betas,
        "weight_decay": learner.weight_decay,
        "max_grad_norm": learner.max_grad_norm,
        "epsilon": recipe.objective.epsilon,
        "epsilon_high": recipe.objective.epsilon_high,
        "temperature": sampling.temperature,
        "max_tokens": sampling.max_tokens,
    }


def train_trl(python: Path, folder: Path, job: dict[str, Any]) -> Trace:
    """One run of `trl_side.py`. Raises RunError with the end of what it said."""
    job_file, result_file = folder / "job.json", folder / "result.json"
    job_file.write_text(json.dumps(job))
    result_file.unlink(missing_ok=True)
    _call(
        [str(python), str(Path(__file__).with_name("trl_side.py")), str(job_file), str(result_file)],
        limit_s=RUN_LIMIT_S,
        OMP_NUM_THREADS=str(job["threads"]),
    )
    found = json.loads(result_file.read_bytes())
    begin = found["began"][0]
    return Trace([end - begin for end in found["ended"]], found["rewards"], found["tokens"])


def read_own(folder: Path) -> Trace:
    """A run folder of asyncrl's: rewards, tokens and the first ticket's time from the archive, steps' ends from
    metrics.jsonl."""
    columns = ["issued", "reward", "loss_mask", "trained_version"]
    parts = Archive(folder / "archive").table(columns=columns).combine_chunks()
    began = min(parts["issued"].to_pylist())
    mask = parts["loss_mask"].chunk(0)
    steps = parts["trained_version"].to_pylist()
    rewards: dict[int, list[float]] = {}
    tokens: dict[int, int] = {}
    for step, reward, row in zip(steps, parts["reward"].to_pylist(), mask.to_pylist(), strict=True):
        rewards.setdefault(step, []).append(reward)
        tokens[step] = tokens.get(step, 0) + sum(row)
    ended = {record["step"] - 1: record["time"] for record in surviving_steps(read_metrics(folder / "metrics.jsonl"))}
    order = sorted(rewards)
    return Trace([ended[s] - began for s in order], [fmean(rewards[s]) for s in order], [tokens[s] for s in order])


@contextmanager
def on_cores(count: int) -> Iterator[None]:
    """This process and those it starts run on the first `count` of the cores it may use (Linux)."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


# --- TRL's environment ------------------------------------------------------------------------------------------------


def trl_python(cache: Path, say: Say) -> Path:
    """The interpreter of an environment that has TRL beside the torch and transformers of this one; made if missing.

    Raises RunError if it cannot be made.
    """
    folder = cache / f"trl-{TRL}-torch-{torch.__version__}-transformers-{transformers.__version__}"
    python, complete = folder / "bin" / "python", folder / "complete"
    if complete.is_file():
        return python
    say(f"making TRL's environment in {folder}, once; torch and transformers are those of this environment")
    _call([sys.executable, "-m", "venv", "--clear", str(folder)], limit_s=INSTALL_LIMIT_S)
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(_call([str(python), "-c", where], limit_s=INSTALL_LIMIT_S).strip())
    # A plain line is a folder to search last, whose own .pth files are not read: asyncrl itself is not there.
    (packages / "torch-of-asyncrl.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pins = [f"trl=={TRL}", f"torch=={torch.__version__.partition('+')[0]}", f"transformers=={transformers.__version__}"]
    _call([str(python), "-m", "pip", "install", "--quiet", *pins], limit_s=INSTALL_LIMIT_S)
    complete.touch()
    return python


def _call(command: list[str], *, limit_s: float, **environment: str) -> str:
    """What a command printed. Raises RunError if it fails or takes longer than `limit_s` seconds."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit_s, check=False, env={**os.environ, **environment}
        )
    except subprocess.TimeoutExpired as error:
        raise RunError(f"{' '.join(command)} took more than {limit_s:.0f} s") from error
    if done.returncode != 0:
        said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-5:])
        raise RunError(f"{' '.join(command)} ended with code {done.returncode}:\n{said}")
    return done.stdout
