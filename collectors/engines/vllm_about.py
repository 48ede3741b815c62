"""What a vLLM server says of itself, and why asyncrl could not use it: a pure decision, with the option that helps."""

from __future__ import annotations

import json

import msgspec

TRANSFER = "asyncrl"
"""The name under which vLLM knows asyncrl's weight transfer."""

LOGPROBS = "processed_logprobs"
"""vLLM's mode in which a logprob is that of the distribution sampled from, after the temperature."""

FLOAT32_HEAD = {"head_dtype": "float32"}
"""vLLM's overrides of a model's configuration with which its head computes in float32, as the learner's does."""


class About(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of a server, as its worker has it (`vllm_worker.WorkerPart.asyncrl_about`)."""

    memory: str  # identity of the shared memory that the worker sees, as in asyncrl.weights.reach
    transfer: str  # backend of its weight transfer; "" = none
    logprobs_mode: str
    dtype: str  # of torch, without the module's name
    head_dtype: str  # in which the head computes
    slots: int  # requests it decodes at once
    max_length: int  # prompt + completion, tokens
    vocabulary: int  # ids
    workers: int  # processes that share the model, data parallel replicas included
    api_processes: int  # that answer at its address
    max_logprobs: int  # that it gives for a token; -1: of all tokens
    own_ends: bool  # whether min_tokens holds back end tokens of the model's own too
    transforms: tuple[str, ...]  # options of vLLM's that make what is served another thing than one plain model
    cpu: bool  # whether it computes on one
    chunked_prefill: bool
    updating: bool  # whether a weight update has begun and not ended


def unfit(about: About, *, memory: str, dtype: str, slots: int, max_length: int | None) -> list[str]:
    """Everything that keeps asyncrl from using this server, each with what to do; [] if nothing does.

    memory: of this process. dtype, slots, max_length: what the recipe asks for; max_length None: the server's own.
    """
    plain = "it serves no plain model that could be read back tensor by tensor: start it without "
    faults = (
        (
            about.memory != memory,
            "its worker does not see the shared memory of this collector, through which weights come: run both on one "
            "host, as one user, in one container",
        ),
        (
            about.transfer != TRANSFER,
            f"its weight transfer is {about.transfer or 'off'}: add --weight-transfer-config "
            f'\'{{"backend": "{TRANSFER}"}}\'',
        ),
        (
            about.logprobs_mode != LOGPROBS,
            f"its logprobs are {about.logprobs_mode}, not of what is sampled from: add --logprobs-mode {LOGPROBS}",
        ),
        (
            about.dtype != dtype,
            f"it computes in {about.dtype}, where model.dtype is {dtype}: start it with --dtype {dtype}",
        ),
        (
            about.head_dtype != "float32",
            f"its head computes in {about.head_dtype}, the learner's in float32: add --hf-overrides "
            f"'{json.dumps(FLOAT32_HEAD)}'",
        ),
        (
            about.slots < slots,
            f"it decodes {about.slots} requests at once, and {slots} will come: start it with --max-num-seqs {slots}, "
            f"or set collector.engine.slots to {about.slots}",
        ),
        (
            max_length is not None and about.max_length < max_length,
            f"it takes {about.max_length} tokens of prompt and answer, less than model.max_length: start it with "
            f"--max-model-len {max_length}",
        ),
        (
            about.workers != 1,
            f"{about.workers} workers share its model, and only one can be read back: start it on one GPU",
        ),
        (
            about.api_processes != 1,
            f"{about.api_processes} processes answer at its address, and an abort would reach one of them: start it "
            "with --api-server-count 1",
        ),
        (bool(about.transforms), plain + ", ".join(about.transforms)),
        (
            about.cpu and about.chunked_prefill,
            "it prefills in parts, which ends vLLM on a CPU when a request has a seed: add --no-enable-chunked-prefill",
        ),
    )
    return [why for found, why in faults if found]
