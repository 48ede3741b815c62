"""What the vLLM engine makes of requests and answers, without vLLM: `tests/vllm` has the engine itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from asyncrl.collectors.engines.base import EngineError, Request, Sampling
from asyncrl.collectors.engines.spans import Served, label_of, served_of
from asyncrl.collectors.engines.stops import StopStrings
from asyncrl.collectors.engines.vllm import VllmEngine
from asyncrl.collectors.engines.vllm_request import VllmAnswer, inexact, prompt_of, sampling_of, seed_of
from asyncrl.staleness import Weights

REQUEST = Request("a", "g", "s", (1, 2, 3), Sampling(), seed=5)
ONE, TWO = Served(Weights(1, 4), "aa"), Served(Weights(2, 3), "")


VOCABULARY = 61


class Logprobs:
    """As vLLM's FlatLogprobs: of each token its own, then those of the likeliest, as (id, log-prob)."""

    def __init__(self, logprobs: Sequence[float], likeliest: Sequence[Sequence[tuple[int, float]]] = ()) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.start_indices: list[int] = []
        self.end_indices: list[int] = []
        for place, logprob in enumerate(logprobs):
            self.start_indices.append(len(self.logprobs))
            for token, each in ((0, logprob), *(likeliest[place] if likeliest else ())):
                self.token_ids.append(token)
                self.logprobs.append(each)
            self.end_indices.append(len(self.logprobs))


@dataclass(frozen=True)
class VersionSpan:
    version: str
    start: int
    end: int


@dataclass(frozen=True)
class Part:
    """What is looked at of a CompletionOutput."""

    token_ids: list[int]
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[VersionSpan] | None = None


@dataclass(frozen=True)
class Output:
    """What is looked at of a RequestOutput."""

    outputs: list[Part]


def answer(*parts: Part, stops: StopStrings | None = None, **sampling: Any) -> VllmAnswer:
    made = VllmAnswer(asking(**sampling), ONE, stops, vocabulary=VOCABULARY)
    for part in parts:
        made.add(Output([part]))  # type: ignore[arg-type]
    return made


def asking(**sampling: Any) -> Request:
    return replace(REQUEST, sampling=Sampling(**sampling))


def test_an_answer_has_the_spans_that_vllm_reports() -> None:
    spans = [VersionSpan(label_of(ONE), 0, 2), VersionSpan(label_of(ONE), 2, 2), VersionSpan(label_of(TWO), 2, 3)]
    completion = answer(
        Part([7, 8], Logprobs([-1.0, -2.0])), Part([9], Logprobs([-0.5]), "stop", spans), Part([])
    ).completion()
    assert completion.token_ids.tolist() == [7, 8, 9]
    assert completion.logprobs.tolist() == [-1.0, -2.0, -0.5]
    assert completion.versions.tolist() == [4, 4, 3]
    assert [(s.weights, s.start, s.end, s.checksum) for s in completion.spans] == [
        (Weights(1, 4), 0, 2, "aa"),
        (Weights(2, 3), 2, 3, ""),
    ]
    assert (completion.finish_reason, completion.error) == ("stop", "")
    assert 0 < completion.first_token <= completion.done


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (Part([7], Logprobs([math.nan]), "length", [VersionSpan(label_of(ONE), 0, 1)]), "nan"),
        (Part([7, 8], Logprobs([-1.0]), "length", [VersionSpan(label_of(ONE), 0, 2)]), "tokens 0 to 2"),
        (Part([7], Logprobs([-1.0]), "length"), "of 1 tokens with a version"),
        (Part([7], Logprobs([-1.0]), "repetition", [VersionSpan(label_of(ONE), 0, 1)]), "'repetition'"),
    ],
)
def test_an_answer_that_cannot_be_trusted_is_an_error_without_tokens(part: Part, says: str) -> None:
    completion = answer(part).completion()
    assert completion.finish_reason == "error"
    assert says in completion.error
    assert len(completion.token_ids) == len(completion.logprobs) == len(completion.versions) == 0


def test_an_aborted_request_that_never_ran_has_nothing() -> None:
    completion = answer(Part([], finish_reason="abort", weight_versions=[])).completion()
    assert (completion.finish_reason, len(completion.token_ids), completion.spans) == ("abort", 0, ())
    assert completion.first_token == 0


