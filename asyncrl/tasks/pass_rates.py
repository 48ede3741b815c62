"""How often a model was right about a row, as it was measured: by `asyncrl profile` or `asyncrl eval`, or by a run that
trained the rows."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.config.yaml_text import YamlTextError, parse
from asyncrl.data.errors import DataError
from asyncrl.rewards.shaping import OUTCOME

PASS_ABOVE = 0.0
"""Reward above which an answer passes where neither document nor recipe says another, as in `asyncrl eval`."""

ARCHIVE = "archive"
"""The folder of a run that has what was trained."""

COLUMNS = ("row_id", "ticket", "member", "segment", "reward", "info", "trained_lineage", "trained_version")


def read_pass_rates(path: Path) -> dict[str, float]:
    """Row id -> share of its scored answers that passed. `path`: a document with `answers`, such as `profile.json`; or
    the folder of a run, of which the newest group of each row counts.

    Raises DataError: not there, not such a document, no scored answer in it.
    """
    rates = _of_run(path) if path.is_dir() else _of_document(path)
    if not rates:
        raise DataError(f"{path} has no scored answer: there are no pass rates to take from it")
    return rates


def digest(rates: Mapping[str, float]) -> str:
    """16 hex digits over what `read_pass_rates` gave, the same on every machine and for every order of rows. Of the
    rates, not of the file: a document that was only written anew is the same, a run that went on training is not.

    >>> digest({"a": 0.5, "b": 1.0}) == digest({"b": 1.0, "a": 0.5}) != digest({"a": 0.5})
    True
    """
    return blake2b(json.dumps(sorted(rates.items())).encode(), digest_size=8).hexdigest()


def _of_document(path: Path) -> dict[str, float]:
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}. {_WRITTEN_BY}") from error
    answers = document.get("answers") if isinstance(document, dict) else None
    if not isinstance(answers, list):
        raise DataError(f"{path} has no list `answers`. {_WRITTEN_BY}")
    above = _pass_above(document.get("report"))
    if above is None:
        raise DataError(f"{path}: report.pass_above is no number. {_WRITTEN_BY}")
    found: dict[str, list[float]] = {}
    for n, answer in enumerate(answers):
        if not _is_answer(answer):
            raise DataError(f"{path}: answers[{n}] has no row_id and reward. {_WRITTEN_BY}")
        reward = answer["reward"]
        if reward is not None and reward == reward:  # JSON of Python's may have NaN
            found.setdefault(answer["row_id"], []).append(reward)
    return {row_id: _rate(rewards, above) for row_id, rewards in found.items()}


def _pass_above(section: object) -> float | None:
    """What a `report`, or the `eval` of a recipe, says of it. None: nothing that could be meant."""
    value = section.get("pass_above", PASS_ABOVE) if isinstance(section, dict) else PASS_ABOVE
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _is_answer(value: Any) -> bool:
    """Whether it has a row's id, and a reward or none."""
    if not isinstance(value, dict) or not isinstance(value.get("row_id"), str):
        return False
    reward = value.get("reward", "")
    return reward is None or (isinstance(reward, int | float) and not isinstance(reward, bool))


_WRITTEN_BY = "Give what `asyncrl profile` or `asyncrl eval --json FILE` wrote, or the folder of a run"


def _of_run(folder: Path) -> dict[str, float]:
    parts = sorted((folder / ARCHIVE).glob("step-*.parquet"))
    if not parts:
        raise DataError(f"{folder} has no {ARCHIVE}/step-*.parquet: it is not the folder of a run that has trained")
    newest: dict[str, _Group] = {}
    for part in parts:
        for group in _groups(part):
            if group.rewards and (group.row_id not in newest or group.trained >= newest[group.row_id].trained):
                newest[group.row_id] = group
    above = _above_of_run(folder)
    return {row_id: _rate(group.rewards, above) for row_id, group in newest.items()}


def _above_of_run(folder: Path) -> float:
    """As its own recipe measures success. An archive may also lie by itself."""
    try:
        recipe = parse((folder / "recipe.yaml").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return PASS_ABOVE
    except (OSError, UnicodeDecodeError, YamlTextError) as error:
        raise DataError(f"{folder / 'recipe.yaml'} cannot be read: {error}") from error
    above = _pass_above(recipe.get("eval") if isinstance(recipe, dict) else None)
    if above is None:
        raise DataError(f"{folder / 'recipe.yaml'}: eval.pass_above is no number")
    return above


class _Group(NamedTuple):
    row_id: str
    trained: tuple[int, int]  # lineage and version of the step
    rewards: list[float]  # of its scored members: their outcome


def _groups(part: Path) -> Iterable[_Group]:
    import pyarrow as pa  # here: only a run with a curriculum has a use for it, and it takes a while
    import pyarrow.parquet as pq

    groups: dict[int, _Group] = {}
    try:
        rows = pq.read_table(part, columns=list(COLUMNS)).to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{part} cannot be read: {error}") from error
    for row in rows:
        if row["segment"] == 0:
            trained = (row["trained_lineage"], row["trained_version"])
            group = groups.setdefault(row["ticket"], _Group(row["row_id"], trained, []))
            group.rewards.extend(_scored(row))
    return groups.values()


def _scored(row: Mapping[str, Any]) -> list[float]:
    reward = row["reward"]
    if reward is None or math.isnan(reward):
        return []
    return [json.loads(row["info"] or "{}").get(OUTCOME, reward)]


def _rate(rewards: list[float], above: float) -> float:
    return sum(reward > above for reward in rewards) / len(rewards)
