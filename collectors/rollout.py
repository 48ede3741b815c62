"""From a ticket to its prompt: which row, and how it is presented.

All of it is a function of the recipe and the ticket, so that a ticket that is issued again gets the same prompt,
wherever it is generated.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from asyncrl.collectors.engines.base import Sampling
from asyncrl.config.recipe import MixtureTask, Recipe, mixed_tasks
from asyncrl.data.errors import RowError
from asyncrl.tasks.base import Message, Row, Task
from asyncrl.tasks.build import build_task
from asyncrl.tasks.chat import NO_ARGUMENTS, Shown, check_template, end_token_ids, render, unseen
from asyncrl.tasks.conversing import check_template_turns, check_turns, tool_schemas
from asyncrl.tasks.mixture import Mixture, mixed_row, own_row, task_of
from asyncrl.tasks.prompt_length import PromptLimit
from asyncrl.tasks.shares import Shares
from asyncrl.tasks.single_turn import SingleTurn
from asyncrl.tasks.tools import row_tools
from asyncrl.tasks.training import RowOf, train_rows

logger = logging.getLogger(__name__)

SIMULATED = "simulated"  # the name of its task
SIMULATED_PROMPT = (1, 2, 3)  # a simulated engine reads no prompt; a record needs one


class PromptError(Exception):
    """A row of `task` cannot be generated for. `reason` is the class it is counted under: row_error, row_error/REASON
    (why a row of a file cannot be used), prompt_too_long."""

    def __init__(self, reason: str, detail: str, *, task: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.task = task


@dataclass(frozen=True, slots=True)
class Prompt:
    """A row of `task` as the model sees it."""

    row: Row
    token_ids: tuple[int, ...]
    task: str
    mixed: bool = False  # the row is a mixture's

    @property
    def own_row(self) -> Row:
        """The row as its own task made it, which is what environments and agents get."""
        return own_row(self.row) if self.mixed else self.row

    @property
    def text(self) -> str:
        """What a person reads: the last message."""
        prompt = self.row.prompt
        return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])


class Prompts(Protocol):
    """Where prompts come from, and how answers are read."""

    stop_token_ids: tuple[int, ...]

    def train(self, ordinal: int) -> Prompt:
        """The prompt of a ticket. Raises PromptError."""

    def heldout(self, index: int) -> Prompt:
        """One of `heldout_rows` prompts nobody trains on. Raises PromptError."""

    @property
    def heldout_rows(self) -> int: ...

    def read(self, token_ids: list[int]) -> str:
        """The text of an answer, without its end token."""


class TaskPrompts:
    """The rows of the recipe's task, or of several, through the model's own chat template. Implements Prompts."""

    def __init__(
        self,
        task: Task,
        limit: PromptLimit,
        *,
        train_row: RowOf,
        stop_token_ids: tuple[int, ...],
        template_args: Mapping[str, Mapping[str, Any]] = NO_ARGUMENTS,
    ) -> None:
        """`train_row`: the row of an ordinal. `template_args`: what the chat template gets besides messages and tools,
        by name of the row's task."""
        self.stop_token_ids = stop_token_ids
        self.tokenizer, self.max_length, self._limit = limit.tokenizer, limit.max_length, limit
        self.tasks = task.tasks if isinstance(task, Mixture) else {task.name: task}
        self._tools = {name: tool_schemas(one) for name, one in self.tasks.items()}
        self._task, self._train_row, self._template_args = task, train_row, template_args

    @classmethod
    def load(cls, recipe: Recipe, model_path: Path) -> TaskPrompts:
        """Build the task and load the model's tokenizer, end tokens and length. Raises what those raise."""
        # Here: importing it takes seconds, and a simulated collector has no use for it.
        from transformers import GenerationConfig

        limit = PromptLimit.load(
            model_path, given=recipe.model.max_length, trust_remote_code=recipe.model.trust_remote_code
        )
        tokenizer = limit.tokenizer
        check_template(tokenizer)  # now: without one, every single row would fail
        own_generation = (model_path / "generation_config.json").is_file()
        generation = GenerationConfig.from_pretrained(model_path) if own_generation else None
        task = build_task(recipe.task, seed=recipe.run.seed, limit=limit)
        check_turns(task, max_turns=recipe.collector.max_turns)
        check_template_turns(task, recipe.task, tokenizer)
        mixed = mixed_tasks(recipe.task) if isinstance(recipe.task, MixtureTask) else {task.name: recipe.task}
        prompts = cls(
            task,
            limit,
            train_row=train_rows(task, recipe.task, seed=recipe.run.seed),
            template_args={name: one.chat_template_args for name, one in mixed.items()},
            stop_token_ids=end_token_ids(tokenizer, generation),
        )
        prompts.warn_of_data()
        prompts.warn_of_unseen()
        return prompts

    def train(self, ordinal: int) -> Prompt:
        return self._prompt(lambda: self._train_row(ordinal))

    def heldout(self, index: int) -> Prompt:
        return self._prompt(lambda: self._task.rows("heldout")[index])

    @property
    def heldout_rows(self) -> int:
        return len(self._task.rows("heldout"))

    def read(self, token_ids: list[int]) -> str:
        if token_ids and token_ids[-1] in self.stop_token_ids:
            token_ids = token_ids[:-1]
        # Special tokens in the middle are shown: an answer that contains them is not the answer without them.
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def messages(self, row: Row) -> list[Message]:
        """A row's conversation. Raises what the task raises."""
        return self._task.messages(row)

    def shown(self, row: Row) -> Shown:
        """What the chat template gets of a row besides its messages. Raises TaskError for tools that are none."""
        name = self._name_of(row)
        tools = self._tools[name] or row_tools(row) or None
        return {"tools": tools, "arguments": self._template_args.get(name, NO_ARGUMENTS)}

    def tools(self, name: str) -> list[dict[str, Any]]:
        """What a chat template is told of the tools of a task; [] without any."""
        return self._tools[name]

    def warn_of_data(self) -> None:
        """Warn of rows of files that are left out or look wrong."""
        for task in self._task.tasks.values() if isinstance(self._task, Mixture) else [self._task]:
            if isinstance(task, SingleTurn):
                for warning in task.dataset.warnings:
                    logger.warning("%s", warning)

    def warn_of_unseen(self) -> None:
        """Warn where the template does not show what it is given, by each task's first row."""
        for index in range(len(self._task.tasks) if isinstance(self._task, Mixture) else 1):
            try:
                row = self._task.rows("train")[index]
                found = unseen(self.tokenizer, self.messages(row), self.shown(row))
            except Exception:  # a row that cannot be shown fails its own tickets, by name, and ends no run
                continue
            for name in found:
                logger.warning(
                    "row %s: %s changes nothing in the prompt: the chat template does not know it, or does the same by "
                    "itself",
                    *(row.id, name),
                )

    def _name_of(self, row: Row) -> str:
        return task_of(row.id) if isinstance(self._task, Mixture) else self._task.name

    def _prompt(self, read: Callable[[], Row]) -> Prompt:
        task = self._task.name
        try:
            row = read()
            task = self._name_of(row)
            token_ids = tuple(render(self.tokenizer, self.messages(row), **self.shown(row)))
        except RowError as error:  # of a very large file, whose rows are not all looked at before
            raise PromptError(f"row_error/{error.reason}", str(error), task=task) from error
        except Exception as error:  # rows and messages are the user's program: they raise what they like
            raise PromptError("row_error", f"{type(error).__name__}: {error}", task=task) from error
        if self._limit.longest is not None and len(token_ids) > self._limit.longest:
            detail = f"row {row.id}: the prompt has {len(token_ids):,} tokens, but {self._limit.said}"
            raise PromptError("prompt_too_long", detail, task=task)
        return Prompt(row, token_ids, task, mixed=isinstance(self._task, Mixture))


