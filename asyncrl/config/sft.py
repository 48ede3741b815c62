"""The recipe of `asyncrl sft`: supervised training on conversations. Each field's doc stands beside it; `docs/sft.md`
shows them all. Structs hold values checked for type and range; rules that cross fields are in `check`."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from msgspec import Meta, field

from asyncrl.config.checks import check_betas, check_model, check_run_name
from asyncrl.config.errors import RecipeError
from asyncrl.config.file_checks import check_data_file, check_model_folder
from asyncrl.config.mixture_checks import check_template_args
from asyncrl.config.recipe import Model
from asyncrl.config.section import NonNegative, Positive, Seconds, Section


class SftRun(Section, frozen=True, kw_only=True):
    name: str = "sft"  # the stem of the run's folder
    output_dir: str | None = None  # the run's own folder; left out: runs/<name>-<date>-<n>
    max_steps: Positive | None = None  # left out: what sft.epochs makes
    seed: NonNegative = 0  # the order of rows is a function of it
    grace_s: Seconds = 60.0  # what the first SIGINT/SIGTERM leaves for a checkpoint


class SftData(Section, frozen=True, kw_only=True):
    train: str | list[str] = ""  # files, as of `task.data` (`docs/data.md`); has to be given. Flag: --data
    heldout: str | list[str] | None = None  # left out: one row in ten of `train`, chosen by hash of the prompt
    format: Literal["auto", "jsonl", "json", "csv", "parquet", "arrow"] = "auto"  # auto: by what the name ends in
    messages: str = "messages"  # column: a conversation; rows without it have the next two
    prompt: str = "prompt"  # column: a string, or a list of messages
    answer: str = "answer"  # column
    system_prompt: str | None = None  # goes before rows that have none
    chat_template_args: dict[str, Any] = field(default_factory=dict)  # as task.chat_template_args of a run
    shuffle: bool = True  # by run.seed and epoch; false: file order
    bad_rows: Literal["error", "skip"] = (
        "error"  # of rows that cannot be used, the first ends the command; or they are left out
    )


class SftCheckpoint(Section, frozen=True, kw_only=True):
    every_steps: Positive = 20  # and at the end
    keep_last: Positive = 2  # the newest ones that are kept


class Sft(Section, frozen=True, kw_only=True):
    epochs: Positive = 1  # times every row is trained, unless run.max_steps says otherwise
    examples_per_step: Positive = 64
    learning_rate: Annotated[float, Meta(gt=0)] = 2e-5  # with model.lora some 1e-4 to 1e-3 is usual
    lr_scheduler_type: Literal["linear", "constant"] = "linear"  # down to 0 at the end, or as it is after the warm-up
    warmup_steps: NonNegative = 10  # linear
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: Annotated[float, Meta(ge=0)] = 0.0
    max_grad_norm: Annotated[float, Meta(gt=0)] = 1.0
    max_tokens_per_microbatch: Positive = 4096  # sequences are packed, never padded; a longer row cannot be used
    max_skipped_steps: Positive = 3  # non-finite gradients in a row that end the run
    heldout_every_steps: Positive = 50  # held-out loss; also before the first step and after the last
    heldout_rows: Positive = 512  # the first so many held-out rows are measured
    checkpoint: SftCheckpoint = field(default_factory=SftCheckpoint)


class SftRecipe(Section, frozen=True, kw_only=True):
    extends: str | None = None  # resolved by the loader, kept for the record
    run: SftRun = field(default_factory=SftRun)
    model: Model = field(default_factory=Model)
    data: SftData = field(default_factory=SftData)
    sft: Sft = field(default_factory=Sft)


def steps_of(recipe: SftRecipe, rows: int) -> int:
    """How many steps the recipe makes of so many training rows.

    >>> steps_of(SftRecipe(sft=Sft(epochs=2, examples_per_step=64)), 100)
    4
    """
    return recipe.run.max_steps or math.ceil(recipe.sft.epochs * rows / recipe.sft.examples_per_step)


def check(recipe: SftRecipe) -> None:
    """Raise RecipeError for the first rule this recipe breaks, or file it names that is not here."""
    check_run_name(recipe.run.name)
    check_model(recipe.model)
    check_betas("sft.betas", recipe.sft.betas)
    data = recipe.data
    if not data.train:
        raise RecipeError("data.train is missing; name a file (--data train.jsonl, or data: {train: ...})")
    columns = {"data.messages": data.messages, "data.prompt": data.prompt, "data.answer": data.answer}
    for key, column in columns.items():
        if list(columns.values()).count(column) > 1:
            raise RecipeError(f"{key} is {column!r}, and so is another column; give each its own name")
    check_data_file("data.train", data.train)
    if data.heldout is not None:
        check_data_file("data.heldout", data.heldout)
    check_template_args("data", data.chat_template_args)
    check_model_folder(recipe.model)
