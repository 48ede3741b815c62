"""A request in vLLM's words, and vLLM's answer in ours: token ids, behaviour logprobs, one span per version."""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from asyncrl.collectors.engines.answer import Answer, failed
from asyncrl.collectors.engines.base import Completion, FinishReason, Request, Span
from asyncrl.collectors.engines.sampling import truncates
from asyncrl.collectors.engines.spans import Served, label_of, served_of
from asyncrl.collectors.engines.stops import StopStrings

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams

COLDEST, HOTTEST = 0.01, 2.0
"""vLLM raises a temperature between 0 and COLDEST to it, and would sample otherwise than the learner computes; it has
none above HOTTEST."""

READ_EVERY = 64
"""Tokens that are looked at together: one by one, between all that vLLM does for the next, it takes much longer."""

FINISHED: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
"""vLLM's ends; all others are errors."""


def inexact(request: Request, *, vocabulary: int, most: int) -> str:
    """Why vLLM cannot sample the request exactly as it asks, and say among which tokens; "" if it can.

    most: log-probs that it gives for a token.
    """
    sampling = request.sampling
    if 0 < sampling.temperature < COLDEST or sampling.temperature > HOTTEST:
        return f"temperature {sampling.temperature}: vLLM has 0, and {COLDEST} to {HOTTEST}"
    if not truncates(sampling):
        return ""
    if sampling.top_k == -1:
        return (
            f"top_p {sampling.top_p} / min_p {sampling.min_p} without top_k: what was left is seen by the log-probs of "
            "the likeliest tokens, and vLLM must be told of how many; set top_k"
        )
    if sampling.top_p < 1 and sampling.min_p > 0:
        return (
            f"top_p {sampling.top_p} with min_p {sampling.min_p}: vLLM applies min_p first, which leaves top_p other "
            "tokens than it should have; use one of them"
        )
    if (wanted := likeliest(request, vocabulary)) > most:
        return (
            f"top_k {sampling.top_k}: the {wanted} log-probs that tell which tokens were left are more than the server "
            f"gives: start it with --max-logprobs {wanted} or more"
        )
    return ""


def likeliest(request: Request, vocabulary: int) -> int:
    """Of how many of the likeliest tokens the log-probs are asked for: those that were left are the finite ones. vLLM
    keeps all that are equal to the last of top_k, of which there are several in bfloat16, so a few more than top_k.

    vLLM has masks of its own (`return_sampling_mask`), but on a GPU only, and then refuses what truncates nothing.
    """
    sampling = request.sampling
    return min(vocabulary, sampling.top_k + 16 + sampling.top_k // 4) if truncates(sampling) else 0


def prompt_of(request: Request, served: Served) -> dict[str, Any]:
    """What vLLM reads. `cache_salt` is part of the key under which it keeps and finds prefixes."""
    return {"prompt_token_ids": list(request.token_ids), "cache_salt": label_of(served)}


def sampling_of(request: Request, *, limit: int, vocabulary: int) -> dict[str, Any]:
    """How vLLM samples this request, by the names of its SamplingParams: it ends at our stop tokens only, and each
    sampled token comes with its logprob. Stop strings are looked for here (`answer.py`): vLLM does it in the same
    place, and needs a tokenizer for it."""
    sampling = request.sampling
    max_tokens = min(sampling.max_tokens, limit - len(request.token_ids))
    found = {
        "temperature": sampling.temperature,
        "max_tokens": max_tokens,
        "min_tokens": min(sampling.min_tokens, max_tokens),
        "stop_token_ids": drawable(sampling.stop_token_ids, vocabulary),
        "ignore_eos": True,
        "seed": seed_of(request),
        "logprobs": likeliest(request, vocabulary),
        "detokenize": False,
    }
    if truncates(sampling):
        found |= {"top_k": sampling.top_k, "top_p": sampling.top_p, "min_p": sampling.min_p}
    return found


def drawable(ids: Sequence[int], vocabulary: int) -> list[int]:
    """Those that have a logit. Others are never sampled, and vLLM dies of one that min_tokens holds back."""
    return [id for id in ids if id < vocabulary]


def sampling_params(request: Request, *, limit: int, vocabulary: int) -> SamplingParams:
    """`sampling_of` as vLLM's own object."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        **sampling_of(request, limit=limit, vocabulary=vocabulary),
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


class VllmAnswer(Answer):
    """One answer while vLLM streams it."""

    def __init__(self, request: Request, served: Served, stops: StopStrings | None, *, vocabulary: int) -> None:
        super().__init__(request, served, stops, barred=drawable(request.sampling.stop_token_ids, vocabulary))
        self._vocabulary = vocabulary
        self._likeliest = likeliest(request, vocabulary)
        self._spans: Sequence[Any] = ()
        self._finish_reason = ""
        self._plain = stops is None and not self._likeliest
        self._tokens: list[int] = []  # with `_own`: not read yet
        self._own: list[float] = []
        self._read_at = 1  # the first one at once: from then on it has begun

    def add(self, part: RequestOutput) -> int:
        """See Answer: what came since the last one. It is read when somebody asks, when a few have come, and at once
        where it may end the answer."""
        output = part.outputs[0]
        tokens = output.token_ids
        count = len(tokens)
        if count:
            found = output.logprobs  # of token t, the entries starts[t] to ends[t]: its own first, then the likeliest
            logprobs = found.logprobs
            if len(logprobs) != count:  # a server gives one also where none is asked for
                logprobs = [logprobs[start] for start in found.start_indices]
            if self._plain:
                self._tokens += tokens
                self._own += logprobs
                if len(self._tokens) >= self._read_at:
                    self.read()
            elif self._likeliest:
                spans = zip(found.start_indices, found.end_indices, strict=True)
                self.take(tokens, logprobs, [self._left(found, start, end) for start, end in spans])
            else:
                self.take(tokens, logprobs)
        if output.finish_reason is not None:
            self.ended = True
            self._finish_reason, self._spans = output.finish_reason, output.weight_versions or ()
        return count

    def read(self) -> None:
        """See Answer."""
        if self._tokens and not self.error:
            self.take(self._tokens, self._own)
            self._tokens, self._own = [], []
            self._read_at = READ_EVERY

    def _left(self, found: Any, start: int, end: int) -> list[int]:
        """The tokens that truncation left: what it took away has a log-prob of minus infinity."""
        entries = zip(found.token_ids[start:end], found.logprobs[start:end], strict=True)
        left = {token for token, logprob in entries if math.isfinite(logprob)}
        if len(left) >= self._likeliest < self._vocabulary:
            self.error = f"more than {len(left)} tokens were left to draw from: too many are equal to the last of top_k"
        return sorted(left)

    def completion(self) -> Completion:
        """What was sampled, by the spans of vLLM, which label the step that sampled a token."""
        self.read()
        finish_reason = FINISHED.get(self._finish_reason, "error")
        error = self.error or (f"vLLM ended it with {self._finish_reason!r}" if finish_reason == "error" else "")
        spans = tuple(
            Span(served.weights, span.start, span.end, served.checksum)
            for span in self._spans
            for served in (served_of(span.version),)
            if span.start < span.end
        )
        if not error and sum(span.end - span.start for span in spans) != self.sampled:
            error = f"vLLM labelled {self._spans} of {self.sampled} tokens with a version"
        return failed(error) if error else self._completion(spans, finish_reason)
