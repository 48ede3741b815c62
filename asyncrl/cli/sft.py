"""`asyncrl sft`: supervised training on conversations, usually what comes before reinforcement learning."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from asyncrl.cli.options import grace_option, own_recipe, resume_option, set_option

if TYPE_CHECKING:
    from asyncrl.config.loading import LoadedSft
    from asyncrl.config.sft import SftRecipe
    from asyncrl.data.conversations import Split

RESUMABLE = ("data.heldout", "data.train", "model.path", "run.grace_s", "run.max_steps")
"""Keys that `--set` may change when a training goes on; files may have moved, their rows must be the same."""


@click.command()
@click.argument("recipe", required=False)
@click.option("--data", metavar="FILE", help="Rows of messages, or of a prompt and an answer. Sets data.train.")
@click.option("--model", metavar="PATH", help="A folder or a Hugging Face id. Sets model.path.")
@resume_option
@set_option
@click.option("--dry-run", is_flag=True, help="Check everything, print the resolved recipe, start nothing.")
@grace_option
def sft(
    recipe: str | None,
    data: str | None,
    model: str | None,
    resume: str | None,
    overrides: Sequence[str],
    dry_run: bool,
    grace: float | None,
) -> int:
    """Supervised training on conversations: the loss is on what the assistant says.

    RECIPE is a path; left out, the defaults hold. The trained model is RUN/model, for `asyncrl run` to go on from.
    """
    from asyncrl.config.loading import load_sft_recipe
    from asyncrl.runtime import folder as folders

    if grace is not None:
        overrides = [*overrides, f"run.grace_s={grace}"]
    previous = folders.find(resume or None) if resume is not None else None
    if previous is not None:
        if data is not None or model is not None:
            raise click.UsageError(
                "--data and --model: a resumed training keeps its own; where files have moved, use --set"
            )
        recipe = own_recipe(previous, recipe, overrides, RESUMABLE)
    loaded = load_sft_recipe(recipe, overrides=overrides, flags={"data": data, "model": model})
    from asyncrl.runtime.sft import check  # after the recipe, whose errors need not wait for it

    split = check(loaded.recipe)
    if dry_run:
        _show(loaded, split)
        return 0
    with folders.opened(loaded, previous) as folder:
        click.echo(f"run folder {folder}")
        return _train(loaded.recipe, split, folder, resume=previous is not None)


def _show(loaded: LoadedSft, split: Split) -> None:
    from asyncrl.config.resolved import resolved_yaml
    from asyncrl.config.sft import steps_of

    click.echo(resolved_yaml(loaded.recipe), nl=False)
    left_out = f", {split.bad}" if str(split.bad) else ""
    steps = steps_of(loaded.recipe, len(split.train))
    click.echo(f"# derived: {len(split.train)} rows to train, {len(split.heldout)} held out{left_out}; {steps} steps")


def _train(recipe: SftRecipe, split: Split, folder: Path, *, resume: bool) -> int:
    from asyncrl.runtime import signals
    from asyncrl.runtime.processes import log_to_stderr
    from asyncrl.runtime.sft import train

    async def main(stop: asyncio.Event) -> int:
        await train(recipe, split, folder=folder, resume=resume, stop=stop)
        return 0

    log_to_stderr()
    return signals.run(main, grace_s=recipe.run.grace_s)
