"""`weights`: how new weights reach the engines (`docs/weights.md`)."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from asyncrl.config.section import Positive, Seconds, Section


class Fallback(Section, frozen=True, kw_only=True):
    """Where a collector takes weights from that its transport did not bring in time."""

    transport: Literal["file"] = "file"
    url: str  # as weights.url


class WeightsConfig(Section, frozen=True, kw_only=True):
    """How new weights reach the engines (`docs/weights.md`)."""

    transport: Literal["auto", "shm", "collective", "file", "delta", "cuda-ipc"] = "auto"  # how; auto: the fastest
    url: str | None = None  # of file and delta: a folder that all hosts see, or s3://... and others that fsspec knows
    lora: Literal["merged", "adapter"] = "merged"  # with model.lora, what engines get: the sum, or A and B alone
    publish_every: Positive = 1  # versions; at most max_trajectory_age + 1
    update: Literal["keep", "recompute", "drain", "abort-and-continue"] = "keep"  # of requests that run meanwhile
    deadline_s: Seconds = 120.0  # of each phase of a transfer
    interface: str | None = None  # of the learner's host, for collective; null: the one that reaches the store
    port: Annotated[int, Meta(ge=0, le=65535)] = 0  # where collectors meet for collective; 0: any that is free
    fallback: Fallback | None = None  # null: who is late goes on with older weights and tries again
    verify_every: Positive = 1  # every n-th publication of a learner is hashed and compared, and its first
    anchor_every: Positive = 10  # of delta: every n-th version is written whole
