"""From a conversation to token ids, and which tokens end an answer: both are the model's own choice, never ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, cast

from asyncrl.tasks.base import Message, TaskError

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

MESSAGE_KEYS = ("role", "content", "tool_calls", "tool_call_id", "name")
"""What a template is given of a message: other keys are the row's own affair."""

NO_ARGUMENTS: Mapping[str, Any] = {}

Tools = Sequence[Mapping[str, Any]]
"""JSON schemas of functions, as chat templates take them."""


class Shown(TypedDict):
    """What a chat template gets of a conversation besides its messages."""

    tools: Tools | None
    arguments: Mapping[str, Any]


def conversation(prompt: str | Sequence[Message], system_prompt: str | None = None) -> list[Message]:
    """A row's prompt as messages: a string is one user message. A system prompt goes first, unless the row has one."""
    messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if system_prompt is not None and not any(message["role"] == "system" for message in messages):
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


def check_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise TaskError if the tokenizer has no chat template."""
    if not tokenizer.chat_template:
        raise TaskError(
            f"{tokenizer.name_or_path or 'the model'} has no chat template, so it is a base model that cannot be given "
            "a conversation.\n"
            "Use the instruct version of it as model.path, or put a chat_template.jinja into the model's folder."
        )


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    answer_follows: bool = True,
    tools: Tools | None = None,
    arguments: Mapping[str, Any] = NO_ARGUMENTS,
) -> list[int]:
    """Token ids of the conversation under the tokenizer's chat template; `answer_follows`: with the mark that opens the
    next answer. tools: schemas of what the model may call. arguments: what else the template gets, such as
    `{"enable_thinking": False}`.

    Raises TaskError: no chat template (a base model), or the template refuses the conversation.
    """
    ids = _applied(tokenizer, messages, tools=tools, arguments=arguments, answer_follows=answer_follows, tokenize=True)
    return cast("list[int]", ids)


def template_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    tools: Tools | None = None,
    arguments: Mapping[str, Any] = NO_ARGUMENTS,
) -> str:
    """What `render` gives the ids of, with the mark that opens the next answer. Raises TaskError as `render` does."""
    text = _applied(tokenizer, messages, tools=tools, arguments=arguments, answer_follows=True, tokenize=False)
    return cast("str", text)


def unseen(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], shown: Shown) -> list[str]:
    """Of what is shown besides the messages, what changes nothing in the text: "tools", and names of arguments, as in
    "chat_template_args.enable_thinking". Raises TaskError as `render` does."""
    arguments = shown["arguments"]
    without: dict[str, Shown] = {
        f"chat_template_args.{name}": {
            **shown,
            "arguments": {key: value for key, value in arguments.items() if key != name},
        }
        for name in arguments
    }
    if shown["tools"]:
        without["tools"] = {**shown, "tools": None}
    text = template_text(tokenizer, messages, **shown) if without else ""
    return [name for name, less in without.items() if template_text(tokenizer, messages, **less) == text]


def _applied(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    tools: Tools | None,
    arguments: Mapping[str, Any],
    answer_follows: bool,
    tokenize: bool,
) -> object:
    check_template(tokenizer)
    # Values of messages may be lists and mappings, which the declaration of transformers leaves out.
    chat: Any = [{key: value for key, value in message.items() if key in MESSAGE_KEYS} for message in messages]
    try:
        # The template writes the special tokens itself: adding the tokenizer's own would double the first one.
        return tokenizer.apply_chat_template(
            chat,
            tools=None if tools is None else [dict(tool) for tool in tools],
            add_generation_prompt=answer_follows,
            tokenize=tokenize,
            return_dict=False,
            tokenizer_kwargs={"verbose": False},  # what is too long is said by whoever has a limit, by name
            **arguments,
        )
    except Exception as error:  # a template is a program of the model's author: it raises what it likes
        roles = ", ".join(message["role"] for message in messages)
        raise TaskError(
            f"the chat template of {tokenizer.name_or_path or 'the model'} refuses messages of the roles {roles}: "
            f"{type(error).__name__}: {error}\n"
            "Some templates take no system message: leave task.system_prompt out, or use another model."
        ) from error


def end_token_ids(
    tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig | None = None
) -> tuple[int, ...]:
    """Ids that end an answer: the tokenizer's, then all of the generation config's, without repetition.

    Chat models often list several in the generation config; an answer that any of them ends is not truncated.
    Raises TaskError if there is none, because no answer could ever end.
    """
    configured = None if generation_config is None else generation_config.eos_token_id
    listed = configured if isinstance(configured, list | tuple) else [configured]
    ids = dict.fromkeys(int(token) for token in (tokenizer.eos_token_id, *listed) if token is not None)
    if not ids:
        raise TaskError(
            f"{tokenizer.name_or_path or 'the tokenizer'} names no end token, so no answer could ever end.\n"
            "Set eos_token in tokenizer_config.json or eos_token_id in generation_config.json of the model's folder."
        )
    return tuple(ids)
