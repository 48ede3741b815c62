"""Whatever an agent does with its conversations, each token is trained once, behind what it was sampled behind."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.collectors.endpoint.asked import read_chat
from asyncrl.collectors.endpoint.errors import ApiError
from asyncrl.collectors.endpoint.session import Model, Session
from asyncrl.collectors.episode import Played
from asyncrl.collectors.segments import trajectories
from asyncrl.rewards.scoring import Score
from asyncrl.tasks.chat import template_text
from tests.endpoint.conftest import LIMIT_S, Policy, episode
from tests.tasks.test_history import FORGETS, PLAIN, tokenizer_of

TOKENIZER = tokenizer_of(PLAIN)
FORGETFUL = tokenizer_of(FORGETS)
END = TOKENIZER.eos_token_id
PIECES = [TOKENIZER.encode(text)[0] for text in "ab xé\n"] + [TOKENIZER.encode("ab")[0]]
"""Tokens to sample: "a" and "b" beside each other would be encoded as one, and "é" is cut in half."""


@dataclass
class Sampled:
    """A session whose policy writes what it is told to."""

    tokenizer: object = TOKENIZER
    calls: int = 100
    max_length: int | None = None
    next_tokens: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        policy = Policy(lambda request: self.next_tokens, tokenizer=self.tokenizer)
        model = Model(self.tokenizer, (END,), self.max_length, "hermes")
        self.session = Session(episode(), policy, model, calls=self.calls)

    async def ask(self, messages, tokens=(END,), **arguments):
        self.next_tokens = list(tokens)
        body = msgspec.json.encode({"messages": messages, **arguments})
        async with asyncio.timeout(LIMIT_S):
            reply = await self.session.answer(read_chat(body))
        return [*messages, reply.document()["choices"][0]["message"]]

    @property
    def rows(self):
        score = Score({"reward": 1.0}, 1.0, "")
        return trajectories(Played(self.session.turns, score, 3.0, "stop"))


def user(text):
    return {"role": "user", "content": text}


def again(message, form):
    """A message as another client would write it."""
    if form == "parts" and isinstance(message["content"], str):
        return {**message, "content": [{"type": "text", "text": message["content"]}]}
    return {**message, "refusal": None, "tool_calls": None, "annotations": []} if form == "nulls" else message


def check_rows(sampled):
    """Each turn has tokens in a row to itself, trained, and before them what they were sampled behind; nothing else is
    trained."""
    rows, places = sampled.rows, set()
    for turn in sampled.session.turns:
        asked = turn.request.token_ids
        whole = (*asked, *turn.completion.token_ids.tolist())
        own = {n: {(n, at) for at in range(len(asked), len(whole))} for n in range(len(rows))}
        places |= next(
            places_there
            for n, places_there in own.items()
            if len(asked) in rows[n].turn_offsets
            and starts(rows[n], whole)
            and rows[n].loss_mask[len(asked) : len(whole)].all()  # the same tokens may stand there for the template
            and not places_there & places
        )
    trained = {(n, at) for n, row in enumerate(rows) for at in np.flatnonzero(row.loss_mask).tolist()}
    assert trained == places
    assert len(places) == sum(len(turn.completion.token_ids) for turn in sampled.session.turns)


def starts(row, sequence):
    return tuple(row.token_ids[: len(sequence)].tolist()) == sequence


answers = st.lists(st.sampled_from(PIECES), max_size=6)
forms = st.sampled_from(["same", "parts", "nulls"])
texts = st.sampled_from(["x", "ab", "", "go on"])


@given(data=st.data(), tokenizer=st.sampled_from([TOKENIZER, FORGETFUL]))
def test_every_sampled_token_is_trained_once_in_the_context_it_was_sampled_in(data, tokenizer):
    async def agent() -> None:
        sampled = Sampled(tokenizer)
        conversations = [[user("begin")]]
        for n in range(data.draw(st.integers(1, 6))):
            messages = data.draw(st.sampled_from(conversations))
            dropped = data.draw(st.sampled_from([0, 0, 0, 1, 2]))
            messages = [again(message, data.draw(forms)) for message in messages[dropped:]]
            if data.draw(st.booleans()) or not messages:
                messages.append({"role": data.draw(st.sampled_from(["user", "tool"])), "content": data.draw(texts)})
            end = [END] if data.draw(st.booleans()) else []
            conversations.append(await sampled.ask(messages, [*data.draw(answers), *end][:64]))
            assert len(sampled.session.turns) == n + 1
            said = [{**m, "content": plain(m["content"])} for m in messages]
            if tokenizer is TOKENIZER:  # what the policy reads is what the agent sent
                assert text_of(sampled.session.turns[-1].request) == template_text(TOKENIZER, said)
        # Two answers to one conversation can be the same tokens, which are then two rows.
        check_rows(sampled)

    asyncio.run(agent())


def plain(content):
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def text_of(request):
    return TOKENIZER.decode(list(request.token_ids))


@given(turns=st.lists(st.tuples(answers, st.booleans(), forms), min_size=1, max_size=6))
def test_a_conversation_that_only_grows_is_one_row(turns):
    async def agent() -> None:
        sampled = Sampled()
        messages = [user("begin")]
        for tokens, ended, form in turns:
            messages = await sampled.ask(messages, [*tokens, *([END] if ended else [])])
            messages = [*(again(message, form) for message in messages), user("ab")]
        (row,) = sampled.rows
        assert row.loss_mask.sum() == sum(len(tokens) + ended for tokens, ended, _ in turns)

    asyncio.run(agent())


def test_without_looking_up_what_was_sampled_a_conversation_falls_apart(monkeypatch):
    """The control of the test above."""
    monkeypatch.setattr("asyncrl.collectors.endpoint.conversation.Conversations.answer", lambda *_, **__: None)

    async def agent() -> int:
        sampled = Sampled()
        messages = await sampled.ask([user("x")], [*TOKENIZER.encode("a"), *TOKENIZER.encode("b"), END])
        await sampled.ask([*messages, user("y")])
        return len(sampled.rows)

    assert asyncio.run(agent()) == 2


@pytest.mark.asyncio
async def test_a_branch_and_a_retry_are_rows_of_their_own():
    sampled = Sampled()
    first = await sampled.ask([user("x")], [PIECES[0], END])
    await sampled.ask([*first, user("left")], [PIECES[1], END])
    await sampled.ask([*first, user("right")], [PIECES[1], END])
    await sampled.ask([user("x")], [PIECES[0], END])
    assert [int(row.loss_mask.sum()) for row in sampled.rows] == [4, 2, 2]
    check_rows(sampled)


@pytest.mark.asyncio
async def test_a_template_that_drops_old_answers_makes_a_segment_of_each():
    sampled = Sampled(FORGETFUL)
    messages = [user("x")]
    for _ in range(3):
        messages = [*await sampled.ask(messages, [PIECES[0], PIECES[3], END]), user("y")]
    assert [int(row.loss_mask.sum()) for row in sampled.rows] == [3, 3, 3]
    check_rows(sampled)


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = 'Let me see. <tool_call>\n{"arguments": {"b": 2,   "a": "é"}, "name": "add"}\n</tool_call>'


@pytest.mark.parametrize("form", ['{"a": "é", "b": 2}', '{"b":2,"a":"\\u00e9"}'])
@pytest.mark.asyncio
async def test_a_call_is_found_again_however_its_arguments_are_written(form):
    sampled = Sampled()
    messages = await sampled.ask([user("x")], [*TOKENIZER.encode(CALL), END], tools=TOOLS)
    answer = dict(messages[-1])
    (call,) = answer["tool_calls"]
    assert (answer["content"], call["function"]["name"]) == ("Let me see.", "add")
    answer["tool_calls"] = [{**call, "function": {"name": "add", "arguments": form}}]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
    await sampled.ask([user("x"), answer, result], tools=TOOLS)
    (row,) = sampled.rows
    assert CALL in TOKENIZER.decode(row.token_ids.tolist())


@pytest.mark.asyncio
async def test_other_arguments_are_another_call():
    """The control of the test above."""
    sampled = Sampled()
    messages = await sampled.ask([user("x")], [*TOKENIZER.encode(CALL), END], tools=TOOLS)
    messages[-1]["tool_calls"][0]["function"]["arguments"] = '{"a": "é", "b": 3}'
    await sampled.ask([*messages, {"role": "tool", "content": "3"}], tools=TOOLS)
    assert len(sampled.rows) == 2


@pytest.mark.asyncio
async def test_what_looks_like_a_call_and_is_none_is_text():
    sampled = Sampled()
    broken = '<tool_call>{"name": "add", "arguments": {</tool_call>'
    messages = await sampled.ask([user("x")], [*TOKENIZER.encode(broken), END], tools=TOOLS)
    assert (messages[-1]["content"], messages[-1].get("tool_calls")) == (broken, None)


@pytest.mark.asyncio
async def test_calls_are_left_in_the_text_where_the_agent_wants_none():
    sampled = Sampled()
    messages = await sampled.ask([user("x")], [*TOKENIZER.encode(CALL), END], tools=TOOLS, tool_choice="none")
    assert messages[-1]["content"] == CALL
    messages = await sampled.ask([user("x")], [*TOKENIZER.encode(CALL + CALL), END], tools=TOOLS)
    assert len(messages[-1]["tool_calls"]) == 2
    one = await sampled.ask([user("x")], [*TOKENIZER.encode(CALL + CALL), END], tools=TOOLS, parallel_tool_calls=False)
    assert len(one[-1]["tool_calls"]) == 1


@pytest.mark.asyncio
async def test_a_conversation_that_leaves_no_room_is_refused_in_the_words_of_openai():
    sampled = Sampled(max_length=20)
    await sampled.ask([user("x" * 3)])
    request = sampled.session.turns[0].request
    assert len(request.token_ids) + request.sampling.max_tokens == 20
    with pytest.raises(ApiError, match="maximum context length is 20 tokens") as caught:
        await sampled.ask([user("x" * 30)])
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")


@pytest.mark.asyncio
async def test_a_score_is_of_all_rows():
    sampled = Sampled()
    await sampled.ask([user("x")])
    await sampled.ask([user("y")])
    assert [(row.segment, row.reward, row.member) for row in sampled.rows] == [(0, 1.0, 0), (1, 1.0, 0)]
    assert not any(math.isnan(row.reward) for row in sampled.rows)
