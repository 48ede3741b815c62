"""`asyncrl export`: what others load of a run, bit for bit what it was, and what the card says about it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from peft import PeftModel
from ruamel.yaml import YAML
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from asyncrl.config.identity import recipe_hash
from asyncrl.config.loading import load_recipe
from asyncrl.learners.checkpoint import file_entry
from asyncrl.learners.lora import in_dtype, served_weights
from asyncrl.runtime.export import Document
from asyncrl.staleness import Weights
from asyncrl.weights.image import Images
from asyncrl.weights.manifest import Manifest, combined_checksum, model_tensors

CONVERSATION = [{"role": "user", "content": "reverse 4711"}]
WITH_LORA = ("model.lora={r: 4, alpha: 8}",)


def document(folder: Path) -> Document:
    return msgspec.json.decode((folder / "export.json").read_bytes(), type=Document)


def card(folder: Path) -> tuple[dict[str, Any], str]:
    """The metadata and the text."""
    _, head, text = (folder / "README.md").read_text().split("---\n", 2)
    return dict(YAML(typ="safe").load(head)), text


def greedy(folder: Path) -> str:
    """The answer of the model in `folder` to the conversation, as its own chat template writes it."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        CONVERSATION, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    answer = model.generate(**prompt, do_sample=False, max_new_tokens=24)
    return str(tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :]))


def published(tensors: Any, tied: Any, **adapter: Any) -> Manifest:
    """What a learner's image of these tensors has for a manifest."""
    images = Images("export-test")
    try:
        return images.write(Weights(1, 7), tensors, tied=tied, **adapter).manifest
    finally:
        images.close()


def test_an_exported_run_answers_as_its_checkpoint_does(called, make_run, base: Path) -> None:
    run = make_run()
    done = called("export")
    assert done.returncode == 0, done.stderr
    folder, checkpoint = run / "exports" / "version-000007-hf", run / "checkpoints" / "version-000007"
    assert done.stdout.splitlines()[-1] == f"folder    {folder}"
    assert greedy(folder) == greedy(checkpoint)
    tensors, tied = model_tensors(AutoModelForCausalLM.from_pretrained(folder))
    for (name, exported), (other, kept) in zip(
        tensors, model_tensors(AutoModelForCausalLM.from_pretrained(checkpoint))[0], strict=True
    ):
        assert name == other
        assert torch.equal(exported, kept)
    assert document(folder).manifest == published(tensors, tied)


def test_what_belongs_to_the_model_is_as_the_recipes_model_had_it(called, make_run, base: Path) -> None:
    run = make_run()
    assert called("export", str(run), "--output", "out").returncode == 0
    folder = run.parents[1] / "out"
    before, after = (GenerationConfig.from_pretrained(path).to_diff_dict() for path in (base, folder))
    assert after == before
    assert (after["temperature"], after["top_k"]) == (0.7, 0)
    old, new = (AutoTokenizer.from_pretrained(path) for path in (base, folder))
    assert new.chat_template == old.chat_template
    text = "reverse 0815 <|im_end|>"
    assert new(text)["input_ids"] == old(text)["input_ids"]
    assert (new.eos_token, new.pad_token) == (old.eos_token, old.pad_token)


def test_a_whole_model_is_in_the_type_that_was_served_or_in_the_one_asked_for(called, make_run) -> None:
    run = make_run("model.dtype=bfloat16")
    kept = AutoModelForCausalLM.from_pretrained(run / "checkpoints" / "version-000007")
    for options, dtype in (((), "bfloat16"), (("--dtype", "float32"), "float32")):
        done = called("export", *options, "--output", dtype)
        assert done.returncode == 0, done.stderr
        folder = run.parents[1] / dtype
        assert json.loads((folder / "config.json").read_bytes())["dtype"] == dtype
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert {tensor.dtype for _, tensor in model_tensors(model)[0]} == {getattr(torch, dtype)}
        announced = combined_checksum(in_dtype(served_weights(kept), dtype))
        assert document(folder).manifest.served == combined_checksum(model_tensors(model)[0]) == announced


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_merged_model_has_the_bits_that_engines_served(
    called, make_run, adapted: PreTrainedModel, dtype: str
) -> None:
    run = make_run(*WITH_LORA, f"model.dtype={dtype}", model=adapted)
    assert called("export", "--to", "merged", "--output", "merged").returncode == 0
    assert called("export", "--to", "hf", "--output", "hf").returncode == 0
    served = served_weights(adapted, dtype)
    manifest = published(in_dtype(served, dtype), served.tied)
    for name in ("merged", "hf"):
        folder = run.parents[1] / name
        assert document(folder).manifest == manifest
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert combined_checksum(model_tensors(model)[0]) == manifest.checksum
        assert not list(folder.glob("adapter*"))


