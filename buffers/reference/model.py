"""The whole reference model: the acts of the other files, weights' announcements, evaluations and the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.buffers.base import BufferError, Member
from asyncrl.buffers.reference.recovery import Recovery
from asyncrl.staleness import Weights


class Model(Recovery):
    """One run's buffer. A stateful test drives it and the server's scripts with the same random acts."""

    def announce(self, weights: Weights, document: Mapping[str, Any]) -> None:
        self._check_lineage(weights.lineage)
        if weights.version > self.version:
            raise BufferError(
                f"weights of version {weights.version} announced before their commit; V is {self.version}"
            )
        self.announced = (weights, dict(document))
        self.announcements += 1
        self._wake_members()

    def request_verification(self, request_id: str) -> None:
        self.verify = request_id
        self._wake_members()

    def claim_evaluation(self, member: Member, request_id: str) -> bool:
        self._member(member)
        if self.evaluation is None or self.evaluation.get("id") != request_id:
            return False
        if self.evaluation_claim not in ("", member.incarnation):
            return False
        self.evaluation_claim = member.incarnation
        return True

    def request_evaluation(self, request: Mapping[str, Any]) -> None:
        self.evaluation, self.evaluation_claim = dict(request), ""
        self.results.clear()  # whoever asks for the next one has seen the last: the store holds no history
        self._wake_members()

    def report_evaluation(self, request_id: str, result: Mapping[str, Any]) -> None:
        self.results[request_id] = dict(result)
        if self.evaluation is not None and self.evaluation.get("id") == request_id:
            self.evaluation, self.evaluation_claim = None, ""
        self.wakes.add(f"result:{request_id}")

    def finish(self, error: str | None) -> None:
        self.phase, self.error = "ended", error
        self._wake_members()
