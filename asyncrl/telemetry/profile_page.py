"""A profile as one HTML file: no network, no library, nothing that an answer could make of it but text."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from hashlib import sha256
from html import escape
from typing import Any

from asyncrl.telemetry.profile_sheet import plain
from asyncrl.telemetry.profile_text import fact_rows, verdict_rows
from asyncrl.telemetry.table import visible

LONGEST = 20_000
"""Characters of one text in the page; more of them make a page that a browser opens slowly. profile.json has all."""

SHOWN = 300
"""Characters of one text that are seen without opening it."""

PASSED = "passed"

_BAR = 120
"""Pixels of the highest bar."""

_STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --page: #fff; --line: #d0d7de; --warn: #fff8c5; --good: #dafbe1; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6edf3; --page: #0d1117; --line: #30363d; --warn: #2e2508; --good: #0f2b18; }
}
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 76em; padding: 0 1em;
  color: var(--text); background: var(--page); overflow-wrap: anywhere; }
h1 { font-size: 1.6em; } h2 { font-size: 1.25em; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; min-width: 56em; overflow-wrap: normal; }
th, td { text-align: left; vertical-align: top; padding: .3em .6em;
  border-top: 1px solid var(--line); }
td:first-child { white-space: nowrap; }
td.text { white-space: pre-wrap; overflow-wrap: anywhere; font-family: ui-monospace, monospace; font-size: 13px; }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: .2em 1.2em; }
dt { font-weight: 600; } dd { margin: 0; }
.verdict { padding: .6em 1em; border-left: 6px solid #bf8700; background: var(--warn); }
.verdict.train { border-color: #1a7f37; background: var(--good); }
.bars { max-width: 100%; height: auto; }
.bars rect { fill: #54aeff; } .bars text { font-size: 11px; text-anchor: middle; fill: currentColor; }
"""

_FILTER = """
document.getElementById("class").addEventListener("change", function (event) {
  document.querySelectorAll("tr[data-class]").forEach(function (row) {
    row.hidden = event.target.value !== "" && row.dataset.class !== event.target.value;
  });
});
"""


def _digest(source: str) -> str:
    """As a browser is told which one is meant."""
    return f"'sha256-{b64encode(sha256(source.encode()).digest()).decode()}'"


# What an answer smuggled past the escaping, if any could, may load nothing, send nothing, and is no script that runs.
_POLICY = f"default-src 'none'; style-src {_digest(_STYLE)}; script-src {_digest(_FILTER)}"


def page(document: Mapping[str, Any]) -> str:
    """The page of what `runtime.profile.profile` returned. Every text in it is escaped, with what is no printable
    character written out."""
    verdict, report, answers = document["verdict"], document["report"], document["answers"]
    said, *reasons = verdict_rows(verdict)
    classes = [class_of(answer, report["pass_above"]) for answer in answers]
    body = [
        f"<h1>Profile of {_text(document['target'])}</h1>",
        f'<div class="verdict{" train" if verdict["verdict"] == "train" else ""}"><h2>{_text(said[1])}</h2>',
        f"<ul>{''.join(f'<li>{_text(name)}: {_text(reason)}</li>' for name, reason in reasons)}</ul></div>",
        f"<h2>Prompts by pass rate</h2>{_bars(report['pass_rate'])}",
        "<h2>Numbers</h2>",
        f"<dl>{''.join(f'<dt>{_text(name)}</dt><dd>{_text(value)}</dd>' for name, value in fact_rows(document))}</dl>",
        f"<h2>Answers</h2>{_choice(classes)}",
        '<div class="wide"><table><thead><tr><th>id</th><th>row</th><th>prompt</th><th>answer</th><th>expected</th>'
        "<th>reward</th><th>parts</th><th>class</th><th>tokens</th></tr></thead><tbody>",
        *(_row(document["id"], n, *pair) for n, pair in enumerate(zip(answers, classes, strict=True), 1)),
        "</tbody></table></div>",
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>Profile of {_text(document['target'])}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + f"\n<script>{_FILTER}</script>\n</body></html>\n"
    )


def class_of(answer: Mapping[str, Any], pass_above: float) -> str:
    """What an answer is sorted under: why it has no score, what is wrong with it, or that it passed."""
    named: str = answer["failure"] or answer["wrong"]
    return named or (PASSED if answer["reward"] > pass_above else "failed")


def _row(profile: str, number: int, answer: Mapping[str, Any], kind: str) -> str:
    parts = ", ".join(
        f"{name} {'-' if value is None else format(value, 'g')}" for name, value in answer["parts"].items()
    )
    cells = [
        f"<td>{_text(f'{profile}-{number}')}</td><td>{_text(answer['row_id'])}</td>",
        *(f'<td class="text">{_long(plain(answer[name]))}</td>' for name in ("prompt", "answer", "expected")),
        f"<td>{'-' if answer['reward'] is None else format(answer['reward'], 'g')}</td><td>{_text(parts)}</td>",
        f'<td title="{_text(answer["detail"])}">{_text(kind)}</td><td>{answer["tokens"]}</td>',
    ]
    return f'<tr data-class="{_text(kind)}">{"".join(cells)}</tr>'


def _bars(counts: Sequence[int]) -> str:
    """A histogram by tenths, drawn."""
    width, highest = 44, max(1, *counts)
    drawn = []
    for tenth, count in enumerate(counts):
        height, x = round(_BAR * count / highest), tenth * width
        drawn.append(
            f'<rect x="{x + 4}" y="{_BAR + 16 - height}" width="{width - 8}" height="{height}"></rect>'
            f'<text x="{x + width / 2:g}" y="{_BAR + 12 - height}">{count}</text>'
            f'<text x="{x + width / 2:g}" y="{_BAR + 32}">{tenth / 10:g}</text>'
        )
    wide, high = width * len(counts), _BAR + 40
    said = ", ".join(f"{count} at {tenth / 10:g}" for tenth, count in enumerate(counts) if count)
    size = f'width="{wide}" height="{high}" viewBox="0 0 {wide} {high}"'
    return f'<svg class="bars" {size} role="img" aria-label="prompts: {said}">{"".join(drawn)}</svg>'


def _choice(classes: Sequence[str]) -> str:
    counts = {kind: classes.count(kind) for kind in sorted(set(classes))}
    options = "".join(f'<option value="{_text(kind)}">{_text(kind)} ({n})</option>' for kind, n in counts.items())
    return f'<label>of the class <select id="class"><option value="">all</option>{options}</select></label>'


def _long(said: str) -> str:
    """A text that is opened where it is long."""
    shown = said if len(said) <= LONGEST else f"{said[:LONGEST]}\n... {len(said) - LONGEST} more characters"
    if len(said) <= SHOWN:
        return _text(shown)
    return f"<details><summary>{_text(said[:SHOWN])}...</summary>{_text(shown)}</details>"


def _text(said: str) -> str:
    return escape(visible(said, lines=True))
