"""Whether a task of several turns can be played with this model and recipe: asked before a run begins."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

from asyncrl.config import recipe
from asyncrl.tasks.agent import Agent
from asyncrl.tasks.base import Message, Task, TaskError
from asyncrl.tasks.build import CustomTask
from asyncrl.tasks.chat import Shown, template_text, unseen
from asyncrl.tasks.mixture import Mixture
from asyncrl.tasks.tools import schemas
from asyncrl.tasks.verifiers import Verifiers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

PROBE = "a result of 4711"


def converses(task: Task) -> bool:
    """Whether an episode may have several answers; of a mixture: one of any of its tasks."""
    if isinstance(task, Mixture):
        return any(map(converses, task.tasks.values()))
    own = isinstance(task, CustomTask) and (bool(task.tools) or task.environment is not None)
    return own or isinstance(task, Agent) or (isinstance(task, Verifiers) and task.plays)


def tool_schemas(task: Task) -> list[dict[str, Any]]:
    """What a chat template is told of the task's tools; [] without any. Raises TaskError."""
    return schemas(task.tools, f"task.type {task.name}") if isinstance(task, CustomTask) else []


def check_turns(task: Task, *, max_turns: int) -> None:
    """Raise TaskError where an episode could not be played anywhere."""
    if isinstance(task, Mixture):
        for one in task.tasks.values():
            check_turns(one, max_turns=max_turns)
        return
    if not converses(task):
        return
    if not sys.platform.startswith("linux"):
        raise TaskError(f"task.type {task.name} has episodes of several turns, whose processes need Linux")
    if isinstance(task, CustomTask) and task.tools and max_turns == 1:
        raise TaskError(
            f"task.type {task.name} has tools, but collector.max_turns is 1: no answer could follow a result. Use 2 or "
            "more"
        )


def check_template_turns(task: Task, config: recipe.Task, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise TaskError where the model's chat template cannot show it what tools gave back."""
    if isinstance(task, Mixture):
        for own, one in zip(recipe.tasks_by_key(config).values(), task.tasks.values(), strict=True):
            check_template_turns(one, own, tokenizer)
        return
    if not isinstance(task, CustomTask) or not task.tools or not isinstance(config, recipe.CustomTask):
        return
    told: Shown = {"tools": tool_schemas(task), "arguments": config.chat_template_args}
    asked: list[Message] = [{"role": "user", "content": "a question"}]
    result: Message = {"role": config.tool_role, "content": PROBE}
    if config.tool_role == "tool":
        result |= {"name": next(iter(task.tools)), "tool_call_id": "call00001"}
    fix = "Use a model whose template has it, or task.tool_role: user, with which results are messages of the user's."
    try:
        text = template_text(tokenizer, [*asked, {"role": "assistant", "content": "a call"}, result], **told)
    except TaskError as error:
        raise TaskError(f"{str(error).splitlines()[0]}\n{fix}") from error
    if PROBE not in text:
        raise TaskError(f"the chat template leaves out messages of the role {config.tool_role}.\n{fix}")
    if "tools" in unseen(tokenizer, asked, told):
        logger.warning("the chat template tells the model nothing of tools: say in the prompt what there is to call")
