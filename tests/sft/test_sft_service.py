"""From files to a model folder: right order, right loss, and the same weights however often it was stopped."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

from asyncrl.config.convert import convert_to
from asyncrl.config.sft import SftRecipe
from asyncrl.data.conversations import read_split
from asyncrl.learners import sft_service
from asyncrl.learners.sft_service import SftError, finetune
from asyncrl.telemetry.metrics import read_metrics, surviving_steps
from tests.sft.conftest import reversing

Train = Callable[..., list[dict[str, Any]]]

ROWS = 40
STEPS = 10


@pytest.fixture
def train(tmp_path: Path, random_model: Path) -> Train:
    """Train on `ROWS` rows and return the records of this call; `stop_after`: so many steps of it."""
    (tmp_path / "rows.jsonl").write_text(reversing(ROWS))

    def _train(
        name: str = "run", *, resume: bool = False, stop_after: int = STEPS, seed: int = 0, **changes: Any
    ) -> list[dict[str, Any]]:
        model = {"path": str(random_model), **changes.pop("model", {})}
        run = {"max_steps": STEPS, "seed": seed, **changes.pop("run", {})}
        checkpoint = {"every_steps": 4}
        sft = {"examples_per_step": 8, "learning_rate": 3e-3, "warmup_steps": 2, "checkpoint": checkpoint, **changes}
        document = {"run": run, "model": model, "data": {"train": str(tmp_path / "rows.jsonl")}, "sft": sft}
        recipe = convert_to(SftRecipe, document)
        records: list[dict[str, Any]] = []
        finetune(
            recipe,
            read_split(recipe.data),
            run_dir=tmp_path / name,
            model_path=random_model,
            resume=resume,
            stop=lambda: sum("event" not in record for record in records) >= stop_after,
            report=lambda record: records.append(dict(record)),
        )
        return records

    return _train


def steps_of(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record for record in records if "event" not in record]


def events(records: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [record for record in records if record.get("event") == name]


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_it_learns_and_leaves_a_model_that_transformers_loads(train: Train, tmp_path: Path) -> None:
    records = train(run={"max_steps": 30}, stop_after=30)
    before, *_, after = events(records, "heldout")
    assert before["step"] == 0
    assert after["step"] == 30
    assert after["loss"] < 0.6 * before["loss"]
    (end,) = events(records, "end")
    assert end["model"] == str(tmp_path / "run" / "model")
    assert end["heldout_loss"] == after["loss"]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["heldout_loss_before"] == before["loss"]
    assert surviving_steps(read_metrics(tmp_path / "run" / "metrics.jsonl")) == steps_of(records)

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert model.config._attn_implementation == "sdpa"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    assert tokenizer.chat_template
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "checkpoints",
        "metrics.jsonl",
        "model",
        "summary.json",
    ]


def test_the_first_losses_are_those_of_the_models_own_code(
    train: Train, tmp_path: Path, random_model: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Held-out loss of step 0, recomputed one row at a time with transformers' labels."""
    (heldout, *_) = events(train(stop_after=0), "heldout")
    model = Qwen3ForCausalLM.from_pretrained(random_model).eval()
    split = read_split(convert_to(SftRecipe, {"data": {"train": str(tmp_path / "rows.jsonl")}}).data)
    total, count = 0.0, 0
    for row in split.heldout:
        asked, said = (message["content"] for message in row.messages)
        prompt = tokenizer.encode(f"<|user|>{asked}<|end|><|assistant|>")
        answer = tokenizer.encode(f"{said}<|end|>")
        labels = torch.tensor([[-100] * len(prompt) + answer])
        with torch.no_grad():
            total += model(input_ids=torch.tensor([prompt + answer]), labels=labels).loss.item() * len(answer)
        count += len(answer)
    assert heldout["rows"] == len(split.heldout)
    assert heldout["tokens"] == count
    assert heldout["loss"] == pytest.approx(total / count, rel=1e-5)


