"""The README.md of an exported model: from facts to text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from huggingface_hub import ModelCardData

from asyncrl.config.resolved import dump
from asyncrl.staleness import Weights
from asyncrl.telemetry.text import number


@dataclass(frozen=True, slots=True)
class Evaluated:
    """One evaluation of a run: mean reward over held-out prompts, with the ends of its 95 % interval."""

    weights: Weights
    reward: float | None
    low: float | None
    high: float | None
    prompts: int
    unscored: int  # answers


@dataclass(frozen=True, slots=True)
class Facts:
    """What a model card tells. `versions`: of the run folder. hub_name: of the base model, where hubs know it."""

    form: str
    run: str
    recipe_hash: str
    extends: str | None
    differences: Mapping[str, Any]
    task: Mapping[str, Any]
    objective: str | None
    max_steps: int
    base_model: str
    hub_name: str | None
    lora: Mapping[str, Any] | None
    weights: Weights
    tokens: int
    dtype: str
    checksum: str
    stamped: bool
    versions: Mapping[str, Any]
    evaluations: Sequence[Evaluated]


def card(facts: Facts) -> str:
    """Markdown, with the metadata that hubs read on top. A licence is for a person to add: it follows from the base
    model's and the data's."""
    lineage, version = facts.weights
    program = f"asyncrl {facts.versions['packages']['asyncrl']}"
    shorter = "" if facts.max_steps == version else f" --set run.max_steps={version}"
    sections = [
        f"---\n{_metadata(facts)}\n---",
        f"# {facts.run}",
        f"`{facts.base_model}`, trained with reinforcement learning by {program}: "
        f"version {version} (lineage {lineage}), that is after {version} steps and {facts.tokens:,} trained tokens. "
        f"{_content(facts)}",
        "## Use\n\n" + _use(facts),
        "## Evaluation\n\n" + _evaluation(facts.evaluations),
        "## Training\n\n" + _training(facts),
        "## Reproduce\n\n"
        "`recipe.yaml` in this folder is the whole recipe, defaults included. Data, task code and a local base model "
        f"are not in it.\n\n```\nasyncrl run recipe.yaml{shorter}\nasyncrl export --to {facts.form}\n```\n\n"
        "What arrives when differs from run to run, and so do the weights.",
        "## Versions\n\n" + _versions(facts.versions),
        "## Checksums\n\n" + _checksums(facts),
    ]
    return "\n\n".join(sections) + "\n"


def _metadata(facts: Facts) -> str:
    adapter = facts.form == "adapter"
    relation = "adapter" if adapter else "finetune"
    tags = ["asyncrl", "reinforcement-learning", facts.objective, "lora" if facts.lora else None]
    data = ModelCardData(
        base_model=facts.hub_name,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=[tag for tag in tags if tag],
        base_model_relation=relation if facts.hub_name else None,
    )
    text: str = data.to_yaml()
    return text


def _content(facts: Facts) -> str:
    if facts.form == "adapter":
        return "This folder holds the adapter alone, float32."
    merged = ", the adapter added" if facts.lora else ""
    return f"This folder holds the whole model, {facts.dtype}{merged}."


def _use(facts: Facts) -> str:
    lines = ["from transformers import AutoModelForCausalLM, AutoTokenizer", "", 'folder = "."  # this one']
    if facts.form == "adapter":
        lines[0:0] = ["from peft import PeftModel"]
        known = facts.hub_name if facts.hub_name == facts.base_model else "..."
        lines += [f'base = AutoModelForCausalLM.from_pretrained("{known}")  # {facts.base_model}, as it was trained on']
        lines += ["model = PeftModel.from_pretrained(base, folder)"]
    else:
        lines += ["model = AutoModelForCausalLM.from_pretrained(folder)"]
    lines += ["tokenizer = AutoTokenizer.from_pretrained(folder)"]
    lines += ['conversation = [{"role": "user", "content": "..."}]']
    lines += [
        "prompt = tokenizer.apply_chat_template("
        'conversation, add_generation_prompt=True, return_dict=True, return_tensors="pt")'
    ]
    lines += ["answer = model.generate(**prompt, max_new_tokens=256)"]
    lines += ['print(tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))']
    return "```python\n" + "\n".join(lines) + "\n```"


def _evaluation(evaluations: Sequence[Evaluated]) -> str:
    if not evaluations:
        return "The run evaluated no version up to this one."
    rows = [
        f"| {one.weights.version} | {number(one.reward)} | [{number(one.low)}, {number(one.high)}] | {one.prompts} "
        f"| {one.unscored} |"
        for one in evaluations
    ]
    head = "| version | reward | 95 % interval | held-out prompts | unscored answers |\n|---|---|---|---|---|\n"
    return (
        "Mean reward of the task on held-out prompts, with its 95 % interval over prompts.\n\n" + head + "\n".join(rows)
    )


def _training(facts: Facts) -> str:
    parts = [
        f"Recipe of run `{facts.run}`, hash `{facts.recipe_hash}`. The task:\n\n```yaml\n{dump(facts.task)}```",
    ]
    if facts.lora is not None:
        parts.append(f"Low-rank adapters:\n\n```yaml\n{dump(facts.lora)}```")
    if facts.differences:
        parent = f"what it extends, `{facts.extends}`" if facts.extends else "the recipe as it was written"
        parts.append(f"Where it differs from {parent}:\n\n```yaml\n{dump(facts.differences)}```")
    else:
        parts.append(
            f"It {f'extends `{facts.extends}`' if facts.extends else 'is a recipe as it was written'}, unchanged."
        )
    return "\n\n".join(parts)


def _versions(versions: Mapping[str, Any]) -> str:
    packages = "\n".join(f"| {name} | {version} |" for name, version in versions["packages"].items())
    commit = versions["git"] or "none: not a git checkout"
    return (
        f"Where the run began:\n\n| | |\n|---|---|\n{packages}\n| Python | {versions['python']} |\n"
        f"| platform | {versions['platform']} |\n| git commit of the working folder | {commit} |"
    )


def _checksums(facts: Facts) -> str:
    stamped = (
        "Rows that the run trained carry the same one, stamped by the engine that sampled them from this version."
        if facts.stamped
        else "No row that the run trained was sampled by it."
    )
    whose = "of the whole model that the adapter makes" if facts.form == "adapter" else "over all tensors"
    return (
        f"xxh3 {whose}, in {facts.dtype}: `{facts.checksum}`. {stamped} `export.json` has every tensor's and every "
        "file's."
    )
