"""Log-probs of chosen tokens and their gradients by blocks of the vocabulary, against log_softmax and gather.

All sides get the same hidden states and the same head, in a process of their own each, whose peak is the memory of
that side alone; they take turns. The sizes are those of a small model with a real vocabulary (Qwen2.5-0.5B: width 896).
Training also asks for entropy and collision of each distribution, which plain does not give: a side of its own, with
the same targets.

Control: one block for the whole vocabulary, all of it kept. It must need more than the share of memory that is the
target, or the target would say nothing about blocks.
"""

from __future__ import annotations

import multiprocessing
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from torch import Tensor

from asyncrl.benchmarks.frame import Measured, Row, Say, Target
from asyncrl.learners import predictions

VOCABULARY = 151_936
MEMORY = 0.25  # of plain's, what the project promises
SECONDS = 1.0
APART = 1e-4  # of the largest: float32 sums over 151,936 terms, in another order
LIMIT_S = 1200.0  # a pass of any side on a machine that is busy


@dataclass(frozen=True, slots=True)
class Problem:
    """How many tokens have how wide a hidden state."""

    tokens: int
    width: int
    vocabulary: int = VOCABULARY


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward and backward pass of one side. cpu_seconds: of all threads, which a busy machine does not stretch.
    bytes: peak of the process over what it had before its first pass. values: log-probs [tokens], then the hidden
    states' gradient, flat."""

    seconds: float
    cpu_seconds: float
    bytes: int
    values: Tensor


def measure(*, quick: bool, say: Say) -> Measured:
    """Rows: `plain`, `blocks` and `spread`, blocks with entropy and collision, on one problem; `whole`, the control;
    `long`, `spread` alone on more tokens."""
    return compare(
        Problem(4096, 64 if quick else 896),
        long=Problem(4096 if quick else 32_768, 64),
        turns=1 if quick else 2,
        say=say,
    )


def compare(problem: Problem, *, long: Problem, turns: int, say: Say) -> Measured:
    """What `measure` measures, on these problems."""
    rows: list[Row] = []

    def finished(name: str, problem: Problem, passes: Sequence[Pass]) -> Row:
        row: Row = {
            "side": name,
            **asdict(problem),
            "seconds": round(median(done.seconds for done in passes), 3),
            "cpu_seconds": round(median(done.cpu_seconds for done in passes), 3),
            "gib": round(passes[0].bytes / 2**30, 3),
        }
        rows.append(row)
        say(
            f"{name}, {problem.tokens:,} tokens x {problem.vocabulary:,}, width {problem.width}: "
            f"{row['seconds']:.1f} s (CPU {row['cpu_seconds']:.1f} s), {row['gib']:.2f} GiB"
        )
        return row

    passes: dict[str, list[Pass]] = {"plain": [], "blocks": [], "spread": []}
    with ExitStack() as stack:
        sides = {name: stack.enter_context(side(name, problem)) for name in passes}
        for turn in range(turns):
            for name in passes if turn % 2 == 0 else reversed(passes):
                passes[name].append(sides[name]())
    plain, blocks, spread = (finished(name, problem, done) for name, done in passes.items())
    apart = max(
        _apart(passes[name][0].values, passes["plain"][0].values, problem.tokens) for name in ("blocks", "spread")
    )
    with side("whole", problem) as once:
        whole = finished("whole", problem, [once()])
    with side("spread", long) as once:
        last = once()
    finished("long", long, [last])
    return Measured(
        rows=rows,
        targets=[
            Target("memory over plain's", blocks["gib"] / plain["gib"], MEMORY, "lower"),
            Target("seconds over plain's", blocks["seconds"] / plain["seconds"], SECONDS, "lower"),
            Target("memory over plain's, with entropy", spread["gib"] / plain["gib"], MEMORY, "lower"),
            Target("seconds over plain's, with entropy", spread["seconds"] / plain["seconds"], SECONDS, "lower"),
            Target("log-probs and gradients apart, of the largest", apart, APART, "lower"),
            Target(f"finite at {long.tokens:,} tokens", float(last.values.isfinite().all()), 1.0, "higher"),
            Target("control: memory of one block for all over plain's", whole["gib"] / plain["gib"], MEMORY, "higher"),
        ],
    )


