"""`asyncrl export`: a checkpoint of a run as a folder for everybody else, with a card that says where it came from.

    README.md        the model card
    recipe.yaml      the whole recipe, without the places of the machine that it ran on
    export.json      which version it is; every tensor and every file with its xxh3
    ...              what transformers, vLLM or peft load

Written beside the target under a hidden name, synced, renamed: a killed export leaves nothing at the target.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError

from asyncrl.buffers.archive import Archive
from asyncrl.collectors.evaluation.report import report
from asyncrl.config.evaluation import REWARD
from asyncrl.config.identity import identity, portable, recipe_hash
from asyncrl.config.loading import recipe_from_document
from asyncrl.config.recipe import BUILTIN_MODELS, Recipe, to_builtins
from asyncrl.config.resolved import extended_by, resolved_yaml
from asyncrl.config.secrets import masked
from asyncrl.config.yaml_text import parse
from asyncrl.learners import checkpoint as checkpoints
from asyncrl.learners.checkpoint import Checkpoint, CheckpointError, FileEntry
from asyncrl.learners.evaluation import stored_evaluations
from asyncrl.learners.exporting import Form, Phase, has_adapter, write_form
from asyncrl.learners.smollm2 import ORIGIN
from asyncrl.runtime import folder as folders
from asyncrl.runtime.evaluation import is_supervised
from asyncrl.runtime.model_card import Evaluated, Facts, card
from asyncrl.staleness import Lineages, Weights
from asyncrl.weights.base import WeightsError
from asyncrl.weights.manifest import Manifest

FORMAT = 1
"""Of `export.json`."""

DOCUMENT, CARD, RECIPE = "export.json", "README.md", "recipe.yaml"

EXPORTS = "exports"
"""Folder of a run in which exports lie that were not told where."""


class ExportError(Exception):
    """What should be exported cannot be found, or not in this form or place; names it and the fix."""


class ExportFailed(RuntimeError):
    """Writing failed, or what was written is not what was read; names the folder and the reason."""


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """`export.json`. `manifest`: of the tensors, as they are published in `dtype`; its `served` is the checksum that
    the version was announced with, if `dtype` is the recipe's. `files`: all others in the folder."""

    format: int = FORMAT
    form: Form
    run: str
    recipe_hash: str
    lineage: int
    version: int
    dtype: str
    manifest: Manifest
    files: dict[str, FileEntry]


@dataclass(frozen=True, slots=True)
class Source:
    """A sound checkpoint, and the run it is of."""

    run: Path
    recipe: Recipe
    checkpoint: Checkpoint


@dataclass(frozen=True, slots=True)
class Exported:
    """What lies in `folder` now. stamped: rows of the archive carry its checksum, as they can only where it is in the
    type that was served."""

    folder: Path
    source: Source
    document: Document
    stamped: bool


def find_source(given: str | None, version: int | None) -> Source:
    """A run (a folder or a name; None: the newest) at its newest sound checkpoint or at `version`; or a checkpoint's
    folder. Raises ExportError, RunFolderError, RecipeError."""
    folder: Path | None = None
    if given is not None and (Path(given).expanduser() / "config.json").is_file():
        folder = Path(given).expanduser().resolve()
        run = folder.parent.parent  # <run>/checkpoints/version-000020
        if not (folder / checkpoints.MANIFEST).is_file() or not (run / RECIPE).is_file():
            raise ExportError(
                f"{folder} is no checkpoint in a run's folder, so nothing says what it is; a model alone is exported "
                "already: copy it"
            )
        if version is not None:
            raise ExportError(f"--version {version}: {folder} is one version; give the run instead: {run}")
    else:
        run = folders.find(given)
        if version is not None:
            folder = run / "checkpoints" / f"version-{version:06d}"
    if is_supervised(run):
        raise ExportError(
            f"{run} is of `asyncrl sft`, which writes its model for everybody at its end: {run / 'model'}"
        )
    recipe = recipe_from_document(parse((run / RECIPE).read_text(encoding="utf-8")))
    return Source(run, recipe, _sound(run, folder))


def _sound(run: Path, folder: Path | None) -> Checkpoint:
    """The checkpoint in `folder`; None: the newest sound one of the run."""
    every = run / "checkpoints"
    if folder is None:
        newest = checkpoints.find_resumable(every)
        if newest is None:
            raise ExportError(f"run {run} has no sound checkpoint yet: there is nothing to export")
        return newest
    if not folder.is_dir():
        kept = ", ".join(sorted(path.name for path in every.glob("version-*"))) or "none"
        raise ExportError(f"run {run} has no checkpoint {folder.name}; it has: {kept}")
    try:
        return checkpoints.load(folder)
    except CheckpointError as error:
        raise ExportError(str(error)) from None


