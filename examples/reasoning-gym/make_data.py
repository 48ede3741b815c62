"""Write train.jsonl: questions of the task in rl.yaml, none of them held out there, answered by somebody careless.

Two answers in five are wrong: how words are spelt backward can be learnt from the others; that it pays to be careful is
left to reinforcement learning.
"""

import json
import random
from pathlib import Path

from asyncrl.config.loading import load_recipe
from asyncrl.tasks.build import build_task

ROWS, WRONG = 6000, 0.4

recipe = load_recipe("./rl.yaml", overrides=["model.path=builtin:tiny"]).recipe  # its own model is not there yet
rows = build_task(recipe.task, seed=0).rows("train")
rng = random.Random(0)


def careless(answer):
    """The word forward, without its last letter, or with a letter twice."""
    place = rng.randrange(len(answer))
    return rng.choice([answer[::-1], answer[:-1], answer[:place] + answer[place] + answer[place:]])


with Path("train.jsonl").open("w") as file:
    for row in rows[:ROWS]:
        answer = careless(row.answer) if rng.random() < WRONG else row.answer
        file.write(json.dumps({"prompt": row.prompt, "answer": answer}) + "\n")
