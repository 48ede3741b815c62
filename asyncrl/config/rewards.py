"""`task.rewards`: the parts of a reward that a recipe can name, and what becomes of their sum (`docs/rewards.md`)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from msgspec import field

from asyncrl.config.curriculum import Curriculum
from asyncrl.config.section import Factor, NonNegative, Positive, Seconds, Section

JUDGE_FIELD = re.compile(r"\{(prompt|answer|expected|messages)\}")
"""What `prompt` of a judge may have filled in."""

Role = Literal["outcome", "constraint", "violation"]
"""outcome: whether the answer is right. constraint: what it looks like; trained on, in no success. violation: what must
not happen; trained on, and an answer with one (a part below 0) is no success, whatever else it earned."""


class Part(Section, frozen=True, kw_only=True):
    """What every part has."""

    type: str
    name: str | None = None  # in records and metrics; null: the type
    weight: float = 1.0  # the reward is the weighted sum of the parts
    role: Role = "outcome"  # success is measured by outcomes; a violation (a part below 0) is no success
    timeout_s: Seconds | None = None  # of this part; null: collector.score_timeout_s, together with other such parts


class Exact(Part, frozen=True, kw_only=True):
    """1 if the stripped answer equals the row's and the model ended it itself, else 0."""

    type: Literal["exact"] = "exact"


class Function(Part, frozen=True, kw_only=True):
    """A function of yours, `def score(row, answer)`: a number, or parts by name (`docs/rewards.md`)."""

    type: Literal["function"] = "function"
    function: str  # module:function, importable from the working folder


class Format(Part, frozen=True, kw_only=True):
    """The whole answer matches the pattern, white space around it aside, and the model ended it itself: 1, else 0."""

    type: Literal["format"] = "format"
    role: Role = "constraint"
    pattern: str  # a regular expression of Python; `.` takes line breaks too


class Length(Part, frozen=True, kw_only=True):
    """Minus the distance from a length, |tokens - target_tokens| / max_tokens. A target of 0 puts a price on every
    token."""

    type: Literal["length"] = "length"
    role: Role = "constraint"
    target_tokens: NonNegative  # of an answer, its end token included; at most collector.sampling.max_tokens


class Overlong(Part, frozen=True, kw_only=True):
    """The soft penalty of DAPO: 0 up to max_tokens - buffer_tokens, from there down to -1 at max_tokens."""

    type: Literal["overlong"] = "overlong"
    role: Role = "constraint"
    buffer_tokens: Positive  # less than collector.sampling.max_tokens


class Math(Part, frozen=True, kw_only=True):
    """1 if what the last \\boxed{} of the answer holds is the row's answer, mathematically, and the model ended its
    answer itself, else 0 (`docs/rewards.md`). Needs asyncrl[math]."""

    type: Literal["math"] = "math"
    boxed: Literal["required", "preferred"] = "required"  # preferred: without a box, the last expression counts


class Choice(Part, frozen=True, kw_only=True):
    """1 if the answer names the letter of the row's answer and no other, else 0."""

    type: Literal["choice"] = "choice"
    options: str | None = None  # column with the list of the options' texts; null: the letters are A to D


class Regex(Part, frozen=True, kw_only=True):
    """1 if the pattern is found in the answer and the model ended it itself, else 0. With a group, if what the first
    group of the last match holds is the row's answer."""

    type: Literal["regex"] = "regex"
    pattern: str  # a regular expression of Python, as in "Answer: (.+)"


class F1(Part, frozen=True, kw_only=True):
    """SQuAD's F1 over the words that answer and row's answer have in common, in [0, 1]; of several, the best."""

    type: Literal["f1"] = "f1"


class Judge(Part, frozen=True, kw_only=True):
    """The verdict of a language model behind an OpenAI-compatible server, from its scale to 0 to 1 (`docs/rewards.md`).
    Needs asyncrl[judge]."""

    type: Literal["judge"] = "judge"
    url: str  # of the server, up to the version: what stands before /chat/completions
    model: str  # as the server calls it
    api_key_env: str | None = None  # environment variable with the server's API key; null: it wants none
    prompt: str = "How good is the answer to the prompt?\n\n{prompt}\n\n{answer}"  # with {expected} and {messages} too
    reply: Literal["number", "json"] = "number"  # at the reply's end, or `score` of a JSON object
    scale: tuple[float, float] = (1.0, 10.0)  # worst and best verdict
    temperature: float | None = 0.0  # null: not sent, for models that refuse it
    max_tokens: Positive | None = 512  # of a reply; null: not sent
    extra_body: dict[str, Any] = field(default_factory=dict)  # other fields of the request
    timeout_s: Seconds = 60.0  # one request
    retries: NonNegative = 3  # of a request that failed, with growing pauses, or those that the server asks for
    at_once: Positive = 16  # requests of a collector
    requests_per_minute: Positive | None = None  # of a collector; null: as they come
    max_calls: Positive | None = None  # of a collector's process; the run ends when they are spent; null: any
    max_total_tokens: Positive | None = None  # the same for tokens, by the server's count
    cache: str | None = None  # folder where replies are kept, for other runs too; null: nowhere

    @property
    def longest_s(self) -> float:
        """After so long a question has no answer, whatever the pauses between its requests."""
        return self.timeout_s * (1 + self.retries)


