"""A double of an SGLang server, written from the source of SGLang 0.5.23 and never from asyncrl's client.

It has what the source has between a request and an answer: a tokenizer manager that holds requests back while it is
paused, a scheduler whose step's tokens are counted one step later (overlap), retraction, weight version events, the
loader that fuses and pads, the weight checker, cumulative streaming. What it does not have is a model: a token is a
hash of (seed, position, the weights' bytes), so that a test can say which weights sampled it.

Functions of the source are named in the docstrings.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from .http_double import HttpDouble, listening

STACKED = (
    (".qkv_proj", ".q_proj", 0),
    (".qkv_proj", ".k_proj", 1),
    (".qkv_proj", ".v_proj", 2),
    (".gate_up_proj", ".gate_proj", 0),
    (".gate_up_proj", ".up_proj", 1),
)
"""`LlamaForCausalLM.stacked_params_mapping`."""

INFO: dict[str, Any] = {
    "version": "0.5.23",
    "frontend": "python",
    "device": "cpu",
    "tp_size": 1,
    "pp_size": 1,
    "dp_size": 1,
    "quantization": None,
    "enable_lora": None,
    "speculative_algorithm": None,
    "preferred_sampling_params": None,
    "enable_watermark": False,
    "allow_auto_truncate": False,
    "enable_hierarchical_cache": False,
    "disaggregation_mode": "null",
    "incremental_streaming_output": False,
    "max_req_input_len": 4090,
}
"""What `/server_info` says of a server that was started with the defaults, as far as anybody looks at it."""

VOCABULARY = 61


def token_of(seed: int, position: int, weights: str) -> tuple[int, float]:
    """Token and log-prob at a position of the whole sequence; a seed counts, as with deterministic inference."""
    digest = hashlib.sha256(f"{seed}/{position}/{weights}".encode()).digest()
    return digest[0] % VOCABULARY, -(1 + digest[1] / 64)


def digest_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Of the weights' values, whatever they are called and however they are fused."""
    return hashlib.sha256(b"".join(sorted(tensor.numpy().tobytes() for _, tensor in tensors))).hexdigest()


@dataclass(eq=False)
class Req:
    """A request in the scheduler."""

    rid: str
    prompt: list[int]
    params: dict[str, Any]
    parts: asyncio.Queue[dict[str, Any] | None] = field(default_factory=asyncio.Queue)
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    launched: int = 0  # tokens sampled, whether or not they are counted
    sent: int = 0
    events: list[tuple[str, int]] = field(default_factory=list)
    to_finish: dict[str, Any] | None = None
    finished: dict[str, Any] | None = None


