"""What a run came to, on one screen: eleven lines, and three prompts with the answers before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from asyncrl.telemetry import text
from asyncrl.telemetry.table import write_facts

ANSWER_WIDTH = 48
"""Characters shown of a prompt or an answer; the whole text is in the run folder's eval/."""


def render(summary: Mapping[str, Any], *, terminal: bool, file: TextIO) -> None:
    """Print `summary` (the run folder's summary.json). `terminal`: with colour and a table."""
    facts = summary_rows(summary)
    prompts = prompt_rows(summary.get("prompts") or [])
    write_facts(facts, terminal=terminal, file=file)
    if not terminal:
        for prompt in prompts:
            file.write("prompt {}: {} -> {} (expected {})\n".format(*prompt))
        file.flush()
    elif prompts:
        table = Table("prompt", "before", "after", "expected", box=None, pad_edge=False, header_style="bold")
        for prompt in prompts:
            table.add_row(*(Text(cell) for cell in prompt))
        Console(file=file, force_terminal=True, highlight=False).print(table)


def summary_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The eleven lines, as (name, value)."""
    seconds, tokens = summary.get("seconds"), summary.get("tokens")
    steps, now = summary.get("steps", "-"), summary.get("steps_now")
    timed = summary.get("tokens_now", tokens)  # of a run that went on: what its last learner did in these seconds
    per_second = timed / seconds if timed is not None and seconds else None
    ended = "stopped early, resume with --resume" if summary.get("stopped") else "finished"
    since = f", {now} of them since it went on," if now not in (None, steps) else ""
    return [
        (
            "run",
            f"{ended}: {steps} steps{since} in {text.duration(seconds)}; "
            f"the learner waited {text.percent(summary.get('learner_wait_share'))} of it",
        ),
        (
            "success",
            f"{text.number(summary.get('success_before'))} -> {text.number(summary.get('success_after'))} "
            f"on {summary.get('eval_n', '-')} held-out rows",
        ),
        ("reward", _reward(summary)),
        ("tokens", f"{'-' if tokens is None else f'{tokens:,}'} trained, {text.count(per_second)} a second"),
        ("age", f"{text.number(summary.get('age_mean'), 2)} on average, {summary.get('age_max', '-')} at most"),
        ("price", text.price(text.Price(**summary["price"])) if summary.get("price") else "-"),
        ("lost", _lost(summary)),
        ("recipe", _place(summary, "resolved_recipe")),
        ("metrics", _place(summary, "metrics")),
        ("archive", _place(summary, "archive")),
        ("checkpoint", _place(summary, "checkpoint")),
    ]


def prompt_rows(prompts: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str, str]]:
    """(prompt, before, after, expected) of up to three prompts, each short enough for one line."""
    return [
        (
            shorten(prompt.get("prompt")),
            shorten(prompt.get("before")),
            shorten(prompt.get("after")),
            shorten(prompt.get("expected")),
        )
        for prompt in prompts[:3]
    ]


def shorten(value: object, width: int = ANSWER_WIDTH) -> str:
    """One line of at most `width` characters, quoted, with what is not printable escaped.

    >>> shorten("12\\n3"), shorten(None), shorten("abcdefgh", width=6)
    ("'12\\\\n3'", '-', "'ab...")
    """
    if value is None:
        return "-"
    shown = repr(str(value))
    return shown if len(shown) <= width else shown[: width - 3] + "..."


def _reward(summary: Mapping[str, Any]) -> str:
    first, last, window = (summary.get(f"reward_{key}") for key in ("first", "last", "window"))
    steps, at_last = ("step", "") if window == 1 else (f"{window or '-'} steps", f" {window or '-'}")
    return f"{text.number(first)} in the first {steps} -> {text.number(last)} in the last{at_last}"


def _lost(summary: Mapping[str, Any]) -> str:
    lost, ratio = summary.get("lost") or {}, summary.get("lost_length_ratio")
    length = "" if ratio is None else f", {text.number(ratio, 2)} x as long as trained ones"
    groups = sum(lost.values())
    if not groups:
        return "nothing"
    failed = any(reason.startswith("failed/") for reason in lost)
    why = f"; why they failed: {summary.get('logs') or 'in the logs of the collectors'}" if failed else ""
    return f"{groups} groups{length}: {text.reasons(lost, separator=', ')}{why}"


def _place(summary: Mapping[str, Any], key: str) -> str:
    return str(summary.get(key) or "-")