class RewardModel(Part, frozen=True, kw_only=True):
    """The number that a reward model gives the conversation with the answer: a sequence classifier of one label, as
    transformers loads it, in a process of its own (`docs/rewards.md`)."""

    type: Literal["reward-model"] = "reward-model"
    path: str  # a folder, or a Hugging Face id
    revision: str | None = None  # of a Hugging Face id
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "cpu"  # or cuda, cuda:1: of those that the collector sees, whose engine must leave it the memory
    max_length: Positive = 4096  # tokens of the conversation; a longer one is unscored
    max_tokens_per_batch: Positive = 16384  # conversations are scored together up to so many tokens, padding included
    timeout_s: Seconds = 60.0  # one batch; the process is killed then


class ToolPolicy(Section, frozen=True, kw_only=True):
    """What a call of one tool does, and which arguments are let through to it. Of a tool that is not listed nothing is
    run, and whatever its schema allows is let through."""

    name: str  # of the tool
    function: str | None = None  # module:function, called with the arguments; null: a valid call counts as executed
    safe: str | None = None  # module:function, given the arguments as one dict: false forbids the call; null: all may


class ToolCallWeights(Section, frozen=True, kw_only=True):
    """Of the numbers that the part makes; each is multiplied by the part's own weight."""

    tool: float = 0.4  # 1: the right tool is called
    arguments: float = 0.4  # 1: with the right arguments
    execution: float = 0.2  # 1: that call is safe, and was executed
    malformed: float = 1.0  # -1: the answer is no call


class ToolCall(Part, frozen=True, kw_only=True):
    """The answer is the one tool call that the row expects, in strict JSON; the row's column `tools` has the schemas
    (`docs/rewards.md`). Makes four numbers. Needs asyncrl[tool-call]."""

    type: Literal["tool-call"] = "tool-call"
    tool_format: Literal["hermes", "json"] = "hermes"  # how the model writes a call (`docs/environments.md`)
    fences: Literal["refuse", "strip"] = "refuse"  # of Markdown around the call
    tools: list[ToolPolicy] = field(default_factory=list)
    call_timeout_s: Seconds = 1.0  # of the function; less than what limits the score
    weights: ToolCallWeights = field(default_factory=ToolCallWeights)


class Code(Part, frozen=True, kw_only=True):
    """The last fenced block of Python of the answer passes the tests of the row: 1, else 0. It runs in a sandbox, on
    Linux only (`docs/rewards.md`)."""

    type: Literal["code"] = "code"
    tests: str = "tests"  # column with the tests; of a row without it: its answer
    score: Literal["all", "share"] = "all"  # share: of the tests that pass, instead of 1 or 0
    test_timeout_s: Seconds = 3.0  # of one test, and of what the program does before it can be called
    total_timeout_s: Seconds = 8.0  # of all tests of an answer; at least 1 s less than what limits the score
    memory_limit: str | int = "512MiB"  # of the program, beyond what the interpreter needs
    modules: list[str] = field(default_factory=list)  # that it may import beside the standard library, such as numpy


RewardPart = (
    Exact | Function | Format | Length | Overlong | Math | Choice | Regex | F1 | Judge | RewardModel | ToolCall | Code
)


class Declared(NamedTuple):
    """What a recipe says of one number of a score."""

    weight: float
    role: Role


def declared(parts: Iterable[Part]) -> dict[str, Declared]:
    """Weight and role of every number that these parts make, by its name in records and metrics.

    >>> declared([Exact(weight=0.5), Overlong(buffer_tokens=4)])["overlong"]
    Declared(weight=1.0, role='constraint')
    """
    return {name: number for part in parts for name, number in numbers(part).items()}


def violations(parts: Mapping[str, Declared]) -> frozenset[str]:
    """The names of those that must not happen."""
    return frozenset(name for name, number in parts.items() if number.role == "violation")


def numbers(part: Part) -> Mapping[str, Declared]:
    """The numbers that one part makes. Most make one, of their own name; a function's are known when it returns.

    >>> list(numbers(ToolCall())), list(numbers(ToolCall(name="call")))[0]
    (['tool', 'arguments', 'execution', 'malformed'], 'call.tool')
    """
    if isinstance(part, ToolCall):
        prefix = "" if part.name is None else f"{part.name}."
        return {
            prefix + number: Declared(
                part.weight * getattr(part.weights, number), "violation" if number == "malformed" else part.role
            )
            for number in ToolCallWeights.__struct_fields__
        }
    return {part_name(part): Declared(part.weight, part.role)}


def part_name(part: Part) -> str:
    """What the part is called in records and metrics."""
    return part.name or part.type


class RewardedTask(Section, frozen=True, kw_only=True):
    """What every task has but a mixture: its type, how its rows are shown, and what becomes of the sum of its parts."""

    type: str
    chat_template_args: dict[str, Any] = field(default_factory=dict)  # for the template, as in {enable_thinking: false}
    curriculum: Curriculum | None = None  # train rows by measured pass rate; null: all of them
    reward_scale: Factor = 1.0  # the weighted sum of all reward parts is multiplied by it
    reward_clip: tuple[float, float] | None = None  # lowest and highest reward, after that; null: no bounds


class ScoringTask(RewardedTask, frozen=True, kw_only=True):
    """A task that says itself what is right."""

    rewards: list[RewardPart] = field(default_factory=list)  # added to the task's own score
