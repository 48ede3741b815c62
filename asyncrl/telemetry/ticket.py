"""How a group reads: when what happened to it, the prompt, each answer with the versions that sampled it, rewards and
log-probs. Pure functions from its record batch (`asyncrl.schema`) to lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TextIO

import numpy as np
import pyarrow as pa
from rich.console import Console
from rich.text import Text

from asyncrl.staleness import Weights
from asyncrl.telemetry import text
from asyncrl.telemetry.table import aligned, visible

Decode = Callable[[Sequence[int]], str]
"""Token ids -> text, special tokens included."""

STYLES = ("cyan", "yellow", "magenta", "green", "blue", "red")
"""Of versions, oldest first; a seventh begins again, and the legend says which is which."""

LOW = 5
"""Percentile shown beside the lowest log-prob: one odd token is no trend."""

NAME_WIDTH = 10


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens one after another that have one origin. `weights` None: not sampled (tool output, a new user turn)."""

    text: str
    tokens: int
    weights: Weights | None


@dataclass(frozen=True, slots=True)
class Answer:
    """One trajectory of the group. Log-probs in nats, over its sampled tokens; None where there is none."""

    name: str  # member, or member.segment
    prompt: str
    pieces: tuple[Piece, ...]
    reward: float  # NaN: unscored
    parts: Mapping[str, float | None]
    finish: str
    failure: str
    logprob_mean: float | None
    logprob_low: float | None  # the LOW-th percentile
    logprob_min: float | None

    @property
    def sampled(self) -> dict[Weights, int]:
        """Tokens by the weights that sampled them, in the order they first appear."""
        found: dict[Weights, int] = {}
        for piece in self.pieces:
            if piece.weights is not None:
                found[piece.weights] = found.get(piece.weights, 0) + piece.tokens
        return found


def answers_of(batch: pa.RecordBatch, decode: Decode) -> list[Answer]:
    """The trajectories of a group, in its order."""
    return [_answer(row, decode) for row in batch.to_pylist()]


def _answer(row: Mapping[str, Any], decode: Decode) -> Answer:
    ids, mask = row["token_ids"], np.asarray(row["loss_mask"]) == 1
    start = row["prompt_length"]
    spans = [Weights(span["lineage"], span["version"]) for span in row["spans"]]
    origin = np.full(len(ids), -1)
    for n, span in enumerate(row["spans"]):
        origin[span["start"] : span["end"]] = n
    origin[~mask] = -1
    edges = [start, *(start + 1 + np.flatnonzero(np.diff(origin[start:]))).tolist(), len(ids)]
    pieces, shown = [], len(_whole(decode(ids[:start])))
    for begin, end in pairwise(edges):
        # The text so far, not of the piece alone: tokenizers join what belongs together, as spaces and bytes of one
        # character, which is then shown with the token that completes it.
        so_far = decode(ids[:end])
        so_far = so_far if end == len(ids) else _whole(so_far)
        if end > begin:
            weights = spans[origin[begin]] if origin[begin] >= 0 else None
            pieces.append(Piece(so_far[shown:], end - begin, weights))
        shown = len(so_far)
    logprobs = np.asarray(row["logprobs"], np.float64)[mask]
    return Answer(
        name=f"{row['member']}.{row['segment']}" if row["segment"] else str(row["member"]),
        prompt=decode(ids[:start]),
        pieces=tuple(pieces),
        reward=row["reward"],
        parts=dict(row["reward_parts"]),
        finish=row["finish_reason"],
        failure=row["failure"],
        logprob_mean=float(logprobs.mean()) if len(logprobs) else None,
        logprob_low=float(np.percentile(logprobs, LOW)) if len(logprobs) else None,
        logprob_min=float(logprobs.min()) if len(logprobs) else None,
    )


def _whole(decoded: str) -> str:
    """Without the mark of a character whose last bytes are still to come."""
    return decoded.rstrip("\ufffd")


def moments_of(batch: pa.RecordBatch) -> dict[str, float]:
    """When what happened to the group, unix seconds by the collector's clock: the first token of any member, the last
    answer, the last score. Without what did not happen."""
    first = [at for at in batch.column("first_token").to_pylist() if at > 0]
    found = {
        "issued": batch.column("issued")[0].as_py(),
        "first token": min(first, default=0.0),
        "done": max(batch.column("done").to_pylist()),
        "scored": max(batch.column("scored").to_pylist()),
        "put": batch.column("put")[0].as_py(),
    }
    return {name: at for name, at in found.items() if at > 0}


