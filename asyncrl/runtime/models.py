"""`model.path` -> a local folder that is complete: built in, a folder, or a Hugging Face id."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

from asyncrl.config.cache_folder import cache_root
from asyncrl.config.recipe import BUILTIN_MODELS, Model, Recipe, ReverseTask, SimulatedEngine, tasks_by_key
from asyncrl.config.sft import SftRecipe
from asyncrl.learners.cache import CHECKSUMS, tiny_name
from asyncrl.learners.smollm2 import NAME as SMOLLM2
from asyncrl.learners.smollm2 import check_available, ensure_smollm2

BUILTIN_TINY, BUILTIN_SMOLLM2 = BUILTIN_MODELS

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "spiece.model")

SMALL_WEIGHTS = 64 << 20
"""Bytes of weight files (16 M float32 parameters) below which more than one thread costs more than it gives."""


class ModelError(Exception):
    """model.path cannot be used; one or two lines with the value and the fix."""


class NotHere(ModelError):
    """What the model is or needs is not on this machine; another one may have it."""


def check(recipe: Recipe | SftRecipe, *, fetch: bool = True) -> Path | None:
    """What can be found out without torch, before any process starts; downloads a Hugging Face model, unless `fetch` is
    false.

    None: there is no folder yet, a built-in model is made later. Raises ModelError, BuiltinModelError.
    """
    if recipe.model.lora is not None and importlib.util.find_spec("peft") is None:
        raise NotHere("model.lora needs the package peft: pip install 'asyncrl[lora]'")
    if recipe.model.path == BUILTIN_TINY:
        return None
    if recipe.model.path == BUILTIN_SMOLLM2:
        check_available()
        return None
    folder = Path(recipe.model.path).expanduser()
    if not folder.is_dir():
        folder = _download(recipe.model, fetch=fetch)
    _check_folder(folder)
    if isinstance(recipe, SftRecipe) or not isinstance(recipe.collector.engine, SimulatedEngine):
        _check_chat_template(folder)
    return folder


def resolve(recipe: Recipe | SftRecipe) -> Path:
    """The local folder of the model; makes a built-in one if it is not cached (torch, 10 to 60 s).

    Raises ModelError, BuiltinModelError.
    """
    folder = check(recipe)
    if folder is not None:
        return folder
    if recipe.model.path == BUILTIN_SMOLLM2:
        return ensure_smollm2()
    from asyncrl.learners.tiny import ensure_tiny  # loads torch

    return ensure_tiny(recipe.run.seed, digits=_digits(recipe))


def _digits(recipe: Recipe | SftRecipe) -> tuple[int, int]:
    """What `builtin:tiny` is warm-started on."""
    tasks = tasks_by_key(recipe.task).values() if isinstance(recipe, Recipe) else ()
    return next((task.digits for task in tasks if isinstance(task, ReverseTask)), ReverseTask().digits)


def here(recipe: Recipe) -> Path | None:
    """The folder of the model if it is complete and on this host; makes and downloads nothing."""
    builtin = {BUILTIN_TINY: tiny_name(recipe.run.seed, _digits(recipe)), BUILTIN_SMOLLM2: SMOLLM2}
    if (name := builtin.get(recipe.model.path)) is not None:
        folder = cache_root() / name
        return folder if (folder / CHECKSUMS).is_file() else None
    try:
        return check(recipe, fetch=False)
    except ModelError:
        return None


def find_tokenizer(recipe: Recipe) -> Path | None:
    """The model's tokenizer.json if it is on this host; makes and downloads nothing."""
    path = recipe.model.path
    if path == BUILTIN_TINY:
        file = cache_root() / tiny_name(recipe.run.seed, _digits(recipe)) / TOKENIZER_FILES[0]
    elif path == BUILTIN_SMOLLM2:
        file = cache_root() / SMOLLM2 / TOKENIZER_FILES[0]
    elif Path(path).expanduser().is_dir():
        file = Path(path).expanduser() / TOKENIZER_FILES[0]
    else:
        from huggingface_hub import try_to_load_from_cache

        try:
            cached = try_to_load_from_cache(path, TOKENIZER_FILES[0], revision=recipe.model.revision)
        except ValueError:  # not the name of a model
            return None
        file = Path(cached) if isinstance(cached, str) else Path(path)
    return file if file.is_file() else None


def threads(folder: Path | None) -> int:
    """How many threads torch should use for this model: OMP_NUM_THREADS if set, 1 for a small one, whose operations are
    too short to be split, else half of the cores: learner and collector of a host share them."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdecimal() and int(given) > 0:
        return int(given)
    return 1 if folder is None or is_small(folder) else max(1, (os.cpu_count() or 1) // 2)


def is_small(folder: Path) -> bool:
    """Whether operations of this model are too short to be split among threads."""
    return sum(file.stat().st_size for file in _weight_files(folder)) < SMALL_WEIGHTS


def _weight_files(folder: Path) -> list[Path]:
    return [*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]


def _check_folder(folder: Path) -> None:
    hint = "give a folder written by save_pretrained, or a Hugging Face id"
    if not (folder / "config.json").is_file():
        raise ModelError(f"model.path {folder} has no config.json; {hint}")
    if not _weight_files(folder):
        raise ModelError(f"model.path {folder} has no weights (*.safetensors); {hint}")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(
            f"model.path {folder} has no tokenizer; save one beside the weights (tokenizer.save_pretrained)"
        )


def _check_chat_template(folder: Path) -> None:
    """The two places where transformers looks for one, so that nobody waits for torch to hear of it."""
    if (folder / "chat_template.jinja").is_file():
        return
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError):
        settings = {}
    if not settings.get("chat_template"):
        raise ModelError(
            f"model.path {folder} has no chat template, so it is a base model that cannot be given a conversation.\n"
            "Use the instruct version of it, or put a chat_template.jinja into the folder."
        )


def _download(model: Model, *, fetch: bool) -> Path:
    neither = f'model.path "{model.path}" is neither a folder here nor a Hugging Face model'
    if model.path.startswith((".", "/", "~")) or model.path.count("/") > 1:
        raise ModelError(f"{neither}; check the path")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
    try:
        return Path(
            snapshot_download(
                model.path,
                revision=model.revision,
                allow_patterns=[*wanted, "*.py"] if model.trust_remote_code else wanted,
                local_files_only=not fetch,
            )
        )
    except LocalEntryNotFoundError:
        if not fetch:
            raise NotHere(
                f'model.path "{model.path}" is not in the local cache; a run downloads it from the Hugging Face hub'
            ) from None
        raise NotHere(f"{neither} in the local cache, and the hub cannot be reached; check the path") from None
    except HFValidationError:
        raise ModelError(f"{neither}; check the path") from None
    except (HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise NotHere(f"{neither} that can be downloaded: {reason}") from None
