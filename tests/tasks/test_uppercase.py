"""The built-in task for real models: its words, its two splits, its prompt, its score."""

from __future__ import annotations

import pytest

from asyncrl.config.recipe import UppercaseTask
from asyncrl.tasks.base import Answer, Row
from asyncrl.tasks.build import build_task
from asyncrl.tasks.uppercase import EXAMPLES, HELDOUT, Uppercase


def test_no_held_out_word_is_ever_trained_or_shown_and_their_order_is_fixed() -> None:
    train, heldout = ([row.id for row in Uppercase().rows(split)] for split in ("train", "heldout"))
    assert (len(train), len(heldout)) == (738, HELDOUT)
    assert len({*train, *heldout, *EXAMPLES}) == 738 + HELDOUT + len(EXAMPLES)
    assert all(word.isascii() and word.islower() and 3 <= len(word) <= 7 for word in (*train, *heldout))
    # A score is comparable between runs and versions only as long as the held-out words are these.
    assert heldout[:3] == ["sheep", "energy", "regular"]
    assert heldout != sorted(heldout)


def test_a_prompt_shows_two_examples_and_then_the_word() -> None:
    task = build_task(UppercaseTask(), seed=0)
    row = task.rows("train")[0]
    roles = [(message["role"], message["content"]) for message in task.messages(row)]
    assert roles == [
        ("system", "Upper-case the word."),
        ("user", "river"),
        ("assistant", "RIVER"),
        ("user", "table"),
        ("assistant", "TABLE"),
        ("user", row.id),
    ]
    assert row.answer == row.id.upper()


@pytest.mark.parametrize(
    ("text", "finish_reason", "score"),
    [("LEMON", "stop", 1.0), ("LEMON", "length", 0.0), ("Lemon", "stop", 0.0), ("LEMON ", "stop", 0.0)],
)
def test_only_the_word_in_capitals_that_the_model_ended_counts(text: str, finish_reason: str, score: float) -> None:
    row = Row(id="lemon", prompt="lemon", answer="LEMON")
    assert Uppercase().score(row, Answer(text, (1, 2), finish_reason)).parts == {"exact": score}
