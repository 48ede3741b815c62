"""What a vLLM server writes, as its source has it (vllm/entrypoints/scale_out/token_in_token_out/protocol.py), read."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import pytest

from asyncrl.collectors.engines.base import EngineError, Request, Sampling
from asyncrl.collectors.engines.spans import Served, label_of
from asyncrl.collectors.engines.vllm_client import Output, VllmClient
from asyncrl.collectors.engines.vllm_request import VllmAnswer
from asyncrl.staleness import Weights

REQUEST = Request("a", "g", "s", (1, 2, 3), Sampling(), seed=5)
LABEL = label_of(Served(Weights(1, 4), "aa"))


TOP = '{"token_id": 9, "logprob": -0.1, "rank": 1}'
"""The likeliest token, which a server adds also where none is asked for."""


def event(choice: str) -> Output:
    text = f'{{"request_id": "generate-tokens-a#1", "usage": null, "output_mode": "tokens", "choices": [{choice}]}}'
    return msgspec.json.decode(text, type=Output)


def choice(tokens: str, logprobs: str, end: str = "null", versions: str = "null") -> str:
    content = ", ".join(
        f'{{"token_id": 0, "logprob": {p}, "rank": 1, "top_logprobs": [{TOP}]}}' for p in logprobs.split()
    )
    return (
        f'{{"index": 0, "token_ids": [{tokens}], "logprobs": {{"content": [{content}]}}, "finish_reason": {end}, '
        f'"stop_reason": null, "routed_experts": null, "sampling_mask": null, "weight_versions": {versions}}}'
    )


def test_events_make_an_answer_with_every_digit_of_a_logprob() -> None:
    answer = VllmAnswer(REQUEST, Served(Weights(1, 4), "aa"), None, vocabulary=61)
    span = f'[{{"version": "{LABEL}", "start": 0, "end": 3}}]'
    outputs = [
        event(choice("5, 6", "-1.2345678806304932 -0.5")),
        event(choice("7", "-2.0")),
        event(choice("", "", '"length"', span)),
    ]
    for output in outputs:
        answer.add(output)  # type: ignore[arg-type]
    assert [output.finished for output in outputs] == [False, False, True]
    completion = answer.completion()
    assert completion.token_ids.tolist() == [5, 6, 7]
    assert completion.logprobs.astype(float).tolist() == [-1.2345678806304932, -0.5, -2.0]
    assert [(s.weights, s.start, s.end, s.checksum) for s in completion.spans] == [(Weights(1, 4), 0, 3, "aa")]


def test_what_truncation_left_is_what_has_a_logprob() -> None:
    sampling = Sampling(top_k=4, top_p=0.9)
    answer = VllmAnswer(replace(REQUEST, sampling=sampling), Served(Weights(1, 4), "aa"), None, vocabulary=61)
    entries = {9: -0.5, 3: -0.9, 7: -9999.0, 1: -9999.0}
    top = ", ".join(f'{{"token_id": {token}, "logprob": {p}, "rank": 1}}' for token, p in entries.items())
    sampled = f'{{"token_id": 3, "logprob": -0.9, "rank": 2, "top_logprobs": [{top}]}}'
    answer.add(event(choice("3", "").replace('"content": []', f'"content": [{sampled}]')))  # type: ignore[arg-type]
    partial = answer.partial()
    assert partial is not None
    assert partial.support is not None
    assert (partial.support.counts.tolist(), partial.support.ids.tolist()) == ([2], [3, 9])
    assert partial.logprobs.astype(float).tolist() == [pytest.approx(-0.9)]


def test_what_the_server_writes_for_no_logprob_is_none() -> None:
    (part,) = event(choice("5", "-9999.0")).outputs
    assert part.logprobs is not None
    assert math.isnan(part.logprobs.logprobs[0])


@pytest.mark.asyncio
async def test_a_server_that_is_not_there_is_said_with_where_to_look() -> None:
    client = VllmClient("http://127.0.0.1:9", api_key=None)
    with pytest.raises(EngineError, match=r"http://127\.0\.0\.1:9 .*correct collector\.engine\.url"):
        await client.wait(0.0)
    await client.close()
