"""Columns of plain text, and what came from outside made safe to print."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO


def aligned(rows: Sequence[Sequence[str]], *, gap: int = 2) -> list[str]:
    """Rows of cells as lines, the cells of a column below each other; the last cell may be of any length.

    >>> aligned([("who", "waits for"), ("learner", "a batch")])
    ['who      waits for', 'learner  a batch']
    """
    widths = [max(len(row[at]) for row in rows if at < len(row)) for at in range(max(map(len, rows), default=0))]
    return [
        (" " * gap).join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)).rstrip() for row in rows
    ]


def write_facts(facts: Sequence[tuple[str, str]], *, terminal: bool, file: TextIO) -> None:
    """Print named lines, one below the other. `terminal`: long ones are folded beside their names, which stand out."""
    if not terminal:
        for name, value in facts:
            file.write(f"{name:<10}  {value}\n")
        file.flush()
        return
    from rich.console import Console  # only where something is shown
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in facts:
        grid.add_row(name, Text(value))
    Console(file=file, force_terminal=True, highlight=False).print(grid)


def visible(text: str, *, lines: bool = False) -> str:
    """`text` with everything that a terminal would obey written out as an escape; line breaks stay if `lines`.

    What a model wrote is shown to a person: it must not move the cursor, set the title or turn the line around.

    >>> visible("a\\x1b[2Jb\\nc"), visible("a\\nb", lines=True)
    ('a\\\\x1b[2Jb\\\\nc', 'a\\nb')
    """
    return "".join(
        char if char.isprintable() or (lines and char == "\n") else char.encode("unicode_escape").decode()
        for char in text
    )