def export(
    source: Source, form: Form, *, dtype: str | None, output: Path | None, on_phase: Callable[[Phase], None]
) -> Exported:
    """Write `form` of `source` to `output`, new or empty; None: <run>/exports/version-<V>-<form>.

    dtype: of a whole model; None: `model.dtype`. on_phase hears what begins. Raises ExportError before anything is
    written, ExportFailed after.
    """
    recipe, checkpoint = source.recipe, source.checkpoint
    if form != "hf" and not has_adapter(checkpoint):
        raise ExportError(
            f"--to {form}: {checkpoint.folder} was trained without model.lora, so it has no adapter; use --to hf"
        )
    if form == "adapter" and dtype is not None:
        raise ExportError(f"--dtype {dtype}: an adapter stays in float32, in which it is trained; leave it out")
    served_in = dtype or recipe.model.dtype
    target = (output or source.run / EXPORTS / f"{checkpoint.folder.name}-{form}").expanduser().resolve()
    with _appearing(target) as folder:
        manifest = write_form(
            checkpoint,
            folder,
            form,
            dtype=served_in,
            trust_remote_code=recipe.model.trust_remote_code,
            on_phase=on_phase,
        )
        stamps = _stamps(source) if served_in == recipe.model.dtype else set()
        if stamps - {manifest.served}:
            raise WeightsError(
                f"{checkpoint.folder} has the checksum {manifest.served}, but rows in {source.run / 'archive'} were "
                f"sampled by this version with {', '.join(sorted(stamps))}"
            )
        stamped = bool(stamps)
        _describe(source, folder, form, manifest, dtype=served_in, stamped=stamped)
        files = [path for path in folder.rglob("*") if path.is_file()]
        for path in files:
            path.chmod((folder / CARD).stat().st_mode)  # safetensors leaves weights that only their owner can read
        names = sorted(str(path.relative_to(folder)) for path in files)
        document = Document(
            form=form,
            run=recipe.run.name,
            recipe_hash=recipe_hash(recipe),
            lineage=checkpoint.weights.lineage,
            version=checkpoint.weights.version,
            dtype=served_in,
            manifest=manifest,
            files={name: checkpoints.file_entry(folder / name) for name in names},
        )
        (folder / DOCUMENT).write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2))
    return Exported(target, source, document, stamped)


@contextmanager
def _appearing(target: Path) -> Iterator[Path]:
    """A folder that becomes `target` at the end of the block, whole; if the block fails, nothing does."""
    building = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ExportError(f"{target} exists and is not empty; give another folder (--output DIR) or remove it")
        building.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(building, ignore_errors=True)  # of a killed process that had this one's number
        building.mkdir()
    except OSError as error:
        raise ExportError(f"cannot write {target} ({error.strerror}); give another folder (--output DIR)") from None
    try:
        yield building
        for path in (*building.rglob("*"), building):
            checkpoints.sync(path)
        building.rename(target)  # refused by the system where something is in it by now
        checkpoints.sync(target.parent)
    except BaseException as error:
        shutil.rmtree(building, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError | WeightsError):
            raise ExportFailed(f"cannot export to {target}: {error}") from error
        raise


def _stamps(source: Source) -> set[str]:
    """The checksums with which rows were sampled by exactly these weights; only steps from this version on, and within
    the age bound, can have trained any."""
    wanted, archive = source.checkpoint.weights, Archive(source.run / "archive")
    steps = range(wanted.version, wanted.version + source.recipe.buffer.max_trajectory_age + 1)
    stamped = [stamp for step in archive.parts() if step.version in steps for stamp in archive.stamps(step)]
    return {checksum for weights, checksum in stamped if weights == wanted and checksum}


def _describe(source: Source, folder: Path, form: Form, manifest: Manifest, *, dtype: str, stamped: bool) -> None:
    """Write the recipe and the model card into `folder`."""
    recipe, checkpoint = source.recipe, source.checkpoint
    resolved = (source.run / RECIPE).read_text(encoding="utf-8")
    identifying = {*identity(recipe), "model.path"}
    differences = parse((source.run / "recipe-diff.yaml").read_text(encoding="utf-8")) or {}
    facts = Facts(
        form=form,
        run=recipe.run.name,
        recipe_hash=recipe_hash(recipe),
        extends=extended_by(resolved),
        differences={key: value for key, value in differences.items() if key in identifying},
        task=masked(to_builtins(recipe)["task"]),
        objective=recipe.objective.preset,
        max_steps=recipe.run.max_steps,
        base_model=recipe.model.path,
        hub_name=_hub_name(recipe.model.path),
        lora=to_builtins(recipe)["model"]["lora"],
        weights=checkpoint.weights,
        tokens=checkpoint.manifest.tokens,
        dtype=dtype,
        checksum=manifest.served,
        stamped=stamped,
        versions=json.loads((source.run / "versions.json").read_bytes()),
        evaluations=_evaluations(source),
    )
    (folder / RECIPE).write_text(resolved_yaml(portable(recipe)), encoding="utf-8")
    (folder / CARD).write_text(card(facts), encoding="utf-8")


def _hub_name(path: str) -> str | None:
    """What model hubs call the base model; None for a folder, and for a model that only asyncrl makes."""
    if path in BUILTIN_MODELS:
        return ORIGIN if path == BUILTIN_MODELS[1] else None
    is_folder = path.startswith((".", "/", "~")) or path.count("/") > 1 or Path(path).is_dir()
    return None if is_folder else path


def _evaluations(source: Source) -> list[Evaluated]:
    """The run's first and its last evaluation on the way to this version."""
    weights, tree = source.checkpoint.weights, Lineages(source.checkpoint.manifest.forks)
    on_branch = [
        (evaluated, result)
        for evaluated, result in stored_evaluations(source.run / "eval").items()
        if evaluated.version <= weights.version and tree.is_ancestor(evaluated, weights.lineage)
    ]
    on_branch.sort(key=lambda one: one[0].version)
    chosen = on_branch[:1] + on_branch[1:][-1:]
    return [_evaluated(evaluated, result, seed=source.recipe.run.seed) for evaluated, result in chosen]


def _evaluated(weights: Weights, result: Mapping[str, Any], *, seed: int) -> Evaluated:
    numbers = report(result["answers"], ks=[], samples=1, pass_above=0.0, seed=seed)
    reward = numbers["metrics"][REWARD]
    return Evaluated(weights, reward["value"], reward["low"], reward["high"], numbers["prompts"], numbers["unscored"])
