"""`agent`: rows from files for an agent of the user's, which calls the policy as often as it likes."""

from __future__ import annotations

import importlib.util
import inspect
import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from asyncrl.config.recipe import AgentTask, SingleTurnTask
from asyncrl.tasks.base import NotInstalled, Row, TaskError
from asyncrl.tasks.modules import load
from asyncrl.tasks.single_turn import SingleTurn

if TYPE_CHECKING:
    from asyncrl.tasks.prompt_length import PromptLimit


class Agent(SingleTurn):
    """The task. The last answer of an agent that gives no reward itself is scored as one of `single-turn`."""

    name = "agent"

    def __init__(self, config: AgentTask, *, key: str = "task", limit: PromptLimit | None = None) -> None:
        """As SingleTurn."""
        rows = SingleTurnTask(data=config.data, rewards=config.rewards, chat_template_args=config.chat_template_args)
        super().__init__(rows, key=key, limit=limit)


def check_agent(config: AgentTask) -> None:
    """Raise TaskError for an agent that could not run here. Loads it, if it is a function."""
    if importlib.util.find_spec("aiohttp") is None:
        raise NotInstalled("task.type agent needs aiohttp: pip install 'asyncrl[agent]' (docs/agents.md)")
    if config.agent is not None:
        load_agent(config.agent)
    if config.command is not None and shutil.which(config.command[0]) is None:
        raise TaskError(
            f"task.command: there is no program {config.command[0]} here, or it cannot be executed; write its path, "
            "relative to the folder that the run starts in, or add its folder to PATH"
        )


def load_agent(name: str) -> Callable[[Row, Any], Any]:
    """The function "module:function" of `task.agent`. Raises TaskError, also for one that cannot be called with a row
    and an endpoint."""
    agent: Callable[[Row, Any], Any] = load("task.agent", name, "function")
    try:
        inspect.signature(agent).bind(None, None)
    except TypeError as error:
        function = name.rpartition(":")[2]
        raise TaskError(
            f"task.agent {name} cannot be called with a row and an endpoint ({error}): write `async def "
            f"{function}(row, endpoint)`"
        ) from None
    except ValueError:  # some functions written in C do not tell
        pass
    return agent
