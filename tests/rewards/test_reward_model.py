"""A reward model in its process: the last real token, any padding, and what becomes of answers when it fails."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import BloomConfig, LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

from asyncrl.config.convert import convert
from asyncrl.config.recipe import Collector
from asyncrl.config.rewards import RewardModel
from asyncrl.rewards.base import Unscored
from asyncrl.rewards.pool import VerifierError
from asyncrl.rewards.reward_model import RewardModelPart
from asyncrl.rewards.reward_model_process import Number
from asyncrl.rewards.reward_model_scores import RewardScores, batches, padding, positions
from asyncrl.tasks.base import Answer, Row
from asyncrl.tasks.verify import scoring_of
from tests.rewards import reward_models

LIMIT_S = 100.0
ROW: dict[str, Any] = {"id": "f:1", "prompt": "2+2?", "answer": "4", "info": {}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return reward_models.make(tmp_path_factory.mktemp("reward-model"))


def chat(answer: str, prompt: str = "2+2?") -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def rendered(answer: str, prompt: str = "2+2?") -> str:
    return f"<user>{prompt}<end><assistant>{answer}<end>"


def numbers(scores: RewardScores, conversations: list[list[dict[str, str]]]) -> list[Number]:
    found = [number for batch in scores.of(conversations) for number in batch]
    return sorted(found, key=lambda number: number.index)


def said(text: str) -> dict[str, Any]:
    return {"text": text, "token_ids": [1], "finish_reason": "stop", "messages": []}


# --- numbers --------------------------------------------------------------------------------------------------------


def test_the_number_is_that_of_the_last_real_token_whatever_the_padding(model: Path) -> None:
    """The token that pads is the one that ends every answer: a score that is read before it would be another one."""
    answers = ["4", "four", "it is 4, I think", "", "4 4 4 4 4 4 4 4 4 4 4", "<end>"]
    expected = [reward_models.alone(model, rendered(answer)) for answer in answers]
    assert len({round(value, 3) for value in expected}) == len(answers), "different answers have different numbers"
    together = numbers(RewardScores(RewardModel(path=str(model))), [chat(answer) for answer in answers])
    one_by_one = RewardScores(RewardModel(path=str(model), max_length=64, max_tokens_per_batch=64))
    single = [numbers(one_by_one, [chat(answer)])[0] for answer in answers]
    assert [number.value for number in together] == pytest.approx(expected, abs=1e-5)
    assert [number.value for number in single] == pytest.approx(expected, abs=1e-5)


def test_without_the_care_for_padding_the_same_batch_has_other_numbers(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: padded with the token that also ends the answers, transformers looks one too early."""
    monkeypatch.setattr("asyncrl.rewards.reward_model_scores.padding", lambda _: reward_models.LETTERS.index("<end>"))
    answers = ["4", "it is 4, I think"]
    found = numbers(RewardScores(RewardModel(path=str(model))), [chat(answer) for answer in answers])
    for answer, number in zip(answers, found, strict=True):
        assert abs(number.value - reward_models.alone(model, rendered(answer))) > 1e-3


def test_a_conversation_that_is_too_long_or_that_the_template_refuses_has_no_number(model: Path) -> None:
    scores = RewardScores(RewardModel(path=str(model), max_length=40))
    system = [{"role": "system", "content": "be kind"}, *chat("4")]
    good, long, refused = numbers(scores, [chat("4"), chat("4" * 40), system])
    assert good.failure == ""
    assert (long.failure, long.detail) == ("reward_model_too_long", "48 tokens are more than max_length 40")
    assert refused.failure == "bad_row"
    assert "no system messages" in refused.detail


def test_what_is_empty_or_longer_than_the_model_can_read_has_no_number_and_the_others_theirs(tmp_path: Path) -> None:
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    scores = RewardScores(RewardModel(path=str(reward_models.make(tmp_path, template=template, positions=32))))
    empty, long, good = numbers(scores, [chat("", ""), chat("4" * 30), chat("4")])
    assert (empty.failure, empty.detail) == ("bad_row", "the chat template makes nothing of it")
    assert (long.failure, long.detail) == (
        "reward_model_too_long",
        "34 tokens are more than the positions of the model, 32",
    )
    assert good.value == pytest.approx(reward_models.alone(tmp_path, "2+2?4"), abs=1e-5)


