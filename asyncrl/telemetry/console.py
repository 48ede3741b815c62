"""The run as a person watches it: a live panel on a terminal, one plain line per step anywhere else.

Shows the names and values of metrics.jsonl (`docs/metrics.md`), and between steps the buffer's own snapshot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from asyncrl.telemetry import text

KEPT_STEPS = 200
"""Records kept for the sparkline, the time left and the advice."""

ADVICE_STEPS = 10
"""Steps that price and advice look back on: long enough that one slow batch is no trend."""


FULL_WIDTH = 100
"""Columns of the panel where the terminal has so many."""

NAME_WIDTH = 16
"""Columns of a line that the frame and the names take."""

SPARKLINE = 48
"""Steps a sparkline shows, at most."""

AGE_STYLES = ("green", "yellow", "dark_orange", "red")


class RunConsole:
    """Feed it records and snapshots as they come; call `close` at the end. Not for several threads at once."""

    def __init__(self, max_steps: int, *, terminal: bool, file: TextIO) -> None:
        """`terminal`: draw the panel on `file`; false: plain lines, nothing that a log file could not hold."""
        self._max_steps = max_steps
        self._file = file
        self._records: list[Mapping[str, Any]] = []
        self._stats: Mapping[str, Any] = {}
        self._live: Live | None = None
        if terminal:
            console = Console(file=file, force_terminal=True)
            self._live = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)

    def on_record(self, record: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl: a step, or an object with the key `event`."""
        if "event" in record:
            self.note(text.event_line(record))
            return
        self._records = [*self._records[1 - KEPT_STEPS :], record]
        self._stats = {}  # older than this record
        if self._live is None:
            left = text.time_left(self._records, self._max_steps)
            self._print(text.step_line(record, max_steps=self._max_steps, left_s=left))
        else:
            self._refresh()

    def on_stats(self, stats: Mapping[str, Any]) -> None:
        """A snapshot of the buffer, `dataclasses.asdict` of its Stats: `states`, `reasons`, `version`, `members` (with
        `name`, `alive`, `serving`), `waiting` (None or with `reason`). Moves the panel on between steps; a log gets its
        lines from steps alone."""
        self._stats = stats
        self._refresh()

    def note(self, line: str) -> None:
        """One line about the run itself ("store up", "warm-starting builtin:tiny (once)")."""
        if self._live is None:
            self._print(line)
        else:
            self._live.console.print(line, markup=False, highlight=False)

    def close(self) -> None:
        """Leave the last state of the panel on the screen. Nothing is shown after it."""
        self._refresh()
        if self._live is not None:
            self._live.stop()

    def _print(self, line: str) -> None:
        self._file.write(line + "\n")
        self._file.flush()  # a log that is followed, or cut off by a kill, still has every step

    def _refresh(self) -> None:
        if self._live is not None and (self._records or self._stats):
            self._live.start()  # hides the cursor until `close`, so not before there is something to show
            shown = panel(
                self._records,
                self._stats,
                max_steps=self._max_steps,
                width=self._live.console.width,
                ascii_only=self._live.console.options.ascii_only,
            )
            self._live.update(shown, refresh=True)


