"""The run as a person watches it: a live panel on a terminal, one plain line per step anywhere else.

Shows the names and values of metrics.jsonl (`docs/metrics.md`), and between steps the buffer's own snapshot.
"""

from __future__ import annotations

from collections.abc import Mapping
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
"""Steps the advice looks back on: long enough that one slow batch is no trend."""


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
            self._live.update(self._panel(ascii_only=self._live.console.options.ascii_only), refresh=True)

    def _panel(self, *, ascii_only: bool) -> Panel:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in panel_rows(self._records, self._stats, max_steps=self._max_steps, ascii_only=ascii_only):
            table.add_row(name, Text(value))
        return Panel(table, title="asyncrl", title_align="left")


def panel_rows(
    records: list[Mapping[str, Any]], stats: Mapping[str, Any], *, max_steps: int, ascii_only: bool
) -> list[tuple[str, str]]:
    """Names and values of the panel. What `stats` knows is newer than the last record."""
    last = records[-1] if records else {}
    blocks = text.ASCII_BLOCKS if ascii_only else text.BLOCKS
    states = stats.get("states") or last.get("buffer") or {}
    held, leased, issued = (states.get(state, "-") for state in ("held", "leased", "issued"))
    rewards = [record.get("reward/mean") for record in records]
    version = stats.get("version", last.get("version", "-"))
    left = text.time_left(records, max_steps) if records else None
    return [
        ("step", f"{last.get('step', 0)}/{max_steps}   left {text.duration(left)}{_skipped(records)}"),
        ("reward", f"{text.number(last.get('reward/mean'))}   {text.sparkline(rewards, blocks=blocks)}".rstrip()),
        ("tokens/s", f"{text.count(last.get('tokens_per_s'))} trained, {text.count(last.get('tokens_total'))} so far"),
        ("buffer", f"held {held}   leased {leased}   in flight {issued}"),
        ("age", text.bars(last.get("age/tokens") or {}, block=blocks[-1])),
        ("lost", text.reasons(stats.get("reasons") or last.get("lost") or {}, separator="   ")),
        ("ess", text.number(last.get("ess"))),
        ("weights", f"learner:{version} {text.served(_collectors(stats, last))}"),
        ("waiting", _waiting(stats, last)),
        ("advice", text.advice(text.wait_share(records[-ADVICE_STEPS:]))),
    ]


def _skipped(records: list[Mapping[str, Any]]) -> str:
    skipped = sum(1 for record in records if record.get("skipped"))
    return f"   {skipped} skipped (non-finite gradient)" if skipped else ""


def _collectors(stats: Mapping[str, Any], last: Mapping[str, Any]) -> Mapping[str, int | None]:
    if "members" not in stats:
        return last.get("collectors") or {}
    return {
        member["name"]: None if member["serving"] is None else member["serving"][1]
        for member in stats["members"]
        if member["alive"]
    }


def _waiting(stats: Mapping[str, Any], last: Mapping[str, Any]) -> str:
    if "waiting" in stats:
        return str(stats["waiting"]["reason"]) if stats["waiting"] else "-"
    return str(last.get("waiting") or "-")
