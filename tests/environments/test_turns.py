"""Episodes of several turns, over real processes: what the model is told, what is trained, how they end."""

from __future__ import annotations

import asyncio
import math
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM

from asyncrl.collectors.episode import EpisodeLost
from asyncrl.collectors.segments import trajectories
from asyncrl.learners.tiny import tiny_config
from asyncrl.learners.tiny_tokenizer import build_tokenizer
from tests.environments.scripted_turns import GAME, LIMIT_S, MAX_LENGTH, MOST_TOKENS, TOOLS, begun, call, playing, said

pytestmark = pytest.mark.asyncio
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizer and configuration; nothing samples from it here."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer(MAX_LENGTH)
    config = tiny_config(tokenizer)
    config.max_position_embeddings = MAX_LENGTH
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def tools(write_module: Callable[[str, str], str]) -> dict[str, Any]:
    return {"type": f"{write_module('tools_of_a_test', TOOLS)}:Sums", "tool_format": "json"}


@pytest.fixture
def game(write_module: Callable[[str, str], str]) -> Callable[..., dict[str, Any]]:
    name = write_module("game_of_a_test", GAME)
    return lambda **arguments: {"type": f"{name}:Game", "args": arguments}


async def test_a_tool_is_called_and_what_was_sampled_is_trained_token_for_token(
    model: Path, tools: dict[str, Any]
) -> None:
    asked = call("add", a=1, b=2)
    async with playing(model, tools) as table:
        played = await table.play(asked, "3")
        tokenizer = table.prompts.tokenizer
    (row,) = trajectories(played)
    before = "<|system|>add(a, b) fail(how)<|end|><|user|>1+2<|end|><|assistant|>"
    text = f"{before}{asked}<|end|><|tool|>3<|end|><|assistant|>3<|end|>"
    assert tokenizer.decode(row.token_ids) == text
    sampled = tokenizer.decode(row.token_ids[row.loss_mask == 1])
    assert sampled == f"{asked}<|end|>3<|end|>"
    assert row.prompt_length == len(tokenizer.encode(before))
    assert row.turn_offsets == (len(tokenizer.encode(before)), len(row.token_ids) - 2)
    assert (row.reward, row.reward_parts, row.turn_rewards) == (1.0, {"right": 1.0, "said": 3.0}, ())
    assert row.info == {"turns": 2, "tool_calls": 1, "tool_errors": 0}
    assert [message["role"] for message in played.messages] == ["assistant", "tool", "assistant"]


async def test_what_goes_wrong_in_a_call_is_told_and_the_episode_goes_on(model: Path, tools: dict[str, Any]) -> None:
    faults = {
        call("add", a=1): "Error: TypeError: missing a required argument: 'b'",
        call("add", a=1, b="x"): "Error: TypeError: argument b: Expected `int`, got `str`",
        call("subtract", a=1): "Error: there is no tool subtract; there are: add, fail",
        call("fail", how="raise"): "Error: ValueError: no such thing",
        call("fail", how="exit"): "Error: SystemExit: 3",
        call("fail", how="memory"): "Error: MemoryError:",
        call("fail", how="die"): "Error: fail ended its process",
        call("fail", how="fork"): "Error: fail ended its process",
        '{"name": 3}': "Error: this call cannot be read: a call needs a name that is a string, got 3",
    }
    async with playing(model, {**tools, "step_timeout_s": 1}) as table:
        played = await table.play(call("fail", how="hang"), "3")
        assert said(played) == ["Error: fail timed out after 1 s"]
        assert (played.score.parts["right"], played.info["tool_errors"]) == (1.0, 1)
    async with playing(model, tools) as table:
        for asked, answer in faults.items():
            played = await table.play(asked, "3")
            assert said(played) == [answer.strip()], asked
            assert (played.score.parts["right"], played.info["tool_errors"]) == (1.0, 1)  # the control is below
        many = f"[{call('add', a=1, b=1)}, {call('fail', how='die')}, {call('add', a=2, b=2)}]"
        assert said(await table.play(many, "3")) == ["2", "Error: fail ended its process", "4"]
        (long,) = said(await table.play(call("fail", how="much"), "3"))
        assert long.endswith("[cut: the result has 100000 characters]")
        played = await table.play(call("fail", how="print"), "3")
        assert (said(played), played.info["tool_errors"]) == (["printed"], 0)


