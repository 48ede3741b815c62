"""A request in SGLang's words, and SGLang's answer in ours: token ids, behaviour logprobs, one span per version."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from asyncrl.collectors.engines.base import Completion, FinishReason, Request, Span
from asyncrl.collectors.engines.vllm_request import completion_of, served_of

STREAM_EVERY = 64
"""Tokens between two parts of an answer. Each repeats all tokens so far: a part for every token would be quadratic."""

ENDS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


def inexact(request: Request) -> str:
    """Why SGLang cannot sample the request with log-probs that are known to be exact; "" if it can."""
    temperature = request.sampling.temperature
    if temperature in (0.0, 1.0):
        return ""
    return (
        f"temperature {temperature}: whether SGLang reports log-probs before or after it depends on the environment of "
        "its process (SGLANG_RETURN_ORIGINAL_LOGPROB), which it does not tell; use 1, or 0 to evaluate"
    )


def body_of(request: Request, rid: str, *, limit: int) -> dict[str, Any]:
    """What `/generate` reads. A seed counts where the server runs with --enable-deterministic-inference; its draws are
    of (seed, position in the sequence), so that an answer that goes on elsewhere draws no number twice."""
    sampling = request.sampling
    return {
        "rid": rid,
        "input_ids": list(request.token_ids),
        "return_logprob": True,
        "logprob_start_len": -1,  # of sampled tokens alone
        "sampling_params": {
            "temperature": sampling.temperature,
            "max_new_tokens": min(sampling.max_tokens, limit - len(request.token_ids)),
            "stop_token_ids": list(sampling.stop_token_ids),
            "sampling_seed": request.seed,
            "stream_interval": STREAM_EVERY,
        },
    }


class Answer:
    """One answer while the server streams it. `tokens` grows; `error` is set if it must not go on."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.error = ""
        self.ended: Mapping[str, Any] | None = None  # the server's finish_reason
        self._logprobs: list[float] = []
        self._spans: list[dict[str, Any]] = []
        self._first_token = 0.0

    def add(self, part: Mapping[str, Any]) -> int:
        """Take a part, which has all that came before it. Returns the number of tokens that are new."""
        tokens: list[int] = part["output_ids"]
        meta = part["meta_info"]
        logprobs = [entry[0] for entry in meta.get("output_token_logprobs", ())]  # [logprob, token, text]
        sampled = [entry[1] for entry in meta.get("output_token_logprobs", ())]
        # What is not finite arrives as null.
        if sampled != tokens or not all(isinstance(logprob, float | int) for logprob in logprobs):
            self.error = f"the tokens {tokens[-5:]} came with log-probs {logprobs[-5:]} of {sampled[-5:]}"
            return 0
        new = len(tokens) - len(self.tokens)
        self.tokens, self._logprobs = tokens, logprobs
        if tokens:
            self._first_token = self._first_token or time.time()
        self.ended, self._spans = meta["finish_reason"], meta.get("weight_versions") or []
        return new

    def elsewhere(self, request: Request) -> bool:
        """Whether it stopped at an end token of the model's, which the request does not stop at."""
        matched = (self.ended or {}).get("matched")
        return isinstance(matched, int) and matched not in request.sampling.stop_token_ids and not self.error

    def completion(self) -> Completion:
        """What was sampled, by the spans of the server, which label the step that sampled a token."""
        ended = self.ended or {}
        finish_reason = ENDS.get(str(ended.get("type")), "error")
        error = self.error
        # A stop at something else than a token is what SGLang makes of logits that are not finite.
        if not error and (finish_reason == "error" or not isinstance(ended.get("matched", 0), int)):
            error = f"SGLang ended it with {dict(ended)}"
        # An abort that carries a status is a failure of the server's own.
        if not error and ended.get("status_code") is not None:
            error = f"SGLang gave it up: {ended.get('message')}"
        spans: tuple[Span, ...] = ()
        if not error:
            try:
                spans = tuple(_span(span) for span in self._spans if span["start"] < span["end"])
            except ValueError:
                error = f"SGLang labelled tokens with {self._spans}, which is not of this run: does another update it?"
        if not error and sum(span.end - span.start for span in spans) != len(self.tokens):
            error = f"SGLang labelled {self._spans} of {len(self.tokens)} tokens with a version"
        if error:  # whatever was wrong, what was sampled before it has no versions one could rely on
            return completion_of([], [], (), "error", error=error)
        return completion_of(self.tokens, self._logprobs, spans, finish_reason, first_token=self._first_token)


def _span(span: Mapping[str, Any]) -> Span:
    """Raises ValueError for a label that is not ours."""
    served = served_of(span["version"])
    return Span(served.weights, span["start"], span["end"], served.checksum)
