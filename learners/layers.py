"""The decoder layers of a model: what is sharded, computed again and compiled one by one."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from asyncrl.learners.model import ModelError


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """What transformers says must not be split between devices; [] of a model that does not say. `model` may be sharded
    already: FSDP2 then has given each a class of its own, a subclass."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if any(base.__name__ in names for base in type(module).__mro__)]


def layers_for(key: str, model: PreTrainedModel) -> list[nn.Module]:
    """`decoder_layers` of a model that must have some. Raises ModelError, which names the recipe's `key` that asks."""
    if layers := decoder_layers(model):
        return layers
    raise ModelError(
        f"{key} works on decoder layers, and {type(model).__name__} does not say which they are (_no_split_modules)\n"
        f"Set {key} to false."
    )
