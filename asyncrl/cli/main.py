"""`asyncrl`: the commands, each in a file of its own that is loaded when it is called."""

from __future__ import annotations

import importlib
import sys

import click

import asyncrl
from asyncrl.cli.errors import report

COMMANDS = {
    "init": ("asyncrl.cli.init", "Write a task of your own that trains at once."),
    "run": ("asyncrl.cli.run", "Train: store, learner and collector in one go."),
    "sft": ("asyncrl.cli.sft", "Supervised training on conversations, before the run."),
    "learner": ("asyncrl.cli.learner", "The learner process alone; creates the run."),
    "collector": ("asyncrl.cli.collector", "A collector process alone; joins a run."),
    "profile": ("asyncrl.cli.profile", "Before training: is the score right, does the model sometimes succeed?"),
    "eval": ("asyncrl.cli.eval", "Evaluate a run, a checkpoint or a model on held-out rows."),
    "export": ("asyncrl.cli.export", "A run's weights for transformers, vLLM or peft, with a model card."),
    "status": ("asyncrl.cli.status", "Where a run is, and who waits for whom."),
    "view": ("asyncrl.cli.view", "Read a run's answers: prompt, answer, rewards, what is wrong."),
    "buffer": ("asyncrl.cli.buffer", "Serve a store; look into a run's buffer; audit its ledger."),
    "plan": (
        "asyncrl.cli.plan",
        "Whether a run fits into the memory of a machine, part by part; exit code 2 if it does not.",
    ),
    "doctor": ("asyncrl.cli.doctor", "Look at this machine and at a store before they matter."),
    "bench": ("asyncrl.cli.bench", "Benchmarks against targets."),
}
"""name -> (module that has a click command of that name, one line). The line is here so that --help loads nothing."""


class Commands(click.Group):
    """A group that imports a command when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(COMMANDS[name][0]), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(asyncrl.__version__, prog_name="asyncrl")
@click.option("--debug", is_flag=True, help="Show where an error was raised.")
def cli(debug: bool) -> None:
    """Asynchronous reinforcement-learning post-training for language models.

    Start with `asyncrl run`: the packaged recipe tiny-reverse, on this machine, in about a minute. For a task of your
    own, `asyncrl init DIR`.
    """


def main() -> None:
    """The console script. Exit codes: 0 done, 1 run failed, 2 bad usage or recipe, 130 and 143 on signals."""
    debug = "--debug" in sys.argv[1:]
    try:
        code = cli.main(standalone_mode=False)
    except (Exception, KeyboardInterrupt) as error:
        code = 130 if isinstance(error, KeyboardInterrupt) else report(error, debug=debug)
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
