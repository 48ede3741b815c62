"""What a store's own words say about it: whether it may lose what it was given, has room, and is near.

Pure functions of the replies to INFO and CONFIG GET; `doctor` asks for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from asyncrl.buffers.store import OLDEST_REDIS
from asyncrl.config.sizes import size_text

Level = Literal["ok", "warning", "error"]

SETTINGS = ("appendfsync", "no-appendfsync-on-rewrite", "save", "maxmemory-policy")
"""What CONFIG GET is asked for. What INFO says as well is taken from there: CONFIG is refused to most users."""

SPARE = 1.25
"""Memory per byte of payloads: keys, rows, the server's own overhead and fragmentation."""

LOSS = "loss window"
APPEND = "CONFIG SET appendonly yes"

SLOW_MS = 10.0
"""Round trip from which a person should know: a group costs a collector about five of them, a step the learner ten."""

CLOCK_S = 1.0
"""Difference from which times that two clocks gave cannot be read side by side."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's: what was looked at, what it is like, and how to better it where it is not well."""

    level: Level
    what: str
    says: str
    fix: str = ""


def ok(what: str, says: str) -> Finding:
    return Finding("ok", what, says)


def warning(what: str, says: str, fix: str) -> Finding:
    return Finding("warning", what, says, fix)


def error(what: str, says: str, fix: str = "") -> Finding:
    return Finding("error", what, says, fix)


def server(info: Mapping[str, Any]) -> Finding:
    """Which server, and whether the scripts run on it."""
    what, redis = "server", str(info.get("redis_version", "0"))
    name = f"Valkey {info['valkey_version']}" if "valkey_version" in info else f"Redis {redis}"
    if tuple(int(part) for part in redis.split(".")[:2]) < OLDEST_REDIS:
        return error(what, name, "asyncrl needs Redis 6.2 or Valkey")
    if info.get("role") in ("slave", "replica"):
        return error(what, f"{name}, a replica, which takes no writes", "give the primary's URL")
    return ok(what, name)


def eviction(info: Mapping[str, Any]) -> Finding:
    """Whether it may throw keys away."""
    what, policy = "eviction", info.get("maxmemory_policy")
    if policy is None:
        return warning(what, "cannot be read (INFO does not tell)", "ask its provider for maxmemory-policy noeviction")
    if policy == "noeviction":
        return ok(what, "never (noeviction)")
    return error(
        what,
        f"{policy}: when memory is short it throws keys away, and with them trajectories",
        "CONFIG SET maxmemory-policy noeviction",
    )


def memory(info: Mapping[str, Any], max_bytes: int) -> Finding:
    """Whether the buffer's bound fits. max_bytes: `buffer.max_bytes` of the recipe."""
    what, need = "memory", int(max_bytes * SPARE)
    limit, total = int(info.get("maxmemory", 0)), int(info.get("total_system_memory", 0))
    wanted = f"buffer.max_bytes is {size_text(max_bytes)}"
    if limit:
        says = f"maxmemory {_gib(limit)}, {_gib(int(info.get('used_memory', 0)))} used; {wanted}"
        if limit < max_bytes:
            return error(
                what, says, f"CONFIG SET maxmemory {need}, or lower buffer.max_bytes: a full store refuses groups"
            )
        if limit < need:
            return warning(what, says, f"rows and overhead come on top: CONFIG SET maxmemory {need}")
        return ok(what, says)
    if not total:
        return ok(what, f"no limit that it tells; {wanted}")
    says = f"no limit but its machine's {_gib(total)}; {wanted}"
    if total < need:
        return warning(what, says, "lower buffer.max_bytes: the kernel ends what fills the machine")
    return ok(what, says)


