"""Whether a run fits into the memory that there is, before anything heavy starts. Pure, but for `look`.

Parts are planned from the recipe and the model's shapes, learner ranks and the engines of one collector alike. A run is
refused if what is certain to be needed exceeds all that a memory has; what is only estimated, or what others hold now,
is a warning. A model whose shapes are not known is planned by nobody and refused for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from asyncrl.collectors.engines.vllm_start import ON_A_CPU
from asyncrl.config.derived import derive
from asyncrl.config.recipe import Recipe, TransformersEngine, VllmEngine
from asyncrl.config.sizes import size_about, size_bytes
from asyncrl.learners.memory import PROCESS, SHARED, SIZE, Part, image_parts, rank_parts, row_tokens
from asyncrl.learners.shapes import Shapes, shapes_of
from asyncrl.runtime.room import Machine, Room, machine

CLOSE = 0.9
"""Share of a memory from which on a plan is close to its limit."""


class DoesNotFit(Exception):
    """The run needs more memory than there is: one to three lines, the largest part and the keys that make it less."""


@dataclass(frozen=True, slots=True)
class Need:
    """What is needed of one memory, bytes. name: for people. certain: the sum of what is; least, most: of all. largest:
    of what is certain, with its bytes."""

    name: str
    room: Room
    certain: int
    least: int
    most: int
    largest: tuple[Part, int]


@dataclass(frozen=True, slots=True)
class Plan:
    """parts: empty where `unknown` says why nothing is planned."""

    parts: tuple[Part, ...]
    machine: Machine
    unknown: str = ""

    @property
    def needs(self) -> list[Need]:
        """By memory: the host's, what of it is /dev/shm, and the first GPU, which rank 0 and the engines have."""
        gpus, shm = self.machine.gpus, self.machine.shared
        shared = [part for part in self.parts if part.where == SHARED]
        host = [part for part in self.parts if not (gpus and part.on_gpu) and (shm is not None or part not in shared)]
        needs = [_need("this machine's memory", self.machine.host, host)]
        if shm is not None:
            needs.append(_need("/dev/shm", shm, shared))
        if gpus:
            each = [part for part in self.parts if part.on_gpu]
            needs.append(_need("GPU 0", gpus[0], each, one_gpu=True))
        return [need for need in needs if need is not None]

    def table(self) -> str:
        """Every part, and what of each memory they take."""
        if self.unknown:
            return f"memory: not planned, {self.unknown}\n"
        rows = [
            (
                part.where,
                part.what + (f" x {part.count}" if part.count > 1 else ""),
                f"{'' if part.certain else '~ '}{_span(*part.span())}",
                "GPU" if part.on_gpu and self.machine.gpus else "",
            )
            for part in self.parts
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}  {d}".rstrip() for a, b, c, d in rows]
        return "\n".join(["memory, by plan (~: estimated):", *lines, self.line()]) + "\n"

    def line(self) -> str:
        """One line: what is needed of which memory."""
        if self.unknown:
            return self.table().strip()
        return "memory: " + "; ".join(
            f"{_span(need.least, need.most)} of {size_about(need.room.total)} ({need.name})" for need in self.needs
        )

    def check(self) -> str:
        """A warning where it is close, else "". Raises DoesNotFit."""
        for need in self.needs:
            if need.certain > need.room.total:
                least, total, (largest, nbytes) = size_about(need.certain), size_about(need.room.total), need.largest
                raise DoesNotFit(
                    f"this run does not fit: it needs {least} of {need.name} at least, of {total}. "
                    f"The largest part: {largest.what} ({largest.where}), {size_about(nbytes)}.\n"
                    f"What makes it less: {', '.join(largest.keys)} (docs/memory.md)"
                )
        return "\n".join(
            f"warning: {need.name} may run out: {_span(need.least, need.most)} are planned, "
            f"{size_about(need.room.free)} are free (`asyncrl run --dry-run` shows the parts)"
            for need in self.needs
            if need.least > CLOSE * need.room.free
        )


async def look(recipe: Recipe, folder: Path | None, *, collects: bool) -> Plan:
    """The plan on this machine. folder: of the model, None for a built-in one. collects: a collector runs here too."""
    return plan(recipe, shapes_of(recipe.model.path, folder), await machine(), collects=collects)


