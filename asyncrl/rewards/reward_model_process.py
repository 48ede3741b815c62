"""The process of a reward model: loads it, then scores the conversations that it gets until its standard input ends.

Started by `reward_model.py` as `python -P -m asyncrl.rewards.reward_model_process PARENT_PID`. Messages are framed as
those of `worker.py`. In: the part of the recipe, then lists of conversations. Out: a `Loaded`, then for each list one
message of numbers for each batch that it was divided into, when that batch is done: the limit of time is one batch's.
"""

from __future__ import annotations

import sys

import msgspec

from asyncrl.config.rewards import RewardModel
from asyncrl.rewards.conversation import Messages
from asyncrl.rewards.worker import die_with_parent, last_line, read_frame, take_protocol, write_frame


class Loaded(msgspec.Struct):
    """The process can score, or never will."""

    error: str = ""


class Number(msgspec.Struct, array_like=True):
    """What the model says of one conversation of a list. failure: why there is no value, "" if there is."""

    index: int
    value: float = 0.0
    failure: str = ""
    detail: str = ""


def main() -> None:
    """The argument is the parent's process id."""
    die_with_parent(int(sys.argv[1]))
    requests, replies = take_protocol()
    part = msgspec.msgpack.decode(read_frame(requests), type=RewardModel)
    try:
        from asyncrl.rewards.reward_model_scores import RewardScores  # loads torch

        scores = RewardScores(part)
    except BaseException as error:  # SystemExit too: the parent must hear why
        write_frame(replies, Loaded(last_line(error)))
        return
    write_frame(replies, Loaded())
    while body := read_frame(requests):
        for numbers in scores.of(msgspec.msgpack.decode(body, type=list[Messages])):
            write_frame(replies, numbers)


if __name__ == "__main__":
    main()
