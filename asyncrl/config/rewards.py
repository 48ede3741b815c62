"""`task.rewards`: the parts of a reward that a recipe can name, and what becomes of their sum (`docs/rewards.md`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from msgspec import field

from asyncrl.config.curriculum import Curriculum
from asyncrl.config.section import Factor, NonNegative, Positive, Seconds, Section

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


RewardPart = Exact | Function | Format | Length | Overlong | Math | Choice | Regex | F1 | ToolCall


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
