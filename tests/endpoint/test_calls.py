"""The endpoint, called by OpenAI's own client."""

from __future__ import annotations

import asyncio
import logging

import httpx2
import openai
import pytest

from asyncrl.collectors.endpoint import session as sessions
from asyncrl.collectors.endpoint.server import OVERRIDDEN, Endpoint
from asyncrl.collectors.engines.base import EngineError

pytestmark = pytest.mark.asyncio

ASK = [{"role": "user", "content": "abc"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "strict": True,
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
]
CALLS = (
    'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>'
)


def ask(client, messages=ASK, **arguments):
    return client.chat.completions.create(model="any", messages=messages, **arguments)


async def test_an_answer_has_what_a_client_reads(kit):
    async with kit.listening() as house:
        seat = house.seat()
        answer = await ask(seat.client, logprobs=True, temperature=1.0)
        (choice,) = answer.choices
        assert (choice.message.content, choice.message.role, choice.finish_reason) == ("cba", "assistant", "stop")
        assert [(t.token, t.logprob, t.bytes) for t in choice.logprobs.content] == [
            (letter, kit.logprob, [ord(letter)]) for letter in "cba"
        ]
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (6, 4, 10)
        assert (answer.model, answer.object) == ("any", "chat.completion")
        (turn,) = seat.session.turns
        assert turn.completion.token_ids.tolist() == [*kit.ids("cba"), kit.end]
        assert [model.id async for model in seat.client.models.list()] == ["policy"]
        assert (await seat.client.models.retrieve("gpt-of/somebody")).id == "gpt-of/somebody"


async def test_the_synchronous_client_too(kit):
    async with kit.listening() as house:
        seat = house.seat()
        answer = await asyncio.to_thread(ask, seat.sync_client)
        assert answer.choices[0].message.content == "cba"

        def read():
            return "".join(chunk.choices[0].delta.content or "" for chunk in ask(seat.sync_client, stream=True))

        assert await asyncio.to_thread(read) == "cba"


async def test_a_conversation_goes_on_over_the_tokens_that_were_sampled(kit):
    async with kit.listening() as house:
        seat = house.seat()
        first = (await ask(seat.client)).choices[0].message
        again = [*ASK, first, {"role": "user", "content": [{"type": "text", "text": "de"}]}]
        assert (await ask(seat.client, again)).choices[0].message.content == "ed"
        one, two = seat.session.turns
        assert two.request.token_ids[: len(one.request.token_ids) + 4] == (
            *one.request.token_ids,
            *one.completion.token_ids.tolist(),
        )
        assert one.request.id != two.request.id
        assert one.request.seed != two.request.seed
        assert one.request.session == two.request.session


async def test_a_streamed_answer_comes_as_it_grows_and_no_character_in_halves(kit):
    async with kit.listening() as house:
        seat = house.seat(kit.policy(lambda request: "häß🙂x"))
        stream = await ask(seat.client, stream=True, logprobs=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        pieces = [c.choices[0].delta.content for c in chunks if c.choices and c.choices[0].delta.content]
        assert "".join(pieces) == "häß🙂x"
        assert len(pieces) >= 4
        assert not any("�" in piece for piece in pieces)
        assert chunks[0].choices[0].delta.role == "assistant"
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
        logprobs = [c.choices[0].logprobs for c in chunks if c.choices and c.choices[0].logprobs]
        assert sum(len(one.content) for one in logprobs) == len("häß🙂x".encode())
        assert chunks[-1].usage.completion_tokens == len("häß🙂x".encode()) + 1


async def test_the_stream_helper_of_the_client_puts_it_together(kit):
    async with kit.listening() as house:
        seat = house.seat(kit.policy(lambda request: CALLS))
        async with seat.client.chat.completions.stream(model="any", messages=ASK, tools=TOOLS) as stream:
            events = [event.type async for event in stream]
            final = await stream.get_final_completion()
        message = final.choices[0].message
        assert "tool_calls.function.arguments.done" in events
        assert message.content == "I add."
        assert [call.function.arguments for call in message.tool_calls] == ['{"a": 1, "b": 2}', '{"a": 3, "b": 4}']
        assert final.choices[0].finish_reason == "tool_calls"


async def test_a_streamed_answer_is_found_again(kit):
    async with kit.listening() as house:
        seat = house.seat(kit.policy(lambda request: " x\n"))
        async with seat.client.chat.completions.stream(model="any", messages=ASK) as stream:
            said = (await stream.get_final_completion()).choices[0].message
        await ask(seat.client, [*ASK, {"role": "assistant", "content": said.content}, *ASK])
        one, two = seat.session.turns
        assert two.request.token_ids[: len(one.request.token_ids)] == one.request.token_ids
        assert len(two.request.token_ids) > len(one.request.token_ids) + 3


async def test_calls_are_the_clients_to_make(kit):
    async with kit.listening() as house:
        seat = house.seat(kit.policy(lambda request: CALLS))
        answer = await ask(seat.client, tools=TOOLS, tool_choice="auto")
        message = answer.choices[0].message
        assert (answer.choices[0].finish_reason, message.content) == ("tool_calls", "I add.")
        assert len({call.id for call in message.tool_calls}) == 2
        assert all(len(call.id) == 9 and call.id.isalnum() for call in message.tool_calls)
        results = [{"role": "tool", "tool_call_id": call.id, "content": "3"} for call in message.tool_calls]
        forbidden = await ask(seat.client, [*ASK, message, *results], tools=TOOLS, tool_choice="none")
        assert (forbidden.choices[0].message.content, forbidden.choices[0].finish_reason) == (CALLS, "stop")
        one, two = seat.session.turns
        whole = (*one.request.token_ids, *one.completion.token_ids.tolist())
        assert two.request.token_ids[: len(whole)] == whole


async def test_a_stop_string_ends_an_answer_and_is_not_shown(kit):
    async with kit.listening() as house:
        seat = house.seat(kit.policy(lambda request: "think\nObservation: made up"))
        answer = await ask(seat.client, stop=["\nObservation:"])
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("think", "stop")
        assert kit.tokenizer.decode(seat.session.turns[0].completion.token_ids).endswith("\nObservation:")
        stream = await ask(seat.client, stop="\nObservation:", stream=True)
        assert "".join([c.choices[0].delta.content or "" async for c in stream]) == "think"


async def test_what_a_client_asks_of_length_holds_within_the_recipes(kit):
    async with kit.listening() as house:
        seat = house.seat(kit.policy(lambda request: "x" * 50), max_tokens=8)
        for arguments, length in (
            ({"max_tokens": 3}, 3),
            ({"max_completion_tokens": 2, "max_tokens": 5}, 2),
            ({"max_tokens": 1000}, 8),
            ({}, 8),
        ):
            choice = (await ask(seat.client, **arguments)).choices[0]
            assert (len(choice.message.content), choice.finish_reason) == (length, "length")


async def test_the_recipe_decides_how_tokens_are_drawn_and_says_so(kit, caplog):
    async with kit.listening() as house:
        seat = house.seat()
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                raw = await seat.client.chat.completions.with_raw_response.create(
                    model="any", messages=ASK, temperature=0.2, top_p=0.9, seed=7
                )
                assert raw.headers[OVERRIDDEN] == "temperature, top_p, seed"
        assert len([record for record in caplog.records if "temperature" in record.message]) == 1
        assert {turn.request.sampling.temperature for turn in seat.session.turns} == {1.0}
        raw = await seat.client.chat.completions.with_raw_response.create(model="any", messages=ASK, user="me")
        assert OVERRIDDEN not in raw.headers


BAD = [
    ({"n": 2}, "n is 2"),
    ({"logprobs": True, "top_logprobs": 5}, "top_logprobs is 5"),
    ({"max_tokens": 0}, "max_tokens is 0"),
    ({"stop": [""]}, "stop has an empty string"),
    ({"response_format": {"type": "json_object"}}, "response_format is json_object"),
    ({"tools": [{"type": "code_interpreter"}]}, r"tools\[0\] is no function"),
    ({"extra_body": {"guided_regex": "a*"}}, "Unrecognized request argument supplied: guided_regex"),
    ({"messages": []}, "messages is \\[\\]"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "wizard"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "image_url"),
    ({"messages": [{"role": "user", "content": 3}]}, "Expected"),
]


@pytest.mark.parametrize(("arguments", "said"), BAD, ids=[said for _, said in BAD])
async def test_what_cannot_be_done_is_refused_by_name(kit, arguments, said):
    async with kit.listening() as house:
        seat = house.seat()
        with pytest.raises(openai.BadRequestError, match=said) as caught:
            await ask(seat.client, **{"messages": ASK, **arguments})
        assert caught.value.type == "invalid_request_error"
        assert seat.session.turns == ()
        assert (await ask(seat.client)).choices[0].message.content == "cba"  # the episode goes on


async def test_what_is_no_json_and_what_is_elsewhere_are_errors_as_clients_read_them(kit):
    async with kit.listening() as house, httpx2.AsyncClient() as http:
        seat = house.seat()
        url, headers = f"{seat.endpoint.base_url}/chat/completions", {"Authorization": f"Bearer {seat.key}"}
        for body in (b"{", b"[" * 100_000, b"\xff", b'{"messages": "x"}'):
            answer = await http.post(url, headers=headers, content=body)
            assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
        assert (await http.get(url, headers=headers)).json()["error"]["message"].startswith("Method Not Allowed")
        assert (await http.post(f"{url}/x", headers=headers)).status_code == 404


async def test_a_key_is_good_for_its_episode_and_as_long_as_it_lasts(kit):
    async with kit.listening() as house, httpx2.AsyncClient() as http:
        one, two = house.seat(), house.seat()
        await ask(one.client)
        assert (len(one.session.turns), len(two.session.turns)) == (1, 0)
        await one.endpoint.end(one.key)
        with pytest.raises(openai.AuthenticationError, match="the episode of this key has ended"):
            await ask(one.client)
        for key in ("sk-nothing", f"{two.key[:-1]}x", "0-", "é", two.key.partition("-")[0]):
            answer = await http.get(
                f"{one.endpoint.base_url}/models", headers={"Authorization": f"Bearer {key}".encode()}
            )
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        answer = await http.get(f"{one.endpoint.base_url}/models")
        assert answer.status_code == 401
        assert "no API key" in answer.text
        await ask(two.client)


async def test_an_episode_that_ends_aborts_its_calls(kit):
    async with kit.listening() as house:
        policy = kit.policy(gate=asyncio.Event())
        seat = house.seat(policy)
        call = asyncio.ensure_future(ask(seat.client))
        await policy.asked.wait()
        await seat.endpoint.end(seat.key)
        with pytest.raises(openai.AuthenticationError, match="has ended"):
            await call
        assert policy.cancelled.is_set()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_ends_its_call_and_nothing_of_it_is_trained(kit, stream):
    async with kit.listening() as house:
        policy = kit.policy(gate=asyncio.Event())
        seat = house.seat(policy)
        with pytest.raises(openai.APITimeoutError):
            await ask(seat.client.with_options(timeout=0.2, max_retries=0), stream=stream)
        await policy.cancelled.wait()
        policy.gate.set()
        assert seat.session.turns == ()
        await ask(seat.client)
        assert len(seat.session.turns) == 1


async def test_a_call_that_is_made_again_is_another_answer(kit):
    """A client that lost an answer asks again: both were sampled, and both are trained."""
    async with kit.listening() as house:
        seat = house.seat()
        await asyncio.gather(*(ask(seat.client) for _ in range(3)))
        assert len(seat.session.turns) == 3
        assert len({turn.request.seed for turn in seat.session.turns}) == 3


async def test_calls_beyond_the_limit_are_refused_and_a_flood_of_them_ends_the_episode(kit, monkeypatch):
    monkeypatch.setattr(sessions, "MOST_REFUSED", 5)
    async with kit.listening() as house:
        seat = house.seat(calls=3)
        outcomes = await asyncio.gather(*(ask(seat.client) for _ in range(8)), return_exceptions=True)
        refused = [error for error in outcomes if isinstance(error, openai.PermissionDeniedError)]
        assert (len(seat.session.turns), len(refused)) == (3, 5)
        assert {error.code for error in refused} == {"max_turns"}
        assert (seat.session.limit, seat.session.failed.is_set()) == ("max_turns", False)
        with pytest.raises(openai.PermissionDeniedError):
            await ask(seat.client)
        assert seat.session.broken.failure == "agent_flood"
        with pytest.raises(openai.InternalServerError, match="cannot go on"):
            await ask(seat.client)


def broken(error):
    def write(*_):
        raise error

    return write


async def test_an_engine_that_fails_ends_the_episode_by_its_own_name_and_is_not_asked_again(kit):
    async with kit.listening() as house:
        policy = kit.policy(broken(EngineError("out of memory")))
        seat = house.seat(policy)
        with pytest.raises(openai.InternalServerError, match="out of memory") as caught:
            await ask(seat.client)  # with its own retries
        assert caught.value.code == "episode_lost"
        assert isinstance(seat.session.broken, EngineError)
        assert len(policy.requests) == 1


async def test_a_request_that_no_engine_serves_is_the_agents_to_mend(kit):
    async with kit.listening() as house:
        seat = house.seat(kit.policy(broken(ValueError("stop strings need a tokenizer"))))
        with pytest.raises(openai.BadRequestError, match="stop strings need a tokenizer"):
            await ask(seat.client)
        assert seat.session.broken is None


@pytest.mark.parametrize(("finish", "failure"), [("abort", "engine_aborted"), ("error", "engine_error")])
async def test_an_answer_that_the_engine_ended_is_no_answer(kit, finish, failure):
    async with kit.listening() as house:
        seat = house.seat(kit.policy(finish=finish))
        with pytest.raises(openai.InternalServerError):
            await ask(seat.client)
        assert seat.session.broken.failure == failure
        assert len(seat.session.turns) == 1  # it was sampled, and is kept unscored


async def test_a_failure_in_a_stream_is_told_in_the_stream(kit):
    def write(request):
        return "x" * 20

    async with kit.listening() as house:
        seat = house.seat(kit.policy(write, finish="abort"))
        with pytest.raises(openai.APIError, match="cannot go on"):
            async for _ in await ask(seat.client, stream=True):
                pass


async def test_a_fault_of_the_endpoint_ends_the_episode(kit, monkeypatch, caplog):
    async with kit.listening() as house:
        seat = house.seat()
        monkeypatch.setattr(seat.session._conversations, "question", broken(ZeroDivisionError("ours")))
        with pytest.raises(openai.InternalServerError, match="ours"):
            await ask(seat.client)
        assert isinstance(seat.session.broken, ZeroDivisionError)


async def test_it_listens_on_the_loopback_unless_told_otherwise(kit):
    async with kit.listening() as house:
        assert house.endpoint.base_url.startswith("http://127.0.0.1:")
        (address,) = house.endpoint._runner.addresses
        assert address[0] == "127.0.0.1"
    everywhere = Endpoint(host="0.0.0.0")
    await everywhere.start()
    try:
        assert everywhere.base_url.startswith("http://127.0.0.1:")
        assert everywhere._runner.addresses[0][0] == "0.0.0.0"
    finally:
        await everywhere.close()


async def test_many_episodes_at_once_keep_apart(kit):
    async with kit.listening() as house, httpx2.AsyncClient(timeout=kit.limit_s) as http:
        seats = [house.seat() for _ in range(50)]

        async def talk(number, seat):
            messages = []
            for turn in range(3):
                messages.append({"role": "user", "content": f"{number} {turn}"})
                answer = await http.post(
                    f"{seat.endpoint.base_url}/chat/completions",
                    headers={"Authorization": f"Bearer {seat.key}"},
                    json={"messages": messages},
                )
                messages.append(answer.json()["choices"][0]["message"])
                assert messages[-1]["content"] == f"{number} {turn}"[::-1]

        await asyncio.gather(*(talk(number, seat) for number, seat in enumerate(seats)))
        assert all(len(seat.session.turns) == 3 for seat in seats)
