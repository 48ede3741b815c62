"""What a row and an answer said, as chat messages: what those read who are asked elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Messages = list[dict[str, Any]]


def asked(row: Mapping[str, Any]) -> Messages:
    """The row's own. row: the fields of `tasks.base.Row`."""
    prompt = row["prompt"]
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(message) for message in prompt]


def answered(answer: Mapping[str, Any]) -> Messages:
    """All that came after it. answer: the fields of `tasks.base.Answer`."""
    messages = answer.get("messages") or [{"role": "assistant", "content": answer["text"]}]
    return [dict(message) for message in messages]
