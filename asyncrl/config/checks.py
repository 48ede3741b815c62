"""Rules that cross fields. All cheap; all before anything heavy starts."""

from __future__ import annotations

import math
import re
from urllib.parse import urlsplit

from asyncrl.config.agent_checks import check_agent
from asyncrl.config.curriculum import check_curriculum
from asyncrl.config.derived import derive
from asyncrl.config.devices import check_devices
from asyncrl.config.engine_checks import check_engine
from asyncrl.config.errors import RecipeError, quoted
from asyncrl.config.eval_checks import check_eval
from asyncrl.config.mixture_checks import check_mixture, check_template_args
from asyncrl.config.objective_checks import check_objective
from asyncrl.config.packages import ReasoningGymTask, VerifiersTask, check_reasoning_gym, check_verifiers
from asyncrl.config.recipe import (
    BUILTIN_MODELS,
    AgentTask,
    CustomTask,
    MixtureTask,
    Model,
    Recipe,
    ReverseTask,
    SamplingConfig,
    SingleTask,
    tasks_by_key,
)
from asyncrl.config.reward_checks import check_rewards
from asyncrl.config.sizes import size_bytes, size_text
from asyncrl.config.weights_checks import check_weights

MOST_TOP_K = 4096
"""Ids stored with a token, of four bytes each, where all else of it takes thirteen."""

LEAST_MEMORY = 256 << 20
"""Bytes of address space that a process of an episode needs to begin."""

URL_SCHEMES = ("redis", "rediss", "unix", "memory")

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_CLASS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def check(recipe: Recipe) -> None:
    """Raise RecipeError for the first rule this recipe breaks. Touches no file and no network."""
    check_run_name(recipe.run.name)
    check_model(recipe.model)
    _check_tasks(recipe)
    _check_buffer(recipe)
    check_engine(recipe)
    _check_sampling(recipe)
    _check_learner(recipe)
    _check_checkpoints(recipe)
    check_eval(recipe)
    check_devices(recipe)
    check_objective(recipe)
    check_rewards(recipe)
    check_weights(recipe)
    _check_times(recipe)


def check_processes(recipe: Recipe) -> None:
    """Raise RecipeError where the recipe cannot be run by more than one process."""
    if recipe.buffer.url.startswith("memory:"):
        raise RecipeError(
            f"buffer.url is {quoted(recipe.buffer.url)}, which lives inside one process, but collector and learner are "
            "processes of their own. Use embedded, or redis://, rediss:// or unix://"
        )


def check_run_name(name: str) -> None:
    """Raise RecipeError for a run.name that cannot name a folder."""
    if not _RUN_NAME.fullmatch(name):
        raise RecipeError(
            f"run.name is {quoted(name)}; it names a folder and keys of the store. Use letters, digits, "
            "`.`, `_` and `-`, at most 64, the first a letter or digit"
        )


def check_model(model: Model) -> None:
    """Raise RecipeError for a section `model` that contradicts itself."""
    path, lora = model.path, model.lora
    if path.startswith("builtin:") and path not in BUILTIN_MODELS:
        raise RecipeError(f"model.path is {quoted(path)}; the built-in models are {', '.join(BUILTIN_MODELS)}")
    if not path:
        raise RecipeError("model.path is empty; write builtin:tiny, a folder or a Hugging Face id")
    if lora is not None and not lora.target_modules:
        raise RecipeError("model.lora.target_modules is []; write all-linear, or names such as [q_proj, v_proj]")


def _check_tasks(recipe: Recipe) -> None:
    if isinstance(recipe.task, MixtureTask):
        check_mixture(recipe.task)
    for key, task in tasks_by_key(recipe.task).items():
        _check_task(key, task, recipe)
        check_template_args(key, task.chat_template_args)
        if task.curriculum is not None:
            check_curriculum(f"{key}.curriculum", task.curriculum)


def _check_task(key: str, task: SingleTask, recipe: Recipe) -> None:
    if isinstance(task, CustomTask) and not _CLASS.fullmatch(task.type):
        raise RecipeError(f"{key}.type is {quoted(task.type)}; write module:Class, such as my_task:MyTask")
    own = task if isinstance(task, AgentTask | CustomTask | VerifiersTask) else None
    if own is not None and own.memory_limit is not None and size_bytes(own.memory_limit) < LEAST_MEMORY:
        raise RecipeError(
            f"{key}.memory_limit is {own.memory_limit}, and a process of Python's has more address space than that "
            f"before it does anything. Use {size_text(LEAST_MEMORY)} or more, or leave it out"
        )
    if isinstance(task, AgentTask):
        check_agent(key, task, recipe.collector.endpoint)
    if isinstance(task, ReasoningGymTask):
        check_reasoning_gym(key, task)
    if isinstance(task, VerifiersTask):
        check_verifiers(key, task)
    if isinstance(task, ReverseTask):
        shortest, longest = task.digits
        if shortest > longest:
            raise RecipeError(f"{key}.digits is [{shortest}, {longest}]; write the shorter length first")
        tokens = recipe.collector.sampling.max_tokens
        if recipe.model.path == "builtin:tiny" and tokens < longest + 1:
            raise RecipeError(
                f"collector.sampling.max_tokens is {tokens}, but an answer of {longest} digits ({key}.digits) needs "
                f"{longest + 1} with its end token; use {longest + 1} or more"
            )