class SglangDouble(HttpDouble):
    """`live`: the tensors as it computes with them. Attributes that tests set stand for what goes wrong in a server."""

    def __init__(self, model: torch.nn.Module, *, max_running: int = 8) -> None:
        super().__init__()
        self.info = dict(INFO)
        self.calls: list[tuple[str, dict[str, Any]]] = []  # (route, body) of everything but generate
        self.bodies: list[dict[str, Any]] = []  # of generate
        self.weight_version = "default"
        self.paused = False  # of the scheduler; the tokenizer manager's own follows it
        self.eos: set[int] = set()  # the model's own end tokens
        self.corrupt = ""  # a live tensor that the next load gets wrong
        self.nan = False  # logits are not finite
        self.deaf = False  # aborts overtake their requests
        self.out_of_memory = False  # the next token of any request
        self.instead: tuple[int, bytes] | None = None  # status and body of what `/generate` answers
        self.steps = asyncio.Event()  # while set, the scheduler makes steps
        self.steps.set()
        self.live = {name: tensor.clone() for name, tensor in _fused(dict(model.named_parameters()))}
        self.sampling_from = digest_of(model.named_parameters())
        self._max_running = max_running
        self._waiting: list[Req] = []
        self._running: list[Req] = []
        self._results: list[tuple[Req, int, float | None]] = []  # of the step that was launched last
        self._resumed = asyncio.Event()
        self._resumed.set()

    # --- the scheduler ------------------------------------------------------------------------------------------------

    async def schedule(self) -> None:
        """`Scheduler.event_loop_overlap`: launch a step, then count the tokens of the one before."""
        while True:
            await asyncio.sleep(0.001)
            await self.steps.wait()
            if self.paused:
                continue
            while self._waiting and len(self._running) < self._max_running:
                self._running.append(self._waiting.pop(0))
            launched = []
            for req in self._running:
                token, logprob = token_of(
                    req.params["sampling_seed"], len(req.prompt) + req.launched, self.sampling_from
                )
                launched.append((req, token, None if self.nan else logprob))
                req.launched += 1
            self._count()
            self._results = [one for one in launched if one[0] in self._running]

    def _count(self) -> None:
        """`process_batch_result`."""
        for req, token, logprob in self._results:
            req.output_ids.append(token)
            req.logprobs.append(logprob)
            self._check_finished(req, token)
            self._stream(req)
        self._results = []
        self._running = [req for req in self._running if req.finished is None]

    def _check_finished(self, req: Req, token: int) -> None:
        """`Req.update_finish_state`."""
        if req.to_finish is not None:
            req.finished = req.to_finish
        elif self.out_of_memory:  # `Scheduler.update_running_batch`
            message = "Out of memory even after retracting all other requests"
            req.finished = {"type": "abort", "message": message, "status_code": 500, "err_type": "InternalServerError"}
        elif token in {*req.params["stop_token_ids"], *self.eos}:
            req.finished = {"type": "stop", "matched": token}
        elif len(req.output_ids) >= req.params["max_new_tokens"]:
            req.finished = {"type": "length", "length": len(req.output_ids)}

    def _stream(self, req: Req) -> None:
        """`OutputStreamer`: the first token at once, then every `stream_interval`, and the end."""
        unsent = len(req.output_ids) - req.sent
        if req.finished or unsent >= req.params["stream_interval"] or (req.sent == 0 and unsent):
            req.sent = len(req.output_ids)
            req.parts.put_nowait(self._part(req))
            if req.finished:
                req.parts.put_nowait(None)

    def _part(self, req: Req) -> dict[str, Any]:
        """`TokenizerManager._handle_batch_output`."""
        meta: dict[str, Any] = {
            "id": req.rid,
            "finish_reason": req.finished,
            "prompt_tokens": len(req.prompt),
            "completion_tokens": len(req.output_ids),
            "weight_version": self.weight_version,
            "output_token_logprobs": [
                [logprob, token, None] for logprob, token in zip(req.logprobs, req.output_ids, strict=True)
            ],
        }
        if req.finished:
            meta["weight_versions"] = self._spans(req)
        return {"text": "", "output_ids": list(req.output_ids), "meta_info": meta}

    def _spans(self, req: Req) -> list[dict[str, Any]]:
        """`compute_weight_version_spans` and `add_weight_versions_to_meta_info`."""
        spans: list[dict[str, Any]] = []
        for version, end in [*req.events, (self.weight_version, len(req.output_ids))]:
            if spans and end <= spans[-1]["end"]:
                continue
            if spans and spans[-1]["version"] == version:
                spans[-1]["end"] = end
                continue
            spans.append({"version": version, "start": spans[-1]["end"] if spans else 0, "end": end})
        return spans

    def _relabel(self, version: str | None) -> None:
        """`Scheduler.record_weight_version_change`."""
        if version is None or version == self.weight_version:
            return
        for req in [*self._running, *self._waiting]:
            if req.output_ids:
                req.events.append((self.weight_version, len(req.output_ids)))
        self.weight_version = version

    # --- routes -------------------------------------------------------------------------------------------------------

    def pause_generation(self, body: dict[str, Any]) -> dict[str, Any]:
        """`Scheduler.pause_generation`: in_place leaves the results of the last step where they are."""
        self.paused = True
        self._resumed.clear()
        if body["mode"] == "retract":
            self._count()
            self._waiting = [*self._waiting, *self._running]
            for req in self._running:
                req.launched = len(req.output_ids)
            self._running = []
        return {"message": "Generation paused successfully.", "status": "ok"}

    def continue_generation(self, body: dict[str, Any]) -> dict[str, Any]:
        self.paused = False
        self._resumed.set()
        return {"message": "Generation continued successfully.", "status": "ok"}

    def update_weights_from_disk(self, body: dict[str, Any]) -> dict[str, Any] | str:
        """`SchedulerWeightUpdater.update_weights_from_disk`: loaded, labelled, then flushed, which fails while requests
        run. A str: HTTP 400."""
        files = sorted(Path(body["model_path"]).glob("*.safetensors"))
        if not files:
            return f"Failed to get weights iterator: no safetensors in {body['model_path']}"
        loaded = {name: tensor for file in files for name, tensor in load_file(file).items()}
        for name, tensor in _fused(loaded):
            if name in self.live:
                self.live[name] = tensor
        self.sampling_from = digest_of(loaded.items())
        if self.corrupt:
            self.live[self.corrupt].view(-1)[3] += 1
        self._relabel(body.get("weight_version"))
        if body.get("flush_cache", True) and self._running:
            return "Weights were updated, but the cache was not flushed because requests are still running or queued."
        return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    def weights_checker(self, body: dict[str, Any]) -> dict[str, Any]:
        """`WeightChecker._compute_checksum`, `tensor_hash` of tensors on a CPU."""
        assert body["action"] == "checksum"
        checksums = {
            name: hashlib.sha256(tensor.contiguous().numpy().tobytes()).digest()[:8].hex()
            for name, tensor in self.live.items()
        }
        rank = {"checksums": checksums, "per_gpu_checksum": "", "parallelism_info": []}
        return {"success": True, "message": "Success.", "ranks": [rank], "per_engine_checksum": ""}

    def abort_request(self, body: dict[str, Any]) -> None:
        """`Scheduler.abort_request`: by prefix; what waits ends at once, what runs after one more step."""
        if self.deaf and not body.get("abort_all"):
            return
        ended = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        for req in [*self._waiting, *self._running]:
            if body.get("abort_all") or req.rid.startswith(body["rid"]):
                if req in self._waiting:
                    self._waiting.remove(req)
                    req.finished = {"type": "abort", "message": "Abort in waiting queue"}
                    self._stream(req)
                else:
                    req.to_finish = ended

    async def generate(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """`TokenizerManager.generate_request`."""
        self.bodies.append(body)
        await self._resumed.wait()
        if len(body["input_ids"]) > self.info["max_req_input_len"]:
            yield {"error": {"message": "The input is longer than the model's context length.", "code": 400}}
            return
        req = Req(body["rid"], body["input_ids"], body["sampling_params"])
        self._waiting.append(req)
        try:
            while (part := await req.parts.get()) is not None:
                yield part
        finally:  # of a client that left, too
            self._waiting = [one for one in self._waiting if one is not req]
            self._running = [one for one in self._running if one is not req]

    # --- HTTP ---------------------------------------------------------------------------------------------------------

    async def respond(self, route: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if route == "/generate" and self.instead is not None:
            self.answer(writer, *self.instead)
        elif route == "/generate":
            await self.stream(writer, self.generate(body))
        else:
            self.calls.append((route, body))
            self.answer(writer, *self._respond(route, body))

    def _respond(self, route: str, body: dict[str, Any]) -> tuple[int, bytes]:
        if route == "/server_info":
            return 200, json.dumps(self.info).encode()
        if route == "/model_info":
            return 200, json.dumps({"weight_version": self.weight_version}).encode()
        answer = getattr(self, route[1:])(body)
        if isinstance(answer, str):
            return 400, json.dumps({"success": False, "message": answer}).encode()
        return 200, b"" if answer is None else json.dumps(answer).encode()


def _fused(tensors: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """`LlamaForCausalLM.load_weights` into stacked parameters, and `VocabParallelEmbedding.weight_loader`, which fills
    up to a multiple of 64 rows with zeros. A tied head is no parameter of its own."""
    stacked: dict[str, list[tuple[int, torch.Tensor]]] = {}
    plain: list[tuple[str, torch.Tensor]] = []
    for name, tensor in tensors.items():
        tensor = tensor.detach().clone()
        for fused, shard, place in STACKED:
            if shard in name:
                stacked.setdefault(name.replace(shard, fused), []).append((place, tensor))
                break
        else:
            if "embed_tokens" in name or "lm_head" in name:
                tensor = torch.cat([tensor, torch.zeros(-len(tensor) % 64, *tensor.shape[1:])])
            plain.append((name, tensor))
    return [
        *plain,
        *(
            (name, torch.cat([t for _, t in sorted(parts, key=lambda part: part[0])]))
            for name, parts in stacked.items()
        ),
    ]


@asynccontextmanager
async def serving(double: SglangDouble) -> AsyncIterator[SglangDouble]:
    """The double behind a port of this host."""
    async with listening(double):
        schedule = asyncio.create_task(double.schedule())
        try:
            yield double
        finally:
            schedule.cancel()
