"""Rules of the engine: what of vLLM's own arguments a recipe may give it."""

from __future__ import annotations

from asyncrl.config.errors import RecipeError
from asyncrl.config.recipe import Recipe, VllmEngine

ELSEWHERE = {
    "model": "model.path",
    "revision": "model.revision",
    "dtype": "model.dtype",
    "trust_remote_code": "model.trust_remote_code",
    **{
        name: f"collector.engine.{name}"
        for name in (
            "max_num_seqs",
            "max_model_len",
            "gpu_memory_utilization",
            "kv_cache_memory_bytes",
            "enforce_eager",
        )
    },
}
"""vLLM's arguments that have a key of their own."""

OURS = frozenset(
    {
        "skip_tokenizer_init",
        "generation_config",
        "logprobs_mode",
        "weight_transfer_config",
        "worker_extension_cls",
        "worker_cls",
        "disable_log_stats",
    }
)
"""What asyncrl sets: behaviour logprobs and weights depend on it."""

UNREAD = frozenset(
    {
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "enable_expert_parallel",
        "quantization",
        "enable_lora",
        "speculative_config",
    }
)
"""With these the served tensors are not those of one plain model."""


def check_engine(recipe: Recipe) -> None:
    """Raise RecipeError for a section `collector.engine` that contradicts itself or the rest."""
    engine = recipe.collector.engine
    if not isinstance(engine, VllmEngine):
        return
    for name in engine.extra_args:
        key = f"collector.engine.extra_args.{name}"
        if name in ELSEWHERE:
            raise RecipeError(f"{key}: this has a key of its own. Write it as {ELSEWHERE[name]}")
        if name in OURS:
            raise RecipeError(f"{key}: asyncrl sets it, since exact log-probs and weights depend on it. Remove it")
        if name in UNREAD:
            raise RecipeError(
                f"{key}: what such an engine serves cannot be read back tensor by tensor and compared with what was "
                "published, in this version. Remove it"
            )
    if recipe.run.deterministic:
        raise RecipeError(
            "run.deterministic is true, but collector.engine.type vllm does not promise the same tokens again. Use "
            "transformers"
        )
