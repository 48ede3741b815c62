"""Log-probs of chosen tokens out of hidden states, without a tensor of tokens x vocabulary.

    log p(y | h) = z_y - log sum over v of exp z_v,        z = softcap(h W' + b) / temperature

Where it is asked for, also how the whole distribution is spread: its entropy H = - sum over v of p_v log p_v, and its
collision probability, the sum over v of p_v^2. Both are sums over the vocabulary, as the normaliser is: no pass more.

A real vocabulary makes the logits the largest tensor of a step: 4,096 tokens x 151,936 in float32 are 2.3 GiB, and
log_softmax with its gradient needs three of them. Here logits exist for a block of the vocabulary at a time. The
normaliser is accumulated over blocks (online softmax: Milakov & Gimelshein 2018, arXiv 1805.02867), and the backward
pass computes blocks again (as Wijmans et al. 2024, arXiv 2411.09009, but no small gradient is left out), except for
those that there is room to keep.

Where a token was drawn between some of the vocabulary only (a `Support`), the sums are over those: the logits of the
others are -inf (`restriction.py`), here as where the token was sampled, and all else follows.

Products and sums are in float32 whatever the hidden states are in: in bfloat16 a logit of 20 is off by up to 0.06, and
so is the log-prob (MiniMax-M1, arXiv 2506.13585: engine and learner agreed only with the head in float32).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asyncrl.learners.memory import BLOCK as BLOCK
from asyncrl.learners.memory import LOGITS as LOGITS  # how much is done at once is decided here, and changed here
from asyncrl.learners.memory import PLAIN as PLAIN
from asyncrl.learners.restriction import Restriction
from asyncrl.schema import Support

IMPOSSIBLE = -1000.0
"""Lowest log-prob in a sum of p log p: exp of it is 0 in any type, and 0 x -1000 is 0, where 0 x -inf is no number."""


class Predicted(NamedTuple):
    """What a model says of P tokens, one after the other, each given what comes before it.

    logprobs [P], nats, differentiable. Where asked for, of the distribution that each token is one outcome of: entropy
    [P], nats, differentiable; collision [P], the sum of squared probabilities, without a gradient. The gradient of a
    token's log-prob with respect to its logits / temperature has the squared norm 1 - 2 p + collision.
    """

    logprobs: Tensor
    entropy: Tensor | None
    collision: Tensor | None


def predicted_plainly(
    logits: Tensor,
    rows: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    spread: bool = False,
    support: Support | None = None,
) -> Predicted:
    """What `predicted` gives, from all logits at once: [M, vocabulary], any floating type."""
    logits = _wide(logits)
    if temperature != 1.0:
        logits = logits / temperature
    if support is not None:
        restriction = Restriction.of(rows, support, vocabulary=logits.shape[1])
        logits, rows = logits.index_select(0, restriction.hidden), restriction.rows
        logits = logits + restriction.apply_(torch.zeros_like(logits))
    # This is log_softmax without a second tensor as large.
    normaliser = torch.logsumexp(logits, dim=1)
    logprobs = logits[rows, targets] - normaliser[rows]
    if not spread:
        return Predicted(logprobs, None, None)
    entropy, collision = _Spread.apply(logits, normaliser.detach())  # type: ignore[no-untyped-call]
    return Predicted(logprobs, entropy[rows], collision[rows])


class _Spread(torch.autograd.Function):
    """Entropy and collision [M] of each row of logits. Nothing as large as they are is kept for the backward pass but
    themselves, which the log-probs keep anyway."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, normaliser: Tensor) -> tuple[Tensor, Tensor]:
        logs = (logits - normaliser[:, None]).clamp_(min=IMPOSSIBLE)
        p = logs.exp()
        entropy = -logs.mul_(p).sum(dim=1)
        collision = torch.mul(p, p, out=p).sum(dim=1)
        ctx.save_for_backward(logits, normaliser, entropy)
        ctx.mark_non_differentiable(collision)
        return entropy, collision

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """d H / d z_v = -p_v (log p_v + H): the normaliser's share is in it."""
        logits, normaliser, entropy = ctx.saved_tensors
        logs = (logits - normaliser[:, None]).clamp_(min=IMPOSSIBLE)
        p = logs.exp()
        return logs.add_(entropy[:, None]).mul_(p).mul_(-grads[0][:, None]), None


