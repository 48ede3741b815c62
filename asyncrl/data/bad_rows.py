"""What becomes of rows that cannot be used: the first one ends the reading, or all are left out and counted."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Literal

from asyncrl.data.errors import DataError, Reason, RowError

log = logging.getLogger(__name__)

Policy = Literal["error", "skip"]


class BadRows:
    """`counts`: rows left out, by reason. The first of each reason is logged, so that a count has an example."""

    def __init__(self, policy: Policy, *, key: str) -> None:
        """`key`: of the recipe, that sets the policy; for the message."""
        self._policy = policy
        self._key = key
        self.counts: Counter[Reason] = Counter()

    def __call__(self, error: RowError) -> None:
        """Raises DataError under the policy `error`."""
        if self._policy == "error":
            raise DataError(f"{error}\nOr leave such rows out and have them counted: {self._key}=skip") from error
        if not self.counts[error.reason]:
            log.warning("left out (%s): %s", error.reason, str(error).splitlines()[0])
        self.counts[error.reason] += 1

    @property
    def by_reason(self) -> dict[str, int]:
        """`counts` as plain text and numbers."""
        return {str(reason): count for reason, count in self.counts.items()}

    def __str__(self) -> str:
        """`3 rows left out: null 2, too-long 1`; "" if there is none."""
        rows = self.counts.total()
        said = ", ".join(f"{reason} {count}" for reason, count in self.counts.most_common())
        return f"{rows} {'row' if rows == 1 else 'rows'} left out: {said}" if rows else ""
