"""A step of the default recipe, written again from the formulas: unpadded, unpacked, one sequence at a time.

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
    run_dir: Path,
    step: int,
    recipe: dict[str, Any],
    *,
    correct: bool = True,
    one_denominator: bool = True,
    of_the_step: bool = True,
) -> dict[str, torch.Tensor]:
    """Parameters after the step that starts from version `step`, from checkpoint `step` and the archive.

    `correct`, `one_denominator` and `of_the_step` are there to be turned off: without the importance ratio, with a mean
    per sequence, or with one per update, the answer must be another.
    """
    start = run_dir / "checkpoints" / f"version-{step:06d}"
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32, attn_implementation="eager").eval()
    rows = pq.read_table(sorted((run_dir / "archive").glob(f"step-*-{step:06d}.parquet"))[-1]).to_pylist()
    state = torch.load(start / "training.pt", weights_only=True)["optimizer"]
    config = recipe["learner"]
    rate = config["learning_rate"] * min(1.0, (state["steps"] + 1) / max(1, config["warmup_steps"]))

    tickets = sorted({row["ticket"] for row in rows})
    updates = min(config["updates_per_step"], len(tickets))
    fewest, more = divmod(len(tickets), updates)
    sizes = [fewest + (n < more) for n in range(updates)]
    parts, counts = [], []
    for size in sizes:
        chosen, tickets = tickets[:size], tickets[size:]
        parts.append([row for row in rows if row["ticket"] in chosen])
        counts.append(sum(sum(row["loss_mask"]) if one_denominator else 1 for row in parts[-1]))
    for part, count in zip(parts, counts, strict=True):
        total = torch.zeros(())
        for row in part:
            losses = token_losses(model, row, rows, recipe, correct=correct)
            total = total + losses.sum() / (1 if one_denominator else len(losses))
        model.zero_grad()
        (total * updates / sum(counts) if of_the_step else total / count).backward()
        adamw(dict(model.named_parameters()), state["adam"]["state"], rate, config)
    return {name: p.detach() for name, p in model.named_parameters()}


def token_losses(
    model: Any, row: dict[str, Any], rows: list[dict[str, Any]], recipe: dict[str, Any], *, correct: bool
) -> torch.Tensor:
    """Of the sampled tokens of one row."""
    low, high = 1 - recipe["objective"]["epsilon"], 1 + recipe["objective"]["epsilon_high"]
    r = [other["reward"] for other in rows if other["ticket"] == row["ticket"]]
    mean = sum(r) / len(r)
    std = math.sqrt(sum((x - mean) ** 2 for x in r) / (len(r) - 1))
    advantage = 0.0 if max(r) == min(r) else (row["reward"] - mean) / (std + 1e-4)
    logits = model(torch.tensor([row["token_ids"]])).logits[0]
    losses = []
    for t in range(1, len(row["token_ids"])):
        if row["loss_mask"][t]:
            temperature = recipe["collector"]["sampling"]["temperature"]
            logprob = torch.log_softmax(logits[t - 1] / temperature, -1)[row["token_ids"][t]]
            ratio = torch.exp(logprob - (row["logprobs"][t] if correct else logprob.detach()))
            losses.append(-torch.minimum(ratio * advantage, torch.clamp(ratio, low, high) * advantage))
    return torch.stack(losses)


@torch.no_grad()
def adamw(parameters: dict[str, Any], moments: dict[int, Any], rate: float, config: dict[str, Any]) -> None:
    """One update in place, of weights and moments; the gradient is clipped by its norm."""
    norm = math.sqrt(sum(float((p.grad.double() ** 2).sum()) for p in parameters.values()))
    shrink = min(1.0, config["max_grad_norm"] / (norm + 1e-6))
    order = [n for n, p in parameters.items() if p.ndim >= 2] + [n for n, p in parameters.items() if p.ndim < 2]
    b1, b2 = config["betas"]
    for index, name in enumerate(order):
        p, adam = parameters[name], moments[index]
        g = p.grad * shrink
        adam["step"] = n = float(adam["step"]) + 1
        adam["exp_avg"] = m = b1 * adam["exp_avg"] + (1 - b1) * g
        adam["exp_avg_sq"] = v = b2 * adam["exp_avg_sq"] + (1 - b2) * g * g
        decay = config["weight_decay"] if p.ndim >= 2 else 0.0
        p.copy_(p * (1 - rate * decay) - rate * (m / (1 - b1**n)) / ((v / (1 - b2**n)).sqrt() + 1e-8))


def largest_difference(run_dir: Path, step: int, recipe: dict[str, Any], **controls: bool) -> float:
    """Between the reference's next weights and the checkpoint of version step + 1."""
    found = AutoModelForCausalLM.from_pretrained(run_dir / "checkpoints" / f"version-{step + 1:06d}")
    expected = next_weights(run_dir, step, recipe, **controls)
    return max(float((found.get_parameter(name).detach() - value).abs().max()) for name, value in expected.items())


if __name__ == "__main__":
    folder, number = Path(sys.argv[1]), int(sys.argv[2])
    resolved = YAML(typ="safe").load((folder / "recipe.yaml").read_text())
    sys.stdout.write(f"{largest_difference(folder, number, resolved):.3g}\n")
