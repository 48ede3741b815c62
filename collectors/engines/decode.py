"""Continuous batching on the public forward of any `AutoModelForCausalLM`: requests join and leave at every step.

Runs in one thread and knows no other. A step is one forward over the live rows, one drawn token per row. Newcomers are
prefilled together, left-padded; equal prompts (the members of a group) are prefilled once.
"""

from __future__ import annotations

import inspect
import logging
import math
import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from asyncrl.collectors.engines.base import Completion, EngineError, FinishReason, Request
from asyncrl.collectors.engines.head import widen_head
from asyncrl.collectors.engines.kv import KeysValues, SlotCache
from asyncrl.collectors.engines.sampling import draw, left_in, may_draw, support_of, truncates, uniforms
from asyncrl.collectors.engines.spans import Served, Stretches, token_versions
from asyncrl.collectors.engines.stops import StopStrings
from asyncrl.schema.support import Support

log = logging.getLogger(__name__)

_ALL = np.empty(0, np.int32)
"""A draw between all tokens, in the words of Support."""

_PREFILL_TOKENS = 8192
"""Padded tokens of one prefill forward, at most (one longer prompt goes alone): bounds its activations, and how long
the running rows stand still for newcomers."""


class Generation:
    """One request from submission to its completion. Written by the decode thread, readable from any: what a token
    comes with is there before the token is, so that the first len(tokens) of everything belong together."""

    def __init__(self, request: Request, budget: int, stops: StopStrings | None = None) -> None:
        sampling = request.sampling
        self.request = request
        self.budget = budget  # tokens it may sample: max_tokens, or what max_length leaves
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        # Per token what it was drawn between; None: no draw of this request is restricted.
        self.support: list[NDArray[np.int32]] | None = None
        self.stretches = Stretches()
        self.prompted: Served | None = None  # the weights that computed the keys and values of its prompt
        self.finish_reason: FinishReason | None = None
        self.stopped_by = ""
        self.error = ""
        self.first_token = 0.0
        self._uniforms = uniforms(request.seed, request.position + budget)[request.position :]
        self._stop = frozenset(sampling.stop_token_ids)
        self._stops = stops
        self._truncates = truncates(sampling)
        if self._truncates or (self._stop and sampling.min_tokens > 0):
            self.support = []

    @property
    def next_uniform(self) -> float:
        return self._uniforms.item(len(self.tokens))

    @property
    def barred(self) -> frozenset[int]:
        """What may not be drawn next, however likely."""
        return self._stop if len(self.tokens) < self.request.sampling.min_tokens else frozenset()

    @property
    def restricted(self) -> bool:
        """Whether the next token is not drawn between all."""
        return self._truncates or bool(self.barred)

    @property
    def newest(self) -> int:
        """The token that the next step feeds."""
        return self.tokens[-1] if self.tokens else self.request.token_ids[-1]

    @property
    def cached(self) -> list[int]:
        """The tokens whose keys and values a running row holds: all but the newest."""
        return [*self.request.token_ids, *self.tokens][:-1]

    def add(self, token: int, logprob: float, served: Served, support: NDArray[np.int32] = _ALL) -> None:
        """Take the token drawn for this request, and see whether it was the last."""
        if not math.isfinite(logprob):
            self.finish_reason = "error"
            self.error = f"the logits under weights {tuple(served.weights)} are not finite at token {len(self.tokens)}"
            return
        if not self.tokens:
            self.first_token = time.time()
        self.stretches.mark(len(self.tokens), served)
        self.logprobs.append(logprob)
        if self.support is not None:
            self.support.append(support)
        self.tokens.append(token)
        if self._stops is not None:
            self.stopped_by = self._stops.add(token, passed=len(self.tokens) <= self.request.sampling.min_tokens)
        if token in self._stop or self.stopped_by:
            self.finish_reason = "stop"
        elif len(self.tokens) == self.budget:
            self.finish_reason = "length"

    def completion(self) -> Completion:
        """The answer, once `finish_reason` is set."""
        if self.finish_reason is None:
            raise RuntimeError(f"request {self.request.id} is still running: it has no completion yet")
        return self._sampled(self.finish_reason)

    def partial(self) -> Completion:
        """What was sampled by now, in any thread."""
        return self._sampled(self.finish_reason or "abort")

    def _sampled(self, finish_reason: FinishReason) -> Completion:
        count = len(self.tokens)
        spans = self.stretches.spans(count)
        supports = [] if self.support is None else self.support[:count]
        counts = np.array([len(ids) for ids in supports], dtype=np.int32)
        return Completion(
            token_ids=np.array(self.tokens[:count], dtype=np.int32),
            logprobs=np.array(self.logprobs[:count], dtype=np.float32),
            versions=token_versions(spans),
            spans=spans,
            finish_reason=finish_reason,
            first_token=self.first_token,
            done=time.time(),
            error=self.error,
            support=Support(counts, np.concatenate(supports)) if counts.any() else None,
            stopped_by=self.stopped_by,
        )


