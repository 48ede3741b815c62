"""A request in SGLang's words, and SGLang's answer in ours: token ids, behaviour logprobs, one span per version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.collectors.engines.answer import Answer, completion_of, failed
from asyncrl.collectors.engines.base import Completion, FinishReason, Request, Span
from asyncrl.collectors.engines.sampling import truncates
from asyncrl.collectors.engines.spans import Served, served_of
from asyncrl.collectors.engines.stops import StopStrings

STREAM_EVERY = 64
"""Tokens between two parts of an answer. Each repeats all tokens so far: a part for every token would be quadratic."""

ENDS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


def inexact(request: Request) -> str:
    """Why SGLang cannot sample the request with log-probs that are known to be exact; "" if it can."""
    sampling = request.sampling
    temperature = sampling.temperature
    if truncates(sampling):
        return (
            f"top_k {sampling.top_k} / top_p {sampling.top_p} / min_p {sampling.min_p}: which tokens SGLang leaves, "
            "and whether its log-probs are those among them, was not tried on a GPU yet; use -1, 1 and 0"
        )
    if sampling.min_tokens:
        return (
            f"min_tokens {sampling.min_tokens}: SGLang also holds back end tokens of the model's own, and does not "
            "tell which; use 0"
        )
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


class SglangAnswer(Answer):
    """One answer while the server streams it."""

    def __init__(self, request: Request, served: Served, stops: StopStrings | None, *, limit: int) -> None:
        """limit: tokens of prompt and answer."""
        super().__init__(request, served, stops)
        self._finish: Mapping[str, Any] = {}  # the server's finish_reason
        self._most = min(request.sampling.max_tokens, limit - len(request.token_ids))
        self._spans: list[dict[str, Any]] = []
        self._certain: int | None = None  # tokens whose version is known before the end; None: of all

    def changed(self, served: Served) -> None:
        """Tokens that were sampled before may come still: a part has `STREAM_EVERY` of them. At the end the server says
        which."""
        if self._certain is None:
            self._certain = len(self.tokens)

    def partial(self) -> Completion | None:
        """See Answer. Of one that lived through an activation: what had come before it."""
        if self._certain is None or self.error:
            return super().partial()
        count, first_token = self._certain, self._first_token
        spans = self._stretches.spans(count)
        return completion_of(self.tokens[:count], self._logprobs[:count], spans, "abort", first_token=first_token)

    def add(self, part: Mapping[str, Any]) -> int:
        """See Answer. A part has all that came before it."""
        tokens: list[int] = part["output_ids"]
        meta = part["meta_info"]
        entries = meta.get("output_token_logprobs", ())  # [logprob, token, text]
        sampled, logprobs = [entry[1] for entry in entries], [entry[0] for entry in entries]
        # What is not finite arrives as null.
        if sampled != tokens or not all(isinstance(logprob, float | int) for logprob in logprobs):
            self.error = f"the tokens {tokens[-5:]} came with log-probs {logprobs[-5:]} of {sampled[-5:]}"
            return 0
        before = self.sampled
        if meta["finish_reason"] is not None:
            self.ended = True
            self._finish, self._spans = meta["finish_reason"], meta.get("weight_versions") or []
        return self.take(tokens[before:], logprobs[before:])

    @property
    def elsewhere(self) -> bool:
        """Whether it stopped at an end token of the model's, which the request does not stop at."""
        matched = self._finish.get("matched")
        own = self._request.sampling.stop_token_ids
        return isinstance(matched, int) and matched not in own and not (self.error or self.stopped_by)

    def completion(self) -> Completion:
        """What was sampled, by the spans of the server, which label the step that sampled a token."""
        ended = self._finish
        finish_reason = ENDS.get(str(ended.get("type")), "error")
        if finish_reason == "stop" and self.elsewhere and len(self.tokens) == self._most:
            finish_reason = "length"
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
        if not error and sum(span.end - span.start for span in spans) != self.sampled:
            error = f"SGLang labelled {self._spans} of {self.sampled} tokens with a version"
        return failed(error) if error else self._completion(spans, finish_reason)


def _span(span: Mapping[str, Any]) -> Span:
    """Raises ValueError for a label that is not ours."""
    served = served_of(span["version"])
    return Span(served.weights, span["start"], span["end"], served.checksum)
