"""The sheet: what goes out is only shown, and what comes back is read however a spreadsheet wrote it."""

from __future__ import annotations

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.telemetry.profile_sheet import COLUMNS, LONGEST_CELL, SheetError, cell, marks, sheet

COMPUTED = "=+-@＝＋－＠"
"""What spreadsheets begin a formula with (OWASP, CSV injection)."""

HOSTILE = [
    "=1+1",
    "+cmd|' /C calc'!A0",
    "-2+3",
    "@SUM(A1)",
    " =1",
    "\n=1",
    "\t=1",
    "＝1+1",
    "\x00\x1b[2J",
    "\ud800",
    "a\r\n,\"b'",
]


def rows_of(data: bytes) -> list[list[str]]:
    return list(csv.reader(io.StringIO(data.decode("utf-8-sig"), newline="")))


@pytest.fixture
def written(entry, tmp_path):
    """A sheet of four answers, and what fills it in: saved again as `save` writes rows."""

    def fill(judgements, *, save=None):
        rows = rows_of(sheet("bcdfgh", [entry(str(n), float(n % 2)) for n in range(4)]))
        for row, judgement in zip(rows[1:], judgements, strict=True):
            row[COLUMNS.index("judgement")] = judgement
        path = tmp_path / "judgements.csv"
        path.write_bytes((save or saved)(rows))
        return path

    return fill


def saved(rows, *, delimiter=",", encoding="utf-8-sig", end="\r\n"):
    text = io.StringIO(newline="")
    csv.writer(text, delimiter=delimiter, lineterminator=end).writerows(rows)
    return text.getvalue().encode(encoding)


def test_each_answer_is_a_row_with_an_empty_judgement(entry):
    head, *rows = rows_of(sheet("bcdfgh", [entry("a", 1.0), entry("b", None, answer="two\nlines", expected=None)]))
    assert tuple(head) == COLUMNS
    assert rows == [
        ["bcdfgh-1", "'2 + 2 = ", "4", "4", "", "1.0", ""],
        ["bcdfgh-2", "'2 + 2 = ", "two\nlines", "", "", "", "verifier_raised"],
    ]


def test_it_begins_with_the_mark_by_which_excel_knows_utf_8(entry):
    assert sheet("bcdfgh", [entry(answer="größer")]).startswith(b"\xef\xbb\xbfid,prompt")


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_in_a_cell_is_obeyed(entry, text):
    (_, row) = rows_of(sheet("bcdfgh", [entry(prompt=text, answer=text, expected=text, failure="", wrong="")]))
    for shown in row[1:4]:
        assert not shown.lstrip().startswith(tuple(COMPUTED))
        assert all(char.isprintable() or char == "\n" for char in shown)


@given(st.text())
def test_no_text_becomes_a_formula_or_breaks_the_rows(text):
    shown = cell(text)
    assert not shown.lstrip().startswith(tuple(COMPUTED))
    assert rows_of(saved([["id", shown]]))[0][1] == shown


@pytest.mark.parametrize("text", ["007", "1/2", "3-4", "1e5", "12345678901234567890", "0.50", "(5)", "1,000"])
def test_what_a_spreadsheet_would_turn_into_another_number_or_a_date_is_kept(text):
    assert cell(text) == f"'{text}"


@pytest.mark.parametrize("text", ["0", "42", "123456789012345", "a = b", "five"])
def test_what_it_leaves_alone_is_written_as_it_is(text):
    assert cell(text) == text


def test_an_answer_of_200_kb_fits_into_a_cell(entry):
    (_, row) = rows_of(sheet("bcdfgh", [entry(answer="x" * 200_000, prompt="\x00" * 200_000)]))
    assert max(map(len, row)) <= LONGEST_CELL + 1


def test_a_filled_sheet_is_read_back(written):
    path = written(["right", "w", "", " YES "])
    assert marks(path, "bcdfgh", 4, pass_above=0.0) == {1: True, 2: False, 4: True}


