"""Passwords in recipes: shown, saved and hashed as `***`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")

HIDDEN = "***"

_USERINFO = re.compile(
    r"(?P<head>[A-Za-z][A-Za-z0-9+.-]*://[^\s/?#:@]*:)\S+(?=@)"
)  # up to the last @: a password may hold a / or @
_QUERY = re.compile(r"(?P<head>[?&](?:password|passwd|token|secret|api_?key)=)[^&#\s]+", re.IGNORECASE)
_SECRET_KEY = re.compile(r"(?:^|_)(?:password|passwd|secret|api_?key|access_?key|auth_?token)$", re.IGNORECASE)


def masked(value: T) -> T:
    """The same value with every password in it replaced: in URLs, and whole texts under keys such as `api_key`.

    >>> masked("rediss://asyncrl:s3cret@hostA:6380/0")
    'rediss://asyncrl:***@hostA:6380/0'
    >>> masked({"args": {"api_key": "sk-1", "n": 2}})
    {'args': {'api_key': '***', 'n': 2}}
    """
    result: Any = value
    if isinstance(value, str):
        result = _QUERY.sub(rf"\g<head>{HIDDEN}", _USERINFO.sub(rf"\g<head>{HIDDEN}", value))
    elif isinstance(value, Mapping):
        result = {
            key: HIDDEN if isinstance(item, str) and item and _SECRET_KEY.search(str(key)) else masked(item)
            for key, item in value.items()
        }
    elif isinstance(value, list | tuple):
        result = type(value)(masked(item) for item in value)
    final: T = result
    return final
