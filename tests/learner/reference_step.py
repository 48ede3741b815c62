"""One step of the default recipe, written again from the formulas: unpadded, unpacked, one sequence at a time.

Imports nothing of asyncrl. Run on a folder whose run kept every version:

    asyncrl run --set learner.checkpoint.every_steps=1 --set learner.checkpoint.keep_last=1000
    python tests/learner/reference_step.py RUN_FOLDER STEP        # largest difference to the checkpoint of STEP + 1
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from ruamel.yaml import YAML
from transformers import AutoModelForCausalLM


def next_weights(
    run_dir: Path, step: int, recipe: dict[str, Any], *, correct: bool = True, one_denominator: bool = True
) -> dict[str, torch.Tensor]:
    """Parameters after the step that starts from version `step`, from checkpoint `step` and the archive.

    `correct` and `one_denominator` are there to be turned off: without the importance ratio, or with a mean per
    sequence, the answer must be another.
    """
    start = run_dir / "checkpoints" / f"version-{step:06d}"
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32, attn_implementation="eager").eval()
    rows = pq.read_table(sorted((run_dir / "archive").glob(f"step-*-{step:06d}.parquet"))[-1]).to_pylist()
    low, high = 1 - recipe["objective"]["epsilon"], 1 + recipe["objective"]["epsilon_high"]
    temperature = recipe["collector"]["sampling"]["temperature"]
    total, tokens = torch.zeros(()), 0
    for row in rows:
        r = [other["reward"] for other in rows if other["ticket"] == row["ticket"] and not math.isnan(other["reward"])]
        if math.isnan(row["reward"]) or len(r) < 2:
            continue
        mean = sum(r) / len(r)
        std = math.sqrt(sum((x - mean) ** 2 for x in r) / (len(r) - 1))
        advantage = 0.0 if max(r) == min(r) else (row["reward"] - mean) / (std + 1e-4)
        logits = model(torch.tensor([row["token_ids"]])).logits[0]
        losses = []
        for t in range(1, len(row["token_ids"])):
            if row["loss_mask"][t]:
                logprob = torch.log_softmax(logits[t - 1] / temperature, -1)[row["token_ids"][t]]
                ratio = torch.exp(logprob - (row["logprobs"][t] if correct else logprob.detach()))
                losses.append(-torch.minimum(ratio * advantage, torch.clamp(ratio, low, high) * advantage))
        tokens += len(losses) if one_denominator else 1
        total = total + torch.stack(losses).sum() / (1 if one_denominator else len(losses))
    (total / tokens).backward()

    config = recipe["learner"]
    state = torch.load(start / "training.pt", weights_only=True)["optimizer"]
    rate = config["learning_rate"] * min(1.0, (state["updates"] + 1) / max(1, config["warmup_steps"]))
    parameters = dict(model.named_parameters())
    norm = math.sqrt(sum(float((p.grad.double() ** 2).sum()) for p in parameters.values()))
    shrink = min(1.0, config["max_grad_norm"] / (norm + 1e-6))
    order = [n for n, p in parameters.items() if p.ndim >= 2] + [n for n, p in parameters.items() if p.ndim < 2]
    b1, b2 = config["betas"]
    result = {}
    for index, name in enumerate(order):
        p, adam = parameters[name], state["adam"]["state"][index]
        n = float(adam["step"]) + 1
        g = p.grad * shrink
        m = b1 * adam["exp_avg"] + (1 - b1) * g
        v = b2 * adam["exp_avg_sq"] + (1 - b2) * g * g
        decay = config["weight_decay"] if p.ndim >= 2 else 0.0
        result[name] = p.detach() * (1 - rate * decay) - rate * (m / (1 - b1**n)) / ((v / (1 - b2**n)).sqrt() + 1e-8)
    return result


def largest_difference(run_dir: Path, step: int, recipe: dict[str, Any], **controls: bool) -> float:
    """Between the reference's next weights and the checkpoint of version step + 1."""
    found = AutoModelForCausalLM.from_pretrained(run_dir / "checkpoints" / f"version-{step + 1:06d}")
    expected = next_weights(run_dir, step, recipe, **controls)
    return max(float((found.get_parameter(name).detach() - value).abs().max()) for name, value in expected.items())


if __name__ == "__main__":
    folder, number = Path(sys.argv[1]), int(sys.argv[2])
    resolved = YAML(typ="safe").load((folder / "recipe.yaml").read_text())
    sys.stdout.write(f"{largest_difference(folder, number, resolved):.3g}\n")
