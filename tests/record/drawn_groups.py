"""Hypothesis strategies of legal groups, and a stream of a batch."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from asyncrl import schema
from asyncrl.schema import (
    Group,
    Support,
    Trajectory,
    VersionSpan,
)
from asyncrl.staleness import Weights

text = st.text(max_size=12)


rewards = st.floats(allow_nan=True, allow_infinity=True)


@st.composite
def trajectories(draw, member):
    prompt = draw(st.integers(1, 5))
    stretches = draw(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), max_size=3))
    length = prompt + sum(n for n, _ in stretches)
    mask, versions = np.zeros(length, np.uint8), np.full(length, -1, np.int32)
    spans, at = [], prompt
    for n, version in stretches:
        mask[at : at + n] = 1
        versions[at : at + n] = version
        spans.append(VersionSpan(Weights(3, version), at, at + n, draw(text)))
        at += n
    logprobs = np.where(mask == 1, draw(st.floats(-50, 0, width=32)), 0).astype(np.float32)
    token_ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=length, max_size=length))
    return Trajectory(
        token_ids=np.array(token_ids, np.int32),
        loss_mask=mask,
        logprobs=logprobs,
        versions=versions,
        member=member,
        prompt_length=prompt,
        spans=tuple(spans),
        reward=draw(st.just(math.nan) | st.floats(-3e38, 3e38)),
        reward_parts=draw(st.dictionaries(text, st.none() | rewards, max_size=3)),
        finish_reason=draw(st.sampled_from(schema.FINISH_REASONS)),
        failure=draw(text),
        turn_offsets=(prompt,),
        turn_rewards=(draw(rewards),),
        done=draw(st.floats(0, 2e9)),
        seed=draw(st.integers(0, 2**63 - 1)),
        info=draw(st.dictionaries(text, st.integers() | text, max_size=2)),
        support=draw(st.none() | supports(token_ids, mask.tolist())),
    )


@st.composite
def supports(draw, token_ids, mask):
    """Of each sampled token nothing, some tokens and itself, or some other tokens that it could not have been."""
    others = st.sets(st.integers(0, 2**31 - 1), max_size=3)
    draws = []
    for token, sampled in zip(token_ids, mask, strict=True):
        ids = draw(others) if sampled else set()
        kept = draw(st.booleans())
        draws.append(sorted(ids | {token}) if ids and kept else sorted(~id for id in ids - {token}))
    return Support.of(draws)


@st.composite
def groups(draw):
    rows = []
    for member in range(draw(st.integers(1, 3))):
        first = draw(trajectories(member))
        told = {name: getattr(first, name) for name in ("reward", "reward_parts", "failure")}
        more = range(1, 1 + draw(st.integers(0, 1)))
        rows += [first, *(dataclasses.replace(draw(trajectories(member)), segment=n, **told) for n in more)]
    sampling = draw(st.fixed_dictionaries({"temperature": st.floats(0.1, 2)}, optional={"top_k": st.integers(-1, 9)}))
    return Group(draw(st.integers(0, 2**40)), 2, 3, "reverse", draw(text), "c", "c/0", sampling, 1.5, 2.5, tuple(rows))


def stream(batch, schema_, count=1):
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema_) as writer:
        for _ in range(count):
            writer.write_batch(batch)
    return sink.getvalue().to_pybytes()
