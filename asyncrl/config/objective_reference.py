"""What the words of the section `objective` stand for: formula, source, when to use it. `docs/objectives.md` is written
from it.

Symbols: t a trained token of answer i, which has T of them; pi the current weights, mu those that sampled; r_t = pi(t)
/ mu(t), and R their product over the answer; w_t the ratio that the surrogate does not hold, and W its product; A_i the
answer's advantage; l_t the loss of a token; sg(x): x, without a gradient. r_i: the rewards of a group of n scored
members, with mean m and standard deviation s over n - 1. x_t = log pi(t) - log ref(t), of the reference.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """A value of one key. formula: with the part's own keys in braces; {low} and {high} of a surrogate are 1 - epsilon
    and 1 + epsilon_high. source: the paper, or what it was taken from. note: its price, or what it is for."""

    formula: str
    source: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Use:
    """A preset. source: whose it is. note: what of it lies elsewhere, or is another's. when: what speaks for it."""

    source: str
    note: str
    when: str


PRESETS = {
    "grpo": Use(
        source="arXiv 2402.03300, with the clip and the mean over tokens of DAPO",
        note="The paper's own is `epsilon: 0.2`, `epsilon_high: 0.2`, `aggregation: sequence` and `beta: 0.04`.",
        when="the default at age 0; ages up to about 4.",
    ),
    "dr-grpo": Use(
        source="arXiv 2503.20783",
        note="No division by spread or length, which favour very easy and very hard prompts and long wrong answers.",
        when="rewards on one scale; lengths that should not drift.",
    ),
    "dapo": Use(
        source="arXiv 2503.14476",
        note="The same parts as `grpo` here. With them go `buffer.dynamic_sampling: true`, the reward part "
        "`overlong`, and if answers are often cut, `mask: {type: truncated}`.",
        when="long answers, 0/1 rewards.",
    ),
    "gspo": Use(
        source="arXiv 2507.18071",
        note="The clip is that of the paper, for answers of thousands of tokens: short ones want 0.01 to 0.1.",
        when="mixtures of experts, long answers.",
    ),
    "cispo": Use(
        source="MiniMax-M1, arXiv 2506.13585",
        note="The limit of 5 is ScaleRL's, arXiv 2510.13786.",
        when="tokens that matter are rare ones, which a PPO clip silences.",
    ),
    "rloo": Use(
        source="arXiv 2402.14740",
        note="What is off-policy is corrected by the ratio of the whole answer, up to 5.",
        when="short answers, small ages. It has no clip, so small rates.",
    ),
    "gdpo": Use(
        source="arXiv 2601.05242",
        note="Over the surrogate of `grpo`.",
        when="several reward parts on different scales.",
    ),
    "async": Use(
        source="the surrogate of CISPO (arXiv 2506.13585) with the limit of ScaleRL (arXiv 2510.13786), the mask of "
        "DPPO (arXiv 2602.04879) and the divergence of prime-rl, OPSM of DeepSeek-V3.2 (arXiv 2512.02556), the batch "
        "spread of arXiv 2508.08221",
        note="The threshold of OPSM is a proposal: its paper gives none.",
        when="the default at ages above 0, good up to 8; mismatch between engine and learner.",
    ),
}

ADVANTAGES = {
    "group-mean-std": Part("(r_i - m) / (s + 1e-4)", "GRPO, arXiv 2402.03300; n - 1 and 1e-4 as in TRL"),
    "group-mean": Part(
        "r_i - m",
        "Dr. GRPO, arXiv 2503.20783",
        "takes (n - 1) / n of the gradient, since an answer is compared with itself too",
    ),
    "leave-one-out": Part("(r_i - m) n / (n - 1)", "RLOO, arXiv 2402.14740", "r_i - mean of the others: unbiased"),
    "group-mean-batch-std": Part(
        "(r_i - m) / (S + 1e-4)", "arXiv 2508.08221", "S: the standard deviation of all rewards of the step"
    ),
    "leave-one-out-batch-std": Part(
        "(r_i - m) n / (n - 1) / (S + 1e-4)", "RLOO, with the S of arXiv 2508.08221", "the same"
    ),
    "gdpo": Part(
        "G_i / (std(G) + 1e-4), G_i = sum over reward parts p of weight_p (r_ip - m_p) / (s_p + 1e-4)",
        "GDPO, arXiv 2601.05242",
        "std(G): over the step",
    ),
    "raw": Part("r_i", "REINFORCE, Williams 1992", "needs no group"),
}