def test_positions_that_are_stretched_are_no_limit() -> None:
    assert positions(LlamaConfig(max_position_embeddings=64)) == 64
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
    assert positions(LlamaConfig(max_position_embeddings=64, rope_scaling=yarn)) is None
    assert positions(BloomConfig()) is None


def test_an_adapter_is_refused(model: Path, tmp_path: Path) -> None:
    """transformers would load it onto its base, and leave out the head that was trained with it: another number."""
    base = LlamaForSequenceClassification.from_pretrained(model)
    settings = LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"], modules_to_save=["score"])
    get_peft_model(base, settings).save_pretrained(tmp_path)
    PreTrainedTokenizerFast.from_pretrained(model).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"is an adapter.*Merge it into its base model"):
        RewardScores(RewardModel(path=str(tmp_path)))


def test_code_of_a_models_repository_is_never_run(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = shutil.copytree(model, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    own = {"model_type": "own", "auto_map": {"AutoConfig": "own.C", "AutoModelForSequenceClassification": "own.M"}}
    (folder / "config.json").write_text(json.dumps({**config, **own}))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # what transformers asks must not be answered by anybody
    with pytest.raises(ValueError, match="trust_remote_code"):
        RewardScores(RewardModel(path=str(folder)))
    assert not (tmp_path / "ran").exists()


def test_what_is_too_much_for_the_memory_is_halved_until_it_fits(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = RewardScores(RewardModel(path=str(model)))
    real = scores._values

    def small(sequences: list[list[int]]) -> list[float]:
        if sum(map(len, sequences)) > 40:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return real(sequences)

    monkeypatch.setattr(scores, "_values", small)
    found = numbers(scores, [chat("4"), chat("five"), chat("six" * 20), chat("7")])
    assert [number.failure for number in found] == ["", "", "reward_model_memory", ""]
    assert found[0].value == pytest.approx(reward_models.alone(model, rendered("4")), abs=1e-5)


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"labels": 2}, "has 2 labels; a reward model has one"),
        ({"template": None}, "has no chat template"),
        ({"causal": True}, r"is no reward model: it has no weights score\.weight"),
    ],
)
def test_what_is_no_reward_model_is_refused(tmp_path: Path, keys: dict[str, Any], why: str) -> None:
    reward_models.make(tmp_path, **keys)
    with pytest.raises(ValueError, match=why):
        RewardScores(RewardModel(path=str(tmp_path)))


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 120))
def test_every_sequence_is_in_one_batch_and_none_is_too_large(lengths: list[int], max_tokens: int) -> None:
    sequences = [(index, [0] * length) for index, length in enumerate(lengths)]
    found = list(batches(sequences, max_tokens=max_tokens))
    assert sorted(pair for batch in found for pair in batch) == sequences
    for batch in found:
        assert len(batch) == 1 or len(batch) * max(len(tokens) for _, tokens in batch) <= max_tokens


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), min_size=1, max_size=9))
def test_the_padding_ends_no_sequence(sequences: list[list[int]]) -> None:
    assert all(padding(sequences) != sequence[-1] for sequence in sequences)


# --- the process ----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def scoring(model: Path, **keys: Any) -> AsyncIterator[RewardModelPart]:
    part = RewardModelPart(RewardModel(path=str(model), name="taste", **keys))
    await asyncio.wait_for(part.start(), LIMIT_S)
    try:
        yield part
    finally:
        await part.close()


def process_of(part: RewardModelPart) -> psutil.Process:
    assert part._process is not None
    return psutil.Process(part._process._process.pid)


