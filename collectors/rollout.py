"""From a ticket to its prompt: which row, and how it is presented.

All of it is a function of the recipe and the ticket, so that a ticket that is issued again gets the same prompt,
wherever it is generated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from asyncrl.collectors.engines.base import Sampling
from asyncrl.config.recipe import Recipe
from asyncrl.tasks.base import Message, Row, Split, Task
from asyncrl.tasks.build import build_task, shuffled
from asyncrl.tasks.chat import check_template, end_token_ids, render
from asyncrl.tasks.conversing import check_template_turns, check_turns, converses, tool_schemas
from asyncrl.tasks.order import row_index

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SIMULATED = "simulated"  # the name of its task
SIMULATED_PROMPT = (1, 2, 3)  # a simulated engine reads no prompt; a record needs one


class PromptError(Exception):
    """A row of `task` cannot be generated for. `reason` is the class it is counted under: row_error,
    prompt_too_long."""

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
    """The rows of the recipe's task through the model's own chat template. Implements Prompts."""

    def __init__(
        self,
        task: Task,
        tokenizer: PreTrainedTokenizerBase,
        *,
        seed: int,
        shuffle: bool,
        max_length: int | None,
        stop_token_ids: tuple[int, ...],
    ) -> None:
        """`max_length`: tokens of prompt and answers together; None: unbounded."""
        self.stop_token_ids = stop_token_ids
        self.tokenizer, self.max_length = tokenizer, max_length
        self.tools = tool_schemas(task)
        self.converses = converses(task)
        self._task = task
        self._seed, self._shuffle = seed, shuffle

    @classmethod
    def load(cls, recipe: Recipe, model_path: Path) -> TaskPrompts:
        """Build the task and load the model's tokenizer, end tokens and length. Raises what those raise."""
        # Here: importing it takes seconds, and a simulated collector has no use for it.
        from transformers import AutoConfig, AutoTokenizer, GenerationConfig

        trust = recipe.model.trust_remote_code
        tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=trust)
        check_template(tokenizer)  # now: without one, every single row would fail
        config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust)
        own_generation = (model_path / "generation_config.json").is_file()
        generation = GenerationConfig.from_pretrained(model_path) if own_generation else None
        own_length = getattr(config.get_text_config(), "max_position_embeddings", None)
        task = build_task(recipe.task, seed=recipe.run.seed)
        check_turns(task, max_turns=recipe.collector.max_turns)
        check_template_turns(task, recipe.task, tokenizer)
        return cls(
            task,
            tokenizer,
            seed=recipe.run.seed,
            shuffle=shuffled(recipe.task),
            max_length=min((n for n in (recipe.model.max_length, own_length) if n is not None), default=None),
            stop_token_ids=end_token_ids(tokenizer, generation),
        )

    def train(self, ordinal: int) -> Prompt:
        def index(rows: int) -> int:
            return row_index(ordinal, rows, seed=self._seed, shuffle=self._shuffle)

        return self._prompt("train", index)

    def heldout(self, index: int) -> Prompt:
        return self._prompt("heldout", lambda _: index)

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

    def _prompt(self, split: Split, index: Callable[[int], int]) -> Prompt:
        try:
            rows = self._task.rows(split)
            row = rows[index(len(rows))]
            token_ids = tuple(render(self.tokenizer, self.messages(row), tools=self.tools or None))
        except Exception as error:  # rows and messages are the user's program: they raise what they like
            raise PromptError("row_error", f"{type(error).__name__}: {error}", task=self._task.name) from error
        if self.max_length is not None and len(token_ids) > self.max_length - 1:
            raise PromptError(
                "prompt_too_long",
                f"row {row.id} has {len(token_ids)} tokens, the model takes {self.max_length} with the answer",
                task=self._task.name,
            )
        return Prompt(row, token_ids, self._task.name)


class SimulatedPrompts:
    """For an engine without a model: the same few tokens for every ticket. Implements Prompts."""

    stop_token_ids: tuple[int, ...] = ()
    heldout_rows = 1

    def train(self, ordinal: int) -> Prompt:
        return Prompt(Row(id=f"simulated-{ordinal}", prompt="(simulated)"), SIMULATED_PROMPT, SIMULATED)

    def heldout(self, index: int) -> Prompt:
        return Prompt(Row(id=f"simulated-heldout-{index}", prompt="(simulated)"), SIMULATED_PROMPT, SIMULATED)

    def read(self, token_ids: list[int]) -> str:
        return f"({len(token_ids)} simulated tokens)"


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
