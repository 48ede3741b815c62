"""How the numbers of a run read: pure functions from values to strings. Missing values read as "-"."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from asyncrl.telemetry.table import visible

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.-=+*%#"

COLLECTOR_BOUND = 0.3
"""Share of its time the learner waits from which on more collectors would help noticeably."""

LEARNER_BOUND = 0.05
"""Share below which they would not: waiting is all they could remove."""

WASTEFUL = 0.2
"""Share of thrown away tokens from which on that is worth a word."""

AGAIN = "returned/"
"""Prefix of reasons for which work was thrown away to be done again."""

RUN_END = "stale/run_end"
"""What was under way when the last step was done: no policy can save it."""

MORE = "add collectors, slots or age"

REMEDIES = {
    "stale/over_age": "more age, or over_age wait, keeps them",
    "returned/over_age": "more age, or over_age wait, keeps them",
    "masked": "more age keeps them",
    "filtered/zero_variance": "prompts that are neither solved nor out of reach keep them",
}
"""What helps more than further collectors where most is thrown away for this reason."""


def number(value: float | None, digits: int = 3) -> str:
    """
    >>> number(0.5), number(None), number(float("nan"))
    ('0.500', '-', '-')
    """
    return "-" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def count(value: float | None) -> str:
    """A count in at most four characters.

    >>> count(0), count(999), count(1840), count(12_345), count(3_400_000), count(None)
    ('0', '999', '1.8k', '12k', '3.4M', '-')
    """
    if value is None or not math.isfinite(value):
        return "-"
    for unit in ("", "k", "M", "G"):
        if value < 999.5 or unit == "G":
            break
        value /= 1000
    return f"{value:.1f}{unit}" if unit and value < 9.95 else f"{value:.0f}{unit}"


def duration(seconds: float | None) -> str:
    """
    >>> duration(4.4), duration(61), duration(3725), duration(None)
    ('0:04', '1:01', '1:02:05', '-')
    """
    if seconds is None or not math.isfinite(seconds):
        return "-"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def percent(share: float | None) -> str:
    """
    >>> percent(0.126), percent(None)
    ('13%', '-')
    """
    return "-" if share is None or not math.isfinite(share) else f"{100 * share:.0f}%"


def sparkline(values: Sequence[float | None], *, width: int = 30, blocks: str = BLOCKS) -> str:
    """The last `width` values as blocks, from the lowest to the highest of them; a missing value is a space.

    >>> sparkline([0.0, 0.5, None, 1.0])
    '▁▅ █'
    """
    shown = values[-width:]
    finite = [value for value in shown if value is not None and math.isfinite(value)]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite)
    scale = (len(blocks) - 1) / span if span else 0.0
    return "".join(
        blocks[math.floor((value - low) * scale + 0.5)] if value is not None and math.isfinite(value) else " "
        for value in shown
    )


def progress(share: float, *, width: int) -> int:
    """How many of `width` cells a bar fills.

    >>> progress(0.5, width=9), progress(2.0, width=9)
    (5, 9)
    """
    return math.floor(min(1.0, max(0.0, share)) * width + 0.5)


def histogram(counts: Sequence[int], *, blocks: str = BLOCKS) -> str:
    """Counts as blocks, as high as their share of the largest; a zero is a space, so that one of many is still seen.

    >>> histogram([0, 4, 8, 1])
    ' ▅█▂'
    """
    highest = max(counts, default=0)
    top = len(blocks) - 1
    return "".join(blocks[max(1, round(count / highest * top))] if count else " " for count in counts)


def shares(counts: Mapping[str, float]) -> str:
    """A histogram as shares, in ascending order of its (whole-number) keys.

    >>> shares({"1": 19, "0": 81}), shares({})
    ('0:81% 1:19%', '-')
    """
    total = sum(counts.values())
    if not total:
        return "-"
    return " ".join(f"{key}:{percent(counts[key] / total)}" for key in sorted(counts, key=int))


def bars(counts: Mapping[str, float], *, width: int = 20, block: str = "█") -> str:
    """The same with a bar for each key; bars of all keys together have about `width` characters.

    >>> bars({"0": 75, "1": 25}, width=8)
    '0 ██████ 75%  1 ██ 25%'
    """
    total = sum(counts.values())
    if not total:
        return "-"
    cells = ((key, counts[key] / total) for key in sorted(counts, key=int))
    return "  ".join(f"{key} {block * math.ceil(share * width - 1e-9)} {percent(share)}" for key, share in cells)


def reasons(lost: Mapping[str, int], *, separator: str = " ") -> str:
    """What was lost, most first; "-" is nothing.

    >>> reasons({"stale/over_age": 2, "failed/data": 0, "stale/run_end": 7})
    'stale/run_end:7 stale/over_age:2'
    """
    some = sorted(((n, reason) for reason, n in lost.items() if n), key=lambda pair: (-pair[0], pair[1]))
    return separator.join(f"{reason}:{n}" for n, reason in some) or "-"


def served(collectors: Mapping[str, int | None], *, separator: str = " ") -> str:
    """The version each collector serves.

    >>> served({"b": 11, "a": None})
    'a:- b:11'
    """
    versions = {name: "-" if version is None else version for name, version in collectors.items()}
    return separator.join(f"{name}:{versions[name]}" for name in sorted(versions)) or "-"


def wait_share(records: Sequence[Mapping[str, Any]]) -> float | None:
    """Share of their time that the learner waited for a batch in these steps."""
    waited = total = 0.0
    for record in records:
        waited += record.get("wait_s") or 0.0
        total += record.get("step_s") or 0.0
    return min(1.0, waited / total) if total else None


class Price(NamedTuple):
    """What the age bound and the recipe's filters cost over some time.

    waited: share of the learner's time. groups: that ended untrained. again: that were thrown away to be generated once
    more. tokens, seconds (of collectors): of both. masked: tokens.
    """

    waited: float | None
    groups: int
    again: int
    tokens: int
    seconds: float
    masked: int


def price_of(records: Sequence[Mapping[str, Any]]) -> Price:
    """Of these steps together."""

    def total(key: str, *, again: bool) -> float:
        amounts = [(record.get(key) or {}).items() for record in records]
        return sum(float(n) for items in amounts for reason, n in items if reason.startswith(AGAIN) is again)

    return Price(
        waited=wait_share(records),
        groups=int(total("step_lost", again=False)),
        again=int(total("step_lost", again=True)),
        tokens=int(sum(total("step_lost_tokens", again=again) for again in (False, True))),
        seconds=sum(total("step_lost_seconds", again=again) for again in (False, True)),
        masked=sum(record.get("tokens_masked") or 0 for record in records),
    )


def price(cost: Price) -> str:
    """In one line; what cost nothing is not named.

    >>> price(Price(waited=0.12, groups=4, again=1, tokens=1234, seconds=3.14, masked=0))
    'waited 12%; lost 4 groups, redid 1: 1.2k tokens, 3.1 s of collectors'
    >>> price(Price(waited=0.0, groups=0, again=0, tokens=0, seconds=0.0, masked=70))
    'waited 0%; masked 70 tokens'
    """
    parts = [f"waited {percent(cost.waited)}"]
    ended = [f"lost {cost.groups} group{'s' if cost.groups > 1 else ''}"] if cost.groups else []
    ended += [f"redid {cost.again}"] if cost.again else []
    if ended:
        parts.append(f"{', '.join(ended)}: {count(cost.tokens)} tokens, {cost.seconds:.1f} s of collectors")
    if cost.masked:
        parts.append(f"masked {count(cost.masked)} tokens")
    return "; ".join(parts)


def thrown_away(records: Sequence[Mapping[str, Any]]) -> tuple[float, str]:
    """Share of the tokens generated in these steps that was thrown away, but for what the end of the run cut off, and
    the reason that took most of them.

    >>> thrown_away([{"tokens": 6, "tokens_masked": 1, "step_lost_tokens": {"stale/over_age": 3, "stale/run_end": 9}}])
    (0.4, 'stale/over_age')
    """
    lost: Counter[str] = Counter()
    for record in records:
        lost.update(record.get("step_lost_tokens") or {})
        lost["masked"] += record.get("tokens_masked") or 0
    del lost[RUN_END]
    trained = sum(record.get("tokens") or 0 for record in records)
    if not lost.total():
        return 0.0, ""
    (reason, _), *_ = lost.most_common(1)
    return lost.total() / (lost.total() + trained), reason


def time_left(records: Sequence[Mapping[str, Any]], max_steps: int, *, window: int = 20) -> float | None:
    """Seconds, if the steps to come take as long as the last `window` did."""
    times = [float(record["step_s"]) for record in records[-window:] if record.get("step_s") is not None]
    if not times:
        return None
    return max(0, max_steps - int(records[-1]["step"])) * sum(times) / len(times)


def advice(records: Sequence[Mapping[str, Any]]) -> str:
    """One line on which side holds these steps up, from the learner's share of waiting, and on what is wasted."""
    share = wait_share(records)
    if share is None:
        return "-"
    waits = f"learner waits {percent(share)}"
    wasted, reason = thrown_away(records)
    if wasted >= WASTEFUL:
        waits += f", {percent(wasted)} of the tokens are thrown away ({reason})"
    if share >= COLLECTOR_BOUND:
        return f"collector-bound, {waits}: {REMEDIES.get(reason, MORE) if wasted >= WASTEFUL else MORE}"
    if share <= LEARNER_BOUND:
        return f"learner-bound, {waits}: only a faster step helps"
    return f"balanced, {waits}"


