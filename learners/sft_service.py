"""Supervised training that a person starts, stops and resumes: train, measure, checkpoint.

Everything is a function of the recipe, the rows and the step: which rows a step takes depends on the seed and on its
number alone. So a training that was killed goes on from its newest checkpoint and, on one thread, ends with the weights
it would have had, bit for bit.
"""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from asyncrl.config.sft import SftRecipe, steps_of
from asyncrl.data.conversations import Split
from asyncrl.learners import checkpoint as checkpoints
from asyncrl.learners.checkpoint import Checkpoint
from asyncrl.learners.lora import save_model
from asyncrl.learners.model import load_tokenizer, longest_sequence
from asyncrl.learners.optimize import Optimizer
from asyncrl.learners.randomness import restore
from asyncrl.learners.sft import Example, accumulate, answer_tokens
from asyncrl.learners.sft_examples import Examples, Longest, make_examples
from asyncrl.learners.trained import load_trained
from asyncrl.learners.writing import save
from asyncrl.staleness import Lineages, Weights
from asyncrl.tasks.chat import end_token_ids
from asyncrl.tasks.order import row_index
from asyncrl.telemetry.documents import write_document
from asyncrl.telemetry.metrics import MetricsWriter

log = logging.getLogger(__name__)

LINEAGE = 0
"""Checkpoints are named (lineage, version) everywhere. Here nothing forks, and the version is the step."""

MODEL = "model"
"""Folder of the run that holds the trained model, to be given as model.path."""


class SftError(RuntimeError):
    """The training cannot be resumed; one to three lines that name what differs and the fix."""


def finetune(
    recipe: SftRecipe,
    split: Split,
    *,
    run_dir: Path,
    model_path: Path,
    resume: bool,
    stop: Callable[[], bool],
    report: Callable[[Mapping[str, Any]], None],
) -> None:
    """Train `split` and write metrics.jsonl, checkpoints/, model/ and summary.json in `run_dir`.

    `stop` is asked after each step; once it says so, a checkpoint is written and the training returns. `report` gets
    every record of metrics.jsonl. Raises ModelError, TaskError, DataError, SftError before the first step; then
    TooManySkipped, CheckpointError.
    """
    metrics = MetricsWriter(run_dir / "metrics.jsonl")

    def write(record: Mapping[str, Any]) -> None:
        metrics.write(record)
        report(record)

    try:
        training = _begin(recipe, split, run_dir, model_path, resume, write)
        while training.step < training.steps and not stop():
            training.train_step()
        training.end()
    finally:
        metrics.close()


