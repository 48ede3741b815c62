"""The sheet in which a person judges the answers of a profile: a CSV file that any spreadsheet opens and saves.

| column | |
|---|---|
| `id` | `<profile>-<number of the answer>`; letters first, so that no spreadsheet takes it for a date or a number |
| `prompt`, `answer`, `expected` | what there is to judge |
| `judgement` | empty: for the person |
| `reward`, `wrong` | what the verifier said; to the right, where it is easily hidden |
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.telemetry.table import visible

COLUMNS = ("id", "prompt", "answer", "expected", "judgement", "reward", "wrong")

LONGEST_CELL = 32_000
"""Characters; spreadsheets cut a cell at 32,767."""

LARGEST_CELL = 131_072
"""Characters of a cell that is read: four times what is written, so that a quote which is missing ends soon."""

FORMULA = "=+-@＝＋－＠"
"""What a cell that a spreadsheet computes begins with, also in the full width of East Asian input."""

_CHANGED = re.compile(r"(?!(0|[1-9][0-9]{0,14})$)[0-9.,(]")
"""What a spreadsheet may take for a number or a date, and show as another: 007, 1/2, 3-4, 1e5, integers beyond 15
digits. Other whole numbers stay what they are."""

RIGHT = (
    "right",
    "r",
    "yes",
    "y",
    "true",
    "correct",
    "1",
    "✓",
    "✔",
    "☑",
    "wahr",
    "vrai",
    "vero",
    "verdadero",
    "verdadeiro",
)
WRONG = ("wrong", "w", "no", "n", "false", "incorrect", "0", "✗", "✘", "☒", "falsch", "faux", "falso")
"""The last ones are what spreadsheets of other languages make of TRUE and FALSE."""

_NUMBER = re.compile(r"[1-9][0-9]{0,8}")


class SheetError(Exception):
    """A sheet cannot be read; one line with the file, the row and the fix."""


def sheet(profile: str, answers: Sequence[Mapping[str, Any]]) -> bytes:
    """The empty sheet. profile: letters that tell it from others; answers: the entries of `heldout.evaluate`.

    With a byte order mark, without which Excel does not read UTF-8. What could be obeyed in a cell, a formula or a
    control character, is written so that it is only shown; line breaks stay.
    """
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\r\n")  # RFC 4180; line breaks in cells are \n, and tell apart
    writer.writerow(COLUMNS)
    for number, answer in enumerate(answers, 1):
        reward = "" if answer["reward"] is None else repr(answer["reward"])
        said = (answer["prompt"], answer["answer"], answer["expected"])
        wrong = answer["failure"] or answer["wrong"]
        writer.writerow([f"{profile}-{number}", *map(cell, said), "", reward, cell(wrong)])
    return text.getvalue().encode("utf-8-sig")


def cell(value: object) -> str:
    """A value as text that a spreadsheet neither computes nor shows as something else.

    >>> cell("=1+1"), cell("1/2"), cell("12"), cell({"a": 1}), cell(None), cell("a\\tb\\nc")
    ("'=1+1", "'1/2", '12', '{"a": 1}', '', 'a\\\\tb\\nc')
    """
    text = visible(plain(value)[:LONGEST_CELL], lines=True)
    text = text if len(text) <= LONGEST_CELL else text[: LONGEST_CELL - 3] + "..."
    begins = text.lstrip()
    return f"'{text}" if begins.startswith(tuple(FORMULA)) or _CHANGED.match(begins) else text


def plain(value: object) -> str:
    """A JSON value as a person reads it: a string as it is."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def marks(path: Path, profile: str, answers: int, *, pass_above: float) -> dict[int, bool]:
    """Whether the person called an answer right, by the answer's number; what was not judged is left out.

    A number other than 0 and 1 is the reward that the answer should have had, right if above `pass_above`. Rows may be
    sorted, deleted, separated by comma, semicolon or tab. Raises SheetError.
    """
    found: dict[int, bool] = {}
    seen: set[str] = set()
    for row, identity, judgement in _rows(path):
        where = f"{path}, row {row}"
        stem, _, number = identity.rpartition("-")
        if stem != profile or not _NUMBER.fullmatch(number) or int(number) > answers:
            raise SheetError(
                f"{where}: this profile has no answer {identity!r:.60}, but {profile}-1 to {profile}-{answers}; give "
                "the sheet that was written with it"
            )
        if identity in seen:
            raise SheetError(f"{where}: {identity} is there twice; keep one of the two rows")
        seen.add(identity)
        if judgement:
            found[int(number)] = _mark(judgement, where, pass_above)
    if not found:
        raise SheetError(f"{path}: no answer is judged; write right or wrong into the column judgement of some")
    return found


def _mark(judgement: str, where: str, pass_above: float) -> bool:
    word = judgement.lower()
    if word in RIGHT or word in WRONG:
        return word in RIGHT
    try:
        number = float(word.replace(",", ".", 1))  # half of the world's spreadsheets write a decimal comma
    except ValueError:
        number = float("nan")
    if not abs(number) < float("inf"):
        raise SheetError(
            f"{where}: judgement is {judgement!r:.60}; write right or wrong (also r and w, yes and no, 1 and 0), the "
            "reward it should have had, or leave it empty"
        )
    return number > pass_above


def _rows(path: Path) -> Iterator[tuple[int, str, str]]:
    """(number of the row in a spreadsheet, id, judgement) of each row that has any text."""
    data = path.read_bytes()
    if data[:2] in (b"PK", b"\xff\xfe", b"\xfe\xff", b"\xd0\xcf"):
        raise SheetError(f"{path} is no CSV file in UTF-8; save it from the spreadsheet as `CSV UTF-8`")
    # What is read, ids and marks, is ASCII; answers that another encoding has spoilt are not looked at.
    text = data.decode("utf-8-sig", errors="replace")
    first = text.splitlines()[0] if text else ""
    wanted = ("id", "judgement")
    for delimiter in ",;\t":
        names = [name.strip().lower() for name in next(csv.reader([first], delimiter=delimiter), [])]
        if all(name in names for name in wanted):
            break
    else:
        raise SheetError(f"{path}, row 1: no columns {' and '.join(wanted)}; keep the first row as it was written")
    if twice := [name for name in wanted if names.count(name) > 1]:
        raise SheetError(f"{path}, row 1: there are {names.count(twice[0])} columns {twice[0]}; keep one of them")
    places = [names.index(name) for name in wanted]
    limit = csv.field_size_limit(LARGEST_CELL)  # of the module, for everybody
    try:
        for row, cells in enumerate(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True), 1):
            if row > 1 and any(map(str.strip, cells)):
                identity, judgement = (cells[at].strip() if at < len(cells) else "" for at in places)
                yield row, identity, judgement
    except csv.Error as error:
        raise SheetError(f"{path}: {error}; keep the cells as they were written and fill in judgement only") from None
    finally:
        csv.field_size_limit(limit)
