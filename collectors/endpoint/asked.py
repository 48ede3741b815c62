"""A request for a chat completion, read strictly: what is not known is refused as OpenAI does, what cannot be done too.

Three kinds of arguments are taken and change nothing. How tokens are drawn is the recipe's: what is trained must have
been sampled from the policy, and its log-probs must be those of that distribution. What only a service has (`store`,
`user`) means nothing here. `tool_choice` can forbid calls, but it cannot force the policy to make one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from asyncrl.collectors.endpoint.errors import ApiError
from asyncrl.collectors.engines.base import Sampling

_PLACE = re.compile(r" - at `\$\.?(.*)`$")
_UNKNOWN = re.compile(r"unknown field `(.*)`")


class Function(msgspec.Struct):
    """Of a call that an assistant made. arguments: JSON, as text."""

    name: str
    arguments: str = ""


class Call(msgspec.Struct):
    """A call that an assistant made."""

    function: Function
    id: str = ""
    type: Literal["function"] = "function"


class Part(msgspec.Struct):
    """A part of a message's content; only text can be read here."""

    type: str
    text: str | None = None


class Incoming(msgspec.Struct):
    """A message as clients send it. Keys that a template does not see (refusal, annotations) are left out."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class StreamOptions(msgspec.Struct):
    """Of a streamed answer."""

    include_usage: bool | None = None


class Chat(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `/v1/chat/completions`."""

    messages: list[Incoming]
    model: str = "policy"
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None
    # The recipe's.
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    # A service's.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    prediction: Any = None

    @property
    def most_tokens(self) -> int | None:
        """Of the answer, as far as the client says."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end the answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def offers_tools(self) -> bool:
        """Whether calls in the answer are the client's to make."""
        return bool(self.tools) and self.tool_choice != "none"

    def overridden(self, sampling: Sampling) -> list[str]:
        """Arguments that ask for another way to draw tokens than the recipe's, which is taken."""
        own = {"temperature": sampling.temperature, "top_p": sampling.top_p, "seed": None}
        asked = [name for name, value in own.items() if getattr(self, name) not in (None, value)]
        return asked + [name for name in _CHANGES if getattr(self, name)]


_CHANGES = ("presence_penalty", "frequency_penalty", "logit_bias")

_decoder = msgspec.json.Decoder(Chat)


def read_chat(body: bytes) -> Chat:
    """The request. Raises ApiError (400)."""
    try:
        chat = _decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise ApiError(400, f"We could not parse the JSON body of your request: {error}") from None
    if not chat.messages:
        raise ApiError(400, "messages is []: it must hold at least one message", param="messages")
    if chat.n not in (None, 1):
        raise ApiError(400, f"n is {chat.n}: this endpoint gives one answer a call", param="n")
    if chat.top_logprobs:
        raise ApiError(
            400,
            f"top_logprobs is {chat.top_logprobs}: only the sampled tokens have log-probs here",
            param="top_logprobs",
        )
    if (most := chat.most_tokens) is not None and most < 1:
        raise ApiError(400, f"max_tokens is {most}: it must be at least 1", param="max_tokens")
    if not all(chat.stops):
        raise ApiError(400, "stop has an empty string, which every answer would end with", param="stop")
    _check_form(chat)
    _check_tools(chat.tools or ())
    return chat


def _check_form(chat: Chat) -> None:
    form = (chat.response_format or {}).get("type", "text")
    if form != "text":
        raise ApiError(
            400,
            f"response_format is {form}: nothing but the policy decides what it writes here. Ask for it in a message",
            param="response_format",
        )
    if any(modality != "text" for modality in chat.modalities or ()):
        raise ApiError(400, "modalities: only text", param="modalities")


def _check_tools(tools: Sequence[dict[str, Any]]) -> None:
    for n, tool in enumerate(tools):
        function = tool.get("function")
        named = isinstance(function, dict) and isinstance(function.get("name"), str)
        if tool.get("type") != "function" or not named:
            raise ApiError(
                400,
                f"tools[{n}] is no function: write {{'type': 'function', 'function': {{'name': ...}}}}",
                param=f"tools[{n}]",
            )


def _invalid(complaint: str) -> ApiError:
    place = _PLACE.search(complaint)
    if unknown := _UNKNOWN.search(complaint):
        return ApiError(400, f"Unrecognized request argument supplied: {unknown[1]}", param=unknown[1])
    return ApiError(400, complaint, param=place[1] if place else None)