def test_an_adapter_loads_with_peft_on_its_base_and_is_the_published_one(
    called, make_run, base: Path, adapted: PreTrainedModel
) -> None:
    run = make_run(*WITH_LORA, model=adapted)
    done = called("export", "--to", "adapter")
    assert done.returncode == 0, done.stderr
    folder = run / "exports" / "version-000007-adapter"
    assert not list(folder.glob("model*")), "only A and B"
    alone = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(folder))
    merged = AutoModelForCausalLM.from_pretrained(run / "checkpoints" / "version-000007")
    untrained = AutoModelForCausalLM.from_pretrained(base)
    prompt = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        CONVERSATION, return_dict=True, return_tensors="pt"
    )
    with torch.no_grad():
        assert (alone(**prompt).logits - merged(**prompt).logits).abs().max() < 1e-3
        assert (untrained(**prompt).logits - merged(**prompt).logits).abs().max() > 1e-1
    served = served_weights(adapted)
    assert served.adapter is not None
    announced = msgspec.structs.replace(served.adapter, served=combined_checksum(served))
    assert document(folder).manifest == published(served.factors.items(), {}, adapter=announced)
    metadata, text = card(folder)
    assert (metadata["library_name"], metadata["tags"][-1]) == ("peft", "lora")
    assert "PeftModel.from_pretrained(base, folder)" in text


def test_the_card_says_where_the_model_came_from(called, make_run, base: Path) -> None:
    run = make_run("buffer.url=redis://someone:s3cret@store.example:6379/0", "run.max_steps=9", versions=(3, 7))
    recipe = load_recipe(str(run / "recipe.yaml")).recipe
    (run / "eval").mkdir()
    for version, rewards in ((0, [0.0, 1.0]), (3, [1.0, 0.0]), (7, [1.0, None]), (9, [1.0, 1.0])):
        answers = [
            {"row_id": str(n), "reward": reward, "failure": "", "finish_reason": "stop"}
            for n, reward in enumerate(rewards)
        ]
        (run / "eval" / f"eval-1-{version}.json").write_text(json.dumps({"answers": answers}))
    done = called("export", "tiny-reverse", "--output", "out")
    assert done.returncode == 0, done.stderr
    folder = run.parents[1] / "out"
    metadata, text = card(folder)
    assert metadata["library_name"] == "transformers"
    assert metadata["tags"] == ["asyncrl", "reinforcement-learning", "grpo"]
    assert "base_model" not in metadata, "it is a folder here"
    assert f"`{base}`" in text
    assert "version 7 (lineage 1), that is after 7 steps and 4,096 trained tokens" in text
    assert recipe_hash(recipe) in text
    assert "what it extends, `tiny-reverse`" in text
    assert "task.digits: [2, 4]" in text
    assert [line for line in text.splitlines() if line.startswith("| 0 ")] == ["| 0 | 0.500 | [0.003, 0.997] | 2 | 0 |"]
    assert [line for line in text.splitlines() if line.startswith("| 7 ")] == ["| 7 | 1.000 | [0.207, 1.000] | 2 | 1 |"]
    assert "| 9 |" not in text, "of a version after this one"
    assert "asyncrl run recipe.yaml --set run.max_steps=7" in text
    assert document(folder).manifest.served in text
    for name, version in json.loads((run / "versions.json").read_bytes())["packages"].items():
        assert f"| {name} | {version} |" in text
    for path in folder.iterdir():
        assert path.suffix == ".safetensors" or "store.example" not in path.read_text(), path
    again = load_recipe(str(folder / "recipe.yaml")).recipe
    assert recipe_hash(again) == recipe_hash(recipe) == document(folder).recipe_hash
    assert again.buffer.url == "embedded"


def test_a_base_model_of_a_hub_is_named_in_the_metadata(called, make_run) -> None:
    run = make_run()
    kept = (run / "recipe.yaml").read_text()
    for path, name in (
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("builtin:smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct"),
    ):
        lines = [f"  path: {path}" if line.startswith("  path: ") else line for line in kept.splitlines()]
        (run / "recipe.yaml").write_text("\n".join(lines) + "\n")
        target = path.replace("/", "-")
        assert called("export", "--output", target).returncode == 0
        metadata, _ = card(run.parents[1] / target)
        assert (metadata["base_model"], metadata["base_model_relation"]) == (name, "finetune")