def step_line(record: Mapping[str, Any], *, max_steps: int, left_s: float | None) -> str:
    """One step as one line of plain ASCII: columns of fixed width first, so that they align and `awk` finds them."""
    buffer = record.get("buffer") or {}
    width = len(str(max_steps))
    share = wait_share([record])
    line = (
        f"step {record['step']:>{width}}/{max_steps}"
        f"  left {duration(left_s):>7}"
        f"  reward {number(record.get('reward/mean')):>6}"
        f"  tokens/s {count(record.get('tokens_per_s')):>4}"
        f"  held {buffer.get('held', '-'):>3}  leased {buffer.get('leased', '-'):>3}"
        f"  in-flight {buffer.get('issued', '-'):>3}"
        f"  ess {number(record.get('ess')):>5}"
        f"  wait {percent(share):>4}"
        f"  age {shares(record.get('age/tokens') or {})}"
        f"  lost {reasons(record.get('lost') or {})}"
        f"  serves {served(record.get('collectors') or {})}"
    )
    cost = price_of([record])
    if cost.groups or cost.again or cost.masked:
        line += f"  price: {price(cost)}"
    if record.get("waiting"):
        line += f"  waits: {record['waiting']}"
    return line + ("  SKIPPED: non-finite gradient" if record.get("skipped") else "")


