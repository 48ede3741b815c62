"""The rules of `asyncrl eval --gate`: a small language, read before anything is sampled. Pure.

    RULE      = METRIC ["in" TASK] CONDITION | "default"
    CONDITION = (">=" | ">" | "<=" | "<") NUMBER["%"]      the metric itself
              | "better"                                   than --against, beyond chance
              | "not worse" ["by" NUMBER["%"]]             no loss beyond chance; no loss larger than NUMBER, or than
                                                           NUMBER % of the other side's

METRIC is one of a report (`collectors/evaluation/report.py`), or a class of what is wrong by its bare name.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from asyncrl.config.evaluation import FEWEST_VOTES, NUMBERED
from asyncrl.config.yaml_text import YamlTextError, parse

DEFAULT = "default"

Condition = Literal[">=", ">", "<=", "<", "better", "not worse", "not worse by"]

METRICS = ("reward", "unscored", "truncated", "tokens", "tokens_per_success")
SHARES = ("wrong/", "unscored", "truncated")
"""Beginnings of the names of those that are a share of the answers, besides `NUMBERED`."""

NAMED = re.compile(r"(?:reward|wrong)/\S+")
CLASS = re.compile(r"[a-z][a-z0-9_.-]*")

_NUMBER = r"-?(?:\d+\.?\d*|\.\d+)(?:e-?\d+)?"
_RULE = re.compile(
    r"(?P<metric>[^\s<>=]+)(?: in (?P<task>[^\s<>=]+))?"
    rf"(?: ?(?P<sign>>=|<=|>|<) ?(?P<bound>{_NUMBER}) ?(?P<percent>%?)"
    rf"|(?P<better> better)"
    rf"| not worse(?: by (?P<margin>{_NUMBER}) ?(?P<relative>%?))?)"
)


class GateError(Exception):
    """A rule cannot be read, or asks for what the evaluation does not have. One line: which rule, what, the fix."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule. `text` as it was written. task: whose prompts alone; "": all. bound: of `<`, `>` and `not worse by`;
    relative: it is a share of the other side's number."""

    text: str
    metric: str
    condition: Condition
    task: str = ""
    bound: float = 0.0
    relative: bool = False

    @property
    def compares(self) -> bool:
        """Whether it needs another side."""
        return self.condition in ("better", "not worse", "not worse by")


Rules = Sequence[Rule | Literal["default"]]
"""Of a gate, in order. `default` is what `gate.default_rules` makes of a document."""


def read_rules(given: str) -> Rules:
    """What `--gate` says: rules with `;` between them, or a YAML file with a list of them. Raises GateError."""
    if given.endswith((".yaml", ".yml")):
        return [_rule(text, f"{given}: ") for text in _lines(Path(given))]
    texts = [text for text in re.split(r"[;\n]", given) if text.strip()]
    if not texts:
        raise GateError("--gate is empty: write `default`, rules such as 'pass@1 >= 0.4; unsafe not worse', or a file")
    return [_rule(text, "--gate: ") for text in texts]


def check_rules(rules: Rules, *, ks: Sequence[int], samples: int, compared: bool) -> None:
    """Raise GateError for a rule that an evaluation with these settings cannot have a number for."""
    for rule in rules:
        if (rule == DEFAULT or (isinstance(rule, Rule) and rule.compares)) and not compared:
            text = rule.text if isinstance(rule, Rule) else DEFAULT
            raise GateError(f"--gate: {text!r} compares with another side: name it, --against TARGET")
        if not isinstance(rule, Rule) or (numbered := NUMBERED.fullmatch(rule.metric)) is None:
            continue
        kind, k = numbered[1], int(numbered[2])
        if kind == "pass" and k not in ks:
            raise GateError(f"--gate: {rule.text!r}: there is pass@{', pass@'.join(map(str, ks))}; ask for it: --k {k}")
        if kind == "majority" and (k != samples or k < FEWEST_VOTES):
            there = f"there is majority@{samples}" if samples >= FEWEST_VOTES else "a majority needs three answers"
            raise GateError(f"--gate: {rule.text!r}: {there}; ask for it: --n {max(k, FEWEST_VOTES)}")


def _lines(file: Path) -> list[str]:
    try:
        found = parse(file.read_text(encoding="utf-8"))
    except YamlTextError as error:
        raise GateError(f"--gate {file}: line {error.line}: {error}") from None
    except UnicodeDecodeError as error:
        raise GateError(f"--gate {file}: {error}: write it in UTF-8") from None
    except (OSError, ValueError) as error:  # ValueError: of a name with a NUL
        why = getattr(error, "strerror", None) or error
        raise GateError(
            f"--gate {str(file)!r:.200} cannot be read: {why}; rules are given as text, or by a file"
        ) from None
    if not (isinstance(found, list) and found and all(isinstance(text, str) for text in found)):
        raise GateError(f"--gate {file}: write a YAML list of rules, as in `- pass@1 >= 0.4`")
    return found


def _rule(text: str, where: str) -> Rule | Literal["default"]:
    text = " ".join(text.split())
    if text == DEFAULT:
        return "default"
    found = _RULE.fullmatch(text)
    if found is None:
        raise GateError(
            f"{where}{text!r} is no rule: write METRIC >= NUMBER, METRIC <= NUMBER, METRIC better, METRIC not worse, "
            "METRIC not worse by NUMBER%, or default"
        )
    metric, task = _metric(found["metric"], f"{where}{text!r}"), found["task"] or ""
    _check_share(metric, found["bound"] or found["margin"], found["percent"] or found["relative"], f"{where}{text!r}")
    if found["sign"]:
        bound = float(found["bound"]) / (100 if found["percent"] else 1)
        return Rule(text, metric, cast(Condition, found["sign"]), task, bound)
    if found["better"]:
        return Rule(text, metric, "better", task)
    if found["margin"] is None:
        return Rule(text, metric, "not worse", task)
    margin, relative = float(found["margin"]), bool(found["relative"])
    if margin < 0:
        raise GateError(f"{where}{text!r}: by how much it may be worse is not below 0")
    return Rule(text, metric, "not worse by", task, margin / (100 if relative else 1), relative=relative)


def _check_share(metric: str, number: str | None, percent: str | None, where: str) -> None:
    """A share is compared with a share: `malformed <= 2` would hold whatever comes out, and was meant as 2 %."""
    if number is None or percent or not (NUMBERED.fullmatch(metric) or metric.startswith(SHARES)):
        return
    if not 0 <= float(number) <= 1:
        raise GateError(f"{where}: {metric.removeprefix('wrong/')} lies between 0 and 1: write {number}%, or a share")


def _metric(name: str, where: str) -> str:
    if name in METRICS or NUMBERED.fullmatch(name) or NAMED.fullmatch(name):
        return name
    known = (*METRICS, "pass@1")
    if close := difflib.get_close_matches(name, known, n=1, cutoff=0.8):
        raise GateError(f"{where}: no metric is called {name!r}: did you mean {close[0]!r}?")
    if CLASS.fullmatch(name) is None:
        raise GateError(
            f"{where}: {name!r} is neither a metric ({', '.join(known)}, majority@N, reward/PART) nor a class of what "
            "is wrong, such as malformed"
        )
    return f"wrong/{name}"
