"""The peer's half of `learner_trl`: steps of TRL's GRPOTrainer, unmodified, on one batch. Runs in TRL's own virtual
environment, where asyncrl is not installed, as `python learner_trl_side.py JOB.json GRADIENT.pt DESCRIPTOR`.

The trainer's own loop makes the steps. What it would generate and score it is handed instead, in the form that
`_generate_and_score_completions` gives, so that a step is loss, gradient, clipping, optimizer and schedule, and nothing
else. Before each step it waits on the connection for a number of threads; after each it answers with the seconds that
the step took, and those of the processor.
"""

from __future__ import annotations

import json
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset  # type: ignore[import-not-found]  # this and trl are not in asyncrl's environment
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]


class Handed(GRPOTrainer):  # type: ignore[misc]  # not known here
    """With micro-batches that are there already."""

    microbatches: list[dict[str, torch.Tensor]]

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, torch.Tensor]:
        handed: dict[str, torch.Tensor] = self.microbatches[self._step % len(self.microbatches)]
        return handed


class OnDemand(TrainerCallback):
    """A step when it is asked for."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._began = self._began_cpu = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        torch.set_num_threads(self._connection.recv())
        self._began, self._began_cpu = time.perf_counter(), time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._connection.send((time.perf_counter() - self._began, time.process_time() - self._began_cpu))


def microbatches(rows: list[dict[str, Any]], size: int) -> list[dict[str, torch.Tensor]]:
    """As TRL makes them of a generation batch: padded to its longest completion, then split. Prompts are of one
    length."""

    def padded(key: str, dtype: torch.dtype) -> torch.Tensor:
        return pad_sequence([torch.tensor(row[key], dtype=dtype) for row in rows], batch_first=True)

    prompts = torch.tensor([row["prompt"] for row in rows])
    whole = {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": padded("completion", torch.int64),
        "completion_mask": pad_sequence(
            [torch.ones(len(row["completion"]), dtype=torch.int64) for row in rows], batch_first=True
        ),
        "advantages": torch.tensor([row["advantage"] for row in rows], dtype=torch.float32),
        "old_per_token_logps": padded("logprobs", torch.float32),
    }
    tokens = whole["completion_mask"].sum()
    return [
        {**{key: values[first : first + size] for key, values in whole.items()}, "num_items_in_batch": tokens}
        for first in range(0, len(rows), size)
    ]


def main(job_file: Path, gradient_file: Path, descriptor: int) -> None:
    job = json.loads(job_file.read_bytes())
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    # Fused, as asyncrl's is.
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=job["learning_rate"], betas=job["betas"], weight_decay=job["weight_decay"], fused=True
    )

    def keep(*_: Any) -> None:
        gradient = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
        torch.save(gradient, gradient_file)
        handle.remove()  # of the first step, when both sides have the same weights

    handle = optimizer.register_step_pre_hook(keep)
    parts = microbatches(job["rows"], job["rows_per_microbatch"])
    trainer = Handed(
        model=model,
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_list([{"prompt": str(n)} for n in range(len(job["rows"]))]),
        callbacks=[OnDemand(Connection(descriptor))],
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)),
        args=GRPOConfig(
            output_dir=str(gradient_file.with_suffix(".trainer")),
            max_steps=job["steps"],
            per_device_train_batch_size=job["rows_per_microbatch"],
            gradient_accumulation_steps=len(parts),
            num_generations=job["rows_per_microbatch"],
            temperature=1.0,
            epsilon=job["epsilon"],
            epsilon_high=job["epsilon_high"],
            beta=0.0,
            loss_type="dapo",  # token mean over the whole batch, as asyncrl's grpo preset
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
    trainer.microbatches = parts
    trainer.train()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
