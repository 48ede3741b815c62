"""What several learner ranks do together. One rank has `ALONE`, in which nothing is ever sent.

Ranks are processes, of one host or several. Rank 0 leases, commits, publishes and saves; it tells the others what to do
(`commands.py`), and all then make the same collectives in the same order. Parameters are sharded by FSDP2; gradients
are summed over ranks, never averaged: the step divides once, by the tokens of all.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import psutil
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from asyncrl.learners.commands import Command, End, decoded, encoded
from asyncrl.learners.gathering import Gathering
from asyncrl.learners.layers import decoder_layers
from asyncrl.weights.manifest import Pieces

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


class Watch(Protocol):
    """Who knows how the processes of the other ranks are. Only rank 0 has one."""

    def check(self) -> None:
        """Raises the error that names the rank, if one has ended."""

    async def cause(self, error: Exception) -> Exception:
        """What `error` of rank 0 comes from: the end of a rank that names it, or itself."""


class Ranks(Protocol):
    """The ranks of one learner, seen from one of them. All but `own`, `refresh`, `tell`, `check` and `cause` are
    collectives where `size` is above 1: every rank must call them, in the same order."""

    rank: int
    size: int

    def shard(self, model: PreTrainedModel, *, offload: bool = False) -> PreTrainedModel:
        """Put `model` where this rank computes, its part of it if there are several ranks. Returns the model whose
        weights are whole: itself, or on rank 0 a copy on the CPU that `gather` brings up to date.

        offload: where that is a GPU and there is a process group, parameters and their gradients stay in host memory,
        and a layer is on the GPU while it is computed."""

    def gather(self, model: PreTrainedModel, whole: PreTrainedModel) -> None:
        """Copy the trained parameters, one after the other, into `whole` on rank 0."""

    def total(self, values: Sequence[float]) -> list[float]:
        """The sum over ranks of each of these numbers, in float64."""

    def most(self, count: int) -> int:
        """The largest of the ranks' counts."""

    def collect(self, own: Tensor, columns: Sequence[int]) -> list[Tensor]:
        """On rank 0: what each rank gave, `own` first. float32 [k, n], with n of rank r in `columns[r]`; else []."""

    def whole(self, tensor: Tensor) -> Tensor:
        """A parameter, its gradient or a norm of them, with all its elements, on every rank."""

    def kept(self, tensor: Tensor) -> Tensor:
        """`whole` on rank 0; empty on the others, which have no use for it and no room."""

    def part_of(self, tensor: Tensor, like: Tensor) -> Tensor:
        """This rank's part of a whole tensor that is sharded as the parameter `like` is."""

    def own(self, tensor: Tensor) -> Tensor:
        """This rank's part of a parameter: the memory itself, to be read or written to. No collective."""

    def refresh(self, model: PreTrainedModel) -> None:
        """Parameters were written to between two passes: the next one gathers them anew. No collective."""

    def tell(self, command: Command) -> None:
        """Rank 0: have the others do this."""

    def check(self) -> None: ...

    async def cause(self, error: Exception) -> Exception: ...


