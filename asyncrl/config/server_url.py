"""The address of a server that a recipe names."""

from __future__ import annotations

from urllib.parse import urlsplit

from asyncrl.config.errors import RecipeError, quoted


def check_url(key: str, url: str, *, example: str) -> None:
    """Raise RecipeError if the value of `key` is no address of a server, or has a password in it. Beside `key` there is
    an `api_key_env`."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise RecipeError(f"{key} is {quoted(url)}; it must be the address of a server, such as {example}")
    if parts.username or parts.password:
        raise RecipeError(
            f"{key} is {quoted(url)}, with a name or password in it. A server takes an API key: put it into an "
            f"environment variable and name that in {key.rpartition('.')[0]}.api_key_env"
        )
