"""The player of a mixture: each row is played as its own task is."""

from __future__ import annotations

import asyncio
from collections import ChainMap
from collections.abc import Mapping

from asyncrl.collectors.episode import Episode, Played, Player, Sampler


class MixedPlayer(Player):
    """players: of each task, by its name in the mixture."""

    def __init__(self, players: Mapping[str, Player]) -> None:
        self._players = players

    @property
    def scoring(self) -> Mapping[str, float]:
        return ChainMap(*(dict(player.scoring) for player in self._players.values()))

    @property
    def answering(self) -> Mapping[str, float]:
        return ChainMap(*(dict(player.answering) for player in self._players.values()))

    async def start(self) -> None:
        """One after the other: they share verifier processes, which the first one starts."""
        for player in self._players.values():
            await player.start()

    async def play(self, episode: Episode, sampler: Sampler) -> Played:
        return await self._players[episode.prompt.task].play(episode, sampler)

    async def close(self) -> None:
        await asyncio.gather(*(player.close() for player in self._players.values()))
