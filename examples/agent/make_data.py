"""Write train.jsonl and heldout.jsonl: strings of 3 to 5 digits, each with what it is backwards. No row is in both."""

import json
import random
from pathlib import Path

ROWS, HELDOUT = 3000, 300

rng = random.Random(0)
digits: dict[str, None] = {}  # in order of appearance, each once
while len(digits) < ROWS:
    digits["".join(rng.choices("0123456789", k=rng.randint(3, 5)))] = None

rows = [json.dumps({"prompt": text, "answer": text[::-1]}) + "\n" for text in digits]
Path("heldout.jsonl").write_text("".join(rows[:HELDOUT]))
Path("train.jsonl").write_text("".join(rows[HELDOUT:]))
