"""The section `objective`: what is minimised, as parts that a preset names and single keys replace.

A key that is not given has the preset's value, and a recipe holds it from the beginning: one that is shown, saved or
hashed says all of it, and read back is the same. Which preset that is where none is named depends on the age that the
recipe allows. What contradicts itself is refused in `objective_checks.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta
from msgspec.structs import force_setattr, replace

from asyncrl.config.section import Factor, NonNegative, Section

Preset = Literal["grpo", "dr-grpo", "dapo", "gspo", "cispo", "rloo", "gdpo", "async"]
AdvantageKind = Literal[
    "group-mean-std",
    "group-mean",
    "leave-one-out",
    "group-mean-batch-std",
    "leave-one-out-batch-std",
    "gdpo",
    "raw",
]
SurrogateKind = Literal["ppo-clip", "cispo", "gspo", "reinforce"]
Aggregation = Literal["token", "sequence", "prompt", "constant"]
Estimator = Literal["k1", "k2", "k3"]
Coefficient = Annotated[float, Meta(ge=0)]


class NoWeight(Section, frozen=True, kw_only=True):
    """Every token weighs 1."""

    type: Literal["none"] = "none"


class TokenTis(Section, frozen=True, kw_only=True):
    """Each token's ratio, cut at the cap: truncated importance sampling."""

    type: Literal["token-tis"] = "token-tis"
    cap: Factor = 2.0  # of verl, slime and SkyRL


class TokenIcepop(Section, frozen=True, kw_only=True):
    """Each token's ratio, or 0 where it is outside the bounds (IcePop)."""

    type: Literal["token-icepop"] = "token-icepop"
    low: Annotated[float, Meta(ge=0)] = 0.5
    high: Factor = 5.0


class SequenceTis(Section, frozen=True, kw_only=True):
    """The product of an answer's ratios, cut at the cap."""

    type: Literal["sequence-tis"] = "sequence-tis"
    cap: Factor = 5.0  # of SkyRL


class SequenceMis(Section, frozen=True, kw_only=True):
    """The product of an answer's ratios, or 0 where it is outside the bounds: masked importance sampling."""

    type: Literal["sequence-mis"] = "sequence-mis"
    low: Annotated[float, Meta(ge=0)] = 0.5
    high: Factor = 2.0


class GeometricWeight(Section, frozen=True, kw_only=True):
    """The geometric mean of an answer's ratios, cut at the cap: does not grow with length, but is biased."""

    type: Literal["geometric"] = "geometric"
    cap: Factor = 2.0


ImportanceWeight = NoWeight | TokenTis | TokenIcepop | SequenceTis | SequenceMis | GeometricWeight


class DppoTv(Section, frozen=True, kw_only=True):
    """Tokens that moved too far where they should go, in probability: pi - mu > threshold with an advantage above 0, or
    mu - pi > threshold below 0 (DPPO)."""

    type: Literal["dppo-tv"] = "dppo-tv"
    threshold: Annotated[float, Meta(gt=0, lt=1)] = 0.2  # of prime-rl


class GeometricSequence(Section, frozen=True, kw_only=True):
    """Answers whose geometric mean ratio is outside the bounds."""

    type: Literal["geometric-sequence"] = "geometric-sequence"
    low: Annotated[float, Meta(ge=0)] = 0.99  # of SkyRL
    high: Factor = 1.01


class K3Mask(Section, frozen=True, kw_only=True):
    """Answers whose mean of ratio - 1 - log ratio, an estimate of a divergence, is above the threshold."""

    type: Literal["k3"] = "k3"
    threshold: Factor = 0.01  # of verl


class Opsm(Section, frozen=True, kw_only=True):
    """Answers worse than their group that the current weights have left: mean of log mu - log pi above delta
    (off-policy sequence masking of DeepSeek-V3.2)."""

    type: Literal["opsm"] = "opsm"
    delta: Annotated[float, Meta(ge=0)] = 0.05  # nats a token


class TruncatedMask(Section, frozen=True, kw_only=True):
    """Answers cut at max_tokens; they still count in what their group is compared with (DAPO's overlong filtering)."""

    type: Literal["truncated"] = "truncated"


class TokenAge(Section, frozen=True, kw_only=True):
    """Tokens older than so many versions, inside the window that buffer.max_trajectory_age leaves."""

    type: Literal["token-age"] = "token-age"
    max_age: NonNegative


Mask = DppoTv | GeometricSequence | K3Mask | Opsm | TruncatedMask | TokenAge


class NoAnchor(Section, frozen=True, kw_only=True):
    """Nothing holds the weights back but the surrogate and the masks."""

    type: Literal["none"] = "none"


class BehaviourKl(Section, frozen=True, kw_only=True):
    """A divergence from the policy that sampled, added to the loss of each token."""

    type: Literal["behaviour-kl"] = "behaviour-kl"
    coefficient: Factor = 1e-3
    estimator: Estimator = "k3"  # k1 and k3 have the gradient of KL(mu || pi), k2 to first order


Anchor = NoAnchor | BehaviourKl


