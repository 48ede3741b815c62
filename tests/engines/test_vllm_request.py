"""What the vLLM engine makes of requests and answers, without vLLM: `tests/vllm` has the engine itself."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.collectors.engines.base import EngineError, Request, Sampling
from asyncrl.collectors.engines.spans import Served
from asyncrl.collectors.engines.vllm import VllmEngine
from asyncrl.collectors.engines.vllm_request import Answer, label_of, prompt_of, seed_of, served_of, too_cold
from asyncrl.staleness import Weights

REQUEST = Request("a", "g", "s", (1, 2, 3), Sampling(), seed=5)
ONE, TWO = Served(Weights(1, 4), "aa"), Served(Weights(2, 3), "")


@dataclass(frozen=True)
class Logprobs:
    logprobs: list[float]


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


def answer(*parts: Part) -> Answer:
    made = Answer()
    for part in parts:
        made.add(part)  # type: ignore[arg-type]
    return made


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


@pytest.mark.parametrize(("temperature", "fits"), [(0.0, True), (0.0099, False), (0.01, True), (7.0, True)])
def test_a_temperature_that_vllm_would_raise_is_refused(temperature: float, fits: bool) -> None:
    assert (too_cold(replace(REQUEST, sampling=Sampling(temperature=temperature))) == "") == fits


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
