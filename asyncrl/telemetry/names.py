"""Every name in metrics.jsonl, with its unit and meaning: the one table that `docs/metrics.md` is made from.

Whoever writes a new key adds it here; a test compares the table with what a run has written.
"""

from __future__ import annotations

from typing import NamedTuple

BUCKET = {
    "tokens": "trained",
    "answers": "whose ratio was measured; under an age, those whose oldest token has it",
    "ratio_mean": "probability of a token under these weights over that under the weights that sampled it, as the "
    "objective has it",
    "ess": "effective sample size of the tokens' ratios w, (sum w)^2 / (n sum w^2): 1 = every token counts the same",
    "ess_sequence": "the same of whole answers, w the product of an answer's ratios, neither cut nor masked",
    "kl": "KL(behaviour || current), nats a token, by the k3 estimator: mean of r - 1 - log r, r the ratio",
    "log_ratio_max": "largest log r, up or down, nats",
    "log_ratio_p999": "that which 99.9 % of the tokens do not exceed",
    "clip_fraction": "share of trained tokens whose ratio was clipped",
    "clip_fraction_positive": "the same, of tokens with an advantage above 0",
    "clip_fraction_negative": "the same, below 0",
    "mask_fraction": "share of tokens that a mask of `objective.mask` took",
    "mask_fraction_positive": "the same, of tokens with an advantage above 0",
    "mask_fraction_negative": "the same, below 0",
    "token_grad": "norms of the tokens' gradients at the logits, added up ([what that is](#share-of-the-gradient))",
    "token_grad_share": "the same, as a share of the step's",
    "mismatch_mean": "probability of a token by the learner under the version that sampled it, over that by the engine",
    "mismatch_max": "the same as a difference of logprobs, nats, the largest",
    "staleness_mean": "probability of a token under these weights, over that under the version that sampled it",
    "staleness_kl": "mean of the difference of these logprobs, version that sampled - current, nats",
}
"""Keys of each object in `by_age` and `by_length`."""


class Topic(NamedTuple):
    """Keys of a step record that belong together. `<name>` in a key stands for any text."""

    title: str
    keys: dict[str, str]


