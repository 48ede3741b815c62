"""How an evaluation reads: a table of numbers with their intervals, what changed, three answers, and the gate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

from asyncrl.telemetry import text
from asyncrl.telemetry.summary import shorten
from asyncrl.telemetry.table import aligned, visible, write_facts

SHOWN_ANSWERS = 3
SHOWN_MOVED = 2
"""Prompts that are answered better and worse; all of them are in the document."""

SHOWN_CHANGES = 6

IN_FACTS = ("unscored", "truncated", "tokens")
"""Metrics that a line of the facts has already."""

Table = list[tuple[str, ...]]
"""A head, and rows."""


def render(document: Mapping[str, Any], *, terminal: bool, file: TextIO) -> None:
    """Print what `runtime.evaluation.evaluate` returned. `terminal`: with colour and tables."""
    write_facts(fact_rows(document), terminal=terminal, file=file)
    for table in tables(document):
        _write(table, terminal=terminal, file=file)
    prompts = [*answer_rows(document), *moved_rows(document)]
    if terminal:
        _write([("prompt", "answer"), *prompts], terminal=True, file=file)
    else:
        for prompt, answer in prompts:
            file.write(f"{prompt}: {answer}\n")
    if "gate" in document:
        write_facts(gate_rows(document["gate"]), terminal=terminal, file=file)
    file.flush()


def tables(document: Mapping[str, Any]) -> Iterator[Table]:
    """The numbers, then those of groups of prompts, then what was wrong before and is now."""
    yield metric_rows(document)
    for name in ("task", "difficulty"):
        if name in document["report"]["by"]:
            yield group_rows(document, name)
    if "difference" in document:
        yield before_rows(document["difference"])
        yield change_rows(document["difference"]["changes"])


def _write(table: Table, *, terminal: bool, file: TextIO) -> None:
    if not terminal:
        file.writelines(f"{line}\n" for line in aligned(table))
        return
    from rich.console import Console  # only where something is shown
    from rich.table import Table as RichTable
    from rich.text import Text

    head, *rows = table
    shown = RichTable(*head, box=None, pad_edge=False, collapse_padding=True, header_style="bold")
    shown.columns[0].overflow = "fold"  # a name that is cut could be that of another metric
    for row in rows:
        shown.add_row(*(Text(cell) for cell in row))
    Console(file=file, force_terminal=True, highlight=False).print(shown)


def fact_rows(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What was evaluated, how, what could not be scored, what it took."""
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
    facts.append(("took", _took(report)))
    if report["samples"] > 1:
        solved = ", ".join(f"{count} {name}" for name, count in report["solved"].items())
        facts.append(("solved", f"prompts: {solved}"))
    return facts


def how_sampled(sampling: Mapping[str, Any], samples: int) -> str:
    """
    >>> how_sampled({"temperature": 1.0, "top_k": 20, "top_p": 1.0, "min_p": 0.0, "max_tokens": 8}, 4)
    '4 samples each at temperature 1 with top_k 20, at most 8 tokens'
    """
    temperature = sampling["temperature"]
    drawn = "one sample" if samples == 1 else f"{samples} samples"
    how = "greedy" if temperature == 0 else f"{drawn} each at temperature {temperature:g}"
    cuts = {
        name: sampling[name] for name, off in (("top_k", -1), ("top_p", 1.0), ("min_p", 0.0)) if sampling[name] != off
    }
    if temperature > 0 and cuts:
        how += " with " + ", ".join(f"{name} {value:g}" for name, value in cuts.items())
    return f"{how}, at most {sampling['max_tokens']} tokens"


def metric_rows(document: Mapping[str, Any]) -> Table:
    """A row for each metric: with `against`, both, their difference, how many prompts are better, equal and worse, and
    the difference's p. A reward of one part is that part."""
    metrics = document["report"]["metrics"]
    compared = document.get("difference", {}).get("metrics", metrics)  # it has the classes of both sides
    parts = [name for name in metrics if name.startswith("reward/")]
    shown = [name for name in compared if name not in IN_FACTS and not (len(parts) == 1 and name in parts)]
    if "against" not in document:
        return [("", "mean [95 % interval]"), *((name, _estimate(metrics[name])) for name in shown)]
    other = document["against"]["report"]["metrics"]
    rows = [
        (name, *(_estimate(side.get(name, NOTHING)) for side in (metrics, other)), *_difference(compared[name]))
        for name in shown
    ]
    return [("", "mean [95 % interval]", "against", "difference, paired", "+/=/-", "p"), *rows]


