"""A request in vLLM's words, and vLLM's answer in ours: token ids, behaviour logprobs, one span per version."""

from __future__ import annotations

import math
import time
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncrl.collectors.engines.base import Completion, FinishReason, Request, Span
from asyncrl.collectors.engines.spans import Served, token_versions
from asyncrl.staleness import Weights

if TYPE_CHECKING:
    from vllm import CompletionOutput, SamplingParams

COLDEST = 0.01
"""vLLM raises a temperature between 0 and this one to it, and would sample otherwise than the learner computes."""

FINISHED: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
"""vLLM's ends; all others are errors."""


def too_cold(request: Request) -> str:
    """Why vLLM cannot sample at the request's temperature as it is; "" if it can."""
    temperature = request.sampling.temperature
    return f"temperature {temperature}: vLLM has none between 0 and {COLDEST}" if 0 < temperature < COLDEST else ""


def prompt_of(request: Request, served: Served) -> dict[str, Any]:
    """What vLLM reads. `cache_salt` is part of the key under which it keeps and finds prefixes."""
    return {"prompt_token_ids": list(request.token_ids), "cache_salt": label_of(served)}


def sampling_of(request: Request, *, limit: int) -> dict[str, Any]:
    """How vLLM samples this request, by the names of its SamplingParams: it ends at our stop tokens only, and each
    sampled token comes with its logprob."""
    sampling = request.sampling
    return {
        "temperature": sampling.temperature,
        "max_tokens": min(sampling.max_tokens, limit - len(request.token_ids)),
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,
        "seed": seed_of(request),
        "logprobs": 0,  # of the sampled token alone
        "detokenize": False,
    }


def sampling_params(request: Request, *, limit: int) -> SamplingParams:
    """`sampling_of` as vLLM's own object."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        **sampling_of(request, limit=limit),
        flat_logprobs=True,  # numbers in lists, where the default makes an object and a dict of each token
        output_kind=RequestOutputKind.DELTA,
    )


def seed_of(request: Request) -> int:
    """vLLM draws from a generator that a request's seed begins: what goes on elsewhere begins one of its own, or it
    would draw the same numbers again. 63 bits."""
    if request.position == 0:
        return request.seed
    digest = blake2b(f"{request.seed}/{request.position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def label_of(served: Served) -> str:
    """The weight version that vLLM stamps its tokens with. It says all that a span needs: no table has to be kept for
    as long as a request may run.

    >>> label_of(Served(Weights(1, 7), "9c0f"))
    '1/7/9c0f'
    """
    return f"{served.weights.lineage}/{served.weights.version}/{served.checksum}"


def served_of(label: str) -> Served:
    """`label_of` backwards."""
    lineage, version, checksum = label.split("/")
    return Served(Weights(int(lineage), int(version)), checksum)


class Answer:
    """One answer while vLLM streams it. `tokens` grows; `error` is set if it must not go on."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.error = ""
        self._logprobs: list[float] = []
        self._spans: list[Any] = []
        self._ended = ""
        self._first_token = 0.0

    def add(self, part: CompletionOutput) -> int:
        """Take what came since the last one. Returns the number of tokens."""
        count = len(part.token_ids)
        if count:
            logprobs: list[float] = part.logprobs.logprobs
            if len(logprobs) != count or not all(map(math.isfinite, logprobs)):
                self.error = f"the logprobs of tokens {len(self.tokens)} to {len(self.tokens) + count} are {logprobs}"
                return 0
            self._first_token = self._first_token or time.time()
            self.tokens.extend(part.token_ids)
            self._logprobs.extend(logprobs)
        if part.finish_reason is not None:
            self._ended, self._spans = part.finish_reason, part.weight_versions or []
        return count

    def completion(self) -> Completion:
        """What was sampled, by the spans of vLLM, which label the step that sampled a token."""
        finish_reason = FINISHED.get(self._ended, "error")
        error = self.error or (f"vLLM ended it with {self._ended!r}" if finish_reason == "error" else "")
        spans = tuple(
            Span(served.weights, span.start, span.end, served.checksum)
            for span in self._spans
            for served in (served_of(span.version),)
            if span.start < span.end
        )
        if not error and sum(span.end - span.start for span in spans) != len(self.tokens):
            error = f"vLLM labelled {self._spans} of {len(self.tokens)} tokens with a version"
        if error:  # whatever was wrong, what was sampled before it has no versions one could rely on
            return completion_of([], [], (), "error", error=error)
        return completion_of(self.tokens, self._logprobs, spans, finish_reason, first_token=self._first_token)


def completion_of(
    tokens: list[int],
    logprobs: list[float],
    spans: tuple[Span, ...],
    finish_reason: FinishReason,
    *,
    error: str = "",
    first_token: float = 0.0,
) -> Completion:
    """A Completion of plain lists, done now."""
    return Completion(
        token_ids=np.array(tokens, dtype=np.int32),
        logprobs=np.array(logprobs, dtype=np.float32),
        versions=token_versions(spans),
        spans=spans,
        finish_reason=finish_reason,
        first_token=first_token,
        done=time.time(),
        error=error,
    )
