"""What a chat template is given of a row besides its messages: arguments of the recipe, tools of the row."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from asyncrl.collectors.endpoint.asked import Incoming
from asyncrl.collectors.endpoint.conversation import Conversations
from asyncrl.collectors.rollout import PromptError, TaskPrompts
from asyncrl.config.convert import convert
from asyncrl.learners.tiny_tokenizer import build_tokenizer
from asyncrl.tasks.base import Message
from asyncrl.tasks.build import build_task
from asyncrl.tasks.chat import render, template_text, unseen
from asyncrl.tasks.history import rendered, went_on
from asyncrl.tasks.prompt_length import PromptLimit
from asyncrl.tasks.training import train_rows

UserModule = Callable[[str], Path]

ASKED: list[Message] = [{"role": "user", "content": "hi"}]
THINKS = "{% if enable_thinking is not defined or enable_thinking %}+{% else %}-{% endif %}"
TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>" + THINKS + "{% endif %}"
)
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
ROWS = """
class Rows:
    def __init__(self, told): self.told = told
    def rows(self, split): return [Row("1", "hi", info={"tools": self.told}), Row("2", "h" * 300), Row("3", "ho")]
    def score(self, row, answer): return 1.0
"""


@pytest.fixture
def tokenizer() -> Any:
    made = build_tokenizer(100)
    made.chat_template = TEMPLATE
    return made


def text_of(tokenizer: Any, ids: Any) -> str:
    return str(tokenizer.decode(list(ids)))


def prompts_of(tokenizer: Any, task: dict[str, Any]) -> TaskPrompts:
    config = convert({"task": task}).task
    built = build_task(config, seed=0)
    parts = {one["name"]: one["task"] for one in task["tasks"]} if "tasks" in task else {built.name: task}
    return TaskPrompts(
        built,
        PromptLimit.of(tokenizer, own=200, given=None),
        train_row=train_rows(built, config, seed=0),
        stop_token_ids=(tokenizer.eos_token_id,),
        template_args={name: one.get("chat_template_args", {}) for name, one in parts.items()},
    )


def test_a_prompt_begins_with_one_mark_though_template_and_tokenizer_both_put_one(tokenizer: Any) -> None:
    """open-r1's issue 462. Control: encoding the text as the tokenizer does by itself gives two."""
    tokenizer.bos_token = "<|system|>"
    bos = tokenizer.bos_token_id
    tokenizer.chat_template = "{{ bos_token }}" + TEMPLATE
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|system|> $A", special_tokens=[("<|system|>", bos)]
    )
    text = template_text(tokenizer, ASKED)
    assert tokenizer.encode(text)[:2] == [bos, bos]
    ids = render(tokenizer, ASKED)
    assert ids.count(bos) == 1
    assert tuple(ids) == rendered(tokenizer, ASKED).token_ids, "of several turns it has the same tokens"


def test_arguments_reach_the_template_wherever_it_is_used(tokenizer: Any) -> None:
    off: dict[str, Any] = {"arguments": {"enable_thinking": False}}
    assert text_of(tokenizer, render(tokenizer, ASKED)).endswith("<|assistant|>+")
    assert text_of(tokenizer, render(tokenizer, ASKED, **off)).endswith("<|assistant|>-")
    before = rendered(tokenizer, ASKED, **off)
    assert before.text.endswith("<|assistant|>-")
    more: list[Message] = [*ASKED, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    assert went_on(tokenizer, before, more, **off).text.endswith("<|assistant|>-")
    asked = Conversations(tokenizer, **off).question([Incoming(role="user", content="hi")], None)
    assert asked.rendered == before, "an agent's calls see what rollouts see"


def test_what_changes_nothing_is_found(tokenizer: Any) -> None:
    arguments = {"enable_thinking": False, "enable_thinkin": False}
    assert unseen(tokenizer, ASKED, {"tools": [LOOK], "arguments": arguments}) == ["chat_template_args.enable_thinkin"]
    assert unseen(tokenizer, ASKED, {"tools": None, "arguments": {"enable_thinking": True}}) == [
        "chat_template_args.enable_thinking"
    ], "it thinks by itself"
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert unseen(tokenizer, ASKED, {"tools": [LOOK], "arguments": {}}) == ["tools"]
    assert unseen(tokenizer, ASKED, {"tools": None, "arguments": {}}) == []


def test_a_rows_tools_are_shown_with_that_row_only(tokenizer: Any, user_module: UserModule) -> None:
    user_module(ROWS)
    prompts = prompts_of(tokenizer, {"type": "my_task:Rows", "args": {"told": [LOOK]}})
    one, three = prompts.heldout(0), prompts.heldout(2)
    assert text_of(tokenizer, one.token_ids) == "[look]<|user|>hi<|end|><|assistant|>+"
    assert text_of(tokenizer, three.token_ids) == "<|user|>ho<|end|><|assistant|>+"
    with pytest.raises(PromptError, match=r"row 2: the prompt has 3\d\d tokens, but the model takes 200") as found:
        prompts.heldout(1)
    assert (found.value.reason, found.value.task) == ("prompt_too_long", "my_task:Rows")


def test_tools_that_no_template_takes_fail_their_row_by_name(tokenizer: Any, user_module: UserModule) -> None:
    user_module(ROWS)
    prompts = prompts_of(tokenizer, {"type": "my_task:Rows", "args": {"told": ["look"]}})
    with pytest.raises(PromptError, match=r"row 1: info\['tools'\] is \['look'\]: give a list") as found:
        prompts.heldout(0)
    assert found.value.reason == "row_error"
    assert prompts.heldout(2).row.id == "3"


def test_each_task_of_a_mixture_has_arguments_of_its_own(
    tokenizer: Any, user_module: UserModule, caplog: pytest.LogCaptureFixture
) -> None:
    user_module(ROWS)
    own = {"type": "my_task:Rows", "args": {"told": [LOOK]}, "chat_template_args": {"enable_thinkin": False}}
    short = {"type": "reverse", "digits": [2, 2], "chat_template_args": {"enable_thinking": False}}
    prompts = prompts_of(
        tokenizer, {"type": "mixture", "tasks": [{"name": "short", "task": short}, {"name": "own", "task": own}]}
    )
    first, second = prompts.heldout(0), prompts.heldout(1)
    assert (first.task, second.task) == ("short", "own")
    assert text_of(tokenizer, first.token_ids).endswith("<|assistant|>-")
    assert text_of(tokenizer, second.token_ids) == "[look]<|user|>hi<|end|><|assistant|>+"
    with caplog.at_level(logging.WARNING):
        prompts.warn_of_unseen()
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("row own/1: chat_template_args.enable_thinkin changes nothing in the prompt")
