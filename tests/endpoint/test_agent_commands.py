"""Agents that are commands: what they are given, what of what they print counts, how they fail."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.endpoint.played_agents import Parts, started

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.faults]

COMMAND = """
import json, os, sys, urllib.request

row = json.load(sys.stdin)
assert row == json.loads(os.environ["ASYNCRL_ROW"])
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"messages": [{"role": "user", "content": row["prompt"]}]}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
answer = json.load(urllib.request.urlopen(request, timeout=10))["choices"][0]["message"]["content"]
print("some words")
exec(row["info"]["agent"])
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def commands(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Parts]:
    folder = tmp_path_factory.mktemp("commands")
    (folder / "program.py").write_text(COMMAND)
    async with started(folder, command=[sys.executable, str(folder / "program.py")]) as parts:
        yield parts


GOOD = 'print(json.dumps({"right": float(answer == row["answer"])}))'


async def test_a_command_is_an_agent_and_its_last_line_the_reward(commands):
    for episode in await commands.play(GOOD, times=2):
        assert (episode.score.reward, episode.score.parts) == (1.0, {"right": 1.0})


COMMAND_FAULTS = [
    ("sys.exit(3)", "agent_raised", "exit code 3"),
    ("print('well done')", "agent_invalid", "last line is 'well done'"),
    ("print('null')", "agent_none", "no reward"),
    ("print('NaN')", "agent_nan", "NaN"),
    ("os.kill(os.getpid(), 9)", "agent_raised", "exit code -9"),
]


@pytest.mark.parametrize(("end", "failure", "said"), COMMAND_FAULTS, ids=[said for *_, said in COMMAND_FAULTS])
async def test_a_command_that_fails_has_a_name(commands, end, failure, said):
    (episode,) = await commands.play(end)
    assert (episode.score.failure, len(episode.turns)) == (failure, 1)
    assert said in episode.info["error"]
