"""Rules of the task `agent`, and of the endpoint that agents call."""

from __future__ import annotations

import re

from asyncrl.config.errors import RecipeError, quoted
from asyncrl.config.recipe import AgentTask, EndpointConfig

_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def check_agent(key: str, task: AgentTask, endpoint: EndpointConfig) -> None:
    """Raise RecipeError for keys that cannot be meant. Nothing is loaded or looked for. `key`: of the task."""
    if (task.agent is None) == (task.command is None):
        both = f"{key}.agent", f"{key}.command"
        said = "neither {} nor {}".format(*both) if task.agent is None else "both {} and {}".format(*both)
        raise RecipeError(
            f"{key} has {said}; write one: agent: my_agent:run for a function, or command: [python, my_agent.py]"
        )
    if task.agent is not None and not _FUNCTION.fullmatch(task.agent):
        raise RecipeError(f"{key}.agent is {quoted(task.agent)}; write module:function, such as my_agent:run")
    if task.command is not None and not (task.command and task.command[0]):
        raise RecipeError(f"{key}.command is {quoted(task.command)}; write a program first, such as [python, agent.py]")
    if not endpoint.host:
        raise RecipeError("collector.endpoint.host is empty; write an address, such as 127.0.0.1")
