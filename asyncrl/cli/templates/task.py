"""What the model is asked, and what its answers are worth. Make both yours."""

import json
from pathlib import Path

from asyncrl.tasks.base import Row

DATA = Path(__file__).with_name("data.jsonl")
HELDOUT = 100  # rows that are never trained: the summary's "success" is about them


class MyTask:
    def rows(self, split):
        """The rows of a split, "train" or "heldout". An id says which row an answer in the run's folder is about."""
        lines = DATA.read_text(encoding="utf-8").splitlines()
        chosen = lines[:HELDOUT] if split == "heldout" else lines[HELDOUT:]
        return [Row(id=f"{split}-{n}", **json.loads(line)) for n, line in enumerate(chosen, start=1)]

    def score(self, row, answer):
        """The reward: a number, or several by name as in {"right": 1.0, "short": 0.2}. Called once for each answer."""
        if answer.finish_reason != "stop":  # cut off at max_tokens: a reward would teach the model not to stop
            return 0.0
        if answer.text.strip() == row.answer:
            return 1.0
        return 0.0