class SimulatedPrompts:
    """For an engine without a model: the same few tokens for every ticket. Implements Prompts.

    weights: of a mixture's tasks, by name; a ticket is of the task that it would be of with a model. None: no mixture.
    """

    stop_token_ids: tuple[int, ...] = ()

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._names = list(weights or ())
        self._shares = Shares(list(weights.values())) if weights else None

    def train(self, ordinal: int) -> Prompt:
        if self._shares is None:
            return _simulated(f"simulated-{ordinal}")
        which, drawn = self._shares.deal(ordinal)
        return _simulated(f"simulated-{drawn}", self._names[which])

    def heldout(self, index: int) -> Prompt:
        return _simulated(f"simulated-heldout-{index}", self._names[index % len(self._names)] if self._names else None)

    @property
    def heldout_rows(self) -> int:
        return len(self._names) or 1

    def read(self, token_ids: list[int]) -> str:
        return f"({len(token_ids)} simulated tokens)"


def _simulated(row_id: str, name: str | None = None) -> Prompt:
    """`name`: of the mixture's task."""
    row = Row(id=row_id, prompt="(simulated)")
    if name is None:
        return Prompt(row, SIMULATED_PROMPT, SIMULATED)
    return Prompt(mixed_row(name, row), SIMULATED_PROMPT, name, mixed=True)


def sampling_of(recipe: Recipe, stop_token_ids: tuple[int, ...]) -> Sampling:
    """The recipe's sampling as an engine takes it."""
    config = recipe.collector.sampling
    return Sampling(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        max_tokens=config.max_tokens,
        min_tokens=config.min_tokens,
        stop_token_ids=stop_token_ids,
        stop=tuple(config.stop),
    )


def run_of(name: str, seed: int) -> str:
    """What seeds are a function of: the same recipe name under another seed samples otherwise."""
    return f"{name}/{seed}"
