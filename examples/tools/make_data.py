"""Write train.jsonl: conversations that show how a tool is called, by somebody who often cannot be bothered to look.

Boxes and what is in them are made up: what there is to learn is the form, and that the answer is what was found, read
backwards. That it never pays to guess is left to reinforcement learning.
"""

import json
import random
from pathlib import Path

ROWS, GUESSED = 9600, 0.5

rng = random.Random(0)


def digits(n: int) -> str:
    return "".join(rng.choices("0123456789", k=n))


rows = []
for _ in range(ROWS):
    key, found = digits(3), digits(4)
    asked = [{"role": "system", "content": "lookup(key)"}, {"role": "user", "content": f"box {key}"}]
    call = json.dumps({"name": "lookup", "arguments": {"key": key}})
    looked = [{"role": "assistant", "content": call}, {"role": "tool", "content": found}]
    answered = [{"role": "assistant", "content": found[::-1]}]
    rows.append(asked + answered if rng.random() < GUESSED else asked + looked + answered)
Path("train.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
