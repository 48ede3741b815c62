"""Rows that say the same twice, and prompts with several answers: told by the hashes of prompt and answer."""

from __future__ import annotations

import numpy as np


def repeated_and_contradicting(
    positions: np.ndarray, prompts: np.ndarray, answers: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Two arrays of pairs of positions: each row with prompt and answer of an earlier one, after the first of these,
    ordered by the later one; and of each prompt with several answers two rows that differ, ordered by the first.

    All three arrays have one value a row, and there is a row; positions rise.
    """
    order = np.lexsort((positions, answers, prompts))
    prompts, answers, positions = prompts[order], answers[order], positions[order]
    same_prompt, same_answer = prompts[1:] == prompts[:-1], answers[1:] == answers[:-1]
    begins = np.append(True, ~(same_prompt & same_answer))
    first = positions[np.flatnonzero(begins)[np.cumsum(begins) - 1]]
    repeated = np.stack((first, positions), axis=1)[~begins]
    differs = np.flatnonzero(same_prompt & ~same_answer)
    differs = differs[np.unique(prompts[differs], return_index=True)[1]]
    contradicting = np.sort(np.stack((positions[differs], positions[differs + 1]), axis=1), axis=1)
    return repeated[np.argsort(repeated[:, 1])], contradicting[np.argsort(contradicting[:, 0])]
