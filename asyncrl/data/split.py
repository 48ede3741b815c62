"""Which prompts are held out: a function of the prompt's text alone, so that no repeated prompt is on both sides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Protocol, TypeVar

import numpy as np

from asyncrl.data.errors import DataError
from asyncrl.data.rows import Prompt

HELDOUT_SHARE = 10  # one prompt in so many


class HasPrompt(Protocol):
    """A row with a prompt, by which it is told from others."""

    @property
    def prompt(self) -> Prompt: ...


R = TypeVar("R", bound=HasPrompt)


def split_heldout(records: Sequence[R], *, section: str = "task.data") -> tuple[list[R], list[R]]:
    """(train, held out), as `held_out` says of their prompts. Raises DataError if all rows have the same prompt."""
    held = held_out(keys_of(records), section=section)
    sides: tuple[list[R], list[R]] = ([], [])
    for is_held, record in zip(held.tolist(), records, strict=True):
        sides[is_held].append(record)
    return sides


def held_out(keys: np.ndarray, *, section: str) -> np.ndarray:
    """Of each prompt's key (uint64) whether it is held out: about one distinct prompt in ten, by its hash.

    Rows with the same prompt (but for white space) land on the same side, so a repeated prompt cannot leak; a prompt
    keeps its side when rows are added or reordered. In a small file, where the hash would leave a side empty, the
    prompt with the smallest or greatest hash goes there. Raises DataError if all rows have the same prompt.
    """
    if keys.min() == keys.max():
        raise DataError(
            f"all rows have the same prompt, so none can be held out: give a file of other prompts as {section}.heldout"
        )
    held: np.ndarray = keys % HELDOUT_SHARE == 0
    if not held.any():
        held[keys == keys.min()] = True
    if held.all():
        held[keys == keys.max()] = False
    return held


def shared_prompts(left: Iterable[HasPrompt], right: Iterable[HasPrompt]) -> int:
    """How many distinct prompts occur on both sides."""
    return len({prompt_key(record.prompt) for record in left} & {prompt_key(record.prompt) for record in right})


def keys_of(records: Sequence[HasPrompt]) -> np.ndarray:
    """`prompt_key` of each, uint64."""
    return np.fromiter((prompt_key(record.prompt) for record in records), np.uint64, len(records))


def prompt_key(prompt: Prompt) -> int:
    """64 bits of a hash of the prompt's text without regard to white space; a string equals its one user message."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    text = "\x1f".join(f"{message['role']}\x1e{' '.join(message['content'].split())}" for message in messages)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
