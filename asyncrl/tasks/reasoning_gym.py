"""`reasoning-gym`: the procedural questions of that package (0.1.25), which makes them and scores the answers.

A question is a function of its index, so nothing is stored and nothing but the index has to reach the verifier. It
makes the question again, with metadata of the types that the package's scores expect; a message would turn their
tuples into lists.

Both splits are stretches of the index, so no index is in both. That is not enough, since generators repeat themselves:
of the three-letter words there are few. So the held-out questions are all different, and where an index of training has
one of them, another index is taken.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.util
import os
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from asyncrl.tasks.base import Answer, Message, NotInstalled, Row, Split, TaskError
from asyncrl.tasks.chat import conversation
from asyncrl.tasks.procedural import ProceduralRows

if TYPE_CHECKING:
    from asyncrl.config.packages import GymDataset, ReasoningGymTask

HELDOUT_TRIES = 4
"""Indices looked at for each held-out row, until enough questions are different."""

TRAIN_TRIES = 100
"""Indices looked at for a training row, until one has a question that is not held out."""

STRIDE = 7919
"""Between them, a prime: the next index is the next row's, which would be asked twice in a row."""

KEPT = 256
"""Questions a verifier keeps: the answers of a group come one after the other, and some questions take 0.5 s."""

DIFFERS = ("isomorphic_strings", "polynomial_multiplication", "ransom_note")
"""Generators of 0.1.25 that walk through a set of strings, whose order Python changes from process to process."""


class ReasoningGym:
    """The task. Its one reward part, `score`, is what the package's `score_answer` says, partial credit included."""

    name = "reasoning-gym"

    def __init__(self, config: ReasoningGymTask) -> None:
        self._config = config
        self._first_train = HELDOUT_TRIES * config.heldout_rows
        self._questions = _composite(config, size=self._first_train + config.rows)
        self._question = lru_cache(KEPT)(self._questions.__getitem__)
        self._package: Any = importlib.import_module("reasoning_gym.utils")
        named: Mapping[str, str] = self._package.SYSTEM_PROMPTS
        prompt = config.system_prompt
        self._system_prompt = None if prompt is None else named.get(prompt, prompt)

    def rows(self, split: Split) -> Sequence[Row]:
        """Raises TaskError: a generator fails, or has too few different questions."""
        if split == "heldout":
            return self._heldout
        train = _TrainRows(self, self._config.rows)
        _ = train[0]
        return train

    def messages(self, row: Row) -> list[Message]:
        return conversation(row.prompt, self._system_prompt)

    def score(self, row: Row, answer: Answer) -> Mapping[str, float]:
        """An answer without the tags, or in `whole` one that was cut off, is None to the package: nearly always 0."""
        question = self._question(row.info["index"])
        if question["question"] != row.prompt:
            raise ValueError(
                f"{row.info['dataset']} made another question of index {row.info['index']} here than in the collector: "
                "set PYTHONHASHSEED=0, and have the same version of reasoning-gym in all processes"
            )
        return {"score": self._questions.score_answer(self._read(answer), question)}

    def part_weights(self) -> Mapping[str, float]:
        return {"score": 1.0}

    def train_row(self, position: int) -> Row:
        """The first question that is not held out, of this position's index and others. Raises TaskError."""
        for tries in range(TRAIN_TRIES):
            row = self._row(self._first_train + (position + tries * STRIDE) % self._config.rows)
            if row.prompt not in self._heldout_questions:
                return row
        raise TaskError(
            f"task.heldout_rows is {self._config.heldout_rows}, and {TRAIN_TRIES} questions for training are all "
            "held out: there are few different ones.\nLower it, or give the generator a config with more of them"
        )

    @cached_property
    def _heldout(self) -> list[Row]:
        rows: dict[str | Sequence[Message], Row] = {}
        for index in range(self._first_train):
            row = self._row(index)
            rows.setdefault(row.prompt, row)
            if len(rows) == self._config.heldout_rows:
                return list(rows.values())
        raise TaskError(
            f"task.heldout_rows is {self._config.heldout_rows}, but the first {self._first_train} questions have only "
            f"{len(rows)} different ones.\nUse {max(1, len(rows) // 2)} or less, so that some are left for training, "
            "or give the generator a config with more of them"
        )

    @cached_property
    def _heldout_questions(self) -> frozenset[object]:
        return frozenset(row.prompt for row in self._heldout)

    def _row(self, index: int) -> Row:
        try:
            question = self._questions[index]
        except Exception as error:
            raise TaskError(f"task.datasets: question {index} cannot be made: {_said(error)}") from error
        dataset = question["metadata"]["source_dataset"]
        return Row(str(index), question["question"], question["answer"], {"dataset": dataset, "index": index})

    def _read(self, answer: Answer) -> str | None:
        if self._config.answer == "tagged":
            extracted: str | None = self._package.extract_answer(answer.text)
            return extracted
        return answer.text.strip() if answer.finish_reason == "stop" else None