def predicted(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    spread: bool = False,
    support: Support | None = None,
) -> Predicted:
    """Of the token targets[p] after hidden[rows[p]], for each p: its log-prob, and with `spread` entropy and collision
    of what it was chosen from; differentiable once.

    hidden [M, width], weight [vocabulary, width], bias [vocabulary] or None, each float32, float64 or half precision;
    rows and targets int64 [P]: a row may be asked for several tokens, or none. support: of P draws, what each token was
    drawn between; None: all of the vocabulary. Returns float32 [P] each, float64 if hidden is. Gradients flow to
    hidden, weight and bias. Raises ValueError for a support with ids beyond the vocabulary.
    """
    restriction = None
    if support is not None:
        restriction = Restriction.of(rows, support, vocabulary=len(weight))
        hidden, rows = hidden.index_select(0, restriction.hidden), restriction.rows
    # What is kept of a logit is its exponential, which a softcap's slope cannot be had from.
    room = LOGITS if torch.is_grad_enabled() and softcap is None else 0
    with torch.autocast(hidden.device.type, enabled=False):
        logprobs, entropy, collision = _Chosen.apply(  # type: ignore[no-untyped-call]  # torch leaves it unannotated
            hidden, weight, bias, rows, targets, temperature, softcap, room, spread, restriction
        )
        if not spread:
            return Predicted(logprobs, None, None)
        return Predicted(logprobs, entropy[rows], collision[rows])


class _Chosen(torch.autograd.Function):
    """Log-probs [P]; entropy and collision of each row of hidden states [M], None without `spread`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: Tensor,
        targets: Tensor,
        temperature: float,
        softcap: float | None,
        room: int,
        spread: bool,
        restriction: Restriction | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """room: logits to keep."""
        blocks = _Blocks(hidden, weight, bias, temperature, softcap)
        h = blocks.hidden
        # The lowest finite number, not -inf: a block that is all -inf must not make -inf - -inf of it.
        top = h.new_full((len(h),), torch.finfo(h.dtype).min)
        picked = h.new_empty(len(rows))
        sums = _Sums.of(h, spread=spread)
        kept: list[tuple[Tensor, Tensor]] = []
        for start, end, chosen in blocks.with_chosen(targets):
            keep = len(h) * (end - start) <= room
            z = blocks.logits(start, end, new=keep)
            if restriction is not None:
                restriction.apply_(z, start)
            picked[chosen] = z[rows[chosen], targets[chosen] - start]
            higher = torch.maximum(top, z.amax(dim=1))
            weights = sums.add(z.sub_(higher[:, None]), blocks.spare, risen=top.sub_(higher))
            top = higher
            if keep:
                kept.append((weights, top.clone()))
            # Those that are kept are the first: a narrower last block must not slip in behind one that had no room.
            room = room - z.numel() if keep else 0
        normaliser = top + sums.total.log()
        entropy, collision = sums.spread() if spread else (None, None)
        ctx.save_for_backward(hidden, weight, bias, rows, targets, normaliser, entropy)
        ctx.temperature, ctx.softcap, ctx.restriction, ctx.kept = temperature, softcap, restriction, kept[::-1]
        ctx.set_materialize_grads(False)
        if collision is not None:
            ctx.mark_non_differentiable(collision)
        return picked - normaliser[rows], entropy, collision

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """d log p(y) / d z_v = 1[v = y] - p_v, summed over the tokens that a row was asked for, and d H / d z_v =
        -p_v (log p_v + H).

        What was kept is used up block by block, so that it makes room for the weight's gradient; another pass over the
        same graph computes it again.
        """
        hidden, weight, bias, rows, targets, normaliser, entropy = ctx.saved_tensors
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        blocks = _Blocks(hidden, weight, bias, ctx.temperature, ctx.softcap)
        h = blocks.hidden
        of_logprobs, of_entropy = (None if g is None else g.to(h.dtype) / ctx.temperature for g in grads[:2])
        grad = h.new_zeros(len(rows)) if of_logprobs is None else of_logprobs
        of_row = h.new_zeros(len(h)).index_add_(0, rows, grad)
        if of_entropy is not None:
            of_row.addcmul_(of_entropy, entropy)
        hidden_grad = torch.zeros_like(h) if of_hidden else None
        weight_grad = torch.empty_like(weight, dtype=h.dtype) if of_weight else None
        bias_grad = torch.empty_like(bias, dtype=h.dtype) if of_bias else None
        for start, end, chosen in blocks.with_chosen(targets):
            slope = None
            if ctx.kept:
                p, top = ctx.kept.pop()
                p.mul_(torch.exp(top - normaliser)[:, None])
            else:
                p = blocks.logits(start, end)
                if ctx.softcap is not None:
                    slope = 1.0 - (p * (ctx.temperature / ctx.softcap)).square_()
                if ctx.restriction is not None:
                    ctx.restriction.apply_(p, start)
                p.sub_(normaliser[:, None]).exp_()
            if of_entropy is None:
                d = p.mul_(-of_row[:, None])
            else:
                # p log p is 0 where p is; there a log of the smallest number does no harm.
                spare = blocks.spare(end - start)
                logs = torch.clamp(p, min=torch.finfo(p.dtype).tiny, out=spare).log_()
                d = p.mul_(logs.mul_(of_entropy[:, None]).add_(of_row[:, None]).neg_())
            d.index_put_((rows[chosen], targets[chosen] - start), grad[chosen], accumulate=True)
            if slope is not None:
                d.mul_(slope)
            if hidden_grad is not None:
                hidden_grad.addmm_(d, weight[start:end].to(h.dtype))
            if weight_grad is not None:
                torch.mm(d.T, h, out=weight_grad[start:end])
            if bias_grad is not None:
                torch.sum(d, dim=0, out=bias_grad[start:end])
        return (
            None if hidden_grad is None else hidden_grad.to(hidden.dtype),
            None if weight_grad is None else weight_grad.to(weight.dtype),
            None if bias_grad is None else bias_grad.to(bias.dtype),
            *(None,) * 7,  # rows, targets, temperature, softcap, room, spread, restriction
        )


@dataclass(slots=True)
class _Sums:
    """Sums over the vocabulary so far, [M] each, with d = logit - the largest of its row so far: total of e^d, and with
    `spread` weighted of d e^d and squared of e^2d."""

    total: Tensor
    weighted: Tensor | None
    squared: Tensor | None

    @classmethod
    def of(cls, hidden: Tensor, *, spread: bool) -> _Sums:
        zeros = hidden.new_zeros(3 if spread else 1, len(hidden))
        return cls(zeros[0], *(zeros[1:] if spread else (None, None)))

    def add(self, d: Tensor, spare: Callable[[int], Tensor], *, risen: Tensor) -> Tensor:
        """Another block. d [M, n]: used up. spare: gives memory of d's shape that is not d's. risen [M], at most 0: the
        largest logit before - that of now. Returns e^d, in d's memory."""
        if self.weighted is None or self.squared is None:
            weights = d.exp_()
            self.total.mul_(risen.exp_()).add_(weights.sum(dim=1))
            return weights
        risen.clamp_(min=IMPOSSIBLE)
        # By its definition of the rows before: d falls by as much as the largest has risen.
        self.weighted.addcmul_(risen, self.total)
        logs = torch.clamp(d, min=IMPOSSIBLE, out=spare(d.shape[1]))
        weights = d.exp_()
        scale = risen.exp_()
        self.total.mul_(scale).add_(weights.sum(dim=1))
        self.weighted.mul_(scale).add_(logs.mul_(weights).sum(dim=1))
        self.squared.mul_(scale.square_()).add_(torch.mul(weights, weights, out=logs).sum(dim=1))
        return weights

    def spread(self) -> tuple[Tensor, Tensor]:
        """Entropy and collision, [M] each."""
        assert self.weighted is not None
        assert self.squared is not None
        return self.total.log() - self.weighted / self.total, self.squared / self.total.square()


