"""What a sink gets: the numbers of metrics.jsonl under the same names, nested ones joined by `/`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol


class SinkError(Exception):
    """A sink cannot be opened; one line, with the fix."""


@dataclass(frozen=True, slots=True)
class Point:
    """The numbers of one record, at a place on its axis: `step` for steps, `eval/version` for evaluations."""

    axis: Literal["step", "eval/version"]
    at: int
    time: float | None  # unix seconds; None where the record has none
    values: dict[str, float]


class Sink(Protocol):
    """Where metrics go besides metrics.jsonl. May block and raise: it runs in a process of its own."""

    def log(self, point: Point) -> None: ...

    def close(self) -> None:
        """Deliver what is buffered."""


def point(record: Mapping[str, Any]) -> Point | None:
    """The numbers of a step or an evaluation; None for other events. Texts and nulls are left out, a list's items are
    numbered.

    >>> point({"step": 3, "time": 9.5, "age/tokens": {"0": 8}, "loss": None, "pass_rate": [1, 2]}).values
    {'step': 3.0, 'age/tokens/0': 8.0, 'pass_rate/0': 1.0, 'pass_rate/1': 2.0}
    """
    if record.get("event") == "eval":
        numbers = {key: record.get(key) for key in ("version", "success", "n", "unscored")}
        values = dict(_numbers("eval", {**record.get("metrics", {}), **numbers}))
        return Point("eval/version", record["version"], record.get("time"), values)
    if "event" in record:
        return None
    values = dict(_numbers("", {key: value for key, value in record.items() if key != "time"}))
    return Point("step", record["step"], record.get("time"), values)


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, bool | int | float):
        yield name, float(value)
    elif isinstance(value, Mapping | list):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from _numbers(f"{name}/{key}" if name else str(key), item)
