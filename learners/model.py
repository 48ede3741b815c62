"""Loading the model a learner trains."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from asyncrl.learners.forward import pack_attention
from asyncrl.learners.head import Head, find_head, float32_logits

log = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "spiece.model")


class ModelError(RuntimeError):
    """The model cannot be loaded; one to three lines that name the value and the fix."""


def load_model(path: str | Path, dtype: str, attn: str, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """A causal language model ready for `token_logprobs`, from a folder or a Hugging Face id.

    dtype: "float32" or "bfloat16", what products are computed in; parameters are float32 in either case, since an
    update of 1e-6 is below bfloat16's resolution and would be lost. attn: "auto" and "sdpa" pack sequences where the
    architecture allows it (logged where not); "eager" and "flash_attention_2" run one sequence at a time.

    The model is in evaluation mode, for good: dropout would make the learner's log-prob differ from the behaviour's at
    equal weights, so that the importance ratio would correct noise. Gradients flow all the same.
    Raises ModelError.
    """
    name = str(path)
    looks_local = isinstance(path, Path) or name.startswith((".", "/", "~"))
    if looks_local:
        folder = Path(path).expanduser()
        if not (folder / "config.json").is_file():
            missing = "holds no config.json" if folder.is_dir() else "is not a folder"
            raise ModelError(
                f"model.path: {name} {missing}\nGive a folder written by save_pretrained, or a Hugging Face id."
            )
        name = str(folder)
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ModelError(f"model.path: cannot read the configuration of {name}: {_first_line(error)}") from error
    if type(config) not in AutoModelForCausalLM._model_mapping and "AutoModelForCausalLM" not in (
        getattr(config, "auto_map", None) or {}
    ):
        raise ModelError(f"model.path: {name} is a {config.model_type} model, not a causal language model")
    try:
        model = AutoModelForCausalLM.from_pretrained(
            name,
            dtype=torch.float32,
            attn_implementation=None if attn == "auto" else attn,
            trust_remote_code=trust_remote_code,
        )
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(f"model.path: cannot load {name} with attention {attn!r}: {_first_line(error)}") from error
    model.compute_dtype = getattr(torch, dtype)
    model.train(False)
    model.requires_grad_(True)
    head = find_head(model)
    if isinstance(head, str):
        rounded = float32_logits(model) if dtype != "float32" else None
        log.warning("%s computes all logits of a pass at once, in %s: %s", name, dtype if rounded else "float32", head)
    known: Any = head if isinstance(head, Head) else None
    model.logprob_head = known
    reason = pack_attention(model) if attn in ("auto", "sdpa") else f"model.attn_implementation is {attn}"
    if reason is not None:
        log.warning("%s runs one sequence at a time, not packed: %s", name, reason)
    return model


def load_tokenizer(path: str | Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer that belongs to the model; ModelError where there is none."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), trust_remote_code=trust_remote_code)
        # transformers makes an empty tokenizer of the model's family where there are no files.
        missing = "" if len(tokenizer) > len(tokenizer.all_special_tokens) else "no vocabulary was found"
    except (OSError, ValueError, KeyError, AttributeError) as error:
        missing = _first_line(error)
    if missing:
        raise ModelError(
            f"model.path: {path} has no tokenizer that transformers can load: {missing}\n"
            f"Save one beside the weights (tokenizer.save_pretrained); looked for {', '.join(TOKENIZER_FILES)}."
        )
    return tokenizer


def longest_sequence(path: str | Path, *, limit: int | None, trust_remote_code: bool) -> int:
    """Tokens of the longest sequence, prompt and completion: the model's own maximum, or `limit` if that is less.

    Raises ModelError if neither says, or if the configuration cannot be read.
    """
    try:
        config = AutoConfig.from_pretrained(str(path), trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ModelError(f"model.path: cannot read the configuration of {path}: {_first_line(error)}") from error
    own = getattr(config.get_text_config(), "max_position_embeddings", None)
    known = [int(length) for length in (own, limit) if length is not None]
    if not known:
        raise ModelError(f"model.path: {path} does not say how long a sequence may be; set model.max_length")
    return min(known)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