def panel(
    records: Sequence[Mapping[str, Any]],
    stats: Mapping[str, Any],
    *,
    max_steps: int,
    width: int,
    ascii_only: bool = False,
) -> Panel:
    """The run on one screen, for a terminal of `width` columns: the last of the step `records`, their course, and what
    the snapshot `stats` (may be empty) knows that is newer. `docs/console.py` draws the same for the README."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(no_wrap=True, overflow="crop" if ascii_only else "ellipsis")
    room = max(20, width - NAME_WIDTH)
    for name, value in panel_rows(records, stats, max_steps=max_steps, room=room, ascii_only=ascii_only):
        table.add_row(name, value)
    return Panel(table, title="asyncrl", title_align="left", border_style="dim", width=min(width, FULL_WIDTH))


def panel_rows(
    records: Sequence[Mapping[str, Any]], stats: Mapping[str, Any], *, max_steps: int, room: int, ascii_only: bool
) -> list[tuple[str, Text]]:
    """Names and values of the panel, each value for one line of `room` columns."""
    last = records[-1] if records else {}
    blocks = text.ASCII_BLOCKS if ascii_only else text.BLOCKS
    line = "=" if ascii_only else "━"
    width = min(SPARKLINE, room - 34)
    states = stats.get("states") or last.get("buffer") or {}
    held, leased, issued = (states.get(state, "-") for state in ("held", "leased", "issued"))
    version = stats.get("version", last.get("version", "-"))
    left = text.time_left(records, max_steps) if records else None
    done = last.get("step", 0)
    lost = text.reasons(stats.get("reasons") or last.get("lost") or {}, separator="   ")
    waiting = _waiting(stats, last, states, ended=done >= max_steps)
    skipped = sum(1 for record in records if record.get("skipped"))

    filled = text.progress(done / max_steps, width=width)

    def course(key: str, style: str) -> tuple[str, str]:
        sparkline = text.sparkline([record.get(key) for record in records], width=width, blocks=blocks)
        return f"{sparkline:<{width}}  ", style

    return [
        (
            "step",
            Text.assemble(
                (f"{f'{done}/{max_steps}':<8}", "bold"),
                (line * filled, "green"),
                (f"{'-' * (width - filled)}  " if ascii_only else f"{line * (width - filled)}  ", "bright_black"),
                f"{text.duration(left)} left",
                (f"  {skipped} skipped (non-finite gradient)" if skipped else "", "bold red"),
            ),
        ),
        (
            "reward",
            Text.assemble((f"{text.number(last.get('reward/mean')):<8}", "bold"), course("reward/mean", "cyan")),
        ),
        (
            "groups",
            Text.assemble(
                ("all wrong ", "dim"),
                (text.histogram(last.get("pass_rate") or [], blocks=blocks), "cyan"),
                (" all right   ", "dim"),
                f"{text.percent(last.get('zero_variance'))} without gradient",
            ),
        ),
        (
            "tokens/s",
            Text.assemble(
                (f"{text.count(last.get('tokens_per_s')):<8}", "bold"),
                course("tokens_per_s", "blue"),
                f"{text.count(last.get('tokens_total'))} trained so far",
            ),
        ),
        ("age", _ages(last.get("age/tokens") or {}, block=line)),
        (
            "off-policy",
            Text(
                f"ess {text.number(last.get('ess'))}   kl {text.number(last.get('kl'), 4)}   "
                f"clipped {text.percent(last.get('clip_fraction'))}"
            ),
        ),
        ("buffer", Text(f"{issued} in flight   {held} held   {leased} leased")),
        ("lost", Text("nothing", "dim") if lost == "-" else Text(lost, "red")),
        ("weights", Text(f"learner:{version}   {text.served(_collectors(stats, last), separator='   ')}")),
        ("waiting", Text(waiting, "dim" if waiting == "-" else "yellow")),
        ("price", Text(text.price(text.price_of(records[-ADVICE_STEPS:])) if records else "-")),
        ("advice", Text(text.advice(records[-ADVICE_STEPS:]), "italic")),
    ]


def _ages(counts: Mapping[str, float], *, block: str) -> Text:
    """The histogram of ages, one colour an age: the older, the warmer."""
    parts = text.bars(counts, block=block).split("  ")
    ages = sorted(map(int, counts)) or [0]
    styles = (AGE_STYLES[min(age, len(AGE_STYLES) - 1)] for age in ages)
    return Text("  ").join(Text(part, style) for part, style in zip(parts, styles, strict=True))


def _collectors(stats: Mapping[str, Any], last: Mapping[str, Any]) -> Mapping[str, int | None]:
    if "members" not in stats:
        return last.get("collectors") or {}
    return {
        member["name"]: None if member["serving"] is None else member["serving"][1]
        for member in stats["members"]
        if member["alive"]
    }


def _waiting(stats: Mapping[str, Any], last: Mapping[str, Any], states: Mapping[str, int], *, ended: bool) -> str:
    """Who waits for what: the learner for groups, or collectors for the learner."""
    if "waiting" in stats:
        learner = stats["waiting"]["reason"] if stats["waiting"] else ""
    else:
        learner = last.get("waiting") or ""
    if not learner and states.get("issued") == 0 and states.get("held") and not ended:
        return "collectors wait for the learner's step: the window is full"
    return learner or "-"
