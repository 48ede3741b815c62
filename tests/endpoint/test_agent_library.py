"""A published agent library, as it is, over the endpoint: smolagents, with the tools of OpenAI's API and with code."""

from __future__ import annotations

import asyncio
import json

import pytest
import smolagents

from asyncrl.collectors.episode import Played
from asyncrl.collectors.segments import trajectories
from asyncrl.rewards.scoring import Score

pytestmark = [pytest.mark.asyncio, pytest.mark.slow]  # the library takes seconds to import


class Add(smolagents.Tool):
    name = "add"
    description = "Adds two numbers."
    inputs = {  # noqa: RUF012  # as the library has it
        "a": {"type": "integer", "description": "the one"},
        "b": {"type": "integer", "description": "the other"},
    }
    output_type = "integer"

    def forward(self, a: int, b: int) -> int:
        return a + b


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def run(kit, kind, answers, **model):
    """What the agent comes to, and the session; the policy gives these answers one after the other."""
    async with kit.listening() as house:
        left = iter(answers)
        seat = house.seat(kit.policy(lambda request: next(left)), max_tokens=2000, max_length=None)

        def work():
            served = smolagents.OpenAIModel(
                model_id="policy", api_base=seat.endpoint.base_url, api_key=seat.key, **model
            )
            agent = kind(tools=[Add()], model=served, max_steps=4, verbosity_level=smolagents.LogLevel.OFF)
            return agent.run("What is 19 and 23?")

        return await asyncio.to_thread(work), seat.session


def trained(session):
    rows = trajectories(Played(session.turns, Score({"reward": 1.0}, 1.0, ""), 3.0, "stop"))
    return sum(int(row.loss_mask.sum()) for row in rows)


def sampled(session):
    return sum(len(turn.completion.token_ids) for turn in session.turns)


async def test_an_agent_that_calls_tools_runs_as_it_is(kit):
    answers = [f"I add.\n{call('add', a=19, b=23)}", call("final_answer", answer="42")]
    found, session = await run(kit, smolagents.ToolCallingAgent, answers)
    assert str(found) == "42"
    assert len(session.turns) == 2
    assert "42" in kit.tokenizer.decode(session.turns[1].request.token_ids)
    assert trained(session) == sampled(session) > 0


async def test_an_agent_that_writes_code_runs_as_it_is(kit):
    answers = ["Thought: I add.\n<code>\nprint(add(19, 23))\n</code>", "<code>\nfinal_answer(42)\n</code>"]
    found, session = await run(kit, smolagents.CodeAgent, answers)
    assert found == 42
    assert len(session.turns) == 2
    assert trained(session) == sampled(session) > 0
