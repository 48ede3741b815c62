"""What becomes of rows that cannot be used: the first one ends the reading, or all are left out and counted."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

from asyncrl.data.errors import DataError, Reason, RowError

log = logging.getLogger(__name__)

Policy = Literal["error", "skip"]


class BadRows:
    """`counts`: rows left out, by reason; `examples`: what the first of each was refused with."""

    def __init__(self, policy: Policy, *, key: str, logs: bool = True) -> None:
        """`key`: of the recipe, that sets the policy; for the message. `logs`: the first of each reason."""
        self.policy = policy
        self._key = key
        self._logs = logs
        self.counts: Counter[Reason] = Counter()
        self.examples: dict[Reason, str] = {}

    def __call__(self, error: RowError) -> None:
        """Raises DataError under the policy `error`."""
        if self.policy == "error":
            raise DataError(f"{error}\nOr leave such rows out and have them counted: {self._key}=skip") from error
        if not self.counts[error.reason]:
            self.examples[error.reason] = str(error).splitlines()[0]
            if self._logs:
                log.warning("left out (%s): %s", error.reason, self.examples[error.reason])
        self.counts[error.reason] += error.rows

    @property
    def by_reason(self) -> dict[str, int]:
        """`counts` as plain text and numbers."""
        return {str(reason): count for reason, count in self.counts.items()}

    def document(self) -> dict[Reason, Any]:
        """Of each reason how many rows, and what the first of them was refused with. JSON."""
        return {reason: {"rows": count, "first": self.examples[reason]} for reason, count in self.counts.most_common()}

    def restore(self, document: Mapping[Reason, Any]) -> None:
        """Count what `document` said of the same rows before."""
        for reason, found in document.items():
            self.counts[reason] += found["rows"]
            self.examples[reason] = found["first"]

    def __str__(self) -> str:
        """`3 rows left out: null 2, too-long 1`; "" if there is none."""
        rows = self.counts.total()
        said = ", ".join(f"{reason} {count}" for reason, count in self.counts.most_common())
        return f"{rows} {'row' if rows == 1 else 'rows'} left out: {said}" if rows else ""
