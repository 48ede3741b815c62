"""Write train.jsonl: questions of the task in rl.yaml and their answers, none of them held out there."""

import json
from pathlib import Path

from asyncrl.config.loading import load_recipe
from asyncrl.tasks.build import build_task

ROWS = 4000

recipe = load_recipe("./rl.yaml", overrides=["model.path=builtin:tiny"]).recipe  # its own model is not there yet
task = build_task(recipe.task, seed=0)
lines = [json.dumps({"prompt": row.prompt, "answer": row.answer}) + "\n" for row in task.rows("train")[:ROWS]]
Path("train.jsonl").write_text("".join(lines))
