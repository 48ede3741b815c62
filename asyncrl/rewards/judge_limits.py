"""What a judge may be asked: so often in a minute, and so often in all."""

from __future__ import annotations

import asyncio

from asyncrl.rewards.pool import VerifierError


class BudgetSpent(VerifierError):
    """A judge may not be asked any more: without it nothing can be scored, so the run ends."""


class Pace:
    """Lets calls through one after the other, evenly, so many a minute; None: at once. First come, first served; one
    that is cancelled while it waits takes nobody's turn."""

    def __init__(self, per_minute: int | None) -> None:
        self._interval_s = 0.0 if per_minute is None else 60.0 / per_minute
        self._next = 0.0
        self._turn = asyncio.Lock()

    async def turn(self) -> None:
        """Wait for one's turn: as long as those before it take, each the interval."""
        async with self._turn:
            loop = asyncio.get_running_loop()
            await asyncio.sleep(max(0.0, self._next - loop.time()))
            self._next = loop.time() + self._interval_s


class Budget:
    """Counts what a judge was asked in this process. max_calls: questions; max_total_tokens: of questions and replies,
    by the judge's own count. None: any number."""

    def __init__(self, name: str, max_calls: int | None, max_total_tokens: int | None) -> None:
        self.calls = 0
        self.tokens = 0
        self._most = 0  # tokens that one reply said
        self._name, self._max_calls, self._max_total_tokens = name, max_calls, max_total_tokens

    def call(self) -> None:
        """Before each question. Raises BudgetSpent."""
        if self._max_calls is not None and self.calls >= self._max_calls:
            raise self._spent("max_calls", self._max_calls)
        if self._max_total_tokens is not None and self.tokens >= self._max_total_tokens:
            raise self._spent("max_total_tokens", self._max_total_tokens)
        self.calls += 1

    def used(self, tokens: int | None) -> None:
        """After each reply. tokens: None, and the server did not say it this time: as many as the most so far."""
        self._most = max(self._most, tokens or 0)
        self.tokens += self._most if tokens is None else tokens

    def _spent(self, key: str, most: int) -> BudgetSpent:
        return BudgetSpent(
            f"the budget of the judge {self._name!r} is spent: {key} is {most}, and it was asked {self.calls} times "
            f"for {self.tokens} tokens.\n`asyncrl run --resume` goes on from the newest checkpoint with as much again"
        )