class _TrainRows(ProceduralRows):
    def __init__(self, task: ReasoningGym, size: int) -> None:
        super().__init__(size)
        self._task = task

    def row(self, position: int) -> Row:
        return self._task.train_row(position)


def _composite(config: ReasoningGymTask, *, size: int) -> Any:
    """The package's own mixture of datasets, also of one. Raises TaskError."""
    if importlib.util.find_spec("reasoning_gym") is None:
        raise NotInstalled(
            "task.type is reasoning-gym, and the package of that name is not installed: "
            "pip install 'asyncrl[reasoning-gym]' (docs/packages.md)"
        )
    known: Mapping[str, tuple[type, type]] = importlib.import_module("reasoning_gym.factory").DATASETS
    module: Any = importlib.import_module("reasoning_gym.composite")
    for dataset in config.datasets:
        _check(dataset, known)
    specs = [module.DatasetSpec(one.name, one.weight, dict(one.config)) for one in config.datasets]
    try:
        return module.CompositeDataset(module.CompositeConfig(seed=0, size=size, datasets=specs))
    except Exception as error:  # generators read word lists and the like
        raise TaskError(
            f"task.datasets: {' and '.join(one.name for one in config.datasets)} cannot be built with {size} questions "
            f"(rows + {HELDOUT_TRIES} x heldout_rows): {_said(error)}"
        ) from error


def _check(dataset: GymDataset, known: Mapping[str, tuple[type, type]]) -> None:
    """Raise TaskError for a name that is no generator's, or a config that it refuses."""
    where, names = f"task.datasets: {dataset.name}", sorted(known.keys() - {"composite"})
    if dataset.name not in names:
        close = difflib.get_close_matches(dataset.name, names, n=1)
        hint = f"Did you mean {close[0]}?" if close else f"It has {', '.join(names)}"
        raise TaskError(f"{where} is none of reasoning-gym's {len(names)} datasets. {hint}")
    if dataset.name in DIFFERS and os.environ.get("PYTHONHASHSEED", "random") == "random":
        raise TaskError(
            f"{where} asks other questions in each process, as long as Python hashes text at random: start the "
            "commands with PYTHONHASHSEED=0 in their environment"
        )
    _, config_class = known[dataset.name]
    fields = [field.name for field in dataclasses.fields(config_class)]
    for key in dataset.config:
        if key not in fields:
            close = difflib.get_close_matches(key, fields, n=1)
            hint = f"Did you mean {close[0]}?" if close else f"It has {', '.join(fields)}"
            raise TaskError(f"{where} has no config {key!r}. {hint}")
    try:
        config = config_class(**dataset.config)
        if hasattr(config, "validate"):  # two have nothing to validate
            config.validate()
    except Exception as error:  # they are checked by assert, and by what comes of a value of another type
        raise TaskError(f"{where} refuses its config {dataset.config}: {_said(error)}") from error


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
