"""What samples tokens, behind one protocol: transformers, vllm, sglang, simulated.

An engine owns slots. A request takes one, joins at the next decode step and leaves when it stops; nothing waits for
the longest. New weights are staged while decoding goes on and activated between two decode steps; a running request
survives with one version span per stretch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from asyncrl.schema.support import Support
from asyncrl.staleness import Weights

if TYPE_CHECKING:
    from asyncrl.weights.base import StagedWeights

FinishReason = Literal["stop", "length", "abort", "error"]
KvMode = Literal["keep", "recompute"]


def request_seed(run: str, ticket: int, attempt: int, member: int, turn: int, *, again: int = 0) -> int:
    """The seed of one request, a pure function of what it is: 63 bits of blake2b, the same on every machine.
    again: how often its episode was begun again. With `run.deterministic` it and attempt are 0 (`episode.py`)."""
    name = f"{run}/{ticket}/{attempt}/{member}/{turn}" + (f"+{again}" if again else "")
    digest = blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. The behaviour logprobs are those of the distribution after all of it.

    Temperature comes first; then top_k, top_p and min_p each say which tokens may be drawn, from the distribution that
    the one before left, renormalised; a token that any of them takes away is never drawn. An answer ends with the token
    that completes a stop string, which is part of it like a stop token is.
    """

    temperature: float = 1.0  # > 0; 0 = greedy, for evaluation only (its logprobs are those at temperature 1)
    top_p: float = 1.0  # the fewest most likely tokens whose mass reaches it; 1: all
    top_k: int = -1  # the so many most likely ones; -1: all
    min_p: float = 0.0  # those of at least min_p x the mass of the most likely one; 0: all
    max_tokens: int = 16
    min_tokens: int = 0  # sampled before any of `stop_token_ids` may be drawn, or a stop string ends the answer
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()  # strings that end an answer wherever they begin and end between its tokens


@dataclass(frozen=True, slots=True)
class Request:
    """One generation. `group` and `session` let an engine share prefixes and keep a conversation on one engine."""

    id: str
    group: str
    session: str
    token_ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    ticket: int = 0  # what the simulated engine's lengths are a function of
    member: int = 0
    position: int = 0  # tokens of this answer that its prompt ends with already: draws of the seed go on from there


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, end) of a completion were sampled by `weights`, whose verified checksum was `checksum`."""

    weights: Weights
    start: int
    end: int
    checksum: str


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer. Arrays have one entry per sampled token, the stop token included.

    token_ids int32 [T]; logprobs float32 [T], nats, under the distribution really sampled from; versions int32 [T].
    support: between which tokens each was drawn; None: each between all of the vocabulary. stopped_by: the stop string
    that ended it.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    spans: tuple[Span, ...]
    finish_reason: FinishReason
    first_token: float = 0.0  # unix seconds
    done: float = 0.0
    error: str = ""
    info: dict[str, Any] = field(default_factory=dict)
    support: Support | None = None
    stopped_by: str = ""


class EngineError(RuntimeError):
    """The engine itself failed (not the request); the collector returns the tickets and restarts it."""


class Engine(Protocol):
    """Samples tokens. All methods are called from one asyncio loop; `generate` runs many at once."""

    name: str

    @property
    def slots(self) -> int:
        """How many requests may decode at once."""

    @property
    def free_slots(self) -> int:
        """`slots` less the requests that run or wait; at least 0."""

    @property
    def serving(self) -> Weights | None:
        """What the next decode step samples from; None before the first activation."""

    @property
    def checksum(self) -> str:
        """Combined checksum of what is served, verified against the manifest; "" before the first activation, and where
        the version was published unhashed."""

    async def start(self) -> None:
        """Load what is needed to stage weights; serves nothing yet."""

    async def generate(self, request: Request) -> Completion:
        """Run one request; queues if no slot is free. Raises EngineError if the engine died or serves nothing yet,
        ValueError for a request it cannot serve exactly (the message says what and why)."""

    def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests at the next decode step: their `generate` returns the partial, finish_reason "abort"."""

    def progress(self, request_id: str) -> int:
        """Tokens sampled so far by a running request, 0 if unknown. Never blocks."""

    def partial(self, request_id: str) -> Completion | None:
        """What a running request has sampled so far, finish_reason "abort" unless that is all; also for one whose
        `generate` has just raised because the engine died. None if the engine cannot say: it is sampled again then.
        Never blocks."""
        return None

    def listen(self, request_id: str, heard: Callable[[], None]) -> None:
        """Call `heard` in the loop soon after a running request has new tokens, until it ends: once for several, if
        they come faster than the loop turns. An engine that cannot tell calls it never; `partial` says what is new."""
        return

    async def stage(self, staged: StagedWeights) -> None:
        """Copy verified weights beside the served ones. Decoding goes on."""

    async def activate(self, kv: KvMode = "keep", *, exchanged: Callable[[], None] | None = None) -> Weights:
        """Switch to the staged weights between two decode steps. `keep`: running requests go on over their old KV;
        `recompute`: their KV is rebuilt under the new weights first. Where they have a checksum, no token is sampled
        from them before the live tensors were compared with it. `exchanged` is called, in the loop, when that
        comparison begins. Returns what is now served."""

    async def check(self) -> None:
        """Return if it is well, raise EngineError if not. Quick, also while it decodes; not called while weights are
        exchanged. An engine that does not answer in time is taken for lost."""
        return

    async def verify(self) -> tuple[Weights, str]:
        """What is served now, and the combined checksum of the live tensors, computed anew. Decoding goes on if the
        engine can. Raises EngineError if nothing is served."""

    async def close(self) -> None:
        """End the engine; what still runs raises EngineError."""
