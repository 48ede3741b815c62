"""Browsing the answers of a run by keys: where a person is, and where a key leads. Pure; what reads keys and draws is
in `asyncrl/cli/view.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from rich.text import Text

from asyncrl.telemetry.view import ORDERS, Order, Shown, Wanted, answer_text, chosen, classes, summary_line

HELP = (
    ("n  right  space", "the next answer"),
    ("p  left", "the one before"),
    ("]  down", "the next step (of evaluations: version)"),
    ("[  up", "the step before"),
    ("o", "order: as trained, worst first, best first, longest first"),
    ("w", "only answers of one class of what is wrong; again: of the next one, then all"),
    ("u", "only unscored answers, or all"),
    ("r", "only answers to this row, or all"),
    ("e", "evaluations instead of training, or back"),
    ("q  Escape", "leave"),
)

KEYS = {"right": "n", " ": "n", "left": "p", "down": "]", "up": "[", "escape": "q", "\x03": "q", "\x04": "q"}
"""Other names of a key."""


@dataclass(frozen=True, slots=True)
class Page:
    """The answers of one step, or of one evaluation. `load` reads them, and is asked when the page is looked at."""

    title: str
    load: Callable[[], Sequence[Shown]]


@dataclass(frozen=True, slots=True)
class Browser:
    """trained, evaluated: pages, oldest first; one of the two has some. at: page of each; n: answer of the page."""

    trained: Sequence[Page]
    evaluated: Sequence[Page]
    of_evaluations: bool = False
    at: tuple[int, int] = (0, 0)
    n: int = 0
    wanted: Wanted = field(default_factory=Wanted)
    order: Order = "trained"
    ended: bool = False

    @property
    def pages(self) -> Sequence[Page]:
        return self.evaluated if self.of_evaluations else self.trained

    @property
    def page(self) -> Page:
        return self.pages[self.at[self.of_evaluations]]

    def answers(self) -> tuple[Sequence[Shown], list[Shown]]:
        """All of the page, and those that are wanted."""
        every = self.page.load()
        return every, chosen(every, self.wanted, self.order)

    def press(self, key: str) -> Browser:
        """Where the key leads. One that means nothing here changes nothing."""
        key = KEYS.get(key, key)
        if key == "q":
            return replace(self, ended=True)
        if key in ("]", "["):
            return self._turn(1 if key == "]" else -1)
        if key == "e" and (self.trained if self.of_evaluations else self.evaluated):
            return replace(self, of_evaluations=not self.of_evaluations, n=0)
        if key == "o":
            following = ORDERS[(ORDERS.index(self.order) + 1) % len(ORDERS)]
            return replace(self, order=following, n=0)
        if key == "u":
            return replace(self, wanted=replace(self.wanted, unscored=not self.wanted.unscored), n=0)
        every, shown = self.answers()
        if key in ("n", "p"):
            return replace(self, n=max(0, min(len(shown) - 1, self.n + (1 if key == "n" else -1))))
        if key == "w":
            labels: list[str | None] = [None, *classes(every)]
            at = labels.index(self.wanted.wrong) if self.wanted.wrong in labels else -1
            return replace(self, wanted=replace(self.wanted, wrong=labels[(at + 1) % len(labels)]), n=0)
        if key == "r" and shown:
            row = None if self.wanted.row is not None else shown[self.n].row_id
            return replace(self, wanted=replace(self.wanted, row=row), n=0)
        return self

    def _turn(self, by: int) -> Browser:
        at = list(self.at)
        at[self.of_evaluations] = max(0, min(len(self.pages) - 1, at[self.of_evaluations] + by))
        return replace(self, at=(at[0], at[1]), n=0)

    def screen(self) -> list[Text]:
        """What is to be seen: the page in a line, the answer, and the keys."""
        every, shown = self.answers()
        only = [f"class {self.wanted.wrong}"] * (self.wanted.wrong is not None)
        only += ["unscored"] * self.wanted.unscored + [f"row {self.wanted.row}"] * (self.wanted.row is not None)
        order = "" if self.order == "trained" else f", {self.order} first"
        head = summary_line(self.page.title, every, len(shown)) + order + (f"; only {', '.join(only)}" if only else "")
        lines = [Text(head, "reverse"), Text()]
        if shown:
            lines += answer_text(shown[self.n], title=f"{self.n + 1}/{len(shown)}")
        else:
            lines.append(Text("no answer of this page is like that: w, u and r take conditions back", "yellow"))
        keys = "n/p answer  ]/[ step  o order  w class  u unscored  r row  e evaluations  q leave"
        return [*lines, Text(), Text(keys, "dim")]