def loss_window(info: Mapping[str, Any], config: Mapping[str, str] | None) -> Finding:
    """What is lost at most when its process or its machine ends. config: None where CONFIG is not allowed."""
    if "aof_enabled" not in info:
        return warning(
            LOSS,
            "cannot be read (INFO does not tell)",
            "ask its provider for an append-only file with appendfsync everysec; without one, everything is lost",
        )
    for key, file in (("aof_last_write_status", "append-only file"), ("rdb_last_bgsave_status", "snapshot")):
        if info.get(key, "ok") != "ok":
            return error(
                LOSS,
                f"the last write of its {file} failed: what it takes is not kept",
                "see its log: is its disk full?",
            )
    return _of_log(config) if int(info["aof_enabled"]) else _of_snapshots(config)


def _of_log(config: Mapping[str, str] | None) -> Finding:
    if config is None or "appendfsync" not in config:
        return warning(
            LOSS,
            "an append-only file; how often it is synced cannot be read (CONFIG is not allowed)",
            "ask its provider for appendfsync: with everysec it is about 1 s",
        )
    sync = config["appendfsync"]
    if sync == "always":
        return ok(LOSS, "appendfsync always: nothing")
    if sync == "no":
        return warning(
            LOSS,
            "appendfsync no: up to about 30 s after a power cut; nothing after kill -9",
            "CONFIG SET appendfsync everysec",
        )
    if config.get("no-appendfsync-on-rewrite") == "yes":
        return warning(
            LOSS,
            "appendfsync everysec, but not during rewrites: up to about 30 s after a power cut; nothing after kill -9",
            "CONFIG SET no-appendfsync-on-rewrite no",
        )
    return ok(LOSS, "appendfsync everysec: up to about 1 s after a power cut; nothing after kill -9")


def _of_snapshots(config: Mapping[str, str] | None) -> Finding:
    if config is None or "save" not in config:
        return warning(
            LOSS,
            "no append-only file; whether there are snapshots cannot be read (CONFIG is not allowed)",
            "ask its provider for an append-only file with appendfsync everysec",
        )
    points = config["save"].split()
    if not points:
        return warning(LOSS, "no append-only file, no snapshots: everything, whenever it ends", APPEND)
    rules = [(int(seconds), int(writes)) for seconds, writes in zip(points[::2], points[1::2], strict=True)]
    said = ", ".join(f"every {seconds} s" + (f" with {n} writes" if n > 1 else "") for seconds, n in rules)
    longest = max(seconds for seconds, _ in rules)
    return warning(LOSS, f"snapshots only, {said}: up to {longest} s, however its process ends", APPEND)


def failover(info: Mapping[str, Any]) -> Finding | None:
    """What one to a replica would lose; None where there is none."""
    what, replicas = "failover", int(info.get("connected_slaves", 0))
    if not replicas:
        return None
    lags = [int(value["lag"]) for key, value in info.items() if _is_replica(key, value)]
    behind = max(lags, default=0)
    could = f"{replicas} replica{'s' if replicas > 1 else ''} could take over"
    says = f"{could}, up to {behind} s behind now: what has not reached it is lost"
    if behind <= 1:
        return ok(what, says)
    return warning(what, says, "they do not keep up: see their network and disks")


def _is_replica(key: str, value: Any) -> bool:
    return key.startswith("slave") and key[5:].isdecimal() and isinstance(value, Mapping) and "lag" in value


def round_trip(median_ms: float) -> Finding:
    """The time of a question and its answer."""
    what, says = "round trip", f"{median_ms:.2f} ms"
    if median_ms < SLOW_MS:
        return ok(what, says)
    return warning(what, says, "a store in the same network answers in less than 1 ms")


def clock(ahead_s: float) -> Finding:
    """ahead_s: the store's clock minus this host's."""
    what = "clock"
    if abs(ahead_s) < CLOCK_S:
        return ok(what, f"{abs(ahead_s):.2f} s from this host's")
    side = "ahead of" if ahead_s > 0 else "behind"
    return warning(
        what,
        f"{abs(ahead_s):.1f} s {side} this host's: times given by both do not compare; limits do not depend on it",
        "let both follow NTP",
    )


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
