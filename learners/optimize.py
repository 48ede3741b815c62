"""The updates of a step: AdamW, linear warm-up, gradient clipping, the guard that lets no non-finite number in, and a
rate that may follow the effective sample size (`pace.py`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from asyncrl.config.recipe import Learner
from asyncrl.config.sft import Sft
from asyncrl.learners.pace import EssCollapsed, Pace, after_measuring, after_step, collapse
from asyncrl.learners.parallel import ALONE, Ranks
from asyncrl.learners.snapshot import Keep, live


class TooManySkipped(RuntimeError):
    """So many steps in a row changed nothing that going on is a waste; names the last reason and what to try."""


@dataclass(frozen=True, slots=True)
class Update:
    """What one update did. skipped: "" or why neither weights nor optimizer state changed. before, pace: what control
    had before and after; their scales differ if the update changed the rate."""

    grad_norm: float  # before clipping; NaN or inf if that is why it was skipped
    learning_rate: float
    skipped: str = ""
    ess: float | None = None  # share of the answers it was made of; None: not measured
    before: Pace = field(default_factory=Pace)
    pace: Pace = field(default_factory=Pace)


@dataclass(frozen=True, slots=True)
class Updates:
    """What the updates of one step did, in their order; at least one. ess: of all their answers together."""

    each: tuple[Update, ...]
    ess: float | None = None

    @property
    def applied(self) -> tuple[Update, ...]:
        """Those that were not skipped."""
        return tuple(update for update in self.each if not update.skipped)

    @property
    def skipped(self) -> str:
        """Empty, or why the last one was skipped, if all were: the step then changed nothing."""
        return "" if self.applied else self.each[-1].skipped

    @property
    def grad_norm(self) -> float:
        """Mean over the applied ones, before clipping; of the last one if all were skipped."""
        norms = [update.grad_norm for update in self.applied or self.each[-1:]]
        return sum(norms) / len(norms)

    @property
    def learning_rate(self) -> float:
        """Mean over the applied ones, whose rates differ with `learner.rate_by_ess` only; of the last one if all were
        skipped."""
        rates = [update.learning_rate for update in self.applied or self.each[-1:]]
        return rates[0] if len(set(rates)) == 1 else sum(rates) / len(rates)


def learning_rate(config: Learner | Sft, steps: int, total: int | None = None) -> float:
    """Of the step that follows `steps` ones that changed something: linear from 1/warmup_steps of the full rate; with a
    linear scheduler then down, so that it would be 0 after `total` steps.

    >>> learning_rate(Learner(learning_rate=1.0, warmup_steps=4), 0), learning_rate(Learner(learning_rate=1.0), 99)
    (0.25, 1.0)
    >>> [learning_rate(Sft(learning_rate=1.0, warmup_steps=2), steps, 6) for steps in range(7)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    warm = min(1.0, (steps + 1) / max(1, config.warmup_steps))
    if total is None or isinstance(config, Learner) or config.lr_scheduler_type == "constant":
        return config.learning_rate * warm
    left = max(0, total - steps) / max(1, total - config.warmup_steps)
    return config.learning_rate * min(warm, left)


class Optimizer:
    """AdamW over a model's parameters. Weight decay applies to matrices, not to norms and biases.

    A gradient of zeros (every reward equal) is still an update: Adam's momentum moves the weights, as it would for any
    batch that says nothing new, and the second moment decays. Skipping it would make the step's effect depend on
    whether one group in the batch happened to vary.
    """

    def __init__(
        self, model: nn.Module, config: Learner | Sft, ranks: Ranks = ALONE, *, total_steps: int | None = None
    ) -> None:
        """model: as it is trained, so sharded already where there are several `ranks`. total_steps: after how many the
        schedule ends, if it does."""
        self._config = config
        self._total_steps = total_steps
        self._ranks = ranks
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        matrices = [p for p in self._parameters if p.ndim >= 2]
        vectors = [p for p in self._parameters if p.ndim < 2]
        self._adam = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=config.learning_rate,
            betas=config.betas,
            fused=True,  # one pass over each parameter: the update of a small model is all call overhead otherwise
        )
        self.updates = 0  # applied ones
        self.steps = 0  # with an applied update: a skipped step does not advance the warm-up
        self.skipped_in_a_row = 0
        self.pace = Pace()

    def step(self, tokens: int) -> Update:
        """A step of one update, by the mean over `tokens` tokens."""
        update = self.update(tokens, denominator=tokens)
        self.ended(Updates((update,)))
        return update

    def update(self, tokens: int, *, denominator: float, ess: float | None = None) -> Update:
        """Apply the accumulated gradient of the SUM over `tokens` tokens, of all ranks, divided by `denominator`, and
        clear it. The rate is that of the step it belongs to, and with `learner.rate_by_ess` scaled by `ess`, the share
        of its own answers.

        Skipped, with weights and optimizer state untouched, when `tokens` is 0 or the gradient's norm is not finite.
        """
        before, pace = self.pace, self.pace
        if isinstance(self._config, Learner) and self._config.rate_by_ess:
            pace = after_measuring(before, ess)
        rate = learning_rate(self._config, self.steps, self._total_steps) * pace.scale
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if not tokens or not gradients:
            return self._skip(0.0, rate, "no token to train: no member of any group was scored, or masks took all")
        torch._foreach_mul_(gradients, 1.0 / denominator)
        # One norm of all ranks' parts: they clip alike, and skip together.
        norm = float(self._ranks.whole(torch.nn.utils.clip_grad_norm_(self._parameters, self._config.max_grad_norm)))
        if not math.isfinite(norm):
            return self._skip(norm, rate, f"the gradient's norm is {norm}")
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        self.updates += 1
        self.pace = pace
        return Update(grad_norm=norm, learning_rate=rate, ess=ess, before=before, pace=pace)

    def _skip(self, norm: float, rate: float, reason: str) -> Update:
        self._adam.zero_grad(set_to_none=True)
        return Update(grad_norm=norm, learning_rate=rate, skipped=reason)

    def ended(self, updates: Updates) -> None:
        """A step is over, after these updates: the next one has its own rate."""
        if updates.skipped:
            self.skipped_in_a_row += 1
        else:
            self.steps += 1
            self.skipped_in_a_row = 0
        if isinstance(self._config, Learner):
            self.pace = after_step(self.pace, updates.ess, limit=self._config.min_ess)

    def check_progress(self, step: Update | Updates) -> None:
        """Raises TooManySkipped when `step` was the last of too many skipped ones, EssCollapsed when its answers were
        the last of too many from which too few count. Called once it is committed: its batch is consumed like any
        other."""
        if step.skipped and self.skipped_in_a_row >= self._config.max_skipped_steps:
            raise TooManySkipped(
                f"{self.skipped_in_a_row} steps in a row changed nothing; the last: {step.skipped}\n"
                "Non-finite gradients: lower learning_rate or use float32; nothing scored: see failures in "
                "metrics.jsonl. max_skipped_steps sets the limit."
            )
        if isinstance(self._config, Learner) and self._config.min_ess is not None and (told := self.collapse(step)):
            raise EssCollapsed(told)

    def collapse(self, step: Update | Updates) -> str:
        """Empty, or that the effective sample size was too low for too many steps, of which `step` was the last."""
        assert isinstance(self._config, Learner)
        limit, steps, scaled = self._config.min_ess, self._config.max_low_ess_steps, self._config.rate_by_ess
        return collapse(self.pace, step.ess, limit=limit, steps=steps, scaled=scaled)

    def state_dict(self, keep: Keep = live) -> dict[str, Any]:
        """Everything a resumed learner needs, loadable with torch.load(weights_only=True); whole, so that any number of
        ranks can go on from it. A collective; of use on rank 0. keep: what is given of each tensor."""
        adam = self._adam.state_dict()
        adam["state"] = {
            index: {name: keep((index, name), self._ranks.kept(value)) for name, value in moments.items()}
            for index, moments in adam["state"].items()
        }
        return {
            "adam": adam,
            "updates": self.updates,
            "steps": self.steps,
            "skipped_in_a_row": self.skipped_in_a_row,
            "pace": asdict(self.pace),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint. Rates and decay come from the recipe, moments and counts from the checkpoint."""
        decays = [group["weight_decay"] for group in self._adam.param_groups]
        parameters = [p for group in self._adam.param_groups for p in group["params"]]  # as Adam numbers them
        moments = {
            index: {name: self._ranks.part_of(value, parameters[index]) for name, value in values.items()}
            for index, values in state["adam"]["state"].items()
        }
        self._adam.load_state_dict({**state["adam"], "state": moments})
        for group, decay in zip(self._adam.param_groups, decays, strict=True):
            group.update(weight_decay=decay, betas=self._config.betas)
        self.updates = int(state["updates"])
        self.steps = int(state["steps"])
        self.skipped_in_a_row = int(state["skipped_in_a_row"])
        self.pace = Pace(**state.get("pace", {}))  # of a version without control: it scaled nothing
