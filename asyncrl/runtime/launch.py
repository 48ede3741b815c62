"""What torchrun tells each process that it starts: its place among the learner's ranks. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from asyncrl.config.errors import quoted
from asyncrl.config.recipe import Recipe


class LaunchError(Exception):
    """torchrun was told one thing and the recipe another, or its hosts cannot reach each other; says which, and the
    fix."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One process of `torchrun ... asyncrl learner`. address, port: of the store that torchrun serves for its processes
    and that lives as long as it does, whatever it starts again."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Launch | None:
        """None: torchrun did not start this process. Raises LaunchError.

        >>> print(Launch.of({"RANK": "0", "WORLD_SIZE": "2"}))  # others set these too
        None
        """
        if "TORCHELASTIC_RUN_ID" not in environ:
            return None
        if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            raise LaunchError("torchrun serves no store for its processes: unset TORCH_DISABLE_SHARE_RDZV_TCP_STORE")
        numbers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        rank, size, local_rank, local_size = (int(environ[name]) for name in numbers)
        return cls(rank, size, local_rank, local_size, environ["MASTER_ADDR"], int(environ["MASTER_PORT"]))

    @property
    def one_host(self) -> bool:
        """Whether all ranks are certain to be on this host: one torchrun has started them."""
        return self.local_size == self.size

    def overrides(self, recipe: Recipe) -> list[str]:
        """What `--set` must add to a recipe whose ranks torchrun starts: their number, where it leaves that open.

        Raises LaunchError where it says another one, or names GPUs."""
        if recipe.learner.devices is not None:
            raise LaunchError(
                f"learner.devices is {quoted(recipe.learner.devices)}, but under torchrun each rank has the GPU of its "
                "number on its host. Leave learner.devices out; CUDA_VISIBLE_DEVICES says which GPUs torchrun may use"
            )
        if recipe.learner.ranks not in (1, self.size):
            raise LaunchError(
                f"learner.ranks is {recipe.learner.ranks}, but torchrun started {self.size} processes (nodes x "
                f"--nproc-per-node). Start as many, or leave learner.ranks out: it is then taken from torchrun"
            )
        return [] if recipe.learner.ranks == self.size else [f"learner.ranks={self.size}"]