@pytest.mark.parametrize(
    "save",
    [
        lambda rows: saved(rows, delimiter=";", encoding="cp1252"),
        lambda rows: saved(rows, delimiter="\t", encoding="utf-8", end="\n"),
        lambda rows: saved([rows[0], *rows[:0:-1]]),
        lambda rows: saved([[row[4], row[0]] for row in rows]),
        lambda rows: saved([*rows, ["", "", ""], []]),
        lambda rows: saved([["ID", *rows[0][1:]], *rows[1:]]),
    ],
    ids=["semicolons", "tabs", "sorted", "columns moved", "empty rows", "capitals"],
)
def test_a_sheet_is_read_however_a_spreadsheet_saved_it(written, save):
    assert marks(written(["1", "0", "", "no"], save=save), "bcdfgh", 4, pass_above=0.0) == {1: True, 2: False, 4: False}


@pytest.mark.parametrize(("yes", "no"), [("✓", "✗"), ("TRUE", "FALSE"), ("WAHR", "FALSCH"), ("right\u00a0", "\tN")])
def test_a_mark_may_be_what_people_and_spreadsheets_make_of_right_and_wrong(written, yes, no):
    assert marks(written([yes, no, "", ""]), "bcdfgh", 4, pass_above=0.0) == {1: True, 2: False}


@pytest.mark.parametrize(
    ("judgement", "right"), [("0.5", False), ("0,75", True), ("2", True), ("-1", False), ("1", True)]
)
def test_a_number_is_the_reward_that_the_answer_should_have_had(written, judgement, right):
    assert marks(written([judgement, "", "", ""]), "bcdfgh", 4, pass_above=0.5) == {1: right}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rows: rows[2].__setitem__(4, "maybe"), "row 3: judgement is 'maybe'; write right or wrong"),
        (lambda rows: rows[2].__setitem__(4, "nan"), "row 3: judgement is 'nan'"),
        (
            lambda rows: rows[2].__setitem__(0, "zzzzzz-2"),
            "row 3: this profile has no answer 'zzzzzz-2', but bcdfgh-1 to",
        ),
        (lambda rows: rows[2].__setitem__(0, "bcdfgh-5"), "no answer 'bcdfgh-5'"),
        (lambda rows: rows[2].__setitem__(0, "bcdfgh-" + "9" * 5000), "row 3"),
        (lambda rows: rows[2].__setitem__(0, "bcdfgh-1"), "row 3: bcdfgh-1 is there twice"),
        (lambda rows: rows[0].__setitem__(4, "mark"), "row 1: no columns id and judgement"),
        (lambda rows: [row.__setitem__(4, "") for row in rows[1:]], "no answer is judged"),
        (lambda rows: [row.append("judgement") for row in rows], "row 1: there are 2 columns judgement"),
        (lambda rows: rows.clear(), "row 1: no columns id and judgement"),
        (lambda rows: rows[2].__setitem__(1, "x" * 200_000), "field larger than field limit"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_row(written, change, said):
    def save(rows):
        change(rows)
        return saved(rows)

    path = written(["right", "right", "right", "right"], save=save)
    with pytest.raises(SheetError) as error:
        marks(path, "bcdfgh", 4, pass_above=0.0)
    assert str(error.value).startswith(str(path))
    assert said in str(error.value)
    assert len(str(error.value)) < len(str(path)) + 300


def test_a_quote_that_is_never_closed_swallows_no_marks_in_silence(written):
    def save(rows):
        return saved(rows).replace(b"bcdfgh-2,", b'bcdfgh-2,"', 1)

    with pytest.raises(SheetError, match="keep the cells as they were written"):
        marks(written(["right", "right", "right", "right"], save=save), "bcdfgh", 4, pass_above=0.0)


@pytest.mark.parametrize("data", [b"PK\x03\x04...", "id;judgement".encode("utf-16")])
def test_another_kind_of_file_is_told_to_be_saved_as_csv(tmp_path, data):
    path = tmp_path / "judgements.csv"
    path.write_bytes(data)
    with pytest.raises(SheetError, match="CSV UTF-8"):
        marks(path, "bcdfgh", 4, pass_above=0.0)