async def test_a_call_that_cannot_be_read_may_end_the_episode(model: Path, tools: dict[str, Any]) -> None:
    async with playing(model, {**tools, "malformed_call": "end"}) as table:
        played = await table.play('{"name": 3}')
        assert (len(played.turns), played.score.parts["right"], played.info["tool_errors"]) == (1, 0.0, 1)


async def test_results_can_be_messages_of_the_user(model: Path, tools: dict[str, Any]) -> None:
    async with playing(model, {**tools, "tool_role": "user"}) as table:
        played = await table.play(f"[{call('add', a=1, b=1)}, {call('add', a=2, b=2)}]", "3")
    assert (said(played), said(played, "user")) == ([], ["2\n4"])


async def test_limits_end_an_episode_which_is_scored_as_it_stands(model: Path, tools: dict[str, Any]) -> None:
    asked = call("add", a=1, b=2)
    async with playing(model, tools, max_turns=2) as table:
        played = await table.play(asked, asked)
        assert (len(played.turns), played.info["ended_by"], played.finish_reason) == (2, "max_turns", "length")
        assert played.score.parts["right"] == 0.0
        played = await table.play(asked, "3...")
        assert (played.info["ended_by"], played.finish_reason) == ("max_tokens", "length")
        assert played.score.parts["right"] == 1.0
    async with playing(model, tools, max_turns=20) as table:
        played = await table.play(*[asked] * 20)
        assert played.info["ended_by"] in ("max_length", "max_tokens")  # before an answer, or within the last one
        (row,) = trajectories(played)
        assert MAX_LENGTH - MOST_TOKENS < len(row.token_ids) <= MAX_LENGTH
        rooms = [MAX_LENGTH - len(request.token_ids) for request in table.scripts[-1].requests]
        limits = [request.sampling.max_tokens for request in table.scripts[-1].requests]
        assert limits == [min(MOST_TOKENS, room) for room in rooms]
        assert rooms[-1] >= 1
        (short,) = trajectories(await table.play(asked, "3"))  # the control: with room there is no limit to name
        assert "ended_by" not in short.info
    async with playing(model, tools, episode_timeout_s=1.0) as table:
        played = await table.play(asked, None)
        assert (played.info["ended_by"], played.finish_reason, played.messages[-1]["content"]) == (
            "timeout",
            "length",
            "not yet",
        )
        assert played.score.parts["right"] == 0.0


async def test_an_environment_opens_answers_and_rewards_turn_by_turn(
    model: Path, game: Callable[..., dict[str, Any]]
) -> None:
    async with playing(model, game()) as table:
        first, second = await asyncio.gather(table.play("3", "7", "5"), table.play("5", member=1))
        text = table.prompts.tokenizer.decode(list(first.turns[0].request.token_ids))
    assert text == "<|user|>guess 1<|end|><|assistant|>"  # of each: nobody played in its process before
    assert second.turns[0].request.token_ids == first.turns[0].request.token_ids
    (row,) = trajectories(first)
    assert row.turn_rewards == (-0.25, -0.25, 1.0)
    assert (row.reward, row.reward_parts) == (0.5, {"turns": 0.5})
    assert row.info == {"turns": 3, "guesses": 3}
    assert said(first, "user") == ["higher", "lower"]
    assert second.score.reward == 1.0


async def test_an_environments_own_score_stands_beside_what_the_turns_gave(
    model: Path, game: Callable[..., dict[str, Any]]
) -> None:
    task = {**game(scored=True), "rewards": [{"type": "length", "target_tokens": 4, "weight": 0.5}]}
    async with playing(model, task, max_turns=4) as table:
        played = await table.play("3", "5")
    # Two answers of a digit and an end each; max_tokens of shaping is that of all answers an episode may have.
    assert played.score.parts == {"quick": 0.5, "turns": 0.75, "length": 0.0}
    assert (played.score.reward, played.score.plain) == (1.25, 1.25)


