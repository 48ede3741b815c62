"""asyncrl's part of a vLLM worker process: its images as a weight transfer of vLLM's, and the proof of what is served.

vLLM imports this module by name (`worker_extension_cls`) before it makes its weight transfer engine, so that ours is
registered by then. The engine's adapter calls, while generation is paused:

    start_weight_update - update_weights(offer) - finish_weight_update - asyncrl_prove

The offer is one of transport shm: the worker maps the image and gives its tensors to vLLM's own loader, which fuses,
pads and packs them. What comes of that is then read back (`vllm_served.py`) and compared.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from asyncrl.collectors.engines import vllm_tether
from asyncrl.collectors.engines.vllm_about import TRANSFER, About
from asyncrl.collectors.engines.vllm_served import ServedModel
from asyncrl.collectors.engines.vllm_words import LastWords
from asyncrl.weights.base import StagedWeights, WeightsError
from asyncrl.weights.manifest import Form, combine, tensor_bytes
from asyncrl.weights.reach import here
from asyncrl.weights.shm import ShmReceiver

MAP_S = 60.0
"""For mapping an image, of which nothing is copied or hashed: it only bounds what hangs."""


@dataclass
class NoInit(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM has no types where it is not installed
    """There is nobody to meet: each update says where its image is."""


@dataclass
class ImageUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """One whole version. `offer`: of transport shm."""

    offer: dict[str, Any] = field(default_factory=dict)


class ImageTransfer(WeightTransferEngine):  # type: ignore[misc]
    """Loads images. `published` is what was loaded last, until it was compared with what is served."""

    init_info_cls = NoInit
    update_info_cls = ImageUpdate
    supports_draft_weight_update = False

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.published: StagedWeights | None = None
        self._receiver = ShmReceiver(mapped=True)

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """See NoInit."""

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """The base class waits for an accelerator afterwards, and fails where there is none; nothing here outlasts the
        call but copies to a GPU, in the stream that then computes."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: ImageUpdate) -> None:
        # Hashed is what comes of the bytes, not the bytes: see `Proof`.
        self.published = self._receiver.stage(update_info.offer, deadline_s=MAP_S, verify=False)
        self.model.load_weights(iter(self.published.tensors.items()))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        for head in self.model.modules():
            # A tied head is not loaded, its table is: vLLM 0.32 on a CPU goes on with the head that it packed before.
            if isinstance(head, ParallelLMHead) and hasattr(head, "cpu_linear") and head.weight.numel():
                dispatch_cpu_unquantized_gemm(head, remove_weight=False)

    def shutdown(self) -> None:
        self.published = None
        self._receiver.close()


WeightTransferEngineFactory.register_engine(TRANSFER, ImageTransfer)

# At each update it warns of layers without weights of their own (a tied head, rotary tables): `prove` knows better.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)

vllm_tether.tie()


@dataclass(frozen=True, slots=True)
class Proof:
    """What was served when it was compared with what was published.

    tied: alias -> source. live: by tensor, the checksum as `_as_read` finds it again.
    """

    checksum: str
    columns: Mapping[str, int]
    tied: Mapping[str, str]
    live: Mapping[str, str]


@torch.no_grad()
def prove(served: ServedModel, published: StagedWeights) -> Proof:
    """Read back what is served and hash it. The proof's checksum is that of `published` exactly if every tensor is bit
    for bit what was published; of matrices that were read through a kernel: up to the signs of zeros, which those of
    the published ones replace. Raises WeightsError if a tied tensor is not its source."""
    hashes: list[str] = []
    live: dict[str, str] = {}
    columns = {name: tensor.shape[-1] for name, tensor in published.tensors.items()}
    for name, tensor in published.tensors.items():
        found, packed = served.tensor(name, columns[name])
        live[name] = _as_read(name, found)
        if packed:
            found = torch.where((found == 0) & (tensor == 0), tensor, found)
        hashes.append(xxhash.xxh3_64_hexdigest(tensor_bytes(name, found)))
    _check_tied(served, published.tied, columns)
    return Proof(combine(hashes), columns, dict(published.tied), live)


