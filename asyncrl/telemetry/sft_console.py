"""Supervised training as a person watches it: one plain line about once a second, and every event."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, TextIO

from asyncrl.telemetry import text

EVERY_S = 1.0
"""Steps of a small model take milliseconds; nobody reads a line for each."""


class SftConsole:
    """Feed it the records of metrics.jsonl as they come."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._steps = 0
        self._recent: list[Mapping[str, Any]] = []
        self._said = float("-inf")

    def on_record(self, record: Mapping[str, Any]) -> None:
        """A step, or an object with the key `event`, of which the first is `start`."""
        if "event" in record:
            if record["event"] == "start":
                self._steps = record["steps"]
            self._print(event_line(record))
            return
        self._recent = [*self._recent[-20:], record]
        now = time.monotonic()
        if now - self._said >= EVERY_S or record["step"] == self._steps:
            self._said = now
            self._print(step_line(record, steps=self._steps, left_s=text.time_left(self._recent, self._steps)))

    def _print(self, line: str) -> None:
        self._file.write(line + "\n")
        self._file.flush()  # a log that is followed, or cut off by a kill, still has every line


def step_line(record: Mapping[str, Any], *, steps: int, left_s: float | None) -> str:
    """One step in under 100 columns."""
    return (
        f"step {record['step']}/{steps}  epoch {text.number(record['epoch'], 2)}  loss {text.number(record['loss'])}  "
        f"grad {text.number(record['grad_norm'])}  lr {record['learning_rate']:.1e}  "
        f"{text.count(record['tokens_per_s'])} tokens/s  left {text.duration(left_s)}"
        + ("  skipped (non-finite gradient)" if record["skipped"] else "")
    )


def event_line(event: Mapping[str, Any]) -> str:
    """What happened besides steps."""
    match event["event"]:
        case "start":
            skipped = event["skipped_rows"]
            left_out = f", {sum(skipped.values())} left out ({text.reasons(skipped)})" if skipped else ""
            begun = f" from step {event['step']}" if event["step"] else ""
            return (
                f"training {event['model']}{begun}: {event['rows']} rows, {event['heldout_rows']} held out{left_out}, "
                f"{event['steps']} steps"
            )
        case "heldout":
            return f"step {event['step']}  held-out loss {text.number(event['loss'], 4)} ({event['rows']} rows)"
        case "checkpoint":
            return f"step {event['step']}  checkpoint {event['path']}"
        case "end" if event["stopped"]:
            return f"stopped after step {event['step']} of {event['steps']}; go on with asyncrl sft --resume"
        case _:
            return (
                f"held-out loss {text.number(event['heldout_loss_before'], 4)} -> "
                f"{text.number(event['heldout_loss'], 4)}; the model, to be given as model.path: {event['model']}"
            )
