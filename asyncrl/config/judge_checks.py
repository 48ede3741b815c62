"""What a judge or a reward model cannot be asked: refused before a run, with the reason."""

from __future__ import annotations

import re

from asyncrl.config.derived import derive
from asyncrl.config.errors import RecipeError, quoted
from asyncrl.config.recipe import Recipe
from asyncrl.config.rewards import JUDGE_FIELD, Judge, Part, RewardModel
from asyncrl.config.server_url import check_url

ENDPOINT = "/chat/completions"
_ANY_FIELD = re.compile(r"(?<![\w}])\{([A-Za-z_]{2,})\}")  # but for \boxed{answer} and \frac{ab}{cd}
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DEVICE = re.compile(r"cpu|cuda(:\d+)?")


def check_remote(key: str, part: Part, recipe: Recipe) -> None:
    """Raise RecipeError if `part`, the value of `key`, is a judge or a reward model that makes no sense in this
    recipe."""
    if isinstance(part, Judge):
        _check_judge(key, part, recipe)
    if isinstance(part, RewardModel):
        if part.role == "violation":
            raise RecipeError(
                f"{key}.role is violation, which is below 0 where something is wrong; the numbers of a reward model "
                "mean nothing by their sign. Use outcome or constraint"
            )
        if recipe.run.deterministic:
            raise RecipeError(
                "run.deterministic is true, but a reward model scores answers that come together in one batch, whose "
                f"last bits are those of the batch. Leave {key} out, or set run.deterministic to false"
            )
        if not _DEVICE.fullmatch(part.device):
            raise RecipeError(f"{key}.device is {quoted(part.device)}; write cpu, cuda, or one of several as cuda:1")
        if part.max_tokens_per_batch < part.max_length:
            raise RecipeError(
                f"{key}.max_tokens_per_batch is {part.max_tokens_per_batch}, less than the {part.max_length} tokens "
                f"that one conversation may have ({key}.max_length). Use at least as many"
            )


def _check_judge(key: str, part: Judge, recipe: Recipe) -> None:
    check_url(f"{key}.url", part.url, example="https://api.openai.com/v1")
    if (base := part.url.rstrip("/")).endswith(ENDPOINT):
        raise RecipeError(
            f"{key}.url is {quoted(part.url)}; {ENDPOINT} is added to it. Write {base.removesuffix(ENDPOINT)}"
        )
    if part.api_key_env is not None and not _VARIABLE.fullmatch(part.api_key_env):
        raise RecipeError(  # it may be the key itself, which no error shows
            f"{key}.api_key_env is no name of an environment variable. Put the key into one, and write the name of "
            "that, such as OPENAI_API_KEY"
        )
    fields = set(_ANY_FIELD.findall(part.prompt))
    if unknown := sorted(field for field in fields if not JUDGE_FIELD.fullmatch(f"{{{field}}}")):
        raise RecipeError(
            f"{key}.prompt has the field {{{unknown[0]}}}; there are {{prompt}}, {{answer}}, {{expected}} and "
            "{messages}"
        )
    if not fields & {"answer", "messages"}:
        raise RecipeError(f"{key}.prompt has neither {{answer}} nor {{messages}}: the judge would not see the answer")
    low, high = part.scale
    if low >= high:
        raise RecipeError(f"{key}.scale is {quoted(part.scale)}; write the worst verdict first, such as [1, 10]")
    _check_waits(key, part, recipe)


def _check_waits(key: str, part: Judge, recipe: Recipe) -> None:
    """A group without a score for `collector.group_timeout_s` is given back: none may wait so long for the judge."""
    limit_s = recipe.collector.group_timeout_s
    if part.longest_s >= limit_s:
        raise RecipeError(
            f"{key} may be asked for {part.longest_s:g} s ({part.retries} retries of {part.timeout_s:g} s), but a "
            f"group without progress for collector.group_timeout_s {limit_s:g} is given back. Use fewer retries or a "
            "shorter timeout_s, or raise collector.group_timeout_s"
        )
    if part.requests_per_minute is None:
        return
    answers = derive(recipe).most_groups * recipe.collector.group_size
    if (longest_s := 60 * answers / part.requests_per_minute) >= limit_s:
        raise RecipeError(
            f"{key}.requests_per_minute is {part.requests_per_minute}: the {answers} answers that may be in work at "
            f"once wait up to {longest_s:.0f} s for it, but a group without progress for collector.group_timeout_s "
            f"{limit_s:g} is given back. Use more, or set collector.max_concurrent_groups to fewer"
        )