class Alone:
    """One rank: no process group, every sum its own."""

    rank = 0
    size = 1

    def shard(self, model: PreTrainedModel, *, offload: bool = False) -> PreTrainedModel:
        nn.Module.to(model, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        return model

    def gather(self, model: PreTrainedModel, whole: PreTrainedModel) -> None:
        pass

    def total(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def most(self, count: int) -> int:
        return count

    def collect(self, own: Tensor, columns: Sequence[int]) -> list[Tensor]:
        return [own]

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor

    def kept(self, tensor: Tensor) -> Tensor:
        return tensor

    def part_of(self, tensor: Tensor, like: Tensor) -> Tensor:
        return tensor

    def own(self, tensor: Tensor) -> Tensor:
        return tensor

    def refresh(self, model: PreTrainedModel) -> None:
        pass

    def tell(self, command: Command) -> None:
        pass

    def check(self) -> None:
        pass

    async def cause(self, error: Exception) -> Exception:
        return error


ALONE = Alone()


class Meeting(NamedTuple):
    """Where the ranks of one start find each other, and this rank's place on its host."""

    store: Store  # nobody else's keys are in it
    interface: str  # of this host's network, on which Gloo listens
    gpu: int  # of this host's GPUs, where it has any
    neighbours: int  # ranks on this host, this one included


def in_folder(folder: Path, rank: int, size: int) -> Meeting:
    """All ranks are on this host and meet through a file: no port is opened for it."""
    from torch import distributed as dist

    store = dist.FileStore(str(folder / "store"), size)  # type: ignore[attr-defined]  # public, but not in __all__
    return Meeting(store, loopback(), gpu=rank, neighbours=size)


class Sharded:
    """One of several ranks: Gloo on the CPU, NCCL where every rank has a GPU."""

    def __init__(
        self, rank: int, size: int, *, meeting: Meeting, step_s: float, silence_s: float, watch: Watch | None = None
    ) -> None:
        """step_s: seconds one collective of a step may take. silence_s: longest that rank 0 may leave the others
        without a command; it waits for batches then, within limits of its own. Raises RuntimeError if they do not meet
        in time, ValueError if there are GPUs, but not one for each rank.
        """
        from torch import distributed as dist  # here: one rank runs without it

        gpus = torch.cuda.device_count()
        if 0 < gpus < meeting.neighbours:
            raise ValueError(
                f"{meeting.neighbours} of learner.ranks {size} are on this host, which has {gpus} GPU(s): "
                "one a rank is needed"
            )
        # Gloo would listen on whatever address the host's name stands for.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", meeting.interface)
        self.rank = rank
        self.size = size
        self._device = torch.device("cuda", meeting.gpu) if gpus else torch.device("cpu")
        self.use_device()
        self._watch = watch
        self._dist = dist
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if gpus else "gloo",
            store=meeting.store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=step_s),
        )
        # The limit is each process's own: the others wait for rank 0's next command, it waits for them to take it.
        self._control = dist.new_group(backend="gloo", timeout=timedelta(seconds=silence_s if rank else step_s))

    def use_device(self) -> None:
        """Have torch take this rank's device as the current one, which is every thread's own."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def shard(self, model: PreTrainedModel, *, offload: bool = False) -> PreTrainedModel:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

        whole = copy.deepcopy(model) if self.rank == 0 else model
        policy = OffloadPolicy()
        if offload:
            policy = CPUOffloadPolicy(pin_memory=self._device.type == "cuda")
        else:
            nn.Module.to(model, self._device)
        mesh = init_device_mesh(self._device.type, (self.size,))
        for layer in decoder_layers(model):
            fully_shard(layer, mesh=mesh, offload_policy=policy)
        fully_shard(model, mesh=mesh, offload_policy=policy)
        device: Any = self._device
        model.compute_device = device
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # else FSDP scales within the sum, which Gloo cannot
        return whole

    @torch.no_grad()
    def gather(self, model: PreTrainedModel, whole: PreTrainedModel) -> None:
        targets = dict(whole.named_parameters()) if self.rank == 0 else {}
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:  # the same as when it was loaded
                continue
            full = self.whole(parameter)
            if self.rank == 0:
                targets[name].copy_(full)

    def stream(self, model: PreTrainedModel, dtype: torch.dtype) -> Iterator[tuple[str, Pieces]]:
        """Rank 0: the trained parameters one after the other, in `dtype`, while the others `give` theirs."""
        return Gathering(model, dtype, rank=self.rank, size=self.size).receive()

    def give(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        """Another rank: its part of what rank 0's `stream` yields."""
        Gathering(model, dtype, rank=self.rank, size=self.size).send()

    def total(self, values: Sequence[float]) -> list[float]:
        sums = torch.tensor(values, dtype=torch.float64)
        self._dist.all_reduce(sums)
        return [float(value) for value in sums]

    def most(self, count: int) -> int:
        largest = torch.tensor([count])
        self._dist.all_reduce(largest, op=self._dist.ReduceOp.MAX)
        return int(largest)

    def collect(self, own: Tensor, columns: Sequence[int]) -> list[Tensor]:
        if self.rank != 0:
            self._dist.send(own.contiguous(), dst=0)
            return []
        parts = [own]
        for rank in range(1, self.size):
            part = torch.empty((own.shape[0], columns[rank]), dtype=own.dtype)
            self._dist.recv(part, src=rank)
            parts.append(part)
        return parts

    def whole(self, tensor: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def kept(self, tensor: Tensor) -> Tensor:
        full = self.whole(tensor)
        return full.cpu() if self.rank == 0 else torch.empty(0)

    def part_of(self, tensor: Tensor, like: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor, distribute_tensor

        if not isinstance(like, DTensor) or tensor.shape != like.shape:  # a count of steps is everybody's
            return tensor
        whole = tensor.to(self._device)
        # No source rank: each cuts its part out of the same file instead of being sent it.
        part = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
        local = part.to_local().to(like.to_local().device)  # the CPU's, with `learner.cpu_offload`
        return DTensor.from_local(
            local, part.device_mesh, part.placements, run_check=False, shape=part.shape, stride=part.stride()
        )

    def own(self, tensor: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def refresh(self, model: PreTrainedModel) -> None:
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # without a backward pass the outermost one keeps what it has gathered

    def tell(self, command: Command) -> None:
        content = torch.frombuffer(bytearray(encoded(command)), dtype=torch.uint8)
        self._dist.broadcast(torch.tensor([len(content)]), src=0, group=self._control)
        self._dist.broadcast(content, src=0, group=self._control)

    def told(self) -> Command:
        """The other ranks: the next command of rank 0, whose end also ends this wait."""
        length = torch.tensor([0])
        self._dist.broadcast(length, src=0, group=self._control)
        content = torch.empty(int(length), dtype=torch.uint8)
        self._dist.broadcast(content, src=0, group=self._control)
        return decoded(content.numpy().tobytes())

    def check(self) -> None:
        if self._watch is not None:
            self._watch.check()

    async def cause(self, error: Exception) -> Exception:
        return error if self._watch is None else await self._watch.cause(error)

    def close(self) -> None:
        """Leave the others; as rank 0, tell them first that training is over."""
        if self.rank == 0:
            with suppress(RuntimeError):  # one that is gone needs no telling: nothing is left to do together
                self.tell(End())
        self._dist.destroy_process_group()


def loopback() -> str:
    """The name of this host's own network interface: lo, lo0."""
    for name, addresses in psutil.net_if_addrs().items():  # type: ignore[no-untyped-call]
        if any(address.address == "127.0.0.1" for address in addresses):
            return str(name)
    raise ValueError("learner.ranks above 1 needs a loopback interface (127.0.0.1), and this host has none")