def _check_buffer(recipe: Recipe) -> None:
    buffer = recipe.buffer
    _check_url(buffer.url)
    # Collectors at the last published version may start groups for k versions more; later weights would never come.
    most = buffer.max_trajectory_age + 1
    if buffer.max_uses > 1 and recipe.weights.publish_every + buffer.max_uses > most + 1:
        raise RecipeError(
            f"buffer.max_uses is {buffer.max_uses} with buffer.max_trajectory_age {buffer.max_trajectory_age} and "
            f"weights.publish_every {recipe.weights.publish_every}: each use takes a step, and a group grows older by "
            f"it. max_uses + publish_every may be at most max_trajectory_age + 2 = {most + 1}"
        )
    if recipe.weights.publish_every > most:
        raise RecipeError(
            f"weights.publish_every is {recipe.weights.publish_every} with buffer.max_trajectory_age "
            f"{buffer.max_trajectory_age}: collectors would wait for weights that come too late. Use {most} or less"
        )
    if buffer.max_uses > 1 and buffer.min_fresh * buffer.max_uses > 1:
        raise RecipeError(
            f"buffer.min_fresh is {buffer.min_fresh:g} with buffer.max_uses {buffer.max_uses}: a group that is trained "
            f"{buffer.max_uses} times is fresh once, so that no more than 1 / max_uses of the batches can be. Lower "
            f"min_fresh to {1 / buffer.max_uses:.3g} or less, or lower max_uses"
        )
    derived = derive(recipe)
    if buffer.max_uses > 1 and derived.fresh_per_step == recipe.learner.groups_per_step:
        raise RecipeError(
            f"buffer.min_fresh is {buffer.min_fresh:g} with learner.groups_per_step {recipe.learner.groups_per_step}: "
            f"no place is left for a group that was trained before, and buffer.max_uses {buffer.max_uses} could not be "
            "held. Raise groups_per_step, or write min_fresh: 0 or max_uses: 1"
        )
    if derived.max_bytes < derived.reserved_bytes:
        raise RecipeError(
            f"buffer.max_bytes is {buffer.max_bytes}, but (max_trajectory_age + 1) x groups_per_step = "
            f"{most * recipe.learner.groups_per_step} groups, which reserve {derived.group_bytes} bytes each, need "
            f"{derived.reserved_bytes}: a step could never be filled.\n"
            "Raise buffer.max_bytes, or lower model.max_length, collector.sampling.max_tokens or top_k, or "
            "collector.group_size or max_turns"
        )


def _check_url(url: str) -> None:
    if url == "embedded":
        return
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise RecipeError(f"buffer.url is {quoted(url)}; it is not a URL ({error})") from None
    if parts.scheme not in URL_SCHEMES:
        raise RecipeError(
            f"buffer.url is {quoted(url)}; write embedded, redis://host:6379/0, rediss://..., unix:///path or memory://"
        )
    if parts.scheme in ("redis", "rediss") and not parts.hostname:
        raise RecipeError(f"buffer.url is {quoted(url)}; it names no host. Write {parts.scheme}://host:6379/0")
    if parts.scheme == "unix" and (parts.hostname or not parts.path.startswith("/")):
        raise RecipeError(f"buffer.url is {quoted(url)}; a socket has an absolute path. Write unix:///path/to/socket")


def _check_sampling(recipe: Recipe) -> None:
    sampling = recipe.collector.sampling
    _check_truncation(sampling)
    if not all(sampling.stop):
        raise RecipeError('collector.sampling.stop has "", which would end every completion at once; remove it')
    if sampling.min_tokens >= sampling.max_tokens:
        raise RecipeError(
            f"collector.sampling.min_tokens is {sampling.min_tokens}, but a completion of "
            f"collector.sampling.max_tokens {sampling.max_tokens} would always be cut off before its end; use less, or "
            "raise max_tokens"
        )
    longest = recipe.model.max_length
    if longest is not None and sampling.max_tokens >= longest:
        raise RecipeError(
            f"collector.sampling.max_tokens is {sampling.max_tokens}, but model.max_length {longest} is prompt and "
            "completion together; leave room for the prompt"
        )


def _check_truncation(sampling: SamplingConfig) -> None:
    top_k = sampling.top_k
    if top_k != -1 and not 1 <= top_k <= MOST_TOP_K:
        raise RecipeError(f"collector.sampling.top_k is {top_k}; use 1 to {MOST_TOP_K}, or -1 for no bound")
    for name, value, off in (("top_p", sampling.top_p, 1.0), ("min_p", sampling.min_p, 0.0)):
        if value != off and top_k == -1:
            raise RecipeError(
                f"collector.sampling.{name} is {value} without top_k: with each token is stored between which ones it "
                "was drawn, and only top_k bounds how many that are. Write collector.sampling.top_k: 50 (at most "
                f"{MOST_TOP_K}), or {name}: {off}"
            )


