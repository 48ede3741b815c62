"""What other systems, and this one's own plan, call things. Only for error messages and `docs/coming-from.md`."""

from __future__ import annotations

from typing import NamedTuple

SYSTEMS = ("TRL / HF", "NeMo RL", "verl", "prime-rl")


class Names(NamedTuple):
    """Other systems' names of one key here, in the order of `SYSTEMS`; () = it has none of its own."""

    here: str
    trl: tuple[str, ...]
    nemo_rl: tuple[str, ...]
    verl: tuple[str, ...]
    prime_rl: tuple[str, ...]


TABLE = (
    Names("run.max_steps", ("max_steps",), ("grpo.max_num_steps",), ("trainer.total_training_steps",), ("max_steps",)),
    Names(
        "run.output_dir",
        ("output_dir",),
        ("logger.log_dir", "checkpointing.checkpoint_dir"),
        ("trainer.default_local_dir",),
        ("output_dir",),
    ),
    Names(
        "model.path",
        ("model_name_or_path",),
        ("policy.model_name",),
        ("actor_rollout_ref.model.path",),
        ("model.name",),
    ),
    Names(
        "buffer.max_trajectory_age",
        ("max_staleness",),
        ("grpo.async_grpo.max_trajectory_age_steps",),
        ("async_training.staleness_threshold",),
        ("orchestrator.max_off_policy_steps",),
    ),
    Names(
        "collector.group_size",
        ("num_generations",),
        ("grpo.num_generations_per_prompt",),
        ("actor_rollout_ref.rollout.n",),
        ("orchestrator.group_size", "rollouts_per_example"),
    ),
    Names("buffer.dynamic_sampling", (), ("grpo.use_dynamic_sampling",), (), ()),
    Names("task.chat_template_args", (), (), ("data.apply_chat_template_kwargs",), ()),
    Names("task.rewards", ("reward_funcs", "reward_weights"), ("grpo.reward_shaping",), (), ()),
    Names("learner.groups_per_step", (), ("grpo.num_prompts_per_step",), ("data.train_batch_size",), ()),
    Names("learner.updates_per_step", (), (), ("actor_rollout_ref.actor.ppo_mini_batch_size",), ()),
    Names(
        "learner.learning_rate",
        ("learning_rate",),
        ("policy.optimizer.kwargs.lr",),
        ("actor_rollout_ref.actor.optim.lr",),
        ("trainer.optim.lr",),
    ),
    Names(
        "collector.sampling.max_tokens",
        ("max_completion_length",),
        ("policy.generation.max_new_tokens",),
        ("data.max_response_length",),
        ("orchestrator.sampling.max_tokens",),
    ),
    Names(
        "objective.epsilon",
        ("epsilon",),
        ("loss_fn.ratio_clip_min",),
        ("actor_rollout_ref.actor.clip_ratio_low",),
        (),
    ),
    Names(
        "objective.epsilon_high",
        ("epsilon_high",),
        ("loss_fn.ratio_clip_max",),
        ("actor_rollout_ref.actor.clip_ratio_high",),
        (),
    ),
    Names(
        "objective.beta",
        ("beta",),
        ("loss_fn.reference_policy_kl_penalty",),
        ("actor_rollout_ref.actor.kl_loss_coef",),
        ("kl_tau",),
    ),
    Names(
        "objective.beta_estimator",
        (),
        ("loss_fn.reference_policy_kl_type",),
        ("actor_rollout_ref.actor.kl_loss_type",),
        (),
    ),
    Names("objective.entropy", (), (), ("actor_rollout_ref.actor.entropy_coeff",), ()),
    Names(
        "learner.gradient_checkpointing",
        ("gradient_checkpointing",),
        ("policy.dtensor_cfg.activation_checkpointing",),
        ("actor_rollout_ref.model.enable_gradient_checkpointing",),
        ("trainer.model.ac",),
    ),
    Names(
        "learner.compile",
        ("torch_compile",),
        (),
        ("actor_rollout_ref.actor.use_torch_compile",),
        ("trainer.model.compile",),
    ),
    Names(
        "learner.cpu_offload",
        (),
        ("policy.dtensor_cfg.cpu_offload",),
        ("actor_rollout_ref.actor.fsdp_config.offload_policy",),
        ("trainer.model.fsdp_cpu_offload",),
    ),
    Names(
        "learner.checkpoint.every_steps",
        ("save_steps",),
        ("checkpointing.save_period",),
        ("trainer.save_freq",),
        ("ckpt.interval",),
    ),
    Names("eval.every_steps", ("eval_steps",), ("grpo.val_period",), ("trainer.test_freq",), ("eval.interval",)),
    Names("eval.metric", ("metric_for_best_model",), ("checkpointing.metric_name",), (), ()),
)

_TOO_COMMON = {"n", "name", "path", "interval", "max_tokens", "group_size"}
"""Last parts that name too many things: recognised with their section only."""

PLANNED = frozenset(
    {
        "telemetry.prometheus",
        "buffer.order",
        "collector.sampling.seed",
        *(f"learner.{name}" for name in ("optimizer", "lr_scheduler_type")),
        "learner.parallel",
    }
)
"""Keys that asyncrl will have and this version has not: said as such, neither guessed at nor ignored."""


def foreign_name(path: str) -> tuple[str, str] | None:
    """(system, key here) for another system's key, by its full name or by its last part; None if it is nobody's.

    >>> foreign_name("collector.num_generations")
    ('TRL / HF', 'collector.group_size')
    """
    last = path.rpartition(".")[2]
    by_last: tuple[str, str] | None = None
    for row in TABLE:
        for system, names in zip(SYSTEMS, row[1:], strict=True):
            for name in names:
                if name == path:
                    return system, row.here
                if by_last is None and last == name.rpartition(".")[2] and last not in _TOO_COMMON:
                    by_last = system, row.here
    return by_last
