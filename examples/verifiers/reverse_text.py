"""A taskset of the package verifiers: write a string of digits backwards. `vf-eval reverse_text` knows it as well."""

import random

import verifiers.v1 as vf

__all__ = ["ReverseText"]


class Data(vf.TaskData):
    answer: str


class Reverse(vf.Task[Data]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer and not trace.is_truncated)

    @vf.reward(weight=0.1)
    async def right_length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) == len(self.data.answer))


class Config(vf.TasksetConfig):
    size: int = 2000
    shortest: int = 3
    longest: int = 6


class ReverseText(vf.Taskset[Reverse, Config]):
    def load(self):
        rng = random.Random(0)
        for _ in range(self.config.size):
            digits = "".join(rng.choices("0123456789", k=rng.randint(self.config.shortest, self.config.longest)))
            yield Reverse(Data(prompt=f"reverse {digits}", answer=digits[::-1]), self.config.task)
