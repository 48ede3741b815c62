"""`verifiers`: tasksets of that package (0.4), one answer to each task, scored by the taskset's own reward functions.

A taskset has tasks; a task has data, its prompt among them, and methods that score a trace, the record of a
conversation. In the package a harness runs the model; here a collector does, in the way of the harness `null` without
tools: system prompt and prompt are answered once. In the verifier's process the answer becomes a trace, and the task's
`setup`, `finalize` and reward functions run, in this order. What needs more than an answer is refused by name, unless
the recipe's `task.env` says who plays it (`environments/verifiers.py`).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

from asyncrl.tasks.base import Answer, Message, Row, Split, TaskError
from asyncrl.tasks.chat import conversation
from asyncrl.tasks.modules import complaint
from asyncrl.tasks.verifiers_package import (
    configuration,
    env_configuration,
    package,
    part,
    refuse_more_than_an_answer,
)

if TYPE_CHECKING:
    from asyncrl.config.packages import VerifiersTask

logger = logging.getLogger(__name__)


class Verifiers:
    """The task. A reward part is a reward function, a plugged one or a judge, by its name and with its weight."""

    name = "verifiers"

    def __init__(self, config: VerifiersTask) -> None:
        self._config = config
        self._where = f"task.environment {config.environment}"
        self._vf = package()
        self._own = configuration(config.environment, config.args)
        self._task_type: Any = self._vf.task_type(config.environment)
        # Its methods and their configuration, without data: verifier processes read no rows.
        hooks: Any = object.__new__(self._task_type)
        hooks.config = self._own.task
        self._weights = self._reward_weights(hooks)
        self.plays = config.env is not None
        if config.env is not None:
            env_configuration(config.environment, config.args, config.env)
        else:
            refuse_more_than_an_answer(config.environment, self._own, hooks)
        import asyncio  # a worker of any task loads this module, and few need that one

        self._runner = asyncio.Runner()  # one loop for all scores: clients of judges outlive a call

    def rows(self, split: Split) -> Sequence[Row]:
        """Ids are positions in the taskset. Raises TaskError."""
        return self._splits[split]

    def messages(self, row: Row) -> list[Message]:
        return conversation(row.prompt)

    def score(self, row: Row, answer: Answer) -> Mapping[str, float]:
        """Raises what the task's code raises, which leaves the answer unscored."""
        return self._runner.run(self._score(row, answer))

    def part_weights(self) -> Mapping[str, float]:
        return self._weights

    def parts(self, trace: Any) -> dict[str, float]:
        """The rewards of a trace. Raises ValueError for one whose weight was not known before."""
        for name, reward in trace.rewards.items():
            if reward.weight != self._weights.get(name, 1.0):
                raise ValueError(
                    f"the reward {name!r} has the weight {reward.weight:g} of a function that returns scores by name; "
                    "give that function the weight 1 and let it return what they are to count"
                )
        return {name: reward.score for name, reward in trace.rewards.items()}

    def restored(self, row: Row) -> Any:
        """The package's own task that a row was made of."""
        return self._task_type(self._task_type.data_type().model_validate(row.info["task"]), config=self._own.task)

    # --- rows ---------------------------------------------------------------------------------------------------------

    @cached_property
    def _splits(self) -> dict[Split, list[Row]]:
        from asyncrl.data.split import prompt_key, shared_prompts, split_heldout  # a verifier process needs no rows

        train: list[Any] = self._load(self._own)  # rows; the split takes whatever has a prompt
        if self._config.heldout_args is not None:
            args = {**self._config.args, **self._config.heldout_args}
            heldout: list[Any] = self._load(configuration(self._config.environment, args))
            if shared := shared_prompts(train, heldout):
                logger.warning("%s: %d held-out prompts are also trained", self._where, shared)
            return {"train": train, "heldout": heldout}
        if len({prompt_key(row.prompt) for row in train}) < 2:
            raise TaskError(
                f"{self._where}: all {len(train)} tasks have the same prompt, so that none can be held out: give what "
                "loads others as task.heldout_args, such as {split: test}"
            )
        train, heldout = split_heldout(train)
        return {"train": train, "heldout": heldout}

    def _load(self, own: Any) -> list[Row]:
        try:
            taskset = self._vf.load_taskset(own)
            tasks = None if not (taskset.bounded or self._config.rows) else list(islice(taskset, self._config.rows))
        except (Exception, SystemExit) as error:
            raise TaskError(f"{self._where}: loading its tasks raised {complaint(error)}") from error
        if tasks is None:
            raise TaskError(f"{self._where} has tasks without end: write how many are to be used as task.rows")
        if not tasks:
            raise TaskError(f"{self._where} has no tasks, with task.args {self._config.args}")
        return [self._row(task) for task in tasks]

    def _row(self, task: Any) -> Row:
        where = f"{self._where}: task {task.data.idx}"
        prompt: list[Message] = []
        for message in self._prompt(where, task.data):
            prompt.append({"role": message.role, "content": message.content})
        sent = task.data.model_dump(mode="json")
        try:
            arrived = self._task_type.data_type().model_validate(sent)
        except Exception as error:
            raise TaskError(f"{where} cannot be sent to the verifier's process: {complaint(error)}") from error
        if type(task) is not self._task_type or arrived != task.data or task.config != self._own.task:
            raise TaskError(
                f"{where} would not be itself in the verifier's process, which makes a {self._task_type.__name__} of "
                "its data, as JSON, and the taskset's config.task: let load() give tasks made of these"
            )
        expected = getattr(task.data, "answer", None)
        answer = expected if isinstance(expected, str | int | float) else None
        return Row(str(task.data.idx), prompt, answer, {"task": sent})

    def _prompt(self, where: str, data: Any) -> list[Any]:
        """What the model answers, in the package's types. Raises TaskError."""
        if data.prompt is None:
            raise TaskError(f"{where} has no prompt: it waits for a user who begins, and here the model only answers")
        if self._config.env is None and (data.image is not None or data.skills):
            raise TaskError(f"{where} wants {'a container' if data.image else 'skills'}; here the model only answers")
        messages = [self._vf.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else list(data.prompt)
        if data.system_prompt is not None:
            messages.insert(0, self._vf.SystemMessage(content=data.system_prompt))
        for message in messages:
            if message.role == "tool" or getattr(message, "tool_calls", None) or not isinstance(message.content, str):
                raise TaskError(f"{where} has more than text in its prompt: {message!r:.200}")
        return messages

    # --- scores -------------------------------------------------------------------------------------------------------

    async def _score(self, row: Row, answer: Answer) -> Mapping[str, float]:
        task = self.restored(row)
        trace = self._trace(task, answer)
        if self._uses_runtime(task):
            invoke, box = part("utils.decorators").invoke, self._vf.SubprocessConfig()
            async with part("runtimes").provision_runtime(box, trace.id, task.runtime_env()) as runtime:
                await invoke(task.setup, {"trace": trace, "runtime": runtime})
                await invoke(task.finalize, {"trace": trace, "runtime": runtime})
                await task.score(trace, runtime)
        else:
            await task.score(trace)
        return self.parts(trace)

    def _trace(self, task: Any, answer: Answer) -> Any:
        """The conversation as the harness would have left it: the prompt's messages, then the model's."""
        vf = self._vf
        messages = [*self._prompt(self._where, task.data), vf.AssistantMessage(content=answer.text)]
        last = len(messages) - 1
        trace = vf.Trace(
            task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
            state=part("state").state_cls(type(task))(),
            agent=vf.AgentInfo(config=vf.AgentConfig(runtime=vf.SubprocessConfig())),
            nodes=[
                vf.MessageNode(parent=n - 1 if n else None, message=message, sampled=n == last)
                for n, message in enumerate(messages)
            ],
            calls=[
                vf.ModelCall(
                    node=last,
                    finish_reason="stop" if answer.finish_reason == "stop" else "length",
                    # A verifier is not told how long a prompt was.
                    usage=vf.Usage(prompt_tokens=0, completion_tokens=len(answer.token_ids)),
                )
            ],
        )
        trace.stop("agent_completed")
        return trace

    def _uses_runtime(self, task: Any) -> bool:
        """Whether its code may want what the package calls a runtime: a folder, and processes in it."""
        base = self._vf.Task
        if type(task).setup is not base.setup or type(task).finalize is not base.finalize:
            return True
        hooks = [*task.hooks("metric"), *task.hooks("reward"), *(judge.score for judge in task.plugged_judges())]
        return any("runtime" in inspect.signature(hook).parameters for hook in hooks)

    def _reward_weights(self, hooks: Any) -> dict[str, float]:
        """Of what does not weigh 1. Raises TaskError without any reward."""
        rewards = {hook.__name__: float(getattr(hook, "_vf_weight", 1.0)) for hook in hooks.hooks("reward")}
        rewards |= {judge.reward_name: float(judge.config.weight) for judge in hooks.plugged_judges()}
        if not rewards and self._config.env is None:  # an Env may have rewards of its own
            raise TaskError(
                f"{self._where} has no reward function: decorate a method of its {self._task_type.__name__} with "
                "@vf.reward, or name one in task.args: {task: {rewards: {NAME: {fn: 'module:function'}}}}"
            )
        return {name: weight for name, weight in rewards.items() if weight != 1.0}