def test_every_file_has_its_checksum(called, make_run) -> None:
    run = make_run()
    assert called("export", "--output", "out").returncode == 0
    folder = run.parents[1] / "out"
    files = document(folder).files
    assert set(files) == {path.name for path in folder.iterdir()} - {"export.json"}
    assert {"README.md", "recipe.yaml", "config.json", "generation_config.json", "tokenizer.json"} < set(files)
    assert all(file_entry(folder / name) == entry for name, entry in files.items())
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1, (
        "whoever may read the card may read the weights"
    )


def test_another_version_is_taken_by_its_number_or_its_folder(called, make_run) -> None:
    run = make_run(versions=(3, 7))
    assert called("export", "--version", "3").returncode == 0
    assert document(run / "exports" / "version-000003-hf").version == 3
    assert called("export", str(run / "checkpoints" / "version-000003"), "--output", "out").returncode == 0
    assert document(run.parents[1] / "out").version == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--to", "adapter"), "trained without model.lora, so it has no adapter; use --to hf"),
        (("--to", "merged"), "trained without model.lora"),
        (("--version", "5"), "has no checkpoint version-000005; it has: version-000007"),
        (("{run}/checkpoints/version-000007", "--version", "7"), "is one version; give the run instead"),
        (("nothing",), "no run 'nothing'"),
        (("{base}",), "is no checkpoint in a run's folder"),
        (("--output", "taken"), "taken exists and is not empty"),
        (("--output", "file"), "file exists and is not empty"),
        (("--output", "/proc/out"), "cannot write /proc/out"),
    ],
)
def test_bad_input_is_one_clear_error_and_writes_nothing(
    called, make_run, base: Path, arguments: tuple[str, ...], said: str
) -> None:
    run = make_run()
    place = run.parents[1]
    (place / "taken").mkdir()
    (place / "taken" / "notes").write_text("mine")
    (place / "file").write_text("mine")
    before = sorted(place.rglob("*"))
    done = called("export", *(argument.format(run=run, base=base) for argument in arguments))
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert sorted(place.rglob("*")) == before
    assert (place / "taken" / "notes").read_text() == "mine"


def test_an_adapter_is_not_cast(called, make_run, adapted: PreTrainedModel) -> None:
    make_run(*WITH_LORA, model=adapted)
    done = called("export", "--to", "adapter", "--dtype", "bfloat16")
    assert (done.returncode, "stays in float32" in done.stderr) == (2, True)


def test_a_damaged_checkpoint_is_refused_and_an_older_sound_one_is_taken_for_the_run(called, make_run) -> None:
    run = make_run(versions=(3, 7))
    weights = run / "checkpoints" / "version-000007" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    done = called("export", "--version", "7")
    assert (done.returncode, "is damaged: model.safetensors" in done.stderr) == (2, True)
    assert called("export").returncode == 0
    assert [path.name for path in (run / "exports").iterdir()] == ["version-000003-hf"]


def test_a_supervised_training_has_its_model_already(called, make_run) -> None:
    run = make_run()
    (run / "recipe.yaml").write_text("model: {path: x}\ndata: {train: x}\nsft: {}\n")
    done = called("export")
    assert done.returncode == 2
    assert f"writes its model for everybody at its end: {run / 'model'}" in done.stderr


def test_an_empty_folder_may_be_filled(called, make_run) -> None:
    run = make_run()
    target = run.parents[1] / "empty"
    target.mkdir()
    assert called("export", "--output", "empty").returncode == 0
    assert (target / "export.json").is_file()


def test_what_lies_beside_the_weights_in_a_checkpoint_comes_along(called, make_run) -> None:
    """A model's own code and further chat templates, as `save_pretrained` leaves them; what training needs does not."""
    run = make_run()
    folder = run / "checkpoints" / "version-000007"
    manifest = json.loads((folder / "checkpoint.json").read_bytes())
    (folder / "additional_chat_templates").mkdir()
    for name in ("modeling_mine.py", "additional_chat_templates/rag.jinja"):
        (folder / name).write_text("content")
        manifest["files"][name] = msgspec.to_builtins(file_entry(folder / name))
    (folder / "checkpoint.json").write_text(json.dumps(manifest))
    assert called("export", "--output", "out").returncode == 0
    out = run.parents[1] / "out"
    assert (out / "modeling_mine.py").read_text() == "content"
    assert (out / "additional_chat_templates" / "rag.jinja").read_text() == "content"
    assert "additional_chat_templates/rag.jinja" in document(out).files
    assert not {"training.pt", "checkpoint.json"} & {path.name for path in out.iterdir()}


def test_the_exported_recipe_starts_a_run_as_it_is(called, make_run) -> None:
    run = make_run()
    shutil.copytree(run, run.parents[1] / "kept")
    assert called("export", "--output", "out").returncode == 0
    done = called("run", "out/recipe.yaml", "--dry-run")
    assert done.returncode == 0, done.stderr