def _begin(
    recipe: SftRecipe,
    split: Split,
    run_dir: Path,
    model_path: Path,
    resume: bool,
    write: Callable[[Mapping[str, Any]], None],
) -> _Training:
    trust = recipe.model.trust_remote_code
    checkpoint = _newest(run_dir / "checkpoints") if resume else None
    source = checkpoint.folder if checkpoint else model_path
    tokenizer = load_tokenizer(source, trust_remote_code=trust)
    model = load_trained(recipe.model, model_path, checkpoint, seed=recipe.run.seed)
    examples = make_examples(
        split,
        tokenizer,
        system_prompt=recipe.data.system_prompt,
        template_args=recipe.data.chat_template_args,
        ends=end_token_ids(tokenizer, model.generation_config),
        longest=_longest(recipe, model_path),
        heldout_rows=recipe.sft.heldout_rows,
    )
    nn.Module.to(model, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    steps = steps_of(recipe, len(examples.train))
    training = _Training(
        recipe=recipe,
        run_dir=run_dir,
        write=write,
        model=model,
        tokenizer=tokenizer,
        examples=examples,
        optimizer=Optimizer(model, recipe.sft, total_steps=steps),
        steps=steps,
    )
    if checkpoint is not None:
        training.continue_from(checkpoint)
    write(
        {
            "event": "start",
            "time": time.time(),
            "step": training.step,
            "steps": steps,
            "rows": len(examples.train),
            "heldout_rows": len(examples.heldout),
            "skipped_rows": dict(examples.skipped),
            "model": str(source),
            "attention": model.config._attn_implementation,
            "device": str(model.device),
        }
    )
    if checkpoint is None:
        training.measure()
    return training


def _newest(folder: Path) -> Checkpoint | None:
    sound, damaged = checkpoints.survey(folder)
    if damaged and not sound:
        raise SftError(f"no checkpoint in {folder} is sound: {'; '.join(damaged)}\nStart a new run.")
    if not sound:
        log.warning("%s holds no checkpoint: starting from the first step", folder)
    return sound[0] if sound else None


def _longest(recipe: SftRecipe, model_path: Path) -> Longest:
    tokens = longest_sequence(
        model_path, limit=recipe.model.max_length, trust_remote_code=recipe.model.trust_remote_code
    )
    budget = recipe.sft.max_tokens_per_microbatch
    if budget < tokens:
        return Longest(budget, f"sft.max_tokens_per_microbatch is {budget}: raise it, or shorten the row")
    if recipe.model.max_length == tokens:
        return Longest(tokens, f"model.max_length is {tokens}: raise it, or shorten the row")
    return Longest(tokens, f"the model takes {tokens}: shorten the row")


@dataclass(slots=True)
class _Training:
    """A training between two steps."""

    recipe: SftRecipe
    run_dir: Path
    write: Callable[[Mapping[str, Any]], None]
    model: PreTrainedModel
    tokenizer: Any
    examples: Examples
    optimizer: Optimizer
    steps: int
    step: int = 0  # finished ones
    tokens_total: int = 0  # trained answer tokens
    saved: int | None = None  # step of the newest checkpoint
    heldout_before: float | None = None
    heldout_loss: float | None = None  # after `measured` steps
    measured: int | None = None

    def continue_from(self, checkpoint: Checkpoint) -> None:
        """Raises SftError where the rows are not those that the checkpoint was trained on."""
        state = checkpoint.training_state()
        if state["fingerprint"] != self.examples.fingerprint:
            raise SftError(
                f"the rows are not those that {checkpoint.folder} was trained on: "
                f"{self.recipe.data.train} or the held-out file has changed since.\n"
                "Restore them, or start a new run with this checkpoint as model.path."
            )
        self.optimizer.load_state_dict(state["optimizer"])
        restore(state["rng"], 0, self.model.device)
        self.step = self.saved = checkpoint.manifest.version
        self.tokens_total = checkpoint.manifest.tokens
        self.heldout_before, self.heldout_loss, self.measured = state["heldout"]

    def train_step(self) -> None:
        """The next step, with what is due after it."""
        started = time.monotonic()
        sft = self.recipe.sft
        chosen = self._rows_of_step()
        nll = accumulate(self.model, chosen, max_tokens=sft.max_tokens_per_microbatch)
        tokens = answer_tokens(chosen)
        update = self.optimizer.step(tokens)
        self.step += 1
        self.tokens_total += tokens
        step_s = time.monotonic() - started
        self.write(
            {
                "step": self.step,
                "time": time.time(),
                "epoch": self._rows_until(self.step) / len(self.examples.train),
                "loss": nll / tokens,
                "grad_norm": update.grad_norm,
                "learning_rate": update.learning_rate,
                "skipped": bool(update.skipped),
                "tokens": tokens,
                "tokens_seen": sum(len(example.token_ids) for example in chosen),
                "tokens_total": self.tokens_total,
                "step_s": step_s,
                "tokens_per_s": tokens / step_s,
            }
        )
        if update.skipped:
            log.warning("step %d changed nothing: %s", self.step, update.skipped)
        self.optimizer.check_progress(update)
        if self.step % sft.heldout_every_steps == 0 or self.step == self.steps:
            self.measure()
        if self.step % sft.checkpoint.every_steps == 0:
            self.checkpoint()

    def _rows_of_step(self) -> list[Example]:
        """The next ones in the order of seed and position."""
        train = self.examples.train
        seed, shuffle = self.recipe.run.seed, self.recipe.data.shuffle
        positions = range(self._rows_until(self.step), self._rows_until(self.step + 1))
        return [train[row_index(n, len(train), seed=seed, shuffle=shuffle)] for n in positions]

    def _rows_until(self, step: int) -> int:
        """How many rows the first `step` steps take: `examples_per_step` each, but without `run.max_steps` no more than
        make whole epochs."""
        sft = self.recipe.sft
        rows = step * sft.examples_per_step
        return rows if self.recipe.run.max_steps else min(rows, sft.epochs * len(self.examples.train))

    @torch.no_grad()
    def measure(self) -> None:
        """Held-out loss: mean negative log-likelihood (nats) over the answer tokens of all held-out examples."""
        heldout, budget = self.examples.heldout, self.recipe.sft.max_tokens_per_microbatch
        tokens = answer_tokens(heldout)
        self.heldout_loss = accumulate(self.model, heldout, max_tokens=budget) / tokens
        self.measured = self.step
        if self.step == 0:
            self.heldout_before = self.heldout_loss
        event = {"event": "heldout", "time": time.time(), "step": self.step, "loss": self.heldout_loss}
        self.write({**event, "rows": len(heldout), "tokens": tokens})

    def checkpoint(self) -> None:
        """Save the current step, unless it is saved already."""
        if self.saved == self.step:
            return
        folder = self.run_dir / "checkpoints"
        path = save(
            folder,
            model=self.model,
            tokenizer=self.tokenizer,
            training={
                "optimizer": self.optimizer.state_dict(),
                "fingerprint": self.examples.fingerprint,
                "heldout": (self.heldout_before, self.heldout_loss, self.measured),
            },
            weights=Weights(LINEAGE, self.step),
            forks={},
            trained=[],
            tokens=self.tokens_total,
        )
        self.saved = self.step
        keep_last = self.recipe.sft.checkpoint.keep_last
        checkpoints.prune(folder, lineages=Lineages({}), current=LINEAGE, keep_last=keep_last)
        self.write({"event": "checkpoint", "time": time.time(), "step": self.step, "path": str(path)})

    def end(self) -> None:
        """Checkpoint; and if the last step is done, the model by itself."""
        self.checkpoint()
        stopped = self.step < self.steps
        if not stopped:
            save_alone(self.model, self.tokenizer, self.run_dir / MODEL)
        summary = {
            "step": self.step,
            "steps": self.steps,
            "tokens": self.tokens_total,
            "heldout_loss_before": _if_finite(self.heldout_before),
            "heldout_loss": _if_finite(self.heldout_loss) if self.measured == self.step else None,
            "rows": len(self.examples.train),
            "skipped_rows": dict(self.examples.skipped),
            "model": None if stopped else str(self.run_dir / MODEL),
            "stopped": stopped,
        }
        write_document(self.run_dir / "summary.json", summary)
        self.write({"event": "end", "time": time.time(), **summary})


def _if_finite(loss: float | None) -> float | None:
    """JSON has no NaN; None says as well that there is no such number."""
    return loss if loss is not None and math.isfinite(loss) else None


def save_alone(model: PreTrainedModel, tokenizer: Any, target: Path) -> None:
    """The model and its tokenizer, nothing to resume from; adapters merged. Complete or not there."""
    building = target.with_name(f".{target.name}.building")  # a fixed name: what a killed process left goes away
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir()
    save_model(model, building)
    tokenizer.save_pretrained(building)
    shutil.rmtree(target, ignore_errors=True)  # of a run that ended already, and was extended
    building.rename(target)