class Objective(Section, frozen=True, kw_only=True):
    """What is minimised (`docs/objectives.md`). null: as the preset has it; `--dry-run` shows what that is."""

    preset: Preset | None = None  # what the keys below are that are not given; null: async at ages above 0, else grpo
    advantage: AdvantageKind | None = None  # how much better than its group an answer was
    importance_weight: ImportanceWeight | None = None  # a weight without a gradient, for where an answer came from
    mask: list[Mask] | None = None  # what is left out of numerator and denominator; one or a list
    surrogate: SurrogateKind | None = None  # the policy gradient, and how far a step may go
    epsilon: Annotated[float, Meta(gt=0, le=1)] | None = None  # the ratio is clipped below 1 - epsilon ...
    epsilon_high: Factor | None = None  # ... and above 1 + epsilon_high
    dual_clip: Annotated[float, Meta(gt=1)] | None = None  # of ppo-clip: the ratio at most, below an advantage of 0
    anchor: Anchor | None = None  # what holds the weights back
    beta: Coefficient = 0.0  # of a KL to the reference, the weights the run started from; 0: no reference in memory
    beta_estimator: Estimator = "k3"  # of that KL; each is weighed by the ratio, and has its gradient
    entropy: Coefficient = 0.0  # of a bonus: the entropy of what each token was chosen from, nats, exact
    aggregation: Aggregation | None = None  # mean over tokens, answers or prompts; constant: answers' sums / max_tokens
    proximal: Literal["behaviour", "behaviour-version"] = "behaviour"  # what the clipped ratio is taken to

    def __post_init__(self) -> None:
        if self.preset is None:
            return  # until the recipe is known: see `completed`
        for key, value in _defaults(self, self.preset).items():
            if getattr(self, key) is None:
                force_setattr(self, key, value)


def default_preset(max_trajectory_age: int) -> Preset:
    """What is meant where no preset is named. Synchronous data need no correction, and `grpo` is what everybody knows;
    `asyncrl bench staleness` shows why old data are not left to it.

    >>> default_preset(0), default_preset(1)
    ('grpo', 'async')
    """
    return "async" if max_trajectory_age > 0 else "grpo"


def completed(objective: Objective, max_trajectory_age: int) -> Objective:
    """The objective of a recipe that allows this age: with a preset, and all parts that follow from it."""
    return objective if objective.preset else replace(objective, preset=default_preset(max_trajectory_age))


CLIPS: dict[str, tuple[float | None, float | None]] = {
    "ppo-clip": (0.2, 0.28),  # DAPO, arXiv 2503.14476
    "cispo": (1.0, 4.0),  # no lower bound, MiniMax-M1, arXiv 2506.13585; at most 5, ScaleRL, arXiv 2510.13786
    "gspo": (3e-4, 4e-4),  # arXiv 2507.18071
    "reinforce": (None, None),
}
"""epsilon and epsilon_high of each surrogate."""

PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {
        "advantage": "group-mean-std",
        "importance_weight": NoWeight(),
        "mask": [],
        "surrogate": "ppo-clip",
        "anchor": NoAnchor(),
        "aggregation": "token",
    }
}
"""Preset -> key -> value. The others are `grpo` with what each has of its own."""

PRESETS |= {
    "dr-grpo": {**PRESETS["grpo"], "advantage": "group-mean", "aggregation": "constant"},
    "dapo": PRESETS["grpo"],
    "gspo": {**PRESETS["grpo"], "surrogate": "gspo", "aggregation": "sequence"},
    "cispo": {**PRESETS["grpo"], "surrogate": "cispo"},
    "rloo": {
        **PRESETS["grpo"],
        "advantage": "leave-one-out",
        "importance_weight": SequenceTis(),
        "surrogate": "reinforce",
        "aggregation": "constant",
    },
    "gdpo": {**PRESETS["grpo"], "advantage": "gdpo"},
    "async": {
        **PRESETS["grpo"],
        "advantage": "leave-one-out-batch-std",
        "mask": [DppoTv(), Opsm()],
        "surrogate": "cispo",
        "anchor": BehaviourKl(coefficient=2e-3, estimator="k2"),
    },
}

PRESET_CLIPS: dict[str, tuple[float, float]] = {"dr-grpo": (0.2, 0.2)}
"""Where a preset's own surrogate has another clip than CLIPS says."""


def _defaults(objective: Objective, name: Preset) -> dict[str, Any]:
    """What the keys of an objective are that were not given: they follow from those that were."""
    preset = PRESETS[name]
    surrogate = objective.surrogate or preset["surrogate"]
    clip = CLIPS[surrogate]
    if surrogate == preset["surrogate"]:
        clip = PRESET_CLIPS.get(name, clip)
    found = {**preset, "mask": list(preset["mask"]), "epsilon": clip[0], "epsilon_high": clip[1]}
    if objective.proximal == "behaviour-version":
        found["importance_weight"] = TokenTis()  # of the engine's mismatch, which the clipped ratio does not hold then
    elif surrogate != preset["surrogate"]:
        # A surrogate with a ratio corrects by it; without one, a weight has to.
        found["importance_weight"] = TokenTis() if surrogate == "reinforce" else NoWeight()
    return found