def _check_learner(recipe: Recipe) -> None:
    learner = recipe.learner
    groups, updates = learner.groups_per_step, learner.updates_per_step
    if updates > groups:
        raise RecipeError(
            f"learner.updates_per_step is {updates}, but a step has {groups} groups (learner.groups_per_step) and a "
            f"group is never split: some updates would have nothing to train. Use {groups} or less, or raise "
            "learner.groups_per_step"
        )
    most = math.ceil(groups / updates)
    if learner.ranks > most:
        what = f"a step has {most} groups (learner.groups_per_step)"
        if updates > 1:
            what = f"an update has at most {most} groups (groups_per_step {groups} / updates_per_step {updates})"
        raise RecipeError(
            f"learner.ranks is {learner.ranks}, but {what} and a group is never split: some ranks would never train. "
            f"Use {most} ranks or fewer, or raise learner.groups_per_step"
        )
    if recipe.run.deterministic and learner.ranks > 1:
        raise RecipeError(
            f"run.deterministic is true with learner.ranks {learner.ranks}: ranks add their shares in their own "
            "order, which no replay can make again. Use one rank, or leave run.deterministic out"
        )
    least = recipe.collector.min_members
    if least is not None and least > recipe.collector.group_size:
        raise RecipeError(
            f"collector.min_members is {least}, but a group has {recipe.collector.group_size} members "
            "(collector.group_size): none could ever be trained. Make it at most that"
        )
    check_betas("learner.betas", learner.betas)
    answers = groups * recipe.collector.group_size
    if learner.min_ess is not None and learner.min_ess * answers <= 1:
        raise RecipeError(
            f"learner.min_ess is {learner.min_ess:g}, but a step has {answers} answers (groups_per_step x group_size), "
            f"whose effective sample size is never below one of them: 1/{answers}. No step could be low; use more"
        )


def _check_checkpoints(recipe: Recipe) -> None:
    saved, evaluated, published = recipe.learner.checkpoint, recipe.eval.every_steps, recipe.weights.publish_every
    if evaluated is not None and evaluated % published:
        raise RecipeError(
            f"eval.every_steps is {evaluated}, but only multiples of weights.publish_every {published} reach "
            "collectors. Make it one of them"
        )
    if saved.keep_best and evaluated is None:
        raise RecipeError(
            f"learner.checkpoint.keep_best is {saved.keep_best}, but nothing says which versions are the best. Set "
            f"eval.every_steps: {math.lcm(saved.every_steps, published)}"
        )
    if saved.keep_best and evaluated is not None and evaluated % saved.every_steps:
        raise RecipeError(
            f"learner.checkpoint.keep_best is {saved.keep_best}, but some of the versions that are evaluated "
            f"(eval.every_steps {evaluated}) have no checkpoint (learner.checkpoint.every_steps {saved.every_steps}). "
            f"Make eval.every_steps a multiple of {saved.every_steps}"
        )
    if saved.keep_every is not None and saved.keep_every % saved.every_steps:
        raise RecipeError(
            f"learner.checkpoint.keep_every is {saved.keep_every}, but only multiples of "
            f"learner.checkpoint.every_steps {saved.every_steps} have a checkpoint. Make it one of them"
        )


def check_betas(key: str, betas: tuple[float, float]) -> None:
    """Raise RecipeError unless both are decay rates."""
    if not all(0 <= beta < 1 for beta in betas):
        raise RecipeError(f"{key} is {quoted(betas)}; each must be 0 or more and less than 1")


def _check_times(recipe: Recipe) -> None:
    run, collector = recipe.run, recipe.collector
    if collector.score_timeout_s >= collector.group_timeout_s:
        raise RecipeError(
            f"collector.score_timeout_s is {collector.score_timeout_s}, but a group without progress for "
            f"collector.group_timeout_s {collector.group_timeout_s} is given back: no slow score could ever end. "
            "Make it less"
        )
    for key, task in tasks_by_key(recipe.task).items():
        if isinstance(task, CustomTask) and task.step_timeout_s >= collector.group_timeout_s:
            raise RecipeError(
                f"{key}.step_timeout_s is {task.step_timeout_s}, but a group without progress for "
                f"collector.group_timeout_s {collector.group_timeout_s} is given back: no slow step could ever end. "
                "Make it less"
            )
    if collector.group_timeout_s >= run.no_progress_s:
        raise RecipeError(
            f"collector.group_timeout_s is {collector.group_timeout_s}, but the run ends after run.no_progress_s "
            f"{run.no_progress_s} without a step: a stuck group could never be given back. Make it less"
        )
