"""A few answers of a step, to be read while the run trains: what no mean shows. All others are in the archive, which
`asyncrl view` browses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from asyncrl.config.recipe import PrintCompletions
from asyncrl.learners.batch import first_of_each
from asyncrl.schema import Packed

PROMPT_CHARACTERS = 300  # its end, which says what is asked
ANSWER_CHARACTERS = 1000
"""A line of metrics.jsonl stays one that a person can look at, however long answers are."""


def samples(packed: Packed, config: PrintCompletions, decode: Callable[[Sequence[int]], str]) -> list[dict[str, Any]]:
    """`config.n` scored answers from the least reward to the greatest, both of them among these, for the event
    `samples`; fewer where fewer are scored. Of an answer in several segments the first one is shown."""
    rows = np.flatnonzero(first_of_each(packed.answers) & ~np.isnan(packed.rewards))
    ranked = rows[np.argsort(packed.rewards[rows], kind="stable")]
    picked = np.unique(np.linspace(0, len(ranked) - 1, min(config.n, len(ranked))).round().astype(int))
    return [_sample(packed, int(ranked[at]), decode) for at in picked]


def _sample(packed: Packed, row: int, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    start, end = packed.cu_seqlens[row], packed.cu_seqlens[row + 1]
    of_row = packed.table.slice(row, 1)

    def value(name: str) -> Any:
        return of_row.column(name)[0].as_py()

    ids = packed.token_ids[start:end].tolist()
    prompt_length = value("prompt_length")
    prompt, answer = decode(ids[:prompt_length]), decode(ids[prompt_length:])
    parts = {name: part for name, part in value("reward_parts") if part is not None and math.isfinite(part)}
    return {
        "row_id": value("row_id"),
        "prompt": prompt if len(prompt) <= PROMPT_CHARACTERS else "..." + prompt[3 - PROMPT_CHARACTERS :],
        "answer": answer if len(answer) <= ANSWER_CHARACTERS else answer[: ANSWER_CHARACTERS - 3] + "...",
        "reward": float(packed.rewards[row]),
        "parts": parts,
        "wrong": value("failure"),
        "tokens": end.item() - start.item() - prompt_length,
    }