class Decoder:
    """The running requests, one row of the cache each. Every method leaves rows and `running` in step. From its making
    on the logits of `model` are float32, where that can be had (logged where not)."""

    def __init__(self, model: PreTrainedModel, *, slots: int) -> None:
        if (reason := widen_head(model)) is not None and model.dtype != torch.float32:
            log.warning(
                "%s computes its logits, and with them log-probs, in %s: %s", model.name_or_path, model.dtype, reason
            )
        self.running: list[Generation] = []
        self.sampled = 0  # tokens, since the start
        self._model = model
        self._slots = slots
        self._cache = SlotCache(slots)
        parameters = inspect.signature(model.forward).parameters
        # transformers 5.24 renamed `past_key_values` to `cache`; models with code of their own keep the old name.
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._takes_positions = "position_ids" in parameters  # models with relative positions only (ALiBi) do not
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}

    @property
    def free(self) -> int:
        return self._slots - len(self.running)

    def join(self, newcomers: Sequence[Generation], served: Served) -> list[Generation]:
        """Take in newcomers, at most `free`. Those whose prompt a running member of their group holds, computed under
        these very weights, begin with its columns, and the next step is their first. The others are prefilled, and the
        first token of each is drawn. Returns those that end with it."""
        late = self._share(newcomers, served)
        prompts: dict[tuple[int, ...], list[Generation]] = {}
        for generation in newcomers:
            if generation in late:
                continue
            prompts.setdefault(generation.request.token_ids, []).append(generation)
        for chunk in _chunks(sorted(prompts, key=len)):
            logits, prefilled = self._prefill(chunk)
            members = [(row, generation) for row, prompt in enumerate(chunk) for generation in prompts[prompt]]
            source = [row for row, _ in members]
            generations = [generation for _, generation in members]
            self._cache.append(prefilled, source, [len(g.request.token_ids) for g in generations])
            for generation in generations:
                generation.prompted = served
            self.running.extend(generations)
            self._draw(generations, logits[torch.tensor(source, device=logits.device)], served)
        return self.sweep()

    def step(self, served: Served) -> list[Generation]:
        """One token for every running request. Returns those that end with it."""
        logits = self._continue([g.newest for g in self.running], self._cache)
        self._draw(self.running, logits, served)
        return self.sweep()

    def sweep(self) -> list[Generation]:
        """Take the requests whose `finish_reason` is set out of their rows and return them."""
        ended = [row for row, generation in enumerate(self.running) if generation.finish_reason is not None]
        if not ended:
            return []
        finished = [self.running[row] for row in ended]
        self.running = [self.running[row] for row in self._cache.remove(ended)]
        return finished

    def rebuild(self, served: Served) -> None:
        """Compute the keys and values of all running requests anew, under the weights served now: `served`."""
        running, self.running = sorted(self.running, key=lambda g: len(g.cached)), []
        self._cache.clear()
        for chunk in _chunks([tuple(g.cached) for g in running]):
            _, prefilled = self._prefill(chunk)
            self._cache.append(prefilled, range(len(chunk)), [len(tokens) for tokens in chunk])
        for generation in running:
            generation.prompted = served
        self.running = running

    def check_exact(self) -> None:
        """Compare padded prefill plus one cached step with plain forwards, on this very model.

        Raises EngineError if they differ: the architecture then keeps state other than keys and values (recurrent
        layers), or does not honour padding, and every behaviour log-probability would be wrong without a sign.
        """
        vocabulary = self._model.config.get_text_config().vocab_size
        sequences = [tuple((7 * i + n) % vocabulary for i in range(n)) for n in (3, 7)]
        try:
            cache = SlotCache(slots=len(sequences))
            _, prefilled = self._prefill([sequence[:-1] for sequence in sequences])
            cache.append(prefilled, range(len(sequences)), [len(sequence) - 1 for sequence in sequences])
            found = self._continue([sequence[-1] for sequence in sequences], cache)
            expected = torch.cat([self._prefill([sequence])[0] for sequence in sequences])
        except Exception as error:
            raise EngineError(
                f"{type(self._model).__name__} cannot be decoded in slots over keys and values alone: "
                f"{type(error).__name__}: {error}"
            ) from error
        # The mean over the vocabulary: single entries are off by far more than a rounding step in 16 bits.
        limit = 1e-3 if self._model.dtype == torch.float32 else 0.1
        difference = float((found.float().log_softmax(-1) - expected.float().log_softmax(-1)).abs().mean())
        if not difference <= limit:
            raise EngineError(
                f"{type(self._model).__name__} decodes differently in padded slots than alone (mean log-probability "
                f"difference {difference:.2g}, limit {limit}): its behaviour log-probabilities would be wrong"
            )

    def _share(self, newcomers: Sequence[Generation], served: Served) -> set[Generation]:
        """Give rows to those newcomers whose prompt is held already, all of it but the token that the next step feeds.
        Returns them."""
        holders = {g.request.group: row for row, g in enumerate(self.running) if g.prompted is served}
        late: dict[Generation, int] = {}
        for generation in newcomers:
            row, prompt = holders.get(generation.request.group), generation.request.token_ids
            if row is not None and len(prompt) > 1 and self.running[row].request.token_ids == prompt:
                late[generation] = row
                generation.prompted = served
        if late:
            self._cache.branch(list(late.values()), [len(g.request.token_ids) - 1 for g in late])
            self.running.extend(late)
        return set(late)

    def _prefill(self, sequences: Sequence[tuple[int, ...]]) -> tuple[torch.Tensor, KeysValues]:
        """One left-padded forward. Returns (logits of each sequence's last token [n, vocabulary], keys and values)."""
        width, device = max(map(len, sequences)), self._model.device
        tokens = torch.tensor([[0] * (width - len(s)) + list(s) for s in sequences], device=device)
        lengths = torch.tensor([len(s) for s in sequences], device=device)
        mask = lengths[:, None] > torch.arange(width - 1, -1, -1, device=device)
        positions = (mask.cumsum(dim=1) - 1).clamp_(min=0)
        # Without a config: layers of full length, also where the model would keep a sliding window only.
        cache = DynamicCache()
        logits = self._forward(tokens, mask, positions, cache)
        return logits, [(keys, values) for keys, values, _ in cache]

    def _continue(self, newest: Sequence[int], cache: SlotCache) -> torch.Tensor:
        """One decode forward: feed each row its newest token. Returns the logits of the next one [rows, vocabulary]."""
        cache.reserve()
        mask, positions = cache.inputs()
        logits = self._forward(torch.tensor(newest, device=mask.device)[:, None], mask, positions, cache)
        cache.advance()
        return logits

    def _forward(self, tokens: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Cache) -> torch.Tensor:
        arguments = {"position_ids": positions, **self._last_only} if self._takes_positions else self._last_only
        output = self._model(
            input_ids=tokens,
            attention_mask=mask,
            use_cache=True,
            **{self._cache_argument: cache},
            **arguments,
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def _draw(self, generations: Sequence[Generation], logits: torch.Tensor, served: Served) -> None:
        temperatures = [g.request.sampling.temperature for g in generations]
        supports = [_ALL] * len(generations)
        if restricted := [row for row, g in enumerate(generations) if g.support is not None and g.restricted]:
            rows = torch.tensor(restricted, device=logits.device)
            few = [generations[row] for row in restricted]
            kept = may_draw(logits[rows], [g.request.sampling for g in few], [g.barred for g in few])
            logits = left_in(logits, rows, kept)
            for row, support in zip(restricted, support_of(kept), strict=True):
                supports[row] = support
        ids, logprobs = draw(logits, temperatures, [g.next_uniform for g in generations])
        for generation, token, logprob, support in zip(
            generations, ids.tolist(), logprobs.tolist(), supports, strict=True
        ):
            generation.add(token, logprob, served, support)
        self.sampled += len(generations)


def _chunks(sequences: Sequence[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
    """Split sequences, ascending by length, into runs of at most _PREFILL_TOKENS padded tokens."""
    chunk: list[tuple[int, ...]] = []
    for sequence in sequences:
        if chunk and (len(chunk) + 1) * len(sequence) > _PREFILL_TOKENS:
            yield chunk
            chunk = []
        chunk.append(sequence)
    if chunk:
        yield chunk
