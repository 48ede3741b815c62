"""`task.curriculum`: which train rows are asked, by how often the model was right about them (`docs/mixing.md`)."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from asyncrl.config.errors import RecipeError
from asyncrl.config.section import Section

Rate = Annotated[float, Meta(ge=0, le=1)]


class Curriculum(Section, frozen=True, kw_only=True):
    """Train rows by measured pass rate (`docs/mixing.md`)."""

    pass_rates: str  # a document of `asyncrl profile` or `asyncrl eval --json`, or the folder of a run
    min: Rate = 0.0  # rows with a lower rate are left out
    max: Rate = 1.0  # and those with a higher one; rows that were not measured stay
    order: Literal["none", "easy-first"] = "none"  # of an epoch; easy-first: a tenth of the rows after the other
    digest: str | None = None  # of the rates; a run that begins writes it here, and takes no others from then on


def check_curriculum(key: str, curriculum: Curriculum) -> None:
    """Raise RecipeError for bounds that cannot be meant. `key`: of the curriculum."""
    if curriculum.min > curriculum.max:
        raise RecipeError(
            f"{key}.min is {curriculum.min:g} and {key}.max {curriculum.max:g}: no row has such a rate. Write the "
            "smaller one as min"
        )
    if (curriculum.min, curriculum.max, curriculum.order) == (0.0, 1.0, "none"):
        raise RecipeError(
            f"{key} leaves every row where it is. Write {key}.max: 0.9 to leave out what the model can do already, or "
            f"{key}.order: easy-first"
        )
