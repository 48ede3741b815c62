"""`asyncrl profile`: before training, whether the score is right and the model sometimes succeeds."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from asyncrl.cli.options import set_option
from asyncrl.cli.progress import progress_bars

GRACE_S = 10.0
"""What a signal leaves: a profile keeps nothing, this only bounds its end."""

OUTPUTS, PER_PROMPT = 64, 8
"""Eight prompts with a pass rate each in steps of an eighth: what a minute shows of most models."""


@click.command("profile")
@click.argument("target", required=False)
@click.option("--recipe", metavar="RECIPE", help="Whose task it is, for a model folder outside a run's folder.")
@click.option("--outputs", type=click.IntRange(min=1), default=OUTPUTS, show_default=True, help="Answers in all.")
@click.option(
    "--per-prompt", type=click.IntRange(min=1), default=PER_PROMPT, show_default=True, help="Answers to each train row."
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="A new or empty folder; left out: profile-<name>-<date>-<n>.",
)
@click.option(
    "--agree",
    "sheet",
    metavar="FILE",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Read a filled judgements.csv instead: how far verifier and person agree. TARGET is then the profile's folder;"
    " left out: the sheet's.",
)
@set_option
@click.pass_context
def profile(
    ctx: click.Context,
    target: str | None,
    recipe: str | None,
    outputs: int,
    per_prompt: int,
    out: Path | None,
    sheet: Path | None,
    overrides: tuple[str, ...],
) -> int:
    """Sample some answers to train rows, score them, and say whether to train: pass rates, reward parts, what is wrong,
    lengths, speed, and a verdict with its reasons.

    TARGET is a recipe, whose model is taken as it is; also what `asyncrl eval` takes: a run or a checkpoint. Writes
    profile.html, profile.json and judgements.csv, in which a person says which answers are right: then --agree.
    """
    if sheet is not None:
        _only_with_sampling(ctx)
        return _agree(sheet, target)
    if outputs % per_prompt:
        raise click.UsageError(f"--outputs {outputs} is no multiple of --per-prompt {per_prompt}")
    from asyncrl.buffers.concurrency import stopped
    from asyncrl.config.devices import use_only
    from asyncrl.runtime import evaluation, signals
    from asyncrl.runtime import profile as profiling
    from asyncrl.telemetry.profile_text import render

    use_only(None)  # which GPUs, the target's recipe says: nobody may have asked CUDA for them before
    found = evaluation.find_target(target, recipe=recipe, overrides=overrides)

    async def work() -> None:
        with _folder(out, found.recipe.run.name) as folder:
            with progress_bars() as show:
                document = await profiling.profile(
                    found,
                    prompts=outputs // per_prompt,
                    samples=per_prompt,
                    on_answer=lambda done, total: show(found.name, done, total),
                )
            try:
                profiling.write(folder, document)
            finally:  # where a file cannot be written, what took minutes is at least seen
                render(document, terminal=sys.stdout.isatty(), file=sys.stdout)
            click.echo(f"{'files':<10}  {folder}: {profiling.PAGE}, {profiling.DOCUMENT}, {profiling.SHEET}")

    async def main(stop: asyncio.Event) -> int:
        await stopped(stop, work())
        return 0

    return signals.run(main, grace_s=GRACE_S)


def _agree(sheet: Path, target: str | None) -> int:
    from asyncrl.runtime import profile as profiling
    from asyncrl.telemetry.profile_text import render_agreement

    document: dict[str, Any] = profiling.judge(sheet, None if target is None else Path(target).expanduser())
    render_agreement(document, terminal=sys.stdout.isatty(), file=sys.stdout)
    return 0


def _only_with_sampling(ctx: click.Context) -> None:
    """Raise UsageError for options that say how to sample."""
    for option, name in (
        ("recipe", "--recipe"),
        ("outputs", "--outputs"),
        ("per_prompt", "--per-prompt"),
        ("out", "--out"),
        ("overrides", "--set"),
    ):
        if ctx.get_parameter_source(option) is not click.core.ParameterSource.DEFAULT:
            raise click.UsageError(f"{name} says how to sample, and --agree samples nothing: leave one of them out")


@contextmanager
def _folder(out: Path | None, name: str) -> Iterator[Path]:
    """The profile's folder, made before what takes minutes; gone again if nothing was written into it."""
    from asyncrl.runtime import folder as folders

    made = True
    if out is None:
        folder = folders.numbered(Path(), f"profile-{name}")
    else:
        folder, made = out.expanduser(), not out.expanduser().exists()
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise click.UsageError(f"--out {out} is not empty; a profile overwrites nothing: give another folder")
    try:
        yield folder
    finally:
        if made and not any(folder.iterdir()):
            folder.rmdir()
