"""The loss is on every answer and on the token that ends it, and nowhere else, whatever the chat template writes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from asyncrl.data.conversations import Conversation
from asyncrl.data.errors import RowError
from asyncrl.learners.sft import Example
from asyncrl.learners.sft_examples import Longest, make_example
from asyncrl.learners.tiny_tokenizer import END, build_tokenizer
from asyncrl.tasks.base import TaskError
from asyncrl.tasks.chat import NO_ARGUMENTS, end_token_ids, render
from tests.sft.conftest import turns

TALK = turns(("user", "hi"), ("assistant", "ho"), ("user", "and?"), ("assistant", "hum"))
TOKENIZER = build_tokenizer(512)

CHATML = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
FORGETS = (
    "{% for m in messages %}{% if m['role'] == 'assistant' and not loop.last %}{{ '<|assistant|>...<|end|>' }}"
    "{% else %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
THINKS = CHATML.replace("'<|assistant|>\n' }}{% endif", "'<|assistant|>\n<|think|>' }}{% endif")
ENDLESS = CHATML.replace("<|end|>", "")


def with_template(template: str | None) -> PreTrainedTokenizerFast:
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = template
    return tokenizer


def example(
    messages: list[dict[str, str]],
    tokenizer: PreTrainedTokenizerFast = TOKENIZER,
    *,
    system_prompt: str | None = None,
    longest: int = 512,
    template_args: Mapping[str, Any] = NO_ARGUMENTS,
) -> Example:
    return make_example(
        Conversation("rows.jsonl:7", messages),
        tokenizer,
        system_prompt=system_prompt,
        ends=end_token_ids(tokenizer),
        longest=Longest(longest, f"model.max_length is {longest}"),
        template_args=template_args,
    )


def spans(made: Example) -> list[str]:
    """Each stretch of trained tokens as text."""
    stretches: list[list[int]] = []
    previous = 0
    for token, flag in zip(made.token_ids, made.trained, strict=True):
        if flag and not previous:
            stretches.append([])
        if flag:
            stretches[-1].append(token)
        previous = flag
    return [TOKENIZER.decode(stretch) for stretch in stretches]


def test_a_template_gets_its_arguments_in_every_part_of_a_conversation() -> None:
    tokenizer = with_template("{{ '<|system|>' + mode + '<|end|>' if mode }}" + CHATML)
    made = example(TALK, tokenizer, template_args={"mode": "brief"})
    assert tokenizer.decode(list(made.token_ids)).startswith("<|system|>brief<|end|><|user|>")
    assert spans(made) == spans(example(TALK, tokenizer)) == ["ho<|end|>", "hum<|end|>"]


def test_every_answer_is_trained_with_its_end_and_nothing_else() -> None:
    made = example(TALK)
    assert spans(made) == ["ho<|end|>", "hum<|end|>"]
    assert list(made.token_ids) == render(TOKENIZER, TALK, answer_follows=False)


def test_what_a_template_writes_after_the_end_is_not_trained() -> None:
    made = example(TALK, with_template(CHATML))
    assert spans(made) == ["ho<|end|>", "hum<|end|>"]
    assert TOKENIZER.decode(made.token_ids).endswith("hum<|end|>\n")


def test_a_system_message_that_the_template_adds_is_no_obstacle() -> None:
    adds = "{% if messages[0]['role'] != 'system' %}{{ '<|system|>Be kind.<|end|>\n' }}{% endif %}" + CHATML
    made = example(TALK, with_template(adds))
    assert spans(made) == ["ho<|end|>", "hum<|end|>"]
    assert TOKENIZER.decode(made.token_ids).startswith("<|system|>Be kind.<|end|>\n<|user|>")


text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(str.strip)


@given(st.lists(st.tuples(text, text), min_size=1, max_size=4), st.none() | text)
def test_trained_tokens_spell_the_answers_of_any_conversation(pairs: list[tuple[str, str]], system: str | None) -> None:
    messages = [message for asked, said in pairs for message in turns(("user", asked), ("assistant", said))]
    made = example(messages, system_prompt=system)
    assert spans(made) == [said + END for _, said in pairs]
    assert TOKENIZER.decode(made.token_ids).startswith(f"<|system|>{system}<|end|>" if system else "<|user|>")


def test_an_answer_is_asked_for_as_the_model_will_be_asked() -> None:
    """The tokens before each trained stretch are those that a rollout would begin from."""
    made = example(TALK)
    starts = [n for n in range(1, len(made.trained)) if made.trained[n] and not made.trained[n - 1]]
    assert [list(made.token_ids[:start]) for start in starts] == [
        render(TOKENIZER, TALK[:1]),
        render(TOKENIZER, TALK[:3]),
    ]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (FORGETS, "writes the first 2 messages otherwise when more follows ('<|end|><|assistant|>ho"),
        (THINKS, "writes the first 1 messages otherwise when more follows"),
        (ENDLESS, "puts no token that ends an answer (<|end|>) behind message 2: the model would never learn to stop"),
        ("{{ raise_exception('no system') }}", "refuses messages of the roles user, assistant"),
    ],
)
def test_a_template_that_would_be_trained_at_other_places_than_used_is_refused(template: str, said: str) -> None:
    with pytest.raises(RowError) as caught:
        example(TALK, with_template(template))
    assert str(caught.value).startswith("rows.jsonl:7: ")
    assert said in str(caught.value)
    assert caught.value.reason == "chat-template"
    assert len(str(caught.value).splitlines()) <= 2


def test_the_refused_template_is_fine_where_it_does_not_matter() -> None:
    assert spans(example(TALK[:2], with_template(FORGETS))) == ["ho<|end|>"]


def test_a_model_without_chat_template_is_not_a_fault_of_the_row() -> None:
    with pytest.raises(TaskError, match="has no chat template"):
        example(TALK, with_template(None))


def test_a_row_that_is_too_long_says_what_limits_it() -> None:
    with pytest.raises(RowError, match=r"rows\.jsonl:7: 19 tokens, but model\.max_length is 18") as caught:
        example(TALK, longest=18)
    assert caught.value.reason == "too-long"
    assert len(example(TALK, longest=19).token_ids) == 19


def test_a_megabyte_is_too_long_and_no_more_than_that(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RowError, match="1000006 tokens"):
        example(turns(("user", "hi"), ("assistant", "x" * 1_000_000)))
    assert not caplog.records, "transformers warns of indexing errors to come, which do not"
