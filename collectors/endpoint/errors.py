"""What is wrong with a call, as OpenAI's clients read it."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """A call that gets no answer. status: of HTTP. code: OpenAI's where it has one; the classes of `docs/agents.md`
    else. param: the argument that is wrong."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    @property
    def kind(self) -> str:
        """OpenAI's `type`."""
        if self.status == 401:
            return "authentication_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    def document(self) -> dict[str, Any]:
        """The body of the response."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}
