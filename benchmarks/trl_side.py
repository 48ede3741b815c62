"""The peer's half of `vs-trl`: TRL's GRPOTrainer, unmodified, on one job. Runs in TRL's own virtual environment, where
asyncrl is not installed, as `python trl_side.py JOB.json RESULT.json`; the result is what `vs_trl.py` compares.

Only public ways to steer the trainer are used: its config, a reward function, a callback, an optimizer of one's own.
Whatever would slow it down and is not part of the comparison is off: checkpoints, logs, gradient checkpointing.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset  # type: ignore[import-not-found]  # this and trl are not in asyncrl's environment
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]


class Recorder(TrainerCallback):
    """When each step began and ended, and what it sampled. A step generates, scores and trains one batch."""

    def __init__(self, eos_token_id: int) -> None:
        self.began: list[float] = []
        self.ended: list[float] = []
        self.rewards: list[float] = []
        self.tokens: list[int] = []
        self._eos = eos_token_id

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.began.append(time.monotonic())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ended.append(time.monotonic())

    def exact(
        self, completions: list[str], completion_ids: list[list[int]], answer: list[str], **_: Any
    ) -> list[float]:
        """asyncrl's reward of this task: 1 for exactly the answer, ended by the model itself."""
        scores = [
            float(said == wanted and ids[-1] == self._eos)
            for said, ids, wanted in zip(completions, completion_ids, answer, strict=True)
        ]
        self.rewards.append(sum(scores) / len(scores))
        self.tokens.append(sum(map(len, completion_ids)))
        return scores


def main(job_file: Path, result_file: Path) -> None:
    job = json.loads(job_file.read_bytes())
    torch.set_num_threads(job["threads"])
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    rows = job["prompts"]
    for row in rows:  # else the two sides would not train the same thing
        if (found := tokenizer(row["prompt"])["input_ids"]) != row["token_ids"]:
            raise SystemExit(f"TRL reads the prompt {row['prompt']!r} as {found}, asyncrl as {row['token_ids']}")
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    # Trainer's own warm-up begins with an update of rate 0; asyncrl's with the first fraction.
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=job["learning_rate"], betas=job["betas"], weight_decay=job["weight_decay"], fused=True
    )
    warmup = max(1, job["warmup_steps"])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min(1.0, (done + 1) / warmup))
    recorder = Recorder(tokenizer.eos_token_id)
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=recorder.exact,
        train_dataset=Dataset.from_list([{"prompt": row["prompt"], "answer": row["answer"]} for row in rows]),
        callbacks=[recorder],
        optimizers=(optimizer, schedule),
        args=GRPOConfig(
            output_dir=str(result_file.with_suffix(".trainer")),
            seed=job["seed"],
            max_steps=job["steps"],
            # one generation and one update a step, as asyncrl does
            per_device_train_batch_size=job["groups_per_step"] * job["group_size"],
            num_generations=job["group_size"],
            steps_per_generation=1,
            shuffle_dataset=False,  # the rows are in asyncrl's order already
            max_completion_length=job["max_tokens"],
            temperature=job["temperature"],
            epsilon=job["epsilon"],
            epsilon_high=job["epsilon_high"],
            beta=0.0,
            loss_type="dapo",  # token mean over the whole batch, as asyncrl's grpo preset
            scale_rewards="group",
            max_grad_norm=job["max_grad_norm"],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
    )
    trainer.train()
    result = {
        "threads": torch.get_num_threads(),
        "began": recorder.began,
        "ended": recorder.ended,
        "rewards": recorder.rewards,
        "tokens": recorder.tokens,
    }
    result_file.write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