def plan(recipe: Recipe, shapes: Shapes | str, there: Machine, *, collects: bool) -> Plan:
    """shapes: of the model, or why they are not known."""
    if isinstance(shapes, str):
        return Plan((), there, unknown=shapes)
    parts = [*rank_parts(recipe, shapes), *image_parts(recipe, shapes)]
    if collects:
        parts += engine_parts(recipe, shapes, there)
    return Plan(tuple(parts), there)


def engine_parts(recipe: Recipe, shapes: Shapes, there: Machine) -> list[Part]:
    """Of the engines in one collector. A server that runs already, or a simulated engine, takes nothing here."""
    engine, count = recipe.collector.engine, recipe.collector.engines
    if not isinstance(engine, TransformersEngine | VllmEngine):
        return []
    process = Part("collector", "process", PROCESS, certain=False)
    served = SIZE[recipe.model.dtype] * shapes.parameters
    if isinstance(engine, TransformersEngine):
        return [*_transformers_parts(recipe, shapes, served, gpu=bool(there.gpus)), process]
    where = "vLLM engine"
    if there.gpus and engine.kv_cache_memory_bytes is None:
        keys = ("collector.engine.gpu_memory_utilization", "collector.engines")
        most = int(engine.gpu_memory_utilization * there.gpus[0].total)
        what = f"{engine.gpu_memory_utilization:g} of the GPU"
        parts = [Part(where, what, most, certain=count == 1, keys=keys, on_gpu=True, count=count)]
    else:
        given = engine.kv_cache_memory_bytes
        cache = ON_A_CPU["kv_cache_memory_bytes"] if given is None else size_bytes(given)
        keys = ("collector.engine.kv_cache_memory_bytes", "collector.engines")
        parts = [
            Part(where, "weights", served, True, ("model.dtype", "model.path"), on_gpu=True, count=count),
            Part(where, "keys and values", cache, True, keys, on_gpu=True, count=count),
        ]
    return [*parts, process]


def _transformers_parts(recipe: Recipe, shapes: Shapes, served: int, *, gpu: bool) -> list[Part]:
    """A CPU's engine serves weights from where the learner wrote them; elsewhere it has them, and the next ones."""
    where, count, keys = "engine", recipe.collector.engines, ("model.dtype", "model.path")
    adapter = recipe.model.lora is not None and recipe.weights.lora == "adapter"
    parts = []
    if adapter:
        parts.append(Part(where, "base, float32", 4 * shapes.parameters, True, ("weights.lora",), True, count))
    if gpu or adapter or recipe.weights.transport not in ("auto", "shm"):
        parts.append(Part(where, "served weights", served, True, keys, True, count))
        parts.append(Part(where, "staged weights", served, False, keys, True, count, least=0))
    slots = derive(recipe).engine_slots
    token = 2 * shapes.layers * shapes.kv_heads * shapes.head_dim * SIZE[recipe.model.dtype]
    row = row_tokens(recipe, shapes)
    cache = slots * token * row * 3 // 2  # columns are had in advance, half as many again
    least = slots * token * min(recipe.collector.sampling.max_tokens, row)
    smaller = ("collector.engine.slots", "model.max_length", "collector.sampling.max_tokens")
    parts.append(Part(where, f"keys and values of {slots} slots", cache, False, smaller, True, count, least=least))
    return parts


def _need(name: str, room: Room, parts: Iterable[Part], *, one_gpu: bool = False) -> Need | None:
    """one_gpu: of parts that lie each on its own, it has one."""
    counted = [(part, *part.span(1 if one_gpu and part.apart else None)) for part in parts]
    certain = [(part, most) for part, _, most in counted if part.certain]
    if not certain:
        return None
    return Need(
        name,
        room,
        certain=sum(most for _, most in certain),
        least=sum(least for _, least, _ in counted),
        most=sum(most for _, _, most in counted),
        largest=max(certain, key=lambda one: one[1]),
    )


def _span(least: int, most: int) -> str:
    texts = list(dict.fromkeys(size_about(nbytes) for nbytes in (least, most)))
    return " to ".join(texts)