class _Blocks:
    """The logits of all rows, some columns of the vocabulary at a time."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, softcap: float | None
    ) -> None:
        self.hidden = _wide(hidden)
        self._weight, self._bias = weight, bias
        self._temperature, self._softcap = temperature, softcap
        self._columns = min(len(weight), max(1, BLOCK // max(1, len(hidden))))
        self._scratch = self.hidden.new_empty(len(hidden) * self._columns)
        self._spare: Tensor | None = None

    def with_chosen(self, targets: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """(start, end, indices [any] of the `targets` in [start, end)) of each block."""
        vocabulary = len(self._weight)
        starts = range(0, vocabulary, self._columns)
        ascending, order = targets.sort()
        edges = torch.tensor([*starts, vocabulary], device=targets.device)
        bounds = torch.searchsorted(ascending, edges).tolist()
        for start, (first, last) in zip(starts, itertools.pairwise(bounds), strict=True):
            yield start, min(start + self._columns, vocabulary), order[first:last]

    def logits(self, start: int, end: int, *, new: bool = False) -> Tensor:
        """[M, end - start], divided by the temperature; in the scratch, or in memory of its own."""
        columns = end - start
        out = self.hidden.new_empty(len(self.hidden), columns) if new else self._shaped(self._scratch, columns)
        z = torch.mm(self.hidden, self._weight[start:end].to(self.hidden.dtype).T, out=out)
        if self._bias is not None:
            z.add_(self._bias[start:end])
        if self._softcap is not None:
            z.div_(self._softcap).tanh_().mul_(self._softcap)
        return z if self._temperature == 1.0 else z.div_(self._temperature)

    def spare(self, columns: int) -> Tensor:
        """[M, columns] of memory that no logits are in; made when it is first asked for."""
        if self._spare is None:
            self._spare = torch.empty_like(self._scratch)
        return self._shaped(self._spare, columns)

    def _shaped(self, memory: Tensor, columns: int) -> Tensor:
        return memory[: len(self.hidden) * columns].view(-1, columns)


def _wide(tensor: Tensor) -> Tensor:
    """As float32, or as float64 if that is what it is."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()