def test_each_epoch_takes_every_row_once_in_an_order_of_its_own(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[list[tuple[int, ...]]] = []
    accumulate = sft_service.accumulate

    def watched(model: Any, examples: Any, **options: Any) -> float:
        if torch.is_grad_enabled():
            taken.append([tuple(example.token_ids) for example in examples])
        return accumulate(model, examples, **options)

    monkeypatch.setattr(sft_service, "accumulate", watched)
    records = train(run={"max_steps": None}, stop_after=1000, epochs=2)
    rows = events(records, "start")[0]["rows"]
    flat = [row for step in taken for row in step]
    assert len(flat) == 2 * rows
    assert Counter(flat[:rows]) == Counter(flat[rows:])
    assert max(Counter(flat[:rows]).values()) == 1
    assert flat[:rows] != flat[rows:]
    assert events(records, "start")[0]["steps"] == len(taken) == -(-2 * rows // 8)
    assert len(taken[-1]) < 8
    assert steps_of(records)[-1]["epoch"] == 2.0, "the last step was a smaller one"


def test_the_learning_rate_warms_up_and_falls_or_stays(train: Train) -> None:
    rates = [record["learning_rate"] / 3e-3 for record in steps_of(train())]
    assert rates == pytest.approx([0.5, 1.0, *(1 - n / 8 for n in range(8))])
    assert rates[2] == 1.0
    rates = [record["learning_rate"] for record in steps_of(train("constant", lr_scheduler_type="constant"))]
    assert rates[2:] == [3e-3] * 8


@pytest.mark.parametrize("lora", [None, {"r": 4, "alpha": 8}], ids=["all weights", "adapter"])
def test_a_training_that_was_stopped_ends_with_the_same_weights_bit_for_bit(
    train: Train, tmp_path: Path, lora: dict[str, int] | None
) -> None:
    whole = train("whole", model={"lora": lora})
    parts = train("parts", model={"lora": lora}, stop_after=3)
    assert events(parts, "end")[0]["stopped"]
    assert not (tmp_path / "parts" / "model").exists()
    parts += train("parts", model={"lora": lora}, resume=True, stop_after=4)
    parts += train("parts", model={"lora": lora}, resume=True)
    assert [record["loss"] for record in steps_of(parts)] == [record["loss"] for record in steps_of(whole)]
    assert weights(tmp_path / "parts" / "model") == weights(tmp_path / "whole" / "model")
    assert events(parts, "end")[-1]["heldout_loss_before"] == events(whole, "end")[0]["heldout_loss_before"]

    train("other", model={"lora": lora}, seed=1)
    assert weights(tmp_path / "other" / "model") != weights(tmp_path / "whole" / "model"), "nothing was trained"


def test_what_was_trained_since_a_checkpoint_is_trained_again_after_a_kill(train: Train, tmp_path: Path) -> None:
    """A killed process leaves checkpoints of steps 4 and 8 of 10, and metrics of the steps after them."""
    whole = train("whole")
    with pytest.raises(Killed):
        train("killed", stop_after=Raising(7))
    assert [path.name for path in (tmp_path / "killed" / "checkpoints").iterdir()] == ["version-000004"]
    again = train("killed", resume=True)
    assert steps_of(again)[0]["step"] == 5
    assert weights(tmp_path / "killed" / "model") == weights(tmp_path / "whole" / "model")
    recorded = surviving_steps(read_metrics(tmp_path / "killed" / "metrics.jsonl"))
    assert [record["loss"] for record in recorded] == [record["loss"] for record in steps_of(whole)]


class Killed(BaseException):
    """What ends a training without any of its own code."""


class Raising(int):
    """A number of steps after which whoever asks is killed."""

    def __le__(self, steps: int) -> bool:
        if steps >= int(self):
            raise Killed
        return False


def test_an_adapter_is_trained_alone_and_saved_both_merged_and_by_itself(
    train: Train, tmp_path: Path, random_model: Path
) -> None:
    train(model={"lora": {"r": 4, "alpha": 8}})
    folder = tmp_path / "run" / "model"
    base = Qwen3ForCausalLM.from_pretrained(random_model).state_dict()
    merged = AutoModelForCausalLM.from_pretrained(folder)
    changed = {name for name, value in merged.state_dict().items() if not torch.equal(value, base[name])}
    assert changed
    assert all("proj" in name for name in changed)
    ids = torch.arange(5)[None]
    adapted = PeftModel.from_pretrained(Qwen3ForCausalLM.from_pretrained(random_model), folder / "adapter")
    torch.testing.assert_close(merged(ids).logits, adapted(input_ids=ids).logits)


def test_other_rows_are_not_resumed_on(train: Train, tmp_path: Path) -> None:
    train(stop_after=5)
    (tmp_path / "rows.jsonl").write_text(reversing(ROWS + 1))
    with pytest.raises(SftError, match=r"the rows are not those that .*version-000005 was trained on"):
        train(resume=True)


def test_damaged_checkpoints_are_passed_over_and_none_at_all_is_said(train: Train, tmp_path: Path) -> None:
    train(stop_after=9)
    folders = sorted((tmp_path / "run" / "checkpoints").iterdir())
    assert [folder.name for folder in folders] == ["version-000008", "version-000009"]
    (folders[1] / "model.safetensors").write_bytes(b"damaged")
    assert steps_of(train(resume=True, stop_after=1))[0]["step"] == 9
    for folder in (tmp_path / "run" / "checkpoints").iterdir():
        (folder / "training.pt").unlink()
    with pytest.raises(SftError, match=r"no checkpoint in .* is sound"):
        train(resume=True)


def test_a_training_may_be_extended_after_its_end(train: Train) -> None:
    train(lr_scheduler_type="constant")
    more = train(resume=True, run={"max_steps": STEPS + 2}, lr_scheduler_type="constant")
    assert [record["step"] for record in steps_of(more)] == [STEPS + 1, STEPS + 2]


def test_a_loss_that_is_no_number_is_null_in_the_summary(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accumulate = sft_service.accumulate

    def diverged(model: Any, examples: Any, **options: Any) -> float:
        return accumulate(model, examples, **options) if torch.is_grad_enabled() else float("nan")

    monkeypatch.setattr(sft_service, "accumulate", diverged)
    train()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(), parse_constant=pytest.fail)
    assert summary["step"] == STEPS
    assert (summary["heldout_loss_before"], summary["heldout_loss"]) == (None, None)


@pytest.fixture
def _one_bad_step(monkeypatch: pytest.MonkeyPatch) -> None:
    accumulate, calls = sft_service.accumulate, iter(range(1000))

    def poisoned(model: Any, examples: Any, **options: Any) -> float:
        loss = accumulate(model, examples, **options)
        if torch.is_grad_enabled() and next(calls) == 2:
            next(model.parameters()).grad.fill_(float("nan"))
        return loss

    monkeypatch.setattr(sft_service, "accumulate", poisoned)


@pytest.mark.usefixtures("_one_bad_step")
def test_a_step_with_a_non_finite_gradient_changes_nothing_and_is_counted(train: Train) -> None:
    skipped = [record["skipped"] for record in steps_of(train())]
    assert skipped == [False, False, True, *[False] * (STEPS - 3)]