def group_rows(document: Mapping[str, Any], by: str) -> Table:
    """Reward and pass@1 of each group of prompts, and what changed of its reward."""
    groups = document["report"]["by"][by]
    changed = document.get("difference", {}).get("by", {}).get(by, {})
    rows = [
        (
            visible(name),
            str(group["prompts"]),
            *(_estimate(group["metrics"].get(metric, NOTHING)) for metric in ("reward", "pass@1")),
            *(_difference(changed[name]["metrics"]["reward"]) if name in changed else ()),
        )
        for name, group in groups.items()
    ]
    return [(by, "prompts", "reward", "pass@1", *(("difference, paired", "+/=/-", "p") if changed else ())), *rows]


def before_rows(difference: Mapping[str, Any]) -> Table:
    """What changed of prompts that the other side solved never, sometimes and always."""
    rows = [
        (name, str(group["prompts"]), *_difference(group["metrics"]["reward"]))
        for name, group in difference["by"]["before"].items()
    ]
    return [("solved by against", "prompts", "reward, difference", "+/=/-", "p"), *rows]


def change_rows(changes: Sequence[Mapping[str, Any]]) -> Table:
    """From what answers were to what those with the same seeds are, the commonest first."""
    moved = [change for change in changes if change["from"] != change["to"]]
    rows = [(one["from"], one["to"], str(one["answers"])) for one in moved[:SHOWN_CHANGES]]
    if rest := sum(one["answers"] for one in moved[SHOWN_CHANGES:]):
        rows.append(("others", "", str(rest)))
    same = sum(change["answers"] for change in changes if change["from"] == change["to"])
    return [("was", "is", "answers"), *rows, ("the same", "", str(same))]


def answer_rows(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(prompt, answer and what was expected) of the first sample of the first prompts: not chosen by how they came
    out."""
    shown = _first_samples(document["answers"])
    against = _first_samples(document["against"]["answers"]) if "against" in document else {}
    rows = []
    for key in list(shown)[:SHOWN_ANSWERS]:
        answer = shown[key]
        said = f"{_answer(answer)}, expected {shorten(answer['expected'])}"
        if key in against:
            said += f"; against: {_answer(against[key])}"
        rows.append((f"prompt {shorten(answer['prompt'])}", said))
    return rows


def moved_rows(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Of the prompts that changed most, for better and for worse: the same of their first answers."""
    rows = []
    for way in ("better", "worse") if "difference" in document else ():
        moved = document["difference"][way]
        for row in moved[:SHOWN_MOVED]:
            ours, theirs = row["answers"][0], row["against"][0]
            said = f"{row['difference']:+.3f}: {_answer(ours)}, expected {shorten(row['expected'])}"
            rows.append((f"{way} {shorten(row['prompt'])}", f"{said}; against: {_answer(theirs)}"))
        if more := len(moved) - SHOWN_MOVED:
            rows += [(way, f"{more} prompts more, in --json")] if more > 0 else []
    return rows


def gate_rows(gate: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Each rule with its verdict, and theirs together."""
    rules = gate["rules"]
    rows = [("rule", f"{one['verdict']:<11}  {visible(one['rule'])}: {one['said']}") for one in rules]
    broken = sum(one["verdict"] != "holds" for one in rules)
    said = (
        "holds"
        if gate["holds"]
        else f"fails: {broken} of {len(rules)} rules {'does' if broken == 1 else 'do'} not hold"
    )
    return [*rows, ("gate", said)]


Key = tuple[str, str]

NOTHING = {"value": None}


def _first_samples(answers: Sequence[Mapping[str, Any]]) -> dict[Key, Mapping[str, Any]]:
    first: dict[Key, Mapping[str, Any]] = {}
    for answer in answers:
        first.setdefault((answer.get("task", ""), answer["row_id"]), answer)
    return first


def _answer(answer: Mapping[str, Any]) -> str:
    wrong = f", {answer['wrong']}" if answer.get("wrong") else ""
    score = answer["failure"] if answer["reward"] is None else f"reward {answer['reward']:g}{wrong}"
    return f"{shorten(answer['answer'])} ({score})"


def _answers(report: Mapping[str, Any]) -> str:
    unscored, cut = report["unscored"], report["truncated"] / report["answers"]
    said = f"{unscored} unscored ({text.reasons(report['failures'])})" if unscored else "all scored"
    return f"{report['answers']}, {said}; {text.percent(cut)} cut at the limit of tokens"


def _took(report: Mapping[str, Any]) -> str:
    tokens = report["metrics"].get("tokens", NOTHING)
    said = [f"{text.number(tokens['value'], 1)} tokens an answer"]
    for name, key in (("an answer", "latency_s"), ("its verifiers", "verifier_s")):
        if (seconds := report[key]) is not None:
            said.append(f"{name} {seconds['p50']:.2g} s (median), 95 % within {seconds['p95']:.2g} s")
    return "; ".join(said)


def _difference(number: Mapping[str, Any]) -> tuple[str, str, str]:
    counts = "-" if number["better"] is None else "{better}/{equal}/{worse}".format(**number)
    return _estimate(number, sign="+"), counts, "-" if number["p"] is None else f"{number['p']:.2g}"


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