@pytest.mark.asyncio
async def test_answers_that_come_together_and_alone_get_the_same(model: Path) -> None:
    answers = ["4", "four", "it is 4, I think"] * 5
    turns = [*chat("a")[1:], {"role": "user", "content": "and?"}, {"role": "assistant", "content": "b"}]
    row = {**ROW, "prompt": [{"role": "user", "content": "x"}]}
    async with scoring(model) as part:
        found = await asyncio.wait_for(asyncio.gather(*(part.verify(ROW, said(text)) for text in answers)), LIMIT_S)
        again = await asyncio.wait_for(part.verify(ROW, said("four")), LIMIT_S)
        with pytest.raises(UnicodeEncodeError):  # alone: it never is in a batch
            await part.verify(ROW, said("\ud800"))
        episode = await asyncio.wait_for(part.verify(row, {**said("b"), "messages": turns}), LIMIT_S)
        process = process_of(part)
    values = [finding.parts["taste"] for finding in found]
    assert values == pytest.approx([reward_models.alone(model, rendered(text)) for text in answers], abs=1e-5)
    assert again.parts["taste"] == pytest.approx(values[1], abs=1e-5)
    whole = "<user>x<end><assistant>a<end><user>and?<end><assistant>b<end>"
    assert episode.parts["taste"] == pytest.approx(reward_models.alone(model, whole), abs=1e-5)
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_number_that_is_none_leaves_the_answer_unscored(tmp_path: Path) -> None:
    folder = reward_models.make(tmp_path)
    spoilt = reward_models.LlamaForSequenceClassification.from_pretrained(folder)
    torch.nn.init.constant_(spoilt.score.weight, math.nan)
    spoilt.save_pretrained(folder)
    rewards = [{"type": "reward-model", "path": str(folder)}]
    task = convert({"task": {"type": "single-turn", "data": {"train": "never-read.jsonl"}, "rewards": rewards}}).task
    scores = scoring_of(task, Collector(), seed=0, max_tokens=20)
    try:
        await asyncio.wait_for(scores.start(), LIMIT_S)
        score = await asyncio.wait_for(scores.score(Row("f:1", "2+2?"), Answer("4", (1,), "stop")), LIMIT_S)
    finally:
        await scores.close()
    assert (score.failure, score.parts) == ("verifier_nan", {"reward-model": None})
    assert math.isnan(score.reward)


@pytest.mark.slow
@pytest.mark.asyncio
async def test_one_that_cannot_be_loaded_is_told_at_the_start(tmp_path: Path) -> None:
    part = RewardModelPart(RewardModel(path=str(reward_models.make(tmp_path, labels=3))))
    with pytest.raises(VerifierError, match=r"'reward-model' cannot be loaded: ValueError.*3 labels.*\nMend path"):
        await asyncio.wait_for(part.start(), LIMIT_S)


@pytest.mark.faults
@pytest.mark.asyncio
async def test_a_killed_or_stopped_process_costs_its_answers_and_the_next_ones_are_scored(model: Path) -> None:
    async with scoring(model, timeout_s=1.0) as part:
        expected = (await asyncio.wait_for(part.verify(ROW, said("4")), LIMIT_S)).parts
        for fault, failure in ((signal.SIGKILL, "reward_model_died"), (signal.SIGSTOP, "reward_model_timeout")):
            ended = process_of(part)
            os.kill(ended.pid, fault)
            asked = [asyncio.create_task(part.verify(ROW, said("4"))) for _ in range(3)]
            for task in asked:
                with pytest.raises(Unscored) as caught:
                    await asyncio.wait_for(task, LIMIT_S)
                assert caught.value.failure == failure
            found = await asyncio.wait_for(part.verify(ROW, said("4")), LIMIT_S)
            assert found.parts == pytest.approx(expected)
            assert process_of(part).pid != ended.pid
            assert not ended.is_running()


@pytest.mark.faults
@pytest.mark.asyncio
async def test_who_gives_up_or_closes_leaves_nobody_waiting(model: Path) -> None:
    async with scoring(model) as part:
        process = process_of(part)
        process.suspend()
        first, second, given_up = [asyncio.create_task(part.verify(ROW, said(text))) for text in ("a", "b", "c")]
        await asyncio.sleep(0)
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        await asyncio.wait_for(part.close(), LIMIT_S)
        for task in (first, second):
            with pytest.raises(VerifierError, match="was closed before this answer was scored"):
                await asyncio.wait_for(task, LIMIT_S)
        with pytest.raises(VerifierError, match="is closed"):
            await part.verify(ROW, said("d"))
        assert not process.is_running()


@pytest.mark.faults
def test_its_process_ends_with_the_collectors_also_by_kill(
    model: Path, start: Callable[..., Any], eventually: Callable[[float, Callable[[], object]], bool]
) -> None:
    program = (
        "import asyncio\n"
        "from asyncrl.config.rewards import RewardModel\n"
        "from asyncrl.rewards.reward_model import RewardModelPart\n"
        "async def main():\n"
        f"    part = RewardModelPart(RewardModel(path={str(model)!r}))\n"
        "    await part.start()\n"
        "    print(part._process._process.pid, flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    collector = start("-c", program)
    scores = psutil.Process(int(collector.stdout.readline()))
    scores.suspend()  # it reads nothing, and so does not see the end of its input
    collector.kill()
    assert eventually(20, lambda: not scores.is_running() or scores.status() == psutil.STATUS_ZOMBIE)
