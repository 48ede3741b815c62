"""Rules of the engine: what of vLLM's own arguments a recipe may give it, and where a server may be."""

from __future__ import annotations

from asyncrl.config.errors import RecipeError
from asyncrl.config.recipe import Recipe, SamplingConfig, SglangEngine, VllmEngine, VllmServerEngine
from asyncrl.config.server_url import check_url

ELSEWHERE = {
    "model": "model.path",
    "revision": "model.revision",
    "dtype": "model.dtype",
    "trust_remote_code": "model.trust_remote_code",
    "device_ids": "collector.devices",
    **{
        name: f"collector.engine.{name}"
        for name in (
            "tensor_parallel_size",
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
        "max_logprobs",
        "hf_overrides",
        "weight_transfer_config",
        "worker_extension_cls",
        "worker_cls",
        "disable_log_stats",
    }
)
"""What asyncrl sets: behaviour logprobs and weights depend on it."""

UNREAD = frozenset(
    {
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
    if not isinstance(engine, VllmEngine | VllmServerEngine | SglangEngine):
        return
    if isinstance(engine, VllmEngine):
        _check_arguments(engine)
    else:
        _check_server(engine, engines=recipe.collector.engines)
    if isinstance(engine, SglangEngine):
        _check_sglang(recipe)
    else:
        _check_vllm(engine.type, recipe.collector.sampling)
    if recipe.run.deterministic:
        raise RecipeError(
            f"run.deterministic is true, but collector.engine.type {engine.type} does not promise the same tokens "
            "again. Use transformers"
        )


def _check_arguments(engine: VllmEngine) -> None:
    if engine.tensor_parallel_size > 1:
        raise RecipeError(
            f"collector.engine.tensor_parallel_size is {engine.tensor_parallel_size}, but what an engine on several "
            "GPUs serves cannot be read back tensor by tensor and compared with what was published, in this version. "
            "Use 1, and more engines"
        )
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


def _check_server(engine: VllmServerEngine | SglangEngine, *, engines: int) -> None:
    check_url("collector.engine.url", engine.url, example="http://127.0.0.1:8000")
    if engines > 1:
        raise RecipeError(
            f"collector.engines is {engines}, but there is one server at collector.engine.url, and each needs its own. "
            "Use 1, and start another collector for another server"
        )


def _check_vllm(engine: str, sampling: SamplingConfig) -> None:
    if not 0.01 <= sampling.temperature <= 2:
        raise RecipeError(
            f"collector.sampling.temperature is {sampling.temperature:g}, but vLLM samples at 0.01 to 2. Use one of "
            "these, or collector.engine.type transformers"
        )
    if sampling.top_p < 1 and sampling.min_p > 0:
        raise RecipeError(
            f"collector.sampling has top_p {sampling.top_p:g} and min_p {sampling.min_p:g}, but vLLM applies min_p "
            f"first, which leaves top_p other tokens than it should have. With collector.engine.type {engine} use one"
        )


def _check_sglang(recipe: Recipe) -> None:
    if recipe.weights.update == "keep":
        raise RecipeError(
            "weights.update is keep, but collector.engine.type sglang cannot keep keys and values and label each token "
            "with the version that sampled it. Write weights.update: recompute (or drain, or abort-and-continue)"
        )
    if recipe.collector.sampling.temperature != 1.0:
        raise RecipeError(
            f"collector.sampling.temperature is {recipe.collector.sampling.temperature:g}, but an SGLang server does "
            "not tell whether its log-probs are those before the temperature or, as they must be, after it. Use 1.0"
        )
    sampling = recipe.collector.sampling
    for key, off in (("top_k", -1), ("top_p", 1.0), ("min_p", 0.0), ("min_tokens", 0)):
        if (value := getattr(sampling, key)) != off:
            raise RecipeError(
                f"collector.sampling.{key} is {value:g}, but which tokens an SGLang server then leaves to draw "
                f"from was not tried yet. Use {off:g}"
            )