STEP = (
    Topic(
        "when and which",
        {
            "step": "steps finished, from 1",
            "version": "the weights after this step",
            "lineage": "the learner's start; (lineage, version) names weights",
            "time": "unix seconds, at its end",
            "step_s": "seconds since the end of the last step",
            "wait_s": "of these, waiting for a batch",
            "train_s": "of these, from fetching the batch to the changed weights and the archive part",
            "publish_s": "of these, making the weights available to collectors",
            "checkpoint/stall_s": "seconds before them, in which the learner stood for a checkpoint of the last step",
            "skipped": "no update was applied, the gradients were not finite; the version moved all the same",
        },
    ),
    Topic(
        "reward",
        {
            "reward/mean": "over the scored members of the batch",
            "reward/std": "the same, standard deviation",
            "reward_part/<name>": "mean of a named part",
            "reward_part/<name>/<name>": "of one task of a [mixture](mixing.md), and its part",
            "reward/mean/<name>": "of one task of a [mixture](mixing.md); `null` where the batch has none of it",
            "reward/std/<name>": "the same, standard deviation",
            "outcome/mean/<name>": "the same of what success is measured by",
            "outcome/mean": "mean of what success is measured by: the reward without shaping, scale and clip",
            "violations": "share of scored members with a part of that role below 0",
            "unscored": "members without a score; they train nothing",
            "failures": 'why, by class: `{"verifier_timeout": 2}`',
            "wrong": 'scored members by the class of what is wrong with them: `{"wrong_tool": 40}`',
            "pass_rate": "11 counts of groups, by the share of scored members with an outcome (the reward without "
            "shaping) above 0, rounded down to tenths: 0, 0.1, ... 1.0",
            "zero_variance": "share of groups whose rewards are all equal: they carry no gradient",
        },
    ),
    Topic(
        "length",
        {
            "length/repetition": "share of the 4-grams of tokens that an answer had before, mean over answers",
            "length/mean": "sampled tokens of a member, over all of its turns and segments",
            "length/max": "the same, of the longest",
            "truncated": "share of members that ended at `max_tokens`",
            "turns/mean": "turns of a member: how often it was asked",
            "segments/mean": "rows of a member; more than one where its history was rewritten",
        },
    ),
    Topic(
        "age and divergence, over the tokens of the step, each with the weights that its update started from; "
        "distances also over those that a mask then took",
        {
            "age/tokens": 'tokens by age, in versions: `{"0": 812, "1": 190}`',
            "age/masked": "sampled tokens by age that were older than the bound and left out: over_age `mask` only",
            "age/mean": "over tokens, in versions",
            "age/max": "never above `buffer.max_trajectory_age`",
            "ratio/mean": "probability of a token under these weights over that under the weights that sampled it",
            "ratio/max": "the same, the largest",
            "ess": "effective sample size of the ratios w, (sum w)^2 / (n sum w^2): 1 = every token counts the same",
            "ess/sequence": "the same of whole answers, w the product of an answer's ratios, neither cut nor masked",
            "kl": "KL(behaviour || current), nats a token, by the k3 estimator",
            "log_ratio/max": "largest difference of the logprobs, up or down, nats",
            "log_ratio/p999": "that which 99.9 % of the tokens do not exceed",
            "clip_fraction": "share of tokens whose ratio was clipped",
            "clip_fraction/positive": "the same, of tokens with an advantage above 0",
            "clip_fraction/negative": "the same, below 0",
            "mask_fraction": "share of tokens that a mask of `objective.mask` took",
            "mask_fraction/positive": "the same, of tokens with an advantage above 0",
            "mask_fraction/negative": "the same, below 0",
            "mask/tokens": 'tokens that each mask of `objective.mask` took: `{"dppo-tv": 12}`',
            "weight/cut": "share of tokens whose importance weight was cut at its cap, or 0 outside its bounds",
            "entropy": "of what each token was chosen from, nats, by these weights at the sampling temperature",
            "kl_reference": "KL of the current policy from the reference, nats a token: mean of ratio x log(current / "
            "reference); `null` with an `objective.beta` of 0",
            "token_grad": "norms of the tokens' gradients at the logits, added up",
            "by_age": "[all of it](#by-age-and-by-length) for the tokens of each age",
            "by_length": "the same for those of answers of each length: `1`, `2-3`, `4-7`, ... sampled tokens",
            "mismatch/age0": "largest difference, in nats, between the engine's logprob and the learner's at age 0, in "
            "the first update, where the weights are the same: what both compute differently",
            "mismatch/age0_error": "mean factor between both probabilities there; healthy: below 1.05",
            "mismatch/age0_kl": "KL(engine || learner) there, nats a token, by k3; healthy: below 0.001",
            "mismatch/age0_continued": "mean factor of tokens that are in none of the three: sampled after a change of "
            "weights under `weights.update: keep`, with what older weights had computed of the prefix",
        },
    ),
    Topic(
        "the two factors of the ratio, over tokens whose version the learner has asked: with `objective.proximal: "
        "behaviour-version` all, but for those from before a resume; `null` with `behaviour`",
        {
            "mismatch/mean": "probability of a token by the learner under the version that sampled it, over that by "
            "the engine: what both compute differently, whatever the age",
            "mismatch/max": "the same as a difference of logprobs, nats, the largest",
            "staleness/mean": "probability of a token by the learner under these weights, over that under the version "
            "that sampled it: what training has changed since; this one is clipped",
            "staleness/kl": "mean of the difference of these logprobs, version that sampled - current, nats",
            "proximal/behaviour_tokens": "trained tokens whose version was not asked, or not held any more: their "
            "ratio has one factor, to the behaviour logprob",
            "proximal/approximate_tokens": "asked tokens after a change of weights under `weights.update: keep`: older "
            "weights have computed a part of what they were conditioned on, which counts as mismatch",
            "proximal/bytes": "memory of the versions held, on rank 0",
        },
    ),
    Topic(
        "optimizer",
        {
            "updates": "optimizer updates that were applied; `learner.updates_per_step`, or fewer",
            "updates_skipped": "those that were not: a gradient that was not finite, or no token to train",
            "loss": "what was minimised: a mean over tokens, answers or prompts (`objective.aggregation`)",
            "grad_norm": "before clipping; mean over the applied updates",
            "learning_rate": "of this step; with `learner.rate_by_ess` the mean over its updates",
            "nonfinite": "tokens left out because a logprob was not finite",
            "ranks/imbalance": "work of the rank that has most of an update, over the ranks' mean, by plan "
            "([shares](learner.md#several-ranks)); 1 with one rank",
            "ranks/idle_passes": "passes that ranks made without tokens, because another one had more micro-batches",
            "tokens_per_microbatch": "the most in one, but for a longer row: `learner.max_tokens_per_microbatch`, "
            "or [half of it](learner.md#out-of-memory)",
        },
    ),
    Topic(
        "flow",
        {
            "tokens": "sampled tokens trained in this step",
            "tokens_masked": "sampled tokens left out because they were older than the bound (`age/masked`)",
            "tokens_total": "`tokens`, since the beginning of the run",
            "tokens_per_s": "`tokens` per second of `step_s`",
            "groups": "groups in the batch",
            "fresh": "share of the batch's groups that no step has trained before; below 1 with `buffer.max_uses` only",
            "uses": 'groups of the batch by the steps that have trained them before: `{"0": 12, "1": 4}`',
            "attempts": "times a group of the batch was issued until it came, mean",
            "buffer": "tickets in each state: `returned issued held leased trained stale filtered failed`",
            "buffer_bytes": "payload bytes held, reserved with tickets, and kept for a rewind",
            "weights/publish_s": "seconds of the last publication",
            "weights/bytes": "bytes of the last publication",
            "weights/sent": "what carried weights further has cost so far, by transport: `bytes`, `seconds`; of "
            "`delta` also `density` and `encode_seconds` of the last version, versions written `whole` and as `deltas`",
            "weights/late": 'collectors found late since the last step, and in which phase: `{"host-b-1": "stage"}`; '
            "`learner` is a sender of its own",
            "weights/staged_s": "seconds in which collectors fetched and checked weights since the last step, added up",
            "weights/paused_s": "the same of the pauses in which their engines exchanged them",
            "collectors": "the version each live collector serves",
            "waiting": "what the learner waited for, in words",
        },
    ),
    Topic(
        "price of the age bound and of filters, beside `wait_s` and `tokens_masked`; by `state/reason`",
        {
            "step_lost": "groups lost since the last step; `returned/reason`: thrown away to be generated again",
            "step_lost_tokens": "the same in tokens; of work that was cancelled, those that were told by then: a lower "
            "bound",
            "step_lost_seconds": "the same in collector-seconds; work that was taken away in progress, whatever for, "
            "is in `cancelled`",
            "lost": "groups generated and not trained, so far; `stale/run_end` is what was under way when the last "
            "step was done; `forfeited/...` is not among them: uses that a trained group did not get",
            "lost_tokens": "the same in tokens, `returned/reason` included",
            "lost_seconds": "the same in collector-seconds",
            "lost_reward": "mean reward (of filtered ones: outcome) of groups that ended so, where it is known; "
            "`trained/trained` to compare with",
            "lost_length": "mean sampled tokens of their members; of work that was cancelled, so far",
            "returns": "times that tickets went back to be issued again, so far, by reason",
        },
    ),
    Topic(
        "of any record",
        {"nonfinite_values": "how many numbers of this record were NaN or infinite and stand as `null`"},
    ),
)

