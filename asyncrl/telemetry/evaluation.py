"""How an evaluation reads: a table of numbers with their intervals, and three answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from asyncrl.telemetry import text
from asyncrl.telemetry.summary import shorten
from asyncrl.telemetry.table import write_facts

SHOWN_ANSWERS = 3


def render(document: Mapping[str, Any], *, terminal: bool, file: TextIO) -> None:
    """Print what `runtime.evaluation.evaluate` returned. `terminal`: with colour and tables."""
    facts, (head, *rows), answers = fact_rows(document), metric_rows(document), answer_rows(document)
    write_facts(facts, terminal=terminal, file=file)
    if not terminal:
        for row in (head, *rows):
            file.write("  ".join(f"{cell:<{width}}" for cell, width in zip(row, _WIDTHS, strict=False)).rstrip() + "\n")
        for prompt, answer in answers:
            file.write(f"prompt {prompt}: {answer}\n")
        file.flush()
        return
    console = Console(file=file, force_terminal=True, highlight=False)
    table = Table(*head, box=None, pad_edge=False, collapse_padding=True, header_style="bold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)
    samples = Table("prompt", "answer", box=None, pad_edge=False, header_style="bold")
    for prompt, answer in answers:
        samples.add_row(Text(prompt), Text(answer))
    console.print(samples)


_WIDTHS = (10, 22, 22, 24, 12)
"""Of the columns of `metric_rows` where nothing lines them up."""


def fact_rows(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What was evaluated, how, and what could not be scored."""
    report, sampling = document["report"], document["sampling"]
    facts = [("evaluated", document["target"])]
    if "against" in document:
        facts.append(("against", document["against"]["target"]))
    facts.append(
        (
            "on",
            f"{report['prompts']} held-out prompts, {how_sampled(sampling, report['samples'])}, "
            f"seed {report['seed']}; an answer passes if its reward is above {report['pass_above']:g}",
        )
    )
    facts.append(("answers", _answers(report)))
    if "against" in document:
        facts.append(("of against", _answers(document["against"]["report"])))
    return facts


def how_sampled(sampling: Mapping[str, Any], samples: int) -> str:
    """
    >>> how_sampled({"temperature": 1.0, "top_k": 20, "top_p": 1.0, "min_p": 0.0, "max_tokens": 8}, 4)
    '4 samples each at temperature 1 with top_k 20, at most 8 tokens'
    """
    temperature = sampling["temperature"]
    how = "greedy" if temperature == 0 else f"{samples} samples each at temperature {temperature:g}"
    cuts = {
        name: sampling[name] for name, off in (("top_k", -1), ("top_p", 1.0), ("min_p", 0.0)) if sampling[name] != off
    }
    if temperature > 0 and cuts:
        how += " with " + ", ".join(f"{name} {value:g}" for name, value in cuts.items())
    return f"{how}, at most {sampling['max_tokens']} tokens"


def metric_rows(document: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A head and a row for each metric: with `against`, both, their difference, and how many prompts
    are better, equal and worse."""
    metrics = document["report"]["metrics"]
    if "against" not in document:
        return [("", "mean [95 % interval]"), *((name, _estimate(value)) for name, value in metrics.items())]
    other, difference = document["against"]["report"]["metrics"], document["difference"]["metrics"]
    return [
        ("", "mean [95 % interval]", "against", "difference, paired", "+/=/-"),
        *(
            (
                name,
                _estimate(value),
                _estimate(other[name]),
                _estimate(difference[name], sign="+"),
                "{better}/{equal}/{worse}".format(**difference[name]),
            )
            for name, value in metrics.items()
        ),
    ]


def answer_rows(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(prompt, answer and what was expected) of the first sample of the first prompts."""
    shown = _first_samples(document["answers"])
    against = _first_samples(document["against"]["answers"]) if "against" in document else {}
    rows = []
    for row_id in list(shown)[:SHOWN_ANSWERS]:
        answer = shown[row_id]
        said = f"{_answer(answer)}, expected {shorten(answer['expected'])}"
        if row_id in against:
            said += f"; against: {_answer(against[row_id])}"
        rows.append((shorten(answer["prompt"]), said))
    return rows


def _first_samples(answers: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    first: dict[str, Mapping[str, Any]] = {}
    for answer in answers:
        first.setdefault(answer["row_id"], answer)
    return first


def _answer(answer: Mapping[str, Any]) -> str:
    score = answer["failure"] if answer["reward"] is None else f"reward {answer['reward']:g}"
    return f"{shorten(answer['answer'])} ({score})"


def _answers(report: Mapping[str, Any]) -> str:
    unscored, cut = report["unscored"], report["truncated"] / report["answers"]
    said = f"{unscored} unscored ({text.reasons(report['failures'])})" if unscored else "all scored"
    return f"{report['answers']}, {said}; {text.percent(cut)} cut at the limit of tokens"


def _estimate(estimate: Mapping[str, Any], *, sign: str = "") -> str:
    """
    >>> _estimate({"value": 0.5, "low": 0.25, "high": 0.75}, sign="+")
    '+0.500 [0.250, 0.750]'
    """
    if estimate["value"] is None:
        return "-"
    if estimate["low"] is None:
        return f"{estimate['value']:{sign}.3f}"
    return f"{estimate['value']:{sign}.3f} [{estimate['low']:.3f}, {estimate['high']:.3f}]"
