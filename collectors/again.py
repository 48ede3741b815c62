"""What is lost with a process that it needed, through no fault of its own, is tried again: so often, and so soon."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from asyncrl.collectors.episode import Episode, EpisodeLost, Played, Player, Sampler

PAUSES_S = (0.0, 2.0)
"""Before the next try of a request that lost its engine, or of an episode that lost its environment or agent: the first
time, the second. Lost a third time it ends: what takes processes with it must not take them all."""


async def play(episode: Episode, player: Player, sampler: Sampler) -> Played:
    """`player.play`, and from the beginning again when something that the episode needs was lost: another sample of the
    same prompt each time, unless it is to have the same draws. Of what was sampled before, no row says anything. Raises
    EpisodeLost after the last try, and what else `play` raises."""
    for pause_s in PAUSES_S:
        try:
            return await player.play(episode, sampler)
        except EpisodeLost:
            episode = replace(episode, again=episode.again + 1)
        await asyncio.sleep(pause_s)
    return await player.play(episode, sampler)
