"""`scale`: does one store carry a thousand collectors? Sustained tickets, how long a question takes, memory, waits.

Real connections, real payloads; groups and steps are sleeps. Half of the collectors' time is work, so that the other
half waits for tickets in the store, and each version of the weights makes every collector beat three times.

Controls, on a short run of small groups: settled rows that never leave must break the bound of the store's memory, and
one group that is gone after its put was answered must be found missing.
"""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import uvloop

from asyncrl.benchmarks.frame import Measured, Row, Say, Target
from asyncrl.benchmarks.scale_clients import Setting
from asyncrl.benchmarks.scale_run import Observed, allow_files, limits_of, observe

FULL = Setting(
    collectors=1_000,
    processes=4,
    groups_per_step=500,
    max_age=4,  # wide enough that hardly a group is late: what is waited for then is the store's doing
    steps=36,
    step_s=4.0,
    group_s=4.0,
    group_bytes=32_768,
)
QUICK = replace(FULL, collectors=100, processes=2, groups_per_step=50, steps=16, step_s=1.0, group_s=1.0)
SMALL = Setting(
    collectors=8,
    processes=1,
    groups_per_step=16,
    max_age=1,
    steps=64,
    step_s=0.0,
    group_s=0.0,
    group_bytes=1_024,
    ranks=1,
)
DROP = replace(SMALL, steps=12, drop=100)

OPERATIONS = ("beat", "tickets", "put", "lease", "payloads", "commit", "stats", "announce", "settled", "archived")

SUSTAINED = 0.9
STORE_CPU = 0.8
ALLOCATOR = 1.25  # size classes of jemalloc: a value takes at most a quarter more than its bytes
ROW_BYTES, MEMBER_BYTES, RUN_BYTES = 1_536, 2_048, 32_768
"""What a ledger row with its place in the store's indexes, a collector, and the run itself take at most."""


def measure(*, quick: bool, say: Say) -> Measured:
    """Rows: the run, one per operation, what the learner waited for, one per short run (quick: 100 collectors)."""
    setting = QUICK if quick else FULL
    say(f"{setting.collectors:,} collectors in {setting.processes} processes, {allow_files(setting.collectors)}")
    with (
        tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as folder,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):

        def run(name: str, setting: Setting) -> Observed:
            seen = runner.run(observe(setting, Path(folder) / name))
            say(f"{name}: {told(setting, seen)}")
            return seen

        seen = run("scale", setting)
        say("p99: " + ", ".join(f"{row['operation']} {row['p99_ms']:.0f} ms" for row in operation_rows(seen)))
        short, stay, dropped = run("short", SMALL), run("stay", replace(SMALL, archive=False)), run("drop", DROP)
    rows = [run_row("scale", setting, seen), *operation_rows(seen), *wait_rows(seen)]
    rows += [run_row("short", SMALL, short), run_row("stay", SMALL, stay), run_row("drop", DROP, dropped)]
    return Measured(rows=rows, targets=targets(setting, seen, short, stay, dropped))


def targets(setting: Setting, seen: Observed, short: Observed, stay: Observed, dropped: Observed) -> list[Target]:
    return [
        Target("tickets/s over what the learner could train", sustained(seen) / offered(setting), SUSTAINED, "higher"),
        Target("share of one core of the store's thread", seen.store_cpu_s / seen.wall_s, STORE_CPU, "lower"),
        Target("store's memory over its bound", over_bound(setting, seen), 1.0, "lower"),
        Target("store's memory over its bound, short run", over_bound(SMALL, short), 1.0, "lower"),
        Target("groups lost", seen.lost + short.lost, 0, "lower"),
        Target("tickets trained twice", seen.twice + short.twice, 0, "lower"),
        Target("problems found by the audit", len(seen.problems) + len(short.problems), 0, "lower"),
        Target("control: memory over its bound, rows never leave", over_bound(SMALL, stay), 1.05, "higher"),
        Target("control: groups lost, one gone after its put", dropped.lost, 1, "higher"),
    ]


def sustained(seen: Observed) -> float:
    """Trained tickets a second."""
    return seen.trained / seen.wall_s


def offered(setting: Setting) -> float:
    """Tickets a second of a learner that never waits."""
    return setting.groups_per_step / setting.step_s


def bound_bytes(setting: Setting) -> float:
    """The most that the run's keys may take: payloads by `max_bytes`; rows of live tickets, at most a window, and of
    those that ended since the oldest checkpoint, two intervals ago; and the collectors."""
    rows = (setting.max_age + 1 + 2 * setting.checkpoint_every) * setting.groups_per_step
    payloads = ALLOCATOR * limits_of(setting).max_bytes
    return payloads + ROW_BYTES * rows + MEMBER_BYTES * setting.collectors + RUN_BYTES


def over_bound(setting: Setting, seen: Observed) -> float:
    return seen.peak_bytes / bound_bytes(setting)


def told(setting: Setting, seen: Observed) -> str:
    """One line for a person."""
    waited = ", ".join(f"{seconds:.1f} s for {what}" for what, seconds in sorted(seen.waited.items())) or "for nothing"
    return (
        f"{sustained(seen):,.0f} tickets/s over {seen.connections:,} connections, store "
        f"{seen.store_cpu_s / seen.wall_s:.0%} of a core, memory {seen.peak_bytes / 1e6:.1f} MB of at most "
        f"{bound_bytes(setting) / 1e6:.1f} MB; in {seen.wall_s:.0f} s the learner waited {waited}; lost {seen.lost}"
    )


def run_row(kind: str, setting: Setting, seen: Observed) -> Row:
    return {
        "kind": kind,
        "collectors": setting.collectors,
        "connections": seen.connections,
        "tickets_per_s": sustained(seen),
        "trained": seen.trained,
        "wall_s": seen.wall_s,
        "waited_s": sum(seen.waited.values()),
        "store_cpu": seen.store_cpu_s / seen.wall_s,
        "clients_cpu": seen.clients_cpu_s / seen.clients_s,
        "peak_bytes": seen.peak_bytes,
        "bound_bytes": bound_bytes(setting),
        "server_bytes": seen.server_bytes,
        "connection_bytes": seen.connection_bytes,
        "lost": seen.lost,
        "twice": seen.twice,
        "problems": "; ".join(seen.problems),
        **{f"puts_{answer}": n for answer, n in sorted(seen.puts.items())},
    }


def operation_rows(seen: Observed) -> list[Row]:
    """Milliseconds of each operation as its caller sees them, the waits between two questions left out."""
    rows = []
    for operation in OPERATIONS:
        ms = 1e3 * np.array(seen.seconds[operation])
        p50, p99 = np.quantile(ms, [0.5, 0.99])
        rows.append(
            {"kind": "operation", "operation": operation, "calls": len(ms), "p50_ms": float(p50), "p99_ms": float(p99)}
        )
    return rows


def wait_rows(seen: Observed) -> list[Row]:
    """What the learner waited for; and for whom, the five that it waited for longest."""
    longest = sorted(seen.waited_for.items(), key=lambda item: -item[1])[:5]
    return [
        *({"kind": "wait", "for": what, "seconds": seconds} for what, seconds in sorted(seen.waited.items())),
        *({"kind": "wait", "for": who, "seconds": seconds} for who, seconds in longest),
    ]
