"""From the parts of a recipe to what verifies: which part is which class, each of whose modules is imported only when a
recipe has it."""

from __future__ import annotations

from asyncrl.config.rewards import (
    F1,
    Choice,
    Code,
    Exact,
    Format,
    Function,
    Judge,
    Length,
    Math,
    Overlong,
    Part,
    Regex,
    RewardModel,
    ToolCall,
)
from asyncrl.rewards.base import Remote, Verifier

REMOTE: tuple[type[Part], ...] = (Judge, RewardModel)
"""Parts that are asked for in the collector's event loop, not computed in a verifier process."""


def verifier(part: Part, *, max_tokens: int) -> Verifier:
    """Of a part that is not remote. max_tokens: that an answer may have. Raises what importing its libraries raises."""
    if isinstance(part, Exact):
        from asyncrl.rewards.exact import ExactMatch

        return ExactMatch(part)
    if isinstance(part, Function):
        from asyncrl.rewards.function import FunctionPart

        return FunctionPart(part)
    if isinstance(part, Format | Length | Overlong):
        from asyncrl.rewards.shaping import Shape

        return Shape(part, max_tokens=max_tokens)
    if isinstance(part, Math):
        from asyncrl.rewards.math import MathAnswer

        return MathAnswer(part)
    if isinstance(part, Choice):
        from asyncrl.rewards.choice import ChoiceAnswer

        return ChoiceAnswer(part)
    if isinstance(part, Regex | F1):
        from asyncrl.rewards.text import PatternMatch, WordOverlap

        return PatternMatch(part) if isinstance(part, Regex) else WordOverlap(part)
    if isinstance(part, ToolCall):
        from asyncrl.rewards.tool_call import ToolCallVerifier

        return ToolCallVerifier(part)
    if isinstance(part, Code):
        from asyncrl.rewards.code import CodeTests

        return CodeTests(part)
    raise TypeError(f"no verifier computes {part!r}")


def remote(part: Part) -> Remote:
    """Of a remote part."""
    if isinstance(part, Judge):
        from asyncrl.rewards.judge import JudgePart

        return JudgePart(part)
    if isinstance(part, RewardModel):
        from asyncrl.rewards.reward_model import RewardModelPart

        return RewardModelPart(part)
    raise TypeError(f"no part that is asked for elsewhere is {part!r}")
