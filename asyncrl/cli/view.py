"""`asyncrl view`: reading what a run's model answered."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from asyncrl.cli.errors import Failure

if TYPE_CHECKING:
    from asyncrl.telemetry.browser import Browser
    from asyncrl.telemetry.view import Order, Wanted

SHOWN = 5
"""Answers that are printed where nobody can press a key."""

ESCAPED = {b"\x1b[A": "up", b"\x1b[B": "down", b"\x1b[C": "right", b"\x1b[D": "left", b"\x1b": "escape"}
ESCAPED |= {key.replace(b"[", b"O"): name for key, name in ESCAPED.items() if len(key) > 1}
"""What terminals send for keys without a character, in both modes of their cursor keys."""

REST_S = 0.05
"""For the rest of such a sequence; a lone Escape has none."""


@click.command()
@click.argument("run", required=False)
@click.option("--step", type=click.IntRange(min=1), help="What this step trained; left out: the last one.")
@click.option("--eval", "version", type=click.IntRange(min=0), help="The evaluation of this version instead.")
@click.option("--wrong", metavar="CLASS", help="Only answers of this class: wrong_answer, verifier_timeout, ...")
@click.option("--unscored", is_flag=True, help="Only answers without a score.")
@click.option("--row", metavar="ID", help="Only answers to this row.")
@click.option("--containing", metavar="TEXT", help="Only answers with this text.")
@click.option(
    "--order", type=click.Choice(["trained", "worst", "best", "longest"]), default="trained", show_default=True
)
@click.option(
    "--n", type=click.IntRange(min=1), help=f"Answers that are printed without a terminal; left out: {SHOWN}."
)
@click.option("--json", "as_lines", is_flag=True, help="All of them, an object a line, instead of the screen.")
def view(
    run: str | None, step: int | None, version: int | None, order: Order, n: int | None, as_lines: bool, **wanted: Any
) -> int:
    """Read a run's answers, one at a time: prompt, answer, reward by part, and what is wrong with it.

    RUN is a folder or a name; left out, the newest. It may still train. On a terminal keys lead on (h shows them);
    without one, or with --n, answers are printed.
    """
    if step is not None and version is not None:
        raise click.UsageError("--step and --eval are two kinds of pages: give one of them")
    from asyncrl.telemetry.view import Wanted

    browser = _browser(run, step, version, Wanted(**wanted), order)
    if as_lines or n is not None or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return _print(browser, most=n, as_lines=as_lines)
    _browse(browser)
    return 0


def _browser(run: str | None, step: int | None, version: int | None, wanted: Wanted, order: Order) -> Browser:
    from asyncrl.runtime.answers import evaluated_pages, trained_pages
    from asyncrl.runtime.place import place_of
    from asyncrl.telemetry.browser import Browser

    place = place_of(run, None)
    if place.folder is None:  # it was found by its folder
        raise Failure(f"{run}: there is no folder of this run on this host")
    trained, evaluated = trained_pages(place), evaluated_pages(place.folder)
    if not trained and not evaluated:
        raise Failure(f"{place.folder} has neither trained nor evaluated yet: there are no answers to look at")
    if step is not None and step not in trained:
        raise Failure(f"{place.folder} has no step {step}; it has {_range(trained)}", 2)
    if version is not None and version not in evaluated:
        known = ", ".join(map(str, evaluated)) or "none"
        raise Failure(f"{place.folder} has no evaluation of version {version}; it has: {known}", 2)
    of_evaluations = version is not None or not trained
    at = (
        list(trained).index(step) if step is not None else max(0, len(trained) - 1),
        list(evaluated).index(version) if version is not None else max(0, len(evaluated) - 1),
    )
    pages = list(trained.values()), list(evaluated.values())
    return Browser(*pages, of_evaluations=of_evaluations, at=at, wanted=wanted, order=order)


def _range(steps: Any) -> str:
    return f"{min(steps)} to {max(steps)}" if steps else "none"


def _print(browser: Browser, *, most: int | None, as_lines: bool) -> int:
    from rich.text import Text

    from asyncrl.telemetry.ticket import print_lines
    from asyncrl.telemetry.view import answer_text, as_json, summary_line

    every, shown = browser.answers()
    if as_lines:
        for answer in shown[:most]:
            click.echo(as_json(answer))
        return 0
    picked = shown[: SHOWN if most is None else most]
    lines = [Text(summary_line(browser.page.title, every, len(shown)))]
    for number, answer in enumerate(picked, start=1):
        lines += [Text(), *answer_text(answer, title=f"{number}/{len(shown)}")]
    print_lines(lines, terminal=sys.stdout.isatty(), file=sys.stdout)
    return 0


def _browse(browser: Browser) -> None:
    """Draw, wait for a key, draw again, on a screen of its own, so that what was on the terminal is still there."""
    from rich.console import Console
    from rich.text import Text

    from asyncrl.telemetry.browser import HELP

    console = Console(highlight=False)
    with console.screen(hide_cursor=True), _keys_at_once():
        while not browser.ended:
            console.clear()
            for line in browser.screen():
                console.print(line)
            key = _key()
            if key == "h":
                console.clear()
                for keys, meaning in HELP:
                    console.print(Text(f"{keys:<18}{meaning}"))
                _key()
            else:
                browser = browser.press(key)


@contextmanager
def _keys_at_once() -> Iterator[None]:
    """The terminal hands over each key as it is pressed, and shows none; afterwards it is as it was."""
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _key() -> str:
    """The next key, by its character or name. A person may take any time for it; a terminal that is gone leaves."""
    descriptor = sys.stdin.fileno()
    pressed = os.read(descriptor, 1)
    if not pressed:
        return "q"
    while pressed.startswith(b"\x1b") and len(pressed) < 3 and select.select([descriptor], [], [], REST_S)[0]:
        pressed += os.read(descriptor, 1)
    return ESCAPED.get(pressed, pressed.decode(errors="replace"))