def timeline(moments: Mapping[str, float]) -> list[str]:
    """A line for each moment, in the order given: when, and how long after the one before. Negative where two hosts'
    clocks differ by more than lies between."""
    times = list(moments.values())
    steps = ["", *(f"{after - before:+.2f} s" for before, after in pairwise(times))]
    rows = [(name, clock(at), step) for (name, at), step in zip(moments.items(), steps, strict=False)]
    if len(times) > 1:
        rows.append(("in all", f"{times[-1] - times[0]:.2f} s", ""))
    return aligned(rows)


def clock(at: float) -> str:
    """Local time of day, with milliseconds."""
    return time.strftime("%H:%M:%S", time.localtime(at)) + f".{int(at % 1 * 1000):03}"


def answer_lines(answers: Sequence[Answer], checksums: Mapping[Weights, str], *, marks: bool) -> list[Text]:
    """The prompt, a legend of versions, the answers, and a table of their numbers. `marks`: each stretch of a version
    begins with its number in brackets, for where there is no colour."""
    versions = sorted({weights for answer in answers for weights in answer.sampled})
    styles = {weights: STYLES[n % len(STYLES)] for n, weights in enumerate(versions)}
    found = []
    for n, answer in enumerate(answers):
        if n == 0 or answer.prompt != answers[n - 1].prompt:
            name = "prompt" if n == 0 else f"prompt of {answer.name}"
            found.append(_block(name, [Text(visible(answer.prompt, lines=True), "bold")]))
        found.append(_block(f"answer {answer.name}", _coloured(answer, styles, marks=marks)))
    for weights in versions:
        tokens = sum(answer.sampled.get(weights, 0) for answer in answers)
        name = f"lineage {weights.lineage} version {weights.version}"
        legend = Text.assemble((name, styles[weights]), f": {tokens} tokens, checksum {checksums.get(weights) or '-'}")
        found.append(_block("sampled by", [legend]))
    found.append(Text())
    return found + [Text(line) for line in aligned(_table(answers))]


def _coloured(answer: Answer, styles: Mapping[Weights, str], *, marks: bool) -> list[Text]:
    found = []
    for piece in answer.pieces:
        shown = visible(piece.text, lines=True)
        if piece.weights is None:
            found.append(Text(f"[not sampled]{shown}" if marks else shown, "dim"))
        else:
            found.append(Text(f"[{piece.weights.version}]{shown}" if marks else shown, styles[piece.weights]))
    return found or [Text("nothing", "dim")]


def _block(name: str, pieces: Sequence[Text]) -> Text:
    """A name and what may take several lines, all of them beside it."""
    block = Text(f"{name:<{NAME_WIDTH}}  ")
    for piece in pieces:
        for n, line in enumerate(piece.split("\n", allow_blank=True)):
            if n:
                block.append("\n" + " " * (NAME_WIDTH + 2))
            block.append_text(line)
    return block


def _table(answers: Sequence[Answer]) -> list[tuple[str, ...]]:
    parts = list(dict.fromkeys(part for answer in answers for part in answer.parts))
    rows = [
        ("answer", "reward", *parts, "tokens", "ends by", "mean logprob", f"{LOW} %", "lowest", "versions", "failure")
    ]
    for answer in answers:
        scores = (answer.parts.get(part) for part in parts)
        versions = " ".join(f"{weights.version}:{tokens}" for weights, tokens in answer.sampled.items())
        rows.append(
            (
                answer.name,
                text.number(answer.reward),
                *map(text.number, scores),
                str(sum(answer.sampled.values())),
                answer.finish,
                text.number(answer.logprob_mean),
                text.number(answer.logprob_low),
                text.number(answer.logprob_min),
                versions or "-",
                visible(answer.failure) or "-",
            )
        )
    return rows


def checksums_of(batch: pa.RecordBatch) -> dict[Weights, str]:
    """The checksum of each set of weights that sampled a token, as the engine verified it."""
    spans = batch.column("spans").flatten().to_pylist()
    return {Weights(span["lineage"], span["version"]): span["checksum"] for span in spans}


def print_lines(lines: Sequence[Text], *, terminal: bool, file: TextIO) -> None:
    """`terminal`: with colour; false: nothing that a file could not hold."""
    if not terminal:
        file.writelines(line.plain.rstrip() + "\n" for line in lines)
        file.flush()
        return
    console = Console(file=file, force_terminal=True, highlight=False)
    for line in lines:
        console.print(line, soft_wrap=True)
