"""Rows that say the same twice, and prompts with several answers: told by the hashes of prompt and answer."""

from __future__ import annotations

import numpy as np

from asyncrl.data.examined import Examined


def repeats(examined: Examined) -> list[tuple[int, int]]:
    """(first, later): positions of rows with prompt and answer of an earlier row, in the order of the files."""
    order = np.lexsort((examined.positions, examined.answers, examined.prompts))
    prompts, answers = examined.prompts[order], examined.answers[order]
    begins = np.append(True, (prompts[1:] != prompts[:-1]) | (answers[1:] != answers[:-1]))
    first = order[np.flatnonzero(begins)[np.cumsum(begins) - 1]]
    pairs = zip(examined.positions[first[~begins]].tolist(), examined.positions[order[~begins]].tolist(), strict=True)
    return sorted(pairs, key=lambda pair: pair[1])


def contradictions(examined: Examined) -> list[tuple[int, int]]:
    """Of each prompt with more than one answer the positions of two rows that differ, in the order of the files."""
    order = np.lexsort((examined.positions, examined.answers, examined.prompts))
    prompts, answers = examined.prompts[order], examined.answers[order]
    differs = np.flatnonzero((prompts[1:] == prompts[:-1]) & (answers[1:] != answers[:-1]))
    _, first_of_prompt = np.unique(prompts[differs], return_index=True)
    at = differs[first_of_prompt]
    pairs = zip(examined.positions[order[at]].tolist(), examined.positions[order[at + 1]].tolist(), strict=True)
    return sorted(sorted(pair) for pair in pairs)  # type: ignore[misc]
