"""From the turns of an episode to its training rows, token for token. Pure.

A turn whose request begins with a row's whole sequence goes on with that row: what stands between is text of tools and
of the template, which is not trained. One that does not, because the history was rewritten (an agent shortens it, a
template drops old thoughts) or because several conversations run beside each other, begins a row of its own: a segment.
So nothing is trained in a context other than the one it was sampled in, and nothing twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from asyncrl.collectors.episode import Played, Turn
from asyncrl.rewards.shaping import OUTCOME
from asyncrl.schema import Support, Trajectory, VersionSpan


def chains(turns: Sequence[Turn]) -> list[list[Turn]]:
    """The turns of each segment. A turn goes on with the longest row that its request begins with; of equal ones, with
    the newest. A row that something was sampled after is whole: a second turn from the same point (a retry, a branch)
    starts again from its own request."""
    rows: list[list[Turn]] = []
    sequences: list[tuple[int, ...]] = []
    for turn in turns:
        asked = turn.request.token_ids
        found = [n for n, row in enumerate(sequences) if len(row) <= len(asked) and asked[: len(row)] == row]
        whole = (*asked, *turn.completion.token_ids.tolist())
        if found:
            n = max(found, key=lambda n: (len(sequences[n]), n))
            rows[n].append(turn)
            sequences[n] = whole
        else:
            rows.append([turn])
            sequences.append(whole)
    return rows


def trajectories(played: Played) -> list[Trajectory]:
    """The training rows of an episode: one per segment, in the order their first turns were asked. Each has the
    episode's reward; they are one member."""
    info = dict(played.info)
    if played.score.plain is not None:  # what success is measured by, where it is not the reward that is trained on
        info[OUTCOME] = played.score.plain
    rewarded = any(turn.reward is not None for turn in played.turns)
    return [
        _trajectory(chain, played, segment=n, rewarded=rewarded, info=info)
        for n, chain in enumerate(chains(played.turns))
    ]


def _trajectory(
    chain: Sequence[Turn], played: Played, *, segment: int, rewarded: bool, info: Mapping[str, Any]
) -> Trajectory:
    last = chain[-1]
    token_ids = np.array((*last.request.token_ids, *last.completion.token_ids.tolist()), dtype=np.int32)
    loss_mask = np.zeros(len(token_ids), dtype=np.uint8)
    logprobs = np.zeros(len(token_ids), dtype=np.float32)
    versions = np.full(len(token_ids), -1, dtype=np.int32)
    spans: list[VersionSpan] = []
    supports: list[tuple[Support | None, int]] = []
    end = 0
    offsets = [len(turn.request.token_ids) for turn in chain]
    for turn, start in zip(chain, offsets, strict=True):
        completion = turn.completion
        sampled = slice(start, start + len(completion.token_ids))
        loss_mask[sampled] = 1
        logprobs[sampled] = completion.logprobs
        versions[sampled] = completion.versions
        spans += (VersionSpan(s.weights, start + s.start, start + s.end, s.checksum) for s in completion.spans)
        supports += [(None, start - end), (completion.support, len(completion.token_ids))]
        end = sampled.stop
    detail = played.score.detail  # of what is wrong, or of why it is unscored
    error = "; ".join(turn.completion.error for turn in chain if turn.completion.error)
    return Trajectory(
        token_ids=token_ids,
        loss_mask=loss_mask,
        logprobs=logprobs,
        versions=versions,
        member=last.request.member,
        segment=segment,
        prompt_length=offsets[0],
        spans=tuple(spans),
        reward=played.score.reward,
        reward_parts=played.score.parts,
        finish_reason=played.finish_reason,
        failure=played.score.failure or played.score.wrong,
        turn_offsets=tuple(offsets),
        turn_rewards=tuple(turn.reward or 0.0 for turn in chain) if rewarded else (),
        first_token=chain[0].completion.first_token,
        done=last.completion.done,
        scored=played.scored,
        seed=chain[0].request.seed,
        info={**({"error": error} if error else {}), **({"detail": detail} if detail else {}), **info},
        support=Support.joined(supports),
    )
