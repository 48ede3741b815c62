"""Stop strings: across tokens, across characters that tokens split, and across the parts of an interrupted answer."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from asyncrl.collectors.engines import transformers as engine_module
from asyncrl.collectors.engines.base import Completion, Request
from asyncrl.collectors.engines.parts import continued, joined
from asyncrl.collectors.engines.stops import StopStrings, load_tokenizer
from asyncrl.collectors.engines.transformers import TransformersEngine
from asyncrl.learners.tiny_tokenizer import build_tokenizer

from .serving import LIMIT_S, serving
from .tiny_models import VOCABULARY, full_forward, make_model, request

BYTES: Tokenizer = build_tokenizer(512).backend_tokenizer  # one token a byte


def words() -> Tokenizer:
    """Of one or two letters each, as many as the tiny models have tokens; special tokens among them."""
    pieces = ["a", "b", "c", *(x + y for x in "abc" for y in "abc"), "<end>"]
    pieces += [f"{n}" for n in range(VOCABULARY - len(pieces))]
    tokenizer = Tokenizer(models.WordLevel({piece: id for id, piece in enumerate(pieces)}, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def sentences() -> Tokenizer:
    """As Llama's: words with their space, and bytes for what no word says."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁stop", "▁go", "now", "▁"]
    tokenizer = Tokenizer(
        models.BPE({piece: id for id, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def ended_at(stops: StopStrings, tokens: list[int], *, min_tokens: int = 0) -> tuple[int, str]:
    """Number of tokens up to the one that ended it, and the string; (0, "") if none did."""
    for count, token in enumerate(tokens, start=1):
        if found := stops.add(token, passed=count <= min_tokens):
            return count, found
    return 0, ""


def by_definition(tokenizer: Tokenizer, strings: list[str], tokens: list[int]) -> int:
    """The first number of tokens whose whole text has one of the strings; a character counts once it is whole."""
    for count in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:count], skip_special_tokens=False)
        if not text.endswith("\N{REPLACEMENT CHARACTER}") and any(string in text for string in strings):
            return count
    return 0


strings = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=3)


@given(strings, st.lists(st.integers(0, 12), max_size=30))
def test_an_answer_ends_with_the_first_token_whose_text_has_one(strings: list[str], tokens: list[int]) -> None:
    tokenizer = words()
    count, found = ended_at(StopStrings(tokenizer, strings), tokens)
    assert count == by_definition(tokenizer, strings, tokens)
    if count:
        assert found in tokenizer.decode(tokens[:count], skip_special_tokens=False)


@given(
    st.lists(st.text("aé\N{GRINNING FACE}", min_size=1, max_size=3), min_size=1, max_size=2),
    st.text("aé\N{GRINNING FACE}", max_size=12),
)
def test_characters_that_tokens_split_count_once_they_are_whole(strings: list[str], text: str) -> None:
    tokens = list(text.encode())
    count, _ = ended_at(StopStrings(BYTES, strings), tokens)
    assert count == by_definition(BYTES, strings, tokens)


@given(st.lists(st.integers(0, 255), max_size=60))
def test_bytes_that_are_no_text_do_no_harm(tokens: list[int]) -> None:
    count, _ = ended_at(StopStrings(BYTES, ["STOP"]), [*tokens, *b"..STOP"])
    assert 0 < count <= len(tokens) + 6


@given(strings, st.lists(st.integers(0, 12), min_size=1, max_size=20), st.data())
def test_what_was_interrupted_ends_where_the_whole_does(
    strings: list[str], tokens: list[int], data: st.DataObject
) -> None:
    whole = ended_at(StopStrings(words(), strings), tokens)
    cut = data.draw(st.integers(0, (whole[0] or len(tokens) + 1) - 1))
    count, found = ended_at(StopStrings(words(), strings, begun=tokens[:cut]), tokens[cut:])
    assert (count and count + cut, found) == whole


def test_spaces_of_words_are_those_of_the_text() -> None:
    tokenizer = sentences()
    stop, go, now = (tokenizer.token_to_id(piece) for piece in ("▁stop", "▁go", "now"))
    assert ended_at(StopStrings(tokenizer, [" stop"]), [stop, go, stop]) == (3, " stop"), "the first has no space"
    assert ended_at(StopStrings(tokenizer, ["onow"]), [stop, go, now]) == (3, "onow")
    assert ended_at(StopStrings(tokenizer, ["é g"]), [1 + 0xC3, 1 + 0xA9, go]) == (3, "é g")


def test_special_tokens_are_text_too() -> None:
    end = words().token_to_id("<end>")
    assert ended_at(StopStrings(words(), ["<end>"]), [0, end]) == (2, "<end>")


def test_of_several_the_one_that_ends_first_is_named() -> None:
    ab, c = words().token_to_id("ab"), words().token_to_id("c")
    assert ended_at(StopStrings(words(), ["b", "a", "ab"]), [ab]) == (1, "a")
    assert ended_at(StopStrings(words(), ["abc", "bc"]), [ab, c]) == (2, "abc")


def test_what_is_complete_within_min_tokens_is_passed_over_and_what_only_begins_there_counts() -> None:
    a, b = (words().token_to_id(piece) for piece in "ab")
    assert ended_at(StopStrings(words(), ["ab"]), [a, b, a, b], min_tokens=2) == (4, "ab")
    assert ended_at(StopStrings(words(), ["ab"]), [a, b, a, b], min_tokens=1) == (2, "ab")
    assert ended_at(StopStrings(words(), ["ab"]), [a, b, a], min_tokens=2) == (0, "")


