"""A conversation goes on over the tokens that were sampled, whatever their text would be encoded as."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from asyncrl.tasks.history import answered, rendered, went_on

PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FORGETS = PLAIN.replace(
    "{{ m.content }}", "{% if m.role == 'assistant' and not loop.last %}...{% else %}{{ m.content }}{% endif %}"
)
TRIMS = PLAIN.replace("{{ m.content }}", "{{ m.content | trim }}")
MARKS = ["<|end|>", "<|user|>", "<|assistant|>", "<|tool|>"]


def tokenizer_of(template: str) -> PreTrainedTokenizerFast:
    """Bytes, and a merge: "ab" is encoded as one token, and can be sampled as two."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: n for n, token in enumerate([*letters, "ab"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    made.add_special_tokens({"additional_special_tokens": MARKS[1:]})
    made.chat_template = template
    return made


TOKENIZER = tokenizer_of(PLAIN)
ASK = [{"role": "user", "content": "x"}]
END = TOKENIZER.convert_tokens_to_ids("<|end|>")


def ids(text: str, tokenizer: PreTrainedTokenizerFast = TOKENIZER) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def said(text: str) -> list[dict[str, str]]:
    return [*ASK, {"role": "assistant", "content": text}, {"role": "tool", "content": "ok"}]


def test_tokens_that_their_text_would_not_be_encoded_as_stay_as_they_were_sampled():
    """Control: encoding the conversation anew gives other ids for the same text."""
    sampled = [*ids("a"), *ids("b"), END]
    before = answered(TOKENIZER, rendered(TOKENIZER, ASK), sampled)
    after = went_on(TOKENIZER, before, said("ab"))
    assert after.token_ids[: len(before.token_ids)] == before.token_ids
    assert TOKENIZER.decode(list(after.token_ids)) == after.text == rendered(TOKENIZER, said("ab")).text
    assert rendered(TOKENIZER, said("ab")).token_ids != after.token_ids


def test_an_answer_that_was_cut_off_gets_its_end_from_the_template():
    before = answered(TOKENIZER, rendered(TOKENIZER, ASK), ids("xyz"))
    after = went_on(TOKENIZER, before, said("xyz"))
    assert after.token_ids[: len(before.token_ids)] == before.token_ids
    assert after.token_ids[len(before.token_ids)] == END


def test_half_a_character_stays_half_a_character():
    half = ids("é")[:1]
    before = answered(TOKENIZER, rendered(TOKENIZER, ASK), [*half, END])
    text = TOKENIZER.decode(half)
    assert text == "�"
    after = went_on(TOKENIZER, before, said(text))
    assert after.token_ids[: len(before.token_ids)] == before.token_ids


@pytest.mark.parametrize(
    ("template", "answer", "kept"), [(FORGETS, "abc", False), (TRIMS, "abc\n", False), (TRIMS, "abc", True)]
)
def test_a_template_that_rewrites_old_turns_is_rendered_anew(template, answer, kept):
    tokenizer = tokenizer_of(template)
    before = answered(tokenizer, rendered(tokenizer, ASK), [*ids(answer, tokenizer), END])
    after = went_on(tokenizer, before, said(answer))
    assert (after.token_ids[: len(before.token_ids)] == before.token_ids) == kept
    if not kept:
        assert after == rendered(tokenizer, said(answer))


@given(st.lists(st.lists(st.integers(0, 256), max_size=6), min_size=1, max_size=4))
def test_whatever_is_sampled_the_next_turn_begins_with_it(answers):
    """Any bytes, over any number of turns, ended by the end token."""
    messages = list(ASK)
    now = rendered(TOKENIZER, messages)
    for sampled in answers:
        before = answered(TOKENIZER, now, [*sampled, END])
        text = before.text[len(now.text) :].removesuffix("<|end|>")
        messages += [{"role": "assistant", "content": text}, {"role": "tool", "content": "é"}]
        now = went_on(TOKENIZER, before, messages)
        assert now.token_ids[: len(before.token_ids)] == before.token_ids
