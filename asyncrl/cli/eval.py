"""`asyncrl eval`: how good a run, a checkpoint or a recipe's model is on rows that are not trained on."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from pathlib import Path
from typing import Any

import click

from asyncrl.cli.errors import FAILED
from asyncrl.cli.options import set_option
from asyncrl.cli.progress import progress_bars

GRACE_S = 10.0
"""What a signal leaves: an evaluation keeps nothing, this only bounds its end."""

SAMPLES = 4
"""Answers to a prompt where neither `--n` nor `eval.n` says how many: the fewest that show whether more tries help."""


def finite(ctx: click.Context, param: click.Parameter, number: float | None) -> float | None:
    """What click takes for a number, without NaN and infinity: nothing passes above them, and JSON has neither."""
    if number is not None and not math.isfinite(number):
        raise click.BadParameter(f"{number} is no number to sample or compare with", ctx, param)
    return number


def whole_numbers(ctx: click.Context, param: click.Parameter, text: str | None) -> list[int] | None:
    """`1,2,8`, ascending and each once; None where not given."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise click.BadParameter(f"{text!r}: write whole numbers from 1 on, such as 1,4,16", ctx, param)
    return sorted({int(part) for part in parts})


@click.command("eval")
@click.argument("target", required=False)
@click.option("--against", metavar="TARGET", help="Compare with another one, on the same prompts and seeds.")
@click.option("--recipe", metavar="RECIPE", help="Whose task is evaluated, for a model folder outside a run's folder.")
@click.option(
    "--n", "samples", type=click.IntRange(min=1), help=f"Answers per prompt; left out: eval.n, or {SAMPLES}, greedy 1."
)
@click.option("--k", "ks", callback=whole_numbers, metavar="K,...", help="Of pass@k; left out: 1, 2, 4, ... up to n.")
@click.option("--prompts", type=click.IntRange(min=1), help="Held-out rows, from the first; left out: eval.prompts.")
@click.option(
    "--temperature", type=click.FloatRange(min=0), callback=finite, help="0 is greedy; left out: eval.sampling's."
)
@click.option("--max-tokens", type=click.IntRange(min=1), help="Of an answer; left out: eval.sampling's.")
@click.option("--seed", type=click.IntRange(min=0), help="Of sampling and intervals; left out: run.seed.")
@click.option(
    "--pass-above",
    type=float,
    callback=finite,
    help="An answer passes if its reward is above; left out: eval.pass_above.",
)
@click.option("--by", "difficulty", metavar="COLUMN", help="Results by a column of the rows, too: eval.difficulty.")
@click.option("--gate", metavar="RULES", help="default, rules, or a YAML file of them; exit code 1 unless all hold.")
@click.option("--json", "file", type=click.Path(path_type=Path, dir_okay=False), help="Write it all, answers too.")
@set_option
def eval(
    target: str | None,
    against: str | None,
    recipe: str | None,
    samples: int | None,
    ks: list[int] | None,
    temperature: float | None,
    pass_above: float | None,
    difficulty: str | None,
    gate: str | None,
    file: Path | None,
    overrides: tuple[str, ...],
    prompts: int | None,
    seed: int | None,
    **options: Any,
) -> int:
    """Sample answers to held-out rows, score them: pass@k and mean reward, with 95 % intervals over prompts.

    TARGET is a run (a folder or a name; left out: the newest), a checkpoint's folder, or a recipe, whose model is taken
    as it is. No store and no other process is needed. RUN --against RUN/recipe.yaml shows what a run changed.

    With --gate, rules decide whether the model may go on, such as 'pass@1 better; unsafe not worse; malformed <= 2%'.
    """
    if file is not None and not file.parent.is_dir():  # not only after minutes of sampling
        raise click.UsageError(f"--json {file}: there is no folder {file.parent}")
    from asyncrl.buffers.concurrency import stopped
    from asyncrl.config.devices import use_only
    from asyncrl.config.evaluation import powers_of_two, sampling_changes
    from asyncrl.runtime import evaluation, gate_rules, signals
    from asyncrl.runtime.gate import gated

    rules = [] if gate is None else gate_rules.read_rules(gate)

    use_only(None)  # which GPUs, the target's recipe says: nobody may have asked CUDA for them before
    ours = evaluation.find_target(target, recipe=recipe, overrides=overrides)
    theirs = None if against is None else evaluation.find_against(against, ours)
    config = ours.recipe.eval
    greedy = (config.sampling.temperature if temperature is None else temperature) == 0
    if greedy and (samples or 1) > 1:
        raise click.UsageError(f"--n {samples} with --temperature 0: greedy answers to one prompt are all the same")
    samples = samples or (1 if greedy else config.n or SAMPLES)
    if ks and ks[-1] > samples:
        raise click.UsageError(f"--k {ks[-1]} needs at least as many answers per prompt: --n {ks[-1]}")
    ks = ks or powers_of_two(samples)
    gate_rules.check_rules(rules, ks=ks, samples=samples, compared=theirs is not None)
    plan = evaluation.Plan(
        prompts=prompts or config.prompts,
        samples=samples,
        ks=ks,
        temperature=temperature,
        sampling=sampling_changes(config.sampling),
        pass_above=config.pass_above if pass_above is None else pass_above,
        difficulty=difficulty or config.difficulty,
        seed=ours.recipe.run.seed if seed is None else seed,
        **options,
    )

    code = 0

    async def work() -> None:
        nonlocal code
        with progress_bars() as on_answer:
            document = await evaluation.evaluate(ours, theirs, plan, on_answer=on_answer)
        try:
            if rules:
                document["gate"] = gated(rules, document)
                code = 0 if document["gate"]["holds"] else FAILED
        finally:  # a rule that asks for what there is not is no reason to lose what took minutes
            _tell(document, file)

    async def main(stop: asyncio.Event) -> int:
        await stopped(stop, work())
        return code

    return signals.run(main, grace_s=GRACE_S)


def _tell(document: dict[str, Any], file: Path | None) -> None:
    from asyncrl.telemetry.evaluation import render

    try:
        if file is not None:
            text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
            file.write_text(text + "\n", encoding="utf-8")
    finally:  # where the file cannot be written, what took minutes is at least seen
        render(document, terminal=sys.stdout.isatty(), file=sys.stdout)