@pytest.fixture(scope="module")
def worded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder with the tokenizer `words`."""
    path = tmp_path_factory.mktemp("worded")
    make_model(seed=99).save_pretrained(path)
    PreTrainedTokenizerFast(tokenizer_object=words()).save_pretrained(path)
    return path


@asynccontextmanager
async def answered(path: Path) -> AsyncIterator[tuple[TransformersEngine, Request, Completion]]:
    """An engine, a request, and its answer without a stop string."""
    async with serving(path) as engine:
        free = request("free", seed=4, max_tokens=40)
        yield engine, free, await engine.generate(free)


@pytest.mark.asyncio
async def test_the_engine_ends_an_answer_with_the_token_that_completes_a_stop_string(worded: Path) -> None:
    tokenizer = words()
    async with answered(worded) as (engine, free, whole):
        tokens: list[int] = whole.token_ids.tolist()
        stop = tokenizer.decode(tokens[9:11])[1:]  # over the border of two tokens, or in one, or before
        ends = by_definition(tokenizer, [stop], tokens)
        stopped = replace(free, sampling=replace(free.sampling, stop=("none of it", stop)))
        answer = await engine.generate(stopped)
        assert (answer.finish_reason, answer.stopped_by) == ("stop", stop)
        assert answer.token_ids.tolist() == tokens[:ends]
        assert answer.support is None
        np.testing.assert_allclose(answer.logprobs, full_forward(make_model(seed=1), free.token_ids, answer), atol=1e-5)
        for cut in range(1, ends):
            first = await engine.generate(replace(stopped, sampling=replace(stopped.sampling, max_tokens=cut)))
            rest = await engine.generate(continued(stopped, first))
            both = joined([first, rest])
            assert (both.token_ids.tolist(), both.stopped_by) == (tokens[:ends], stop)
        later = replace(stopped, sampling=replace(stopped.sampling, min_tokens=ends))
        assert len((await engine.generate(later)).token_ids) > ends


@pytest.mark.asyncio
async def test_the_tokenizer_is_loaded_once_and_only_if_somebody_stops_at_a_string(
    worded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[Path] = []

    def counting(path: Path, *, trust_remote_code: bool) -> Tokenizer:
        loaded.append(path)
        return load_tokenizer(path, trust_remote_code=trust_remote_code)

    monkeypatch.setattr(engine_module, "load_tokenizer", counting)
    async with serving(worded) as engine:
        await engine.generate(request("a"))
        assert not loaded
        await asyncio.gather(*(engine.generate(request(f"r{n}", seed=n, stop=("x",))) for n in range(4)))
        assert loaded == [worded]


@pytest.mark.asyncio
async def test_a_request_is_aborted_and_cancelled_also_while_the_tokenizer_is_loaded(
    worded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def slow(path: Path, *, trust_remote_code: bool) -> Tokenizer:
        loop.call_soon_threadsafe(loading.set)
        assert go_on.wait(LIMIT_S)
        return load_tokenizer(path, trust_remote_code=trust_remote_code)

    monkeypatch.setattr(engine_module, "load_tokenizer", slow)
    async with serving(worded) as engine:
        tasks = [asyncio.create_task(engine.generate(request(id, stop=("x",)))) for id in ("a", "b", "c")]
        await loading.wait()
        engine.abort(["a"])
        tasks[1].cancel()
        go_on.set()
        aborted, cancelled, whole = await asyncio.gather(*tasks, return_exceptions=True)
        assert engine.free_slots == engine.slots
    assert isinstance(aborted, Completion)
    assert (aborted.finish_reason, len(aborted.token_ids)) == ("abort", 0)
    assert isinstance(cancelled, asyncio.CancelledError)
    assert isinstance(whole, Completion)
    assert len(whole.token_ids) == 12


def test_a_tokenizer_that_does_not_load_is_named(worded: Path, tmp_path: Path) -> None:
    shutil.copytree(worded, tmp_path / "broken")
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="broken has none that loads"):
        load_tokenizer(tmp_path / "broken", trust_remote_code=False)


@pytest.mark.asyncio
async def test_a_folder_without_a_tokenizer_refuses_stop_strings_and_serves_the_rest(saved: Path) -> None:
    async with serving(saved) as engine:
        for _ in range(2):
            with pytest.raises(ValueError, match="stop strings need the model's tokenizer"):
                await engine.generate(request("a", stop=("x",)))
        assert engine.free_slots == engine.slots
        assert (await engine.generate(request("a"))).finish_reason == "length"


@pytest.mark.asyncio
async def test_an_empty_stop_string_is_refused(worded: Path) -> None:
    async with serving(worded) as engine:
        with pytest.raises(ValueError, match="end every answer at once"):
            await engine.generate(request("a", stop=("x", "")))


def test_a_tokenizer_that_cannot_decode_token_by_token_is_refused(
    worded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow:
        vocab_files_names = PreTrainedTokenizerFast.vocab_files_names

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: Slow())
    with pytest.raises(ValueError, match="Slow, does not: use stop_token_ids"):
        load_tokenizer(worded, trust_remote_code=False)