def event_line(event: Mapping[str, Any]) -> str:
    """An event as one line.

    >>> event_line({"event": "eval", "version": 0, "success": 0.203, "n": 128})
    'eval: version 0 has success 0.203 on 128 held-out rows'
    >>> event_line({"event": "start", "lineage": 1, "time": 1.5})
    'start: lineage 1'
    >>> event_line({"event": "warning", "version": 7, "about": "ess/sequence", "text": "few answers carry it"})
    'warning at step 7: few answers carry it'
    """
    name = str(event["event"])
    if name == "eval":
        unscored = f", {event['unscored']} unscored" if event.get("unscored") else ""
        return (
            f"eval: version {event.get('version', '-')} has success {number(event.get('success'))} "
            f"on {event.get('prompts', event.get('n', '-'))} held-out rows{unscored}"
        )
    if name == "warning":
        return f"warning at step {event.get('version', '-')}: {event.get('text', '')}"
    if name == "samples":
        shown = [f"answers of step {event.get('version', '-')}:", *map(sample_lines, event.get("samples", ()))]
        return "\n".join(shown)
    if name == "microbatch":
        return (
            f"out of memory: from step {event.get('version', '-')} on a micro-batch has up to "
            f"{event.get('tokens', '-')} tokens, before {event.get('tokens_before', '-')}"
        )
    if name == "restart":
        return (
            f"{event.get('reason', '-')}; starting it again from the newest checkpoint in "
            f"{number(event.get('delay_s'), 0)} s ({event.get('count', '-')} of {event.get('limit', '-')})"
        )
    if name == "learning_rate":
        return (
            f"learning rate x {number(event.get('scale'))} from step {event.get('version', '-')} on, before x "
            f"{number(event.get('scale_before'))}: ess/sequence {number(event.get('ess'))}, average "
            f"{number(event.get('average'))}"
        )
    told = [f"{key} {value}" for key, value in event.items() if key not in ("event", "time") and _is_plain(value)]
    return f"{name}: {', '.join(told)}" if told else name


def sample_lines(sample: Mapping[str, Any]) -> str:
    """A prompt and an answer of a step, with nothing that a terminal would obey.

    >>> print(sample_lines({"row_id": "f:1", "prompt": "2+2?", "answer": "5", "reward": 0.0, "wrong": "wrong_answer"}))
      f:1  reward 0.000  wrong_answer
        asked     2+2?
        answered  5
    """
    head = ["  " + str(sample.get("row_id", "-")), f"reward {number(sample.get('reward'))}", sample.get("wrong", "")]
    lines = ["  ".join(visible(part) for part in head if part)]
    for name in ("prompt", "answer"):
        first, *rest = visible(str(sample.get(name, "")), lines=True).split("\n")
        lines += [f"    {'asked' if name == 'prompt' else 'answered':<8}  {first}", *(" " * 14 + line for line in rest)]
    return "\n".join(lines)


def _is_plain(value: object) -> bool:
    return isinstance(value, (str, int, float)) and value != ""
