"""An answer in parts: what is left to sample once a part was interrupted, and the whole of all parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from asyncrl.collectors.engines.base import Completion, Request, Span
from asyncrl.collectors.engines.spans import token_versions
from asyncrl.schema.support import Support


def continued(request: Request, part: Completion) -> Request:
    """The request for what `part` of its answer leaves to sample."""
    count = len(part.token_ids)
    return replace(
        request,
        token_ids=(*request.token_ids, *part.token_ids.tolist()),
        sampling=replace(
            request.sampling,
            max_tokens=request.sampling.max_tokens - count,
            min_tokens=max(0, request.sampling.min_tokens - count),
        ),
        position=request.position + count,
    )


def joined(parts: Sequence[Completion]) -> Completion:
    """One answer of its parts, in order: one span a stretch, also where the weights did not change in the end."""
    if len(parts) == 1:
        return parts[0]
    spans: list[Span] = []
    start = 0
    for part in parts:
        for span in part.spans:
            span = replace(span, start=start + span.start, end=start + span.end)
            if spans and (spans[-1].weights, spans[-1].checksum) == (span.weights, span.checksum):
                span = replace(span, start=spans.pop().start)
            spans.append(span)
        start += len(part.token_ids)
    return replace(
        parts[-1],
        token_ids=np.concatenate([part.token_ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        versions=token_versions(spans),
        spans=tuple(spans),
        support=Support.joined([(part.support, len(part.token_ids)) for part in parts]),
        first_token=next((part.first_token for part in parts if part.first_token), 0.0),
    )


def ended(request: Request, part: Completion) -> Completion | None:
    """`part` of its answer as the whole of it, if nothing is left to sample: an engine was lost before it said so."""
    if part.finish_reason in ("stop", "length"):
        return part
    if part.stopped_by or (len(part.token_ids) and int(part.token_ids[-1]) in request.sampling.stop_token_ids):
        return replace(part, finish_reason="stop")
    # Exactly so many: a simulated engine knows no limit, and goes on beyond it.
    return replace(part, finish_reason="length") if len(part.token_ids) == request.sampling.max_tokens else None