FAULTS = {
    "reset raises": ("environment_raised", 0),
    "reset hangs": ("environment_timeout", 0),
    "no opening": ("environment_invalid", 0),
    "step raises": ("environment_raised", 1),
    "step hangs": ("environment_timeout", 1),
    "step dies": ("environment_died", 1),
    "no step": ("environment_invalid", 1),
    "reward": ("environment_invalid", 1),
    "nothing said": ("environment_invalid", 1),
    "unknown role": ("environment_invalid", 1),
    "score raises": ("environment_raised", 1),
    "odd info": ("environment_invalid", 1),
}


@pytest.mark.parametrize("hanging", [True, False], ids=["that hangs", "that does something else"])
async def test_a_faulty_environment_leaves_its_episode_unscored_by_name(
    model: Path, game: Callable[..., dict[str, Any]], hanging: bool
) -> None:
    """All of them in one collector; the last one has no fault: the control."""
    faults = {fault: found for fault, found in FAULTS.items() if ("hangs" in fault) == hanging}
    async with playing(model, {**game(), "step_timeout_s": 2 if hanging else 20}) as table:
        for fault, (failure, turns) in {**faults, "": ("", 1)}.items():
            played = await table.play("5", fault=fault)
            assert played.score.failure == failure, fault
            assert played.score.asked == (not failure), "an environment's fault is no verifier's"
            assert math.isnan(played.score.reward) == bool(failure)
            assert len(played.turns) == 1  # one stands in the record also where nothing was sampled
            assert sum(len(turn.completion.token_ids) > 0 for turn in played.turns) == turns, fault
            (row,) = trajectories(played)
            assert row.failure == failure


async def test_an_environment_that_cannot_close_has_been_scored_all_the_same(
    model: Path, game: Callable[..., dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    async with playing(model, game()) as table:
        played = await table.play("5", fault="close raises")
    assert (played.score.reward, played.score.failure) == (1.0, "")
    assert "close: OSError: at the end" in caplog.text


async def test_the_examples_of_the_page_can_be_played(model: Path, write_module: Callable[[str, str], str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")
    tools, game = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    async with playing(model, {"type": f"{write_module('tools_of_the_page', tools)}:Boxes"}) as table:
        played = await table.play(f"<tool_call>{call('lookup', key='407')}</tool_call>", "?")
    assert said(played) == ["2891"]
    async with playing(model, {"type": f"{write_module('game_of_the_page', game)}:Game"}, max_turns=2) as table:
        played = await table.play("x", "x")
    assert said(played, "user") == ["lower", "lower"]
    assert played.score.parts == {"turns": -0.2}


@pytest.mark.faults
async def test_without_the_process_that_makes_processes_an_episode_is_lost_not_failed(
    model: Path, tools: dict[str, Any]
) -> None:
    async with playing(model, {**tools, "step_timeout_s": 30}) as table:
        lost = asyncio.ensure_future(table.play(call("fail", how="hang"), "3"))
        zygote = table.player._processes._zygote
        assert zygote is not None
        await begun(zygote)
        await asyncio.wait({lost}, timeout=0.2)
        os.kill(zygote._process.pid, signal.SIGKILL)
        with pytest.raises(EpisodeLost, match="environment_lost"):
            await lost
        assert (await table.play(call("add", a=1, b=2), "3")).score.parts["right"] == 1.0


async def test_cancelling_an_episode_leaves_no_process(model: Path, tools: dict[str, Any]) -> None:
    async with playing(model, tools) as table:
        episode = asyncio.ensure_future(table.play(call("add", a=1, b=2), None))
        zygote = table.player._processes._zygote
        assert zygote is not None
        await begun(zygote)
        episode.cancel()
        await asyncio.wait({episode}, timeout=LIMIT_S)
        assert episode.cancelled()
        assert not zygote._made