IMPORTANCE_WEIGHTS = {
    "none": Part("1", "Williams 1992: what sampled is what is trained", "that of age and mismatch"),
    "token-tis": Part(
        "min(w_t, {cap})",
        "Ionides 2008; for language models Yao et al. 2025; 2 as in verl",
        "how often a prefix comes up is not corrected, and what is cut",
    ),
    "token-icepop": Part("w_t inside [{low}, {high}], else 0", "IcePop, Ring-1T, arXiv 2510.18855", "the same"),
    "sequence-tis": Part(
        "min(W, {cap})",
        "Ionides 2008, of whole answers; 5 as in SkyRL",
        "what is cut; without a cap none at all, with a variance that grows with length",
    ),
    "sequence-mis": Part(
        "W inside [{low}, {high}], else 0",
        "Liu, Li et al. 2025; the default of TRL",
        "what is outside, which with length is more and more",
    ),
    "geometric": Part("min(W^(1/T), {cap})", "verl", "a measure of distance, no unbiased weight"),
}

SURROGATES = {
    "ppo-clip": Part(
        "- min(r_t A_i, clip(r_t, {low}, {high}) A_i)",
        "PPO, arXiv 1707.06347; asymmetric as in DAPO, arXiv 2503.14476",
        "`dual_clip: c`: at most - c A_i where A_i < 0 (arXiv 1912.09729)",
    ),
    "cispo": Part(
        "- sg(clip(r_t, {low}, {high})) A_i log pi(t)",
        "MiniMax-M1, arXiv 2506.13585",
        "every token keeps its gradient; `epsilon: 1` is no lower bound",
    ),
    "gspo": Part(
        "- min(R^(1/T) A_i, clip(R^(1/T), {low}, {high}) A_i)", "arXiv 2507.18071", "an answer is clipped as a whole"
    ),
    "reinforce": Part(
        "- A_i log pi(t)", "Williams 1992; for language models arXiv 2402.14740", "no ratio, no clip: give it a weight"
    ),
}

MASKS = {
    "dppo-tv": Part(
        "tokens with A_i > 0 and pi(t) - mu(t) > {threshold}, or A_i < 0 and mu(t) - pi(t) > {threshold}",
        "DPPO, arXiv 2602.04879; 0.2 as in prime-rl",
        "moved far enough, measured where a rare token's ratio does not count",
    ),
    "geometric-sequence": Part(
        "answers with W^(1/T) outside [{low}, {high}]", "verl; the bounds of SkyRL", "the same bounds for every length"
    ),
    "k3": Part(
        "answers with a mean of w_t - 1 - log w_t above {threshold}",
        "verl; the estimator is that of Schulman 2020",
        "deviations up and down do not cancel out",
    ),
    "opsm": Part(
        "answers with A_i < 0 and a mean of - log r_t above {delta}",
        "DeepSeek-V3.2, arXiv 2512.02556",
        "what is worse, and was left already, is not pushed further",
    ),
    "truncated": Part(
        "answers cut at `max_tokens`",
        "overlong filtering of DAPO, arXiv 2503.14476",
        "they stay in what their group is compared with",
    ),
    "token-age": Part(
        "tokens older than {max_age}",
        "asyncrl",
        "inside the window of `buffer.max_trajectory_age`",
    ),
}

ANCHORS = {
    "none": Part("0", "Dr. GRPO, arXiv 2503.20783, and most others since: no KL"),
    "behaviour-kl": Part(
        "{coefficient} ({estimator})", "prime-rl, with k2", "holds back how far a step goes from what sampled"
    ),
}

ESTIMATORS = {
    "k1": Part("- log r_t", "Schulman 2020"),
    "k2": Part("(log r_t)^2 / 2", "Schulman 2020"),
    "k3": Part("r_t - 1 - log r_t", "Schulman 2020"),
}

REFERENCE = {
    "k1": Part("r_t x_t", "Schulman 2020", "r_t (x_t + 1)"),
    "k2": Part("sg(r_t) x_t^2 / 2", "Schulman 2020; arXiv 2510.01555", "r_t x_t; the value is right to second order"),
    "k3": Part("r_t (exp(-x_t) - 1 + x_t)", "Schulman 2020; DeepSeek-V3.2, arXiv 2512.02556", "r_t x_t"),
}

AGGREGATIONS = {
    "token": Part("mean of l_t over tokens", "DAPO, arXiv 2503.14476"),
    "sequence": Part("mean over answers of the mean of l_t over an answer's tokens", "GRPO, arXiv 2402.03300"),
    "prompt": Part(
        "mean over prompts of the mean of l_t over the tokens of all its answers", "ScaleRL, arXiv 2510.13786"
    ),
    "constant": Part(
        "mean over answers of the sum of l_t over an answer's tokens / max_tokens", "Dr. GRPO, arXiv 2503.20783"
    ),
}
