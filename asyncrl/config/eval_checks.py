"""Rules of the section `eval`."""

from __future__ import annotations

from asyncrl.config.errors import RecipeError, quoted
from asyncrl.config.evaluation import FEWEST_VOTES, NUMBERED, REWARD, Eval, powers_of_two
from asyncrl.config.recipe import AgentTask, Recipe, SglangEngine, SingleTurnTask


def check_eval(recipe: Recipe) -> None:
    """Raise RecipeError for what no evaluation could do."""
    config = recipe.eval
    samples = config.n or 1
    if config.sampling.temperature == 0 and samples > 1:
        raise RecipeError(
            f"eval.n is {samples} and eval.sampling.temperature 0: greedy answers to one prompt are all the same. "
            "Use eval.n: 1, or a temperature"
        )
    _check_data(recipe)
    _check_sampling(recipe)
    _check_metric(config, samples)


def _check_data(recipe: Recipe) -> None:
    if recipe.eval.data is None:
        return
    if not isinstance(recipe.task, SingleTurnTask | AgentTask):
        raise RecipeError(
            f"eval.data is {quoted(recipe.eval.data)}, but task.type {recipe.task.type} reads no data files of its own "
            "(task.data), and so no others"
        )
    if recipe.task.data.heldout != recipe.eval.data:  # where it is left out, `Recipe` takes eval.data for it
        raise RecipeError(
            f"eval.data is {quoted(recipe.eval.data)} and task.data.heldout {quoted(str(recipe.task.data.heldout))}: "
            "both say which rows are held out. Leave one of them out"
        )


def _check_sampling(recipe: Recipe) -> None:
    given, trained = recipe.eval.sampling, recipe.collector.sampling
    top_k = trained.top_k if given.top_k is None else given.top_k
    top_p = trained.top_p if given.top_p is None else given.top_p
    if top_k != -1 and top_k < 1:
        raise RecipeError(f"eval.sampling.top_k is {top_k}; write a number from 1 on, or -1 for all tokens")
    if given.top_p is not None and given.top_p < 1 and top_k == -1:
        raise RecipeError(
            f"eval.sampling.top_p is {given.top_p} without top_k: engines must be told of how many tokens they keep "
            "the log-probs. Set eval.sampling.top_k too, such as 100"
        )
    if isinstance(recipe.collector.engine, SglangEngine) and (top_k != -1 or top_p < 1):
        raise RecipeError("eval.sampling.top_k and top_p: SGLang does not say which tokens it left. Leave them out")
    longest = recipe.model.max_length
    if longest is not None and given.max_tokens is not None and given.max_tokens >= longest:
        raise RecipeError(
            f"eval.sampling.max_tokens is {given.max_tokens}, but model.max_length {longest} is prompt and answer "
            "together; leave room for the prompt"
        )


def _check_metric(config: Eval, samples: int) -> None:
    if config.metric == REWARD:
        return
    numbered = NUMBERED.fullmatch(config.metric)
    if numbered is None:
        raise RecipeError(f"eval.metric is {quoted(config.metric)}; write reward, pass@K or majority@N")
    kind, k = numbered[1], int(numbered[2])
    measured = powers_of_two(samples)
    if kind == "pass" and k not in measured:
        raise RecipeError(
            f"eval.metric is {config.metric}, but of {samples} answers to a prompt (eval.n) pass@"
            f"{', pass@'.join(map(str, measured))} is measured. Take one of these, or another eval.n"
        )
    if kind == "majority" and (k != samples or k < FEWEST_VOTES):
        asked = max(k, FEWEST_VOTES)
        raise RecipeError(
            f"eval.metric is {config.metric}, but a majority is of all answers to a prompt, three at least, and eval.n "
            f"is {samples}. Write eval.n: {asked} and eval.metric: majority@{asked}"
        )