def _apart(one: Tensor, other: Tensor, tokens: int) -> float:
    return max(
        float((a - b).abs().max() / b.abs().max())
        for a, b in ((one[:tokens], other[:tokens]), (one[tokens:], other[tokens:]))
    )


@contextmanager
def side(name: str, problem: Problem) -> Iterator[Callable[[], Pass]]:
    """A process that holds the problem and makes a pass whenever it is called. name: a side of `compare`, or `at-once`,
    the learner's way for few logits."""
    context = multiprocessing.get_context("spawn")
    mine, its = context.Pipe()
    process = context.Process(target=_serve, args=(its, name, problem, torch.get_num_threads()), daemon=True)
    process.start()
    its.close()  # so that its end is noticed

    def once() -> Pass:
        try:
            mine.send(None)
            if not mine.poll(LIMIT_S):
                raise TimeoutError(f"{name}, {problem}: no pass within {LIMIT_S:.0f} s")
            seconds, cpu_seconds, used, values = mine.recv()
        except (EOFError, ConnectionError):
            process.join(10)
            raise RuntimeError(
                f"{name}, {problem}: its process ended with {process.exitcode}; -9: the machine's memory is too small"
            ) from None
        return Pass(seconds, cpu_seconds, used, torch.from_numpy(values))

    try:
        yield once
    finally:
        mine.close()
        process.join(10)
        process.kill()


def _serve(calls: Connection, name: str, problem: Problem, threads: int) -> None:
    torch.set_num_threads(threads)
    if name == "whole":
        predictions.BLOCK = predictions.LOGITS = problem.tokens * problem.vocabulary
    others: dict[str, Callable[..., Tensor]] = {"plain": _plain, "at-once": _at_once}
    logprobs = others.get(name) or partial(_by_blocks, spread=name == "spread")
    inputs, weights = _inputs(problem)
    before = psutil.Process().memory_info().rss  # type: ignore[no-untyped-call]
    while True:
        try:
            calls.recv()
        except EOFError:
            return
        start, start_cpu = time.perf_counter(), time.process_time()
        found = logprobs(*inputs)
        gradient, _ = torch.autograd.grad((found * weights).sum(), inputs[:2])
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - start_cpu
        values = torch.cat([found.detach(), gradient.flatten()])
        del found, gradient, _
        calls.send((seconds, cpu_seconds, _peak() - before, values.numpy()))


def _inputs(problem: Problem) -> tuple[tuple[Any, ...], Tensor]:
    """What `predicted` takes, and the gradient that comes from the loss. Logits have a deviation of 3."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(problem.tokens, problem.width, generator=generator)
    weight = torch.randn(problem.vocabulary, problem.width, generator=generator).mul_(3 / problem.width**0.5)
    targets = torch.randint(0, problem.vocabulary, (problem.tokens,), generator=generator)
    _small = torch.mm(hidden[:64], weight[:64].T)  # threads are started before the clock is
    rows = torch.arange(problem.tokens)
    return (hidden.requires_grad_(), weight.requires_grad_(), None, rows, targets), torch.randn(
        problem.tokens, generator=generator
    )


def _plain(hidden: Tensor, weight: Tensor, _bias: None, _rows: Tensor, targets: Tensor) -> Tensor:
    return torch.log_softmax(hidden @ weight.T, dim=-1).gather(1, targets[:, None]).squeeze(1)


def _at_once(hidden: Tensor, weight: Tensor, _bias: None, rows: Tensor, targets: Tensor) -> Tensor:
    """As a pass of the learner's with few logits."""
    return predictions.predicted_plainly(hidden @ weight.T, rows, targets, spread=True).logprobs


def _by_blocks(*inputs: Any, spread: bool) -> Tensor:
    return predictions.predicted(*inputs, spread=spread).logprobs


def _peak() -> int:
    """Bytes of memory that this process has had at most.

    Linux counts into `ru_maxrss` what a process had before it was this program, as a copy of its parent: there the
    address space of the program alone is asked.
    """
    if sys.platform != "linux":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])
