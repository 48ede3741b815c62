"""What every section of a recipe is made of."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

Positive = Annotated[int, Meta(ge=1)]
Several = Annotated[int, Meta(ge=2)]
NonNegative = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]
Factor = Annotated[float, Meta(gt=0)]


class Section(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Base of every section: unknown keys fail, values do not change after loading. (`kw_only` is not inherited.)"""