@torch.no_grad()
def prove_again(served: ServedModel, proof: Proof) -> str:
    """The proof's checksum if the same is served now; else one of what is."""
    live = {name: _as_read(name, served.tensor(name, columns)[0]) for name, columns in proof.columns.items()}
    _check_tied(served, proof.tied, proof.columns)
    return proof.checksum if live == proof.live else combine(live.values())


def _check_tied(served: ServedModel, tied: Mapping[str, str], columns: Mapping[str, int]) -> None:
    for alias, source in tied.items():
        head, _ = served.tensor(alias, columns[source], multiplied=True)
        if not torch.equal(head, served.tensor(source, columns[source])[0]):
            raise WeightsError(f"{alias} computes with other values than {source}, which it is tied to")


def _as_read(name: str, found: torch.Tensor) -> str:
    """The checksum with all zeros positive."""
    return xxhash.xxh3_64_hexdigest(tensor_bytes(name, found + 0.0))


class WorkerPart:
    """Mixed into vLLM's worker, whose attributes it uses: what the adapter calls in the worker. What is wrong with the
    weights is returned, in words, for vLLM would turn an exception into a traceback of three processes."""

    vllm_config: Any
    weight_transfer_engine: ImageTransfer
    _weight_update_active: bool
    asyncrl_proof: Proof | None = None

    def asyncrl_about(self) -> dict[str, Any]:
        """An `About`, for a server whose configuration nobody here has chosen."""
        config = self.vllm_config
        transforms = {
            "--quantization": config.model_config.quantization is not None,
            "--enable-lora": config.lora_config is not None,
            "--speculative-config": config.speculative_config is not None,
            "--enable-expert-parallel": config.parallel_config.enable_expert_parallel,
        }
        about = About(
            memory=here().memory,
            transfer="" if config.weight_transfer_config is None else config.weight_transfer_config.backend,
            logprobs_mode=str(config.model_config.logprobs_mode),
            dtype=str(config.model_config.dtype).removeprefix("torch."),
            head_dtype=str(config.model_config.head_dtype).removeprefix("torch."),
            slots=config.scheduler_config.max_num_seqs,
            max_length=config.model_config.max_model_len,
            vocabulary=config.model_config.get_vocab_size(),
            workers=config.parallel_config.world_size_across_dp,
            api_processes=config.parallel_config._api_process_count,
            max_logprobs=config.model_config.max_logprobs,
            own_ends=not config.model_config.skip_tokenizer_init or config.model_config.generation_config != "vllm",
            transforms=tuple(name for name, used in transforms.items() if used),
            cpu=current_platform.is_cpu(),
            chunked_prefill=config.scheduler_config.enable_chunked_prefill,
            updating=self._weight_update_active,
        )
        found: dict[str, Any] = msgspec.to_builtins(about)
        return found

    def asyncrl_last_words(self, file: str) -> None:
        """Have the error that ends this process written into a file."""
        logging.getLogger("vllm").addHandler(LastWords(Path(file)))

    def asyncrl_check(self, forms: Sequence[Sequence[Any]], tied: dict[str, str]) -> str:
        """What `ServedModel.check` says against weights of these (name, dtype, shape); "" = nothing."""
        try:
            self._asyncrl_served().check([Form(name, dtype, tuple(shape)) for name, dtype, shape in forms], tied)
        except WeightsError as error:
            return str(error)
        return ""

    def asyncrl_prove(self) -> tuple[str, str]:
        """(checksum of what is served now, what is wrong with it)."""
        transfer = self.weight_transfer_engine
        try:
            if transfer.published is None:
                assert self.asyncrl_proof is not None, "something is served first"
                return prove_again(self._asyncrl_served(), self.asyncrl_proof), ""
            self.asyncrl_proof = prove(self._asyncrl_served(), transfer.published)
            transfer.published = None  # its memory is the publisher's again
        except WeightsError as error:
            return "", str(error)
        return self.asyncrl_proof.checksum, ""

    def _asyncrl_served(self) -> ServedModel:
        return ServedModel(self.weight_transfer_engine.model)
