"""`errands`: a request in words, answered by one tool call. Procedural, and small enough for a model that reads bytes.

    pay 12           {"name":"pay","arguments":{"amount":12}}
    weather on 14    {"name":"weather","arguments":{"day":14}}
    pay 250          {"name":"refuse","arguments":{"reason":"limit"}}     more than may be paid
    pay ann          {"name":"refuse","arguments":{"reason":"unclear"}}   nobody said how much

What a request wants is one of these four kinds. The requests of a kind have an order that nothing changes, and its
first ones are held out: no held-out request is ever trained, whatever the seed.

What is to be copied is a number, a day too: the built-in model's warm start copies digits, and no other text. With days
of the week it got 0.2 of the held-out requests right, of 29 to train, and 0.4 of 127.

`python -m asyncrl.tasks.errands > demonstrations.jsonl` writes conversations for `asyncrl sft`.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.tasks.base import Answer, Message, Row, Split
from asyncrl.tasks.chat import conversation
from asyncrl.tasks.order import permute
from asyncrl.tasks.procedural import ProceduralRows

HELDOUT = 20  # rounds of requests
LIMIT = 99
"""The most that may be paid. A schema cannot say it: what is allowed is the policy's affair, not the tool's."""

LAST_DAY = 31

# --- the tools --------------------------------------------------------------------------------------------------------


def pay(amount: int) -> str:
    return f"paid {amount}"


def weather(day: int) -> str:
    return f"rain on {day}"


def refuse(reason: str) -> str:
    return f"refused: {reason}"


def may_pay(arguments: Mapping[str, Any]) -> bool:
    """Whether a payment is let through."""
    return bool(arguments["amount"] <= LIMIT)


def _tool(name: str, **properties: Mapping[str, Any]) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    _tool("pay", amount={"type": "integer", "minimum": 1}),
    _tool("weather", day={"type": "integer", "minimum": 1, "maximum": LAST_DAY}),
    _tool("refuse", reason={"enum": ["limit", "unclear"]}),
]
"""What a row shows of them."""

# --- the requests -----------------------------------------------------------------------------------------------------

NAMES = ("ann", "bob", "eva", "gus", "jim", "leo", "mia", "sue")


@dataclass(frozen=True, slots=True)
class Kind:
    """Requests that want the same: each pattern with each value."""

    name: str
    patterns: Sequence[str]
    values: Sequence[Any]
    call: Callable[[Any], dict[str, Any]]

    @property
    def size(self) -> int:
        return len(self.patterns) * len(self.values)

    def request(self, number: int) -> tuple[str, str]:
        """The request with this number and the call that it wants, as text."""
        value, pattern = divmod(permute(number, self.size, key=f"errands/{self.name}"), len(self.patterns))
        return self.patterns[pattern].format(self.values[value]), written(self.call(self.values[value]))


def written(call: object) -> str:
    """As JSON, as short as it gets: to a model that reads bytes each is a token."""
    return json.dumps(call, separators=(",", ":"))


def _call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


PAYING = ("pay {}", "please pay {}", "pay {} now", "i owe {}")
PAY = Kind("pay", PAYING, range(1, LIMIT + 1), lambda amount: _call("pay", amount=amount))
ASKING = ("weather on {}", "how is {}", "rain on {}", "{} weather", "is it hot on {}", "will {} be fine", "snow on {}")
WEATHER = Kind("weather", ASKING, range(1, LAST_DAY + 1), lambda day: _call("weather", day=day))
OVER = Kind("over", PAYING, range(LIMIT + 1, 1000), lambda amount: _call("refuse", reason="limit"))
VAGUE = (*PAYING, "pay {} some")
UNCLEAR = Kind("unclear", VAGUE, NAMES, lambda name: _call("refuse", reason="unclear"))
ROUND = (PAY, WEATHER, PAY, OVER, UNCLEAR)
"""Requests come in rounds, in which most are to be granted: to refuse them all earns little."""


class ErrandRows(ProceduralRows):
    """The rows of a split, made on demand: round after round, and the requests of each kind in their order."""

    def __init__(self, split: Split) -> None:
        self._heldout = split == "heldout"
        self._split = split
        super().__init__(len(ROUND) * (HELDOUT if self._heldout else max(kind.size for kind in ROUND)))

    def row(self, position: int) -> Row:
        rounds, place = divmod(position, len(ROUND))
        kind = ROUND[place]
        each = ROUND.count(kind)
        number, heldout = rounds * each + ROUND[:place].count(kind), HELDOUT * each
        if not self._heldout:
            number = heldout + number % (kind.size - heldout)
        request, call = kind.request(number)
        return Row(f"{self._split}-{position}", request, call, {"kind": kind.name, "tools": TOOLS})


class Errands:
    """The task. What a call is worth, the recipe's verifiers say."""

    name = "errands"

    def rows(self, split: Split) -> ErrandRows:
        return ErrandRows(split)

    def messages(self, row: Row) -> list[Message]:
        return conversation(row.prompt)

    def score(self, row: Row, answer: Answer) -> Mapping[str, float]:
        return {}

    def part_weights(self) -> Mapping[str, float]:
        return {}


# --- demonstrations ---------------------------------------------------------------------------------------------------

DEMONSTRATIONS = 3000
CARELESS = 0.25
"""Share of the demonstrations with a mistake, of the kinds that collected ones have: a model imitates them too, and
what an imitation cannot unlearn, a verifier can."""


def careless(row: Row, rng: random.Random) -> str:
    """A call by somebody who chats, pays whatever is asked, guesses what was not said, or gets an argument wrong."""
    call = json.loads(row.answer)
    if rng.random() < 0.3:
        return f"ok {row.answer}"
    if call["name"] == "refuse":
        asked = [int(word) for word in str(row.prompt).split() if word.isdecimal()]
        return written(_call("pay", amount=asked[0] if asked else 10))
    if call["name"] == "weather":
        return written(_call("refuse", reason="unclear"))
    return written(_call("pay", amount=rng.randint(1, LIMIT)))


def demonstrations(count: int, careless_share: float) -> Iterator[dict[str, Any]]:
    rng = random.Random(0)
    rows = ErrandRows("train")
    shown = " ".join(f"{t['function']['name']}({', '.join(t['function']['parameters']['properties'])})" for t in TOOLS)
    for _ in range(count):
        row = rows[rng.randrange(len(rows))]
        answer = careless(row, rng) if rng.random() < careless_share else row.answer
        yield {
            "messages": [
                {"role": "system", "content": shown},
                {"role": "user", "content": row.prompt},
                {"role": "assistant", "content": answer},
            ]
        }


if __name__ == "__main__":
    for demonstration in demonstrations(DEMONSTRATIONS, CARELESS):
        sys.stdout.write(written(demonstration) + "\n")