@given(st.integers(0, 2**31), st.integers(0, 2**31), st.sampled_from(["", "9c0fb7d2e4a81f36"]))
def test_a_label_says_all_that_a_span_needs(lineage: int, version: int, checksum: str) -> None:
    served = Served(Weights(lineage, version), checksum)
    assert served_of(label_of(served)) == served


def test_a_prompt_is_found_again_only_under_its_version() -> None:
    assert prompt_of(REQUEST, ONE) == prompt_of(replace(REQUEST, id="b"), ONE)
    assert prompt_of(REQUEST, ONE) != prompt_of(REQUEST, TWO)


@given(st.integers(0, 2**63 - 1), st.integers(1, 10**6))
def test_what_goes_on_has_a_seed_of_its_own(seed: int, position: int) -> None:
    begun = replace(REQUEST, seed=seed)
    assert seed_of(begun) == seed
    assert seed_of(replace(begun, position=position)) == seed_of(replace(begun, position=position)) != seed
    assert 0 <= seed_of(replace(begun, position=position)) < 2**63


@pytest.mark.parametrize(
    ("sampling", "says"),
    [
        ({"temperature": 0.0}, ""),
        ({"temperature": 0.0, "top_p": 0.5}, ""),  # greedy truncates nothing
        ({"temperature": 0.0099}, "vLLM has 0, and 0.01 to 2"),
        ({"temperature": 0.01}, ""),
        ({"temperature": 2.0}, ""),
        ({"temperature": 2.1}, "vLLM has 0, and 0.01 to 2"),
        ({"top_p": 0.9}, "set top_k"),
        ({"min_p": 0.1}, "set top_k"),
        ({"top_k": 4, "top_p": 0.9}, ""),
        ({"top_k": 4, "min_p": 0.1}, ""),
        ({"top_k": 4, "min_p": 0.1, "top_p": 0.9}, "min_p first"),
        ({"top_k": 5}, "--max-logprobs 22"),
    ],
)
def test_what_vllm_cannot_sample_exactly_is_refused_with_what_to_change(sampling: dict[str, Any], says: str) -> None:
    why = inexact(asking(**sampling), vocabulary=VOCABULARY, most=21)
    assert (why == "") == (says == "")
    assert says in why


def test_a_request_that_truncates_asks_for_the_logprobs_of_more_tokens_than_it_may_keep() -> None:
    asked = sampling_of(asking(top_k=8, top_p=0.9, max_tokens=5), limit=100, vocabulary=VOCABULARY)
    assert (asked["top_k"], asked["top_p"], asked["min_p"], asked["logprobs"]) == (8, 0.9, 0.0, 26)
    assert sampling_of(asking(top_k=60), limit=100, vocabulary=VOCABULARY)["logprobs"] == VOCABULARY
    assert "top_k" not in sampling_of(asking(temperature=0.0, top_k=8), limit=100, vocabulary=VOCABULARY)
    assert sampling_of(asking(), limit=100, vocabulary=VOCABULARY)["logprobs"] == 0


def test_what_has_no_logit_is_no_stop_token_and_the_least_is_never_more_than_the_most() -> None:
    asked = sampling_of(
        asking(stop_token_ids=(3, VOCABULARY), min_tokens=9, max_tokens=30), limit=8, vocabulary=VOCABULARY
    )
    assert (asked["stop_token_ids"], asked["min_tokens"], asked["max_tokens"]) == ([3], 5, 5)


SPANS = [VersionSpan(label_of(ONE), 0, 3)]
OUT = (50, -math.inf)


def test_the_support_is_what_truncation_left_of_each_draw() -> None:
    parts = (
        Part([7], Logprobs([-0.5], [[(7, -0.5), (2, -1.0), OUT]])),
        Part([9, 4], Logprobs([-0.1, -1.0], [[(9, -0.1), OUT], [(8, -0.4), (4, -1.0), OUT]]), "length", SPANS),
    )
    # Its own entry comes first under another id here: only ids with a log-prob of their own count, 0 among them.
    support = answer(*parts, top_k=3).completion().support
    assert support is not None
    assert support.counts.tolist() == [3, 2, 3]
    assert support.ids.tolist() == [0, 2, 7, 0, 9, 0, 4, 8]


