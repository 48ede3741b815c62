"""What a step has to say beside its numbers: why its rate changed, that micro-batches are smaller, and what a person
should look at. Events of metrics.jsonl, which the console shows as they come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.config.recipe import Learner
from asyncrl.learners.mismatch import unhealthy
from asyncrl.learners.optimize import Optimizer, Updates
from asyncrl.learners.watch import Evaluated, Watch


class Notices:
    """Of one learner. A warning about the engine is given once: what causes it is there at every step."""

    def __init__(self, config: Learner, watch: Watch) -> None:
        self._config = config
        self._watch = watch
        self._told = False
        self._tokens = config.max_tokens_per_microbatch

    def of(
        self,
        metrics: Mapping[str, Any],
        updates: Updates,
        optimizer: Optimizer,
        evaluations: Sequence[Evaluated] = (),
    ) -> list[dict[str, Any]]:
        """Events of the step that had these metrics and updates, without time, lineage and version. evaluations: of the
        run so far, by version."""
        signs = [_warning(sign.about, sign.text) for sign in self._watch.see(metrics, evaluations)]
        own = self._warnings(metrics, updates, optimizer)
        return [*rate_changes(updates), *self._budget_change(metrics), *own, *signs]

    def _budget_change(self, metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
        """In this step, or before this learner was started again."""
        before, self._tokens = self._tokens, metrics["tokens_per_microbatch"]
        if self._tokens == before:
            return []
        return [{"event": "microbatch", "tokens_before": before, "tokens": self._tokens}]

    def _warnings(self, metrics: Mapping[str, Any], updates: Updates, optimizer: Optimizer) -> list[dict[str, Any]]:
        found = []
        if not self._told and (text := unhealthy(metrics)):
            self._told = True
            found.append(_warning("mismatch/age0", text))
        # Once for each stretch of low steps; with min_ess the run ends instead.
        just_low = self._config.min_ess is None and optimizer.pace.low == self._config.max_low_ess_steps
        if just_low and (text := optimizer.collapse(updates)):
            found.append(_warning("ess/sequence", text))
        return found


def rate_changes(updates: Updates) -> list[dict[str, Any]]:
    """An event for each update from which on the recipe's rate has another factor, with the numbers that caused it."""
    return [
        {
            "event": "learning_rate",
            "update": number,
            "scale_before": update.before.scale,
            "scale": update.pace.scale,
            "learning_rate": update.learning_rate,
            "ess": update.ess,
            "average": update.pace.average,
        }
        for number, update in enumerate(updates.each, start=1)
        if update.pace.scale != update.before.scale
    ]


def _warning(about: str, text: str) -> dict[str, Any]:
    return {"event": "warning", "about": about, "text": text.replace("\n", " ")}