EVENTS = {
    "start": {
        "lineage": "the new one",
        "version": "the weights it starts from",
        "parent": "(lineage, version) it goes on from",
        "model": "folder",
        "attention": "what computes it",
        "device": "where",
        "machine": "what decides a step's bits besides its groups: torch, threads, device, ranks",
        "settings": "what of the recipe does, by key",
    },
    "eval": {
        "lineage": "of the weights",
        "version": "of the weights",
        "success": "mean reward of the answers to held-out rows",
        "prompts": "held-out rows",
        "n": "answers",
        "unscored": "answers without a score",
        "metrics": "all of the evaluation's, by name ([what they are](eval.md#what-the-numbers-mean))",
        "id": "names the file",
        "path": "of all answers",
    },
    "checkpoint": {
        "lineage": "of the weights",
        "version": "of the weights",
        "path": "folder",
        "checkpoint/stall_s": "seconds in which the learner stood for it",
        "checkpoint/save_s": "seconds from its snapshot until it was written, synced and in its place",
    },
    "recovered": {
        "lineage": "the learner's own",
        "version": "the learner's own",
        "store_lineage": "where the store was, which had lost its newest writes",
        "store_version": "the same",
        "steps": "that were committed to it again",
    },
    "learning_rate": {
        "lineage": "of the weights",
        "version": "after the step",
        "update": "of the step, from 1, in which the rate got another factor (`learner.rate_by_ess`)",
        "scale_before": "the factor until then",
        "scale": "from then on",
        "learning_rate": "of this update",
        "ess": "the effective sample size of its answers, as a share of them",
        "average": "the same, over the updates until then",
    },
    "microbatch": {
        "lineage": "of the weights",
        "version": "after the step",
        "tokens_before": "the budget of a micro-batch until one did not fit into memory",
        "tokens": "from then on",
    },
    "warning": {
        "lineage": "of the weights",
        "version": "after the step",
        "about": "the metric: `ess/sequence`, `mismatch/age0`; `checkpoint`: one could not be written; or `watch/...`: "
        "a sign that the reward is hacked",
        "text": "numbers, and what to look at",
    },
    "samples": {
        "lineage": "of the weights",
        "version": "after the step",
        "samples": "answers of its batch (`telemetry.print_completions`), each with `row_id`, `prompt`, `answer`, "
        "`reward`, `parts`, `wrong` and `tokens`",
    },
    "restart": {
        "reason": "how the learner died",
        "count": "deaths since the last newer checkpoint",
        "limit": "`learner.max_restarts`",
        "delay_s": "seconds until it is started again",
    },
    "end": {"version": "the last one", "stopped": "before its last step"},
}
"""event -> its keys; each has `time`, unix seconds, too."""


def step_names() -> dict[str, str]:
    """Every key of a step record with its meaning."""
    return {key: meaning for topic in STEP for key, meaning in topic.keys.items()}