def test_more_tokens_that_are_equal_to_the_last_of_top_k_than_were_asked_for_are_an_error() -> None:
    equal = [[(token, -3.0) for token in range(20)]]  # top_k 3 asks for 19
    completion = answer(Part([7], Logprobs([-3.0], equal), "length", SPANS), top_k=3).completion()
    assert completion.finish_reason == "error"
    assert "equal to the last of top_k" in completion.error


def test_the_support_of_tokens_before_the_least_number_is_all_but_the_stop_tokens() -> None:
    part = Part([7, 8, 9], Logprobs([-1.0, -1.0, -1.0]), "length", SPANS)
    support = answer(part, min_tokens=2, stop_token_ids=(5, 40, VOCABULARY)).completion().support
    assert support is not None
    assert (support.counts.tolist(), support.ids.tolist()) == ([2, 2, 0], [~40, ~5, ~40, ~5])
    assert answer(part, min_tokens=2).completion().support is None
    assert answer(part, stop_token_ids=(5, 40)).completion().support is None


def letters() -> Tokenizer:
    """Token n is the n-th letter."""
    return Tokenizer(WordLevel({chr(ord("a") + n): n for n in range(26)}, unk_token="a"))


def test_an_answer_ends_with_the_token_that_completes_a_stop_string_whatever_comes_after_it() -> None:
    # "b c": the decoder of whole words puts blanks between them.
    made = answer(
        Part([0, 1], Logprobs([-1.0, -2.0])),
        Part([2, 3, 1], Logprobs([-0.5, -0.6, -0.7])),
        Part([2], Logprobs([-0.8])),
        stops=StopStrings(letters(), ["b c"]),
    )
    assert (made.tokens, made.stopped_by, made.sampled) == ([0, 1, 2], "b c", 6)
    spans = [VersionSpan(label_of(ONE), 0, 2), VersionSpan(label_of(TWO), 2, 5), VersionSpan(label_of(ONE), 5, 6)]
    made.add(Output([Part([], None, "abort", spans)]))  # type: ignore[arg-type]
    completion = made.completion()
    assert (completion.finish_reason, completion.stopped_by) == ("stop", "b c")
    assert completion.token_ids.tolist() == [0, 1, 2]
    assert completion.logprobs.tolist() == [-1.0, -2.0, -0.5]
    assert [(s.weights, s.start, s.end) for s in completion.spans] == [(Weights(1, 4), 0, 2), (Weights(2, 3), 2, 3)]


def test_a_stop_string_that_is_complete_too_early_ends_nothing() -> None:
    parts = Part([1, 2, 1, 2], Logprobs([-1.0] * 4))
    made = answer(parts, stops=StopStrings(letters(), ["b c"]), min_tokens=2)
    assert (made.tokens, made.stopped_by) == ([1, 2, 1, 2], "b c")
    made = answer(parts, stops=StopStrings(letters(), ["b c"]), min_tokens=4)
    assert (made.tokens, made.stopped_by) == ([1, 2, 1, 2], "")


def test_a_partial_has_what_has_come_with_the_weights_that_were_served_then() -> None:
    made = answer(Part([7, 8], Logprobs([-1.0, -2.0])))
    made.changed(TWO)
    made.add(Output([Part([9], Logprobs([-0.5]))]))  # type: ignore[arg-type]
    partial = made.partial()
    assert partial is not None
    assert (partial.token_ids.tolist(), partial.finish_reason) == ([7, 8, 9], "abort")
    assert [(s.weights, s.start, s.end, s.checksum) for s in partial.spans] == [
        (Weights(1, 4), 0, 2, "aa"),
        (Weights(2, 3), 2, 3, ""),
    ]
    made.add(Output([Part([9], Logprobs([math.nan]))]))  # type: ignore[arg-type]
    assert made.partial() is None


@pytest.mark.asyncio
async def test_without_vllm_the_engine_says_what_to_install(tmp_path: Path) -> None:
    engine = VllmEngine(
        "e0",
        tmp_path,
        slots=1,
        max_length=None,
        dtype="float32",
        trust_remote_code=False,
        gpu_memory_utilization=0.9,
        kv_cache_memory_bytes=None,
        enforce_eager=None,
        extra={},
    )
    with pytest.raises(EngineError, match=r"pip install 'asyncrl\[vllm\]'"):
        await engine.start()
    await engine.close()
