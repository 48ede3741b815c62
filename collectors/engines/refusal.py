"""What no engine can serve exactly, said before anything runs."""

from __future__ import annotations

import math

from asyncrl.collectors.engines.base import Request


def refusal(request: Request, *, limit: int, vocabulary: int) -> str:
    """Why the request cannot be served by a model that takes `limit` tokens, prompt and answer; "" if it can."""
    sampling, length = request.sampling, len(request.token_ids)
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        return f"temperature {sampling.temperature} is not a number >= 0"
    if not 0 < sampling.top_p <= 1:
        return f"top_p {sampling.top_p} is not above 0 and at most 1 (off)"
    if sampling.top_k != -1 and sampling.top_k < 1:
        return f"top_k {sampling.top_k} is not 1 or more, or -1 (off)"
    if not 0 <= sampling.min_p <= 1:
        return f"min_p {sampling.min_p} is not from 0 (off) to 1"
    if not all(sampling.stop):
        return "one of its stop strings is empty: it would end every answer at once"
    if sampling.min_tokens < 0:
        return f"min_tokens {sampling.min_tokens} is not 0 or more"
    if sampling.max_tokens < 1:
        return f"max_tokens {sampling.max_tokens} leaves nothing to sample"
    if not 0 < length < limit:
        return f"a prompt of {length} tokens; this model takes 1 to {limit - 1}"
    if min(request.token_ids) < 0 or max(request.token_ids) >= vocabulary:
        return f"a prompt token is outside the model's vocabulary of {vocabulary}"
    return ""
