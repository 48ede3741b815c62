"""Write train.jsonl and heldout.jsonl: `sort 4821` is answered by `1248`. No row of one is in the other."""

import json
import random
from pathlib import Path

ROWS, HELDOUT = 3000, 300

rng = random.Random(0)
digits: dict[str, None] = {}  # in order of appearance, each once
while len(digits) < ROWS:
    digits["".join(rng.choices("0123456789", k=rng.randint(3, 6)))] = None

rows = [json.dumps({"prompt": f"sort {text}", "answer": "".join(sorted(text))}) + "\n" for text in digits]
Path("heldout.jsonl").write_text("".join(rows[:HELDOUT]))
Path("train.jsonl").write_text("".join(rows[HELDOUT:]))
