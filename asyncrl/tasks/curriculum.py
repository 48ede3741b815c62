"""Which train rows are asked, and in which order, by how often the model was right about them."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

from asyncrl.config.curriculum import Curriculum
from asyncrl.data.errors import DataError
from asyncrl.tasks.base import Row, TaskError
from asyncrl.tasks.mixture import BETWEEN
from asyncrl.tasks.order import permute, row_index
from asyncrl.tasks.pass_rates import digest, read_pass_rates

logger = logging.getLogger(__name__)

LOOKED_THROUGH = 100_000
"""Rows among which measured ones are looked for, after those that training begins with: a procedural task may have
2**40."""

STAGES = 10
"""Of an epoch that goes from easy to hard: within a tenth of the rows the order is shuffled as ever, since rates that
differ by less than was measured mean nothing."""


class Course:
    """The rows of a split that a curriculum leaves, as indices, in an order of `len(self)` places.

    Nothing is kept of rows that were not measured, so it costs the same for ten of them and for 2**40.
    """

    def __init__(self, rows: int, rates: Mapping[int, float], curriculum: Curriculum) -> None:
        """rates: of measured rows, by index. Raises ValueError if no row is left."""
        stay = {index: rate for index, rate in rates.items() if curriculum.min <= rate <= curriculum.max}
        self._staged = curriculum.order == "easy-first"
        self.left_out = len(rates) - len(stay)
        self._len = rows - self.left_out
        if self._len < 1:
            raise ValueError("no row is left")
        # Rows that were not measured are taken for what rows are like on the whole.
        mean = sum(rates.values()) / max(1, len(rates))
        by_rate = sorted(stay, key=lambda index: (-stay[index], index)) if self._staged else []
        self._easy = [index for index in by_rate if stay[index] > mean]
        self._hard = [index for index in by_rate if stay[index] <= mean]
        # Places between those are of all other rows, in the order of the file.
        aside = sorted(rates) if self._staged else sorted(rates.keys() - stay.keys())
        self._before = [index - n for n, index in enumerate(aside)]  # rows that are not aside, below each that is

    def __len__(self) -> int:
        return self._len

    def at(self, place: int) -> int:
        """The index of the row in this place, 0 <= place < len(self)."""
        between = place - len(self._easy)
        if between < 0:
            return self._easy[place]
        others = self._len - len(self._easy) - len(self._hard)
        if between >= others:
            return self._hard[between - others]
        return between + bisect_right(self._before, between)

    def index(self, ordinal: int, *, seed: int, shuffle: bool) -> int:
        """The row of the prompt with this ordinal. Each row of the course occurs once in every `len(self)` ordinals."""
        if not self._staged:
            return self.at(row_index(ordinal, self._len, seed=seed, shuffle=shuffle))
        epoch, place = divmod(ordinal, self._len)
        size = -(-self._len // STAGES)
        stage, within = divmod(place, size)
        begin = stage * size
        if shuffle:
            within = permute(within, min(size, self._len - begin), key=f"order/{seed}/{epoch}/{stage}")
        return self.at(begin + within)


def course_of(
    curriculum: Curriculum, rows: Sequence[Row], *, seed: int, shuffle: bool, key: str, name: str | None
) -> Course:
    """The course of a task's train rows. `seed` and `shuffle`: of their order. `key`: of the task in the recipe;
    `name`: in a mixture, whose evaluations have it before the ids.

    Raises DataError: no pass rates, or others than the run began with; TaskError: none of them is of these rows, or all
    rows are left out.
    """
    path = Path(curriculum.pass_rates).expanduser()
    measured = read_pass_rates(path)
    if curriculum.digest is not None and digest(measured) != curriculum.digest:
        raise DataError(
            f"{key}.curriculum.pass_rates {path} has other pass rates than the run began with: their digest is "
            f"{digest(measured)}, not {curriculum.digest}.\n"
            "It would ask other rows from here on. Put back what was there, or begin a new run, whose recipe has no "
            f"{key}.curriculum.digest yet."
        )
    own = _own(measured, name)
    # A profile, and a run, ask from the beginning of this order: mostly these are the rows, wherever they stand.
    first = (row_index(n, len(rows), seed=seed, shuffle=shuffle) for n in range(min(len(rows), 2 * len(own))))
    rates: dict[int, float] = {}
    for index in chain(first, range(min(len(rows), LOOKED_THROUGH))):
        if len(rates) == len(own):
            break
        try:
            row_id = rows[index].id
        except Exception:  # a row that cannot be read fails its own tickets, by name, and ends no run
            continue
        if row_id in own:
            rates[index] = own[row_id]
    if not rates:
        raise TaskError(
            f"{key}.curriculum.pass_rates {path} measured {len(own)} rows, such as {next(iter(own))!r}, and none of "
            "them was found among the train rows.\n"
            "Measure train rows with `asyncrl profile`; `asyncrl eval` asks those that are held out."
        )
    try:
        course = Course(len(rows), rates, curriculum)
    except ValueError:
        raise TaskError(
            f"{key}.curriculum leaves out all {len(rows)} train rows: none has a pass rate from {curriculum.min:g} to "
            f"{curriculum.max:g}"
        ) from None
    logger.info(
        "%s.curriculum: %d of %d train rows are left out, %d measured ones stay, %d were not measured and stay; %d "
        "measured ids are no train rows",
        *(key, course.left_out, len(rows), len(rates) - course.left_out),
        *(len(rows) - len(rates), len(own) - len(rates)),
    )
    return course


def _own(measured: Mapping[str, float], name: str | None) -> Mapping[str, float]:
    """The rates of one task by the ids that it has alone. Of what a mixture measured these are the rows that have its
    name before their ids; where none has, the task was measured alone."""
    before = f"{name}{BETWEEN}"
    mixed = {row_id.removeprefix(before): rate for row_id, rate in measured.items() if row_id.startswith(before)}
    return mixed if name is not None and mixed else measured
