"""Objectives that contradict themselves: refused before a run, with the reason."""

from __future__ import annotations

from asyncrl.config.errors import RecipeError
from asyncrl.config.objective import (
    PRESETS,
    DppoTv,
    GeometricSequence,
    GeometricWeight,
    K3Mask,
    Mask,
    NoWeight,
    Objective,
    Opsm,
    SequenceMis,
    SequenceTis,
    TokenAge,
    TokenIcepop,
)
from asyncrl.config.recipe import Recipe

_OF_SEQUENCES = SequenceTis | SequenceMis | GeometricWeight
_BY_WEIGHTS = DppoTv | GeometricSequence | K3Mask | Opsm
"""Masks that the weights of the moment decide."""


def check_objective(recipe: Recipe) -> None:
    """Raise RecipeError for the first two parts of `objective` that cannot both be meant."""
    objective = recipe.objective
    _check_ratios(objective)
    _check_clip(objective)
    _check_bounds(objective)
    _check_reference(objective)
    _check_masks(objective, cuts_tokens=recipe.buffer.over_age == "mask")
    if recipe.collector.group_size == 1 and objective.advantage != "raw":
        raise RecipeError(
            f"collector.group_size is 1, but objective.advantage {objective.advantage} compares the answers to one "
            "prompt with each other: every advantage would be 0. Use 2 or more"
        )


def _check_ratios(objective: Objective) -> None:
    weight = objective.importance_weight
    assert weight is not None
    weighed = not isinstance(weight, NoWeight)
    if objective.surrogate != "reinforce" and objective.proximal == "behaviour" and weighed:
        raise RecipeError(
            f"objective.importance_weight is {weight.type}, but the surrogate {objective.surrogate} holds the same "
            "ratio already, to the policy that sampled: it would be counted twice. Leave it out, or write "
            "objective.proximal: behaviour-version, which splits the ratio, or objective.surrogate: reinforce"
        )
    if objective.surrogate == "reinforce" and objective.proximal == "behaviour-version":
        raise RecipeError(
            "objective.proximal is behaviour-version, but the surrogate reinforce has no ratio to be taken to it. "
            "Leave it out, or write objective.surrogate: ppo-clip"
        )


def _check_clip(objective: Objective) -> None:
    for key in ("epsilon", "epsilon_high"):
        if objective.surrogate == "reinforce" and getattr(objective, key) is not None:
            raise RecipeError(
                f"objective.{key} is {getattr(objective, key)}, but the surrogate reinforce clips nothing. Leave it "
                "out, or write objective.surrogate: ppo-clip"
            )
    if objective.dual_clip is not None and objective.surrogate != "ppo-clip":
        raise RecipeError(
            f"objective.dual_clip is {objective.dual_clip}, which the surrogate {objective.surrogate} has not. Leave "
            "it out, or write objective.surrogate: ppo-clip"
        )
    if objective.dual_clip is not None and objective.epsilon_high is not None:
        lowest = 1 + objective.epsilon_high
        if objective.dual_clip <= lowest:
            raise RecipeError(
                f"objective.dual_clip is {objective.dual_clip}, inside the clip (1 + epsilon_high = {lowest:g}): "
                "answers that got worse and more probable must be able to come back. Use more, such as 10"
            )


def _check_bounds(objective: Objective) -> None:
    bounded = [("importance_weight", objective.importance_weight), *(("mask", mask) for mask in objective.mask or ())]
    for key, part in bounded:
        if isinstance(part, TokenIcepop | SequenceMis | GeometricSequence) and not part.low < 1 < part.high:
            raise RecipeError(
                f"objective.{key} has low {part.low} and high {part.high}; a ratio of 1, of weights that have not "
                "changed, must lie between them"
            )


def _check_reference(objective: Objective) -> None:
    if objective.beta_estimator != "k3" and not objective.beta:
        raise RecipeError(
            f"objective.beta_estimator is {objective.beta_estimator}, but objective.beta is 0: there is no divergence "
            "from a reference to be estimated. Leave it out, or write objective.beta: 1e-3"
        )


def _check_masks(objective: Objective, *, cuts_tokens: bool) -> None:
    masks = objective.mask or ()
    names = [mask.type for mask in masks]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise RecipeError(f"objective.mask has {twice} twice. Keep one of them")
    weight = objective.importance_weight
    whole = "the surrogate gspo" if objective.surrogate == "gspo" else ""
    if isinstance(weight, _OF_SEQUENCES):
        whole = f"the importance weight {weight.type}"
    takes = "buffer.over_age mask" if cuts_tokens else ""
    if parted := next((mask for mask in masks if isinstance(mask, DppoTv | TokenAge)), None):
        takes = f"objective.mask {_whose(parted, objective)}"
    if whole and takes:
        raise RecipeError(
            f"{whole} takes the ratio of a whole answer, of which {takes} would take single tokens out: what is left "
            "has another ratio. Use parts that both look at tokens, or both at answers"
        )
    decided = next((mask for mask in masks if isinstance(mask, _BY_WEIGHTS)), None)
    if decided is not None and objective.aggregation == "prompt":
        raise RecipeError(
            f"objective.aggregation is prompt, but objective.mask {_whose(decided, objective)} is decided by the "
            "weights of the moment: how many tokens of a prompt are left is not known before all of its answers were "
            "looked at. Use aggregation token or sequence, or the masks truncated and token-age"
        )


def _whose(mask: Mask, objective: Objective) -> str:
    """The mask's name, and whether it may be there without having been asked for."""
    assert objective.preset is not None
    return f"{mask.type} (of preset {objective.preset})" if mask in PRESETS[objective.preset]["mask"] else mask.type
