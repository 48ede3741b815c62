"""`uppercase`: write a common English word in capitals, shown how by two examples. For real models that are small.

The rows are `words.txt`, 1,040 words of 3 to 7 letters. Their order is fixed by a permutation that nothing changes; the
first `HELDOUT` of it are held out, so no held-out word is ever trained, whatever the seed, and a score is comparable
between runs. A word takes a model of 135 million parameters two to five tokens, which it has seldom seen in this
order: the examples make it try, at about one in four, and the rest has to be learnt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from asyncrl.rewards.base import Finding
from asyncrl.rewards.exact import compared
from asyncrl.tasks.base import Answer, Message, Row, Split
from asyncrl.tasks.chat import conversation
from asyncrl.tasks.order import permute

HELDOUT = 300
EXAMPLES = ("river", "table")
"""Shown in every prompt, and rows of neither split."""


@cache
def words() -> tuple[str, ...]:
    """Every word but the examples, in the fixed order."""
    listed = Path(__file__).with_name("words.txt").read_text(encoding="utf-8").split()
    rest = [word for word in listed if word not in EXAMPLES]
    return tuple(rest[permute(position, len(rest), key="uppercase")] for position in range(len(rest)))


class Uppercase:
    """The task. An answer scores 1 if it is exactly the word in capitals and the model itself ended it, else 0."""

    name = "uppercase"

    def rows(self, split: Split) -> Sequence[Row]:
        chosen = words()[:HELDOUT] if split == "heldout" else words()[HELDOUT:]
        return [Row(id=word, prompt=_prompt(word), answer=word.upper()) for word in chosen]

    def messages(self, row: Row) -> list[Message]:
        return conversation(row.prompt)

    def score(self, row: Row, answer: Answer) -> Finding:
        return compared("exact", answer.text, row.answer, answer.finish_reason)

    def part_weights(self) -> Mapping[str, float]:
        return {"exact": 1.0}


def _prompt(word: str) -> list[Message]:
    """The examples as turns of a conversation, then the word."""
    turns: list[Message] = [{"role": "system", "content": "Upper-case the word."}]
    for example in EXAMPLES:
        turns.append({"role": "user", "content": example})
        turns.append({"role": "assistant", "content": example.upper()})
    return [*turns, {"role": "user", "content": word}]
