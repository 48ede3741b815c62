"""Whether a run fits into the memory that there is, before anything heavy starts. Pure, but for `look`.

Parts are planned from the recipe and the model's shapes, learner ranks, the engines of one collector and its reward
models alike, each on the GPU that it is placed on. A run is refused if what is certain to be needed exceeds all that a
memory has; what is only estimated, or what others hold now, is a warning. A model whose shapes are not known is planned
by nobody and refused for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from asyncrl.collectors.engines.vllm_start import ON_A_CPU
from asyncrl.config.derived import derive
from asyncrl.config.devices import Placement, computes_here, placed
from asyncrl.config.recipe import Recipe, TransformersEngine, VllmEngine
from asyncrl.config.sizes import size_about, size_bytes
from asyncrl.learners.memory import PROCESS, SHARED, SIZE, Part, image_parts, rank_parts, row_tokens
from asyncrl.learners.shapes import Shapes, shapes_of
from asyncrl.runtime.reward_model_memory import reward_model_parts, reward_model_shapes
from asyncrl.runtime.room import Machine, Room, machine

BUFFERS = 2
"""As `weights/cuda_ipc.py` has them, which loads torch."""

CLOSE = 0.9
"""Share of a memory from which on a plan is close to its limit."""

FIRST = "rank 0"
"""Where what only the learner's first rank has lies."""


class DoesNotFit(Exception):
    """The run needs more memory than there is: one to three lines, the largest part and the keys that make it less."""


@dataclass(frozen=True, slots=True)
class Need:
    """What is needed of one memory, bytes. name: for people. certain: the sum of what is; least, most: of all. largest:
    of what is certain, with its bytes, and of the least of all that a recipe can make smaller."""

    name: str
    room: Room
    certain: int
    least: int
    most: int
    largest: tuple[Part, int]
    largest_of_all: tuple[Part, int]


@dataclass(frozen=True, slots=True)
class Plan:
    """parts: empty where `unknown` says why nothing is planned. inside: for what there must be room in what each vLLM
    engine takes of its GPU; no part of any sum. left_out: reward models of which nothing is known, each with why."""

    parts: tuple[Part, ...]
    machine: Machine
    placement: Placement
    inside: tuple[Part, ...] = ()
    unknown: str = ""
    left_out: tuple[str, ...] = ()

    @property
    def needs(self) -> list[Need]:
        """By memory: the host's, what of it is /dev/shm, each GPU that is used, and what an engine takes of one. GPUs
        of which the same is needed are one entry."""
        gpus, shm = self.machine.gpus, self.machine.shared
        shared = [part for part in self.parts if part.where == SHARED]
        host = [part for part in self.parts if not (gpus and part.on_gpu) and (shm is not None or part not in shared)]
        needs = [_need("the machine's memory", self.machine.host, [(part, part.count) for part in host])]
        if shm is not None:
            needs.append(_need("/dev/shm", shm, [(part, part.count) for part in shared]))
        alike: dict[Need, list[int]] = {}
        own = {part.gpu for part in self.parts if part.gpu is not None}
        for gpu in sorted({*self.placement.ranks, *self.placement.engines, *own}):
            if (need := self._of(gpu)) is not None:
                alike.setdefault(need, []).append(gpu)
        needs += [replace(need, name=_named(same)) for need, same in alike.items()]
        if self.inside:
            share = next(part.most for part in self.parts if part.where == self.inside[0].where)
            room = Room(share, share)
            needs.append(_need("what a vLLM engine takes of its GPU", room, [(part, 1) for part in self.inside]))
        return [need for need in needs if need is not None]

    def _of(self, gpu: int) -> Need | None:
        """Of what lies on the GPU: a rank's parts for each rank there, an engine's for each engine."""
        there = [(part, self._gpus(part).count(gpu)) for part in self.parts if part.on_gpu]
        return _need("", self.machine.gpus[gpu], [(part, count) for part, count in there if count])

    def _gpus(self, part: Part) -> tuple[int, ...]:
        """On which it lies, of all alike."""
        if part.gpu is not None:
            return (part.gpu,)
        if part.where == FIRST:
            return self.placement.ranks[:1]
        return self.placement.ranks if part.apart else self.placement.engines

    def table(self) -> str:
        """Every part, and what of each memory they take."""
        if self.unknown:
            return f"memory: not planned, {self.unknown}\n"
        rows = [
            (
                part.where,
                part.what + (f" x {part.count}" if part.count > 1 else ""),
                f"{'' if part.certain else '~ '}{_span(*part.span())}",
                self._where(part),
            )
            for part in (*self.parts, *self.inside)
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}  {d}".rstrip() for a, b, c, d in rows]
        return "\n".join(["memory, by plan (~: estimated):", *lines, self.line()]) + "\n"

    def _where(self, part: Part) -> str:
        if part in self.inside:
            return "in it"
        if not part.on_gpu or not self.machine.gpus:
            return ""
        return _named(sorted(set(self._gpus(part))))

    def line(self) -> str:
        """One line: what is needed of which memory."""
        if self.unknown:
            return self.table().strip()
        planned = "; ".join(
            f"{_span(need.least, need.most)} of {size_about(need.room.total)} ({need.name})" for need in self.needs
        )
        return "; ".join([f"memory: {planned}", *(f"not planned: {one}" for one in self.left_out)])

    def check(self, *, by_estimate: bool = False) -> str:
        """A warning where it is close, else "". Raises DoesNotFit; by_estimate: also where only the least of what is
        estimated says so, which refuses no run, but is the better answer for a machine that is yet to be had."""
        for need in self.needs:
            certain = need.certain > need.room.total
            if certain or (by_estimate and need.least > need.room.total):
                least, how = (need.certain, "at least") if certain else (need.least, "by estimate")
                largest, nbytes = need.largest if certain else need.largest_of_all
                raise DoesNotFit(
                    f"this run does not fit: it needs {size_about(least)} of {need.name} {how}, of "
                    f"{size_about(need.room.total)}. The largest part: {largest.what} ({largest.where}), "
                    f"{size_about(nbytes)}.\n"
                    f"What makes it less: {', '.join(largest.keys)} (docs/memory.md)"
                )
        return "\n".join(
            f"warning: {need.name} may run out: {_span(need.least, need.most)} are planned, "
            f"{size_about(need.room.free)} are free (`asyncrl run --dry-run` shows the parts)"
            for need in self.needs
            if need.least > CLOSE * need.room.free
        )


async def look(recipe: Recipe, folder: Path | None, *, collects: bool, neighbours: int | None = None) -> Plan:
    """The plan on this machine. folder: of the model, None for a built-in one. collects: a collector runs here too.
    neighbours: the learner's ranks that do; None: all. Raises RecipeError if the machine has too few GPUs."""
    shapes = shapes_of(recipe.model.path, folder)
    scoring = reward_model_shapes(recipe) if collects else {}
    return plan(recipe, shapes, await machine(), collects=collects, neighbours=neighbours, scoring=scoring)


def plan(
    recipe: Recipe,
    shapes: Shapes | str,
    there: Machine,
    *,
    collects: bool,
    neighbours: int | None = None,
    scoring: Mapping[str, Shapes | str] | None = None,
) -> Plan:
    """shapes: of the model, or why they are not known. collects: whether a collector is on the machine; neighbours: how
    many of the learner's ranks are, None: all. scoring: shapes of reward models, by key, or why they are not known.
    Raises RecipeError if it has too few GPUs."""
    ranks = recipe.learner.ranks if neighbours is None else neighbours
    placement = placed(recipe, len(there.gpus), ranks=ranks, collects=collects)
    if isinstance(shapes, str):
        return Plan((), there, placement, unknown=shapes)
    if ranks:
        own = [replace(part, count=ranks) if part.apart else part for part in rank_parts(recipe, shapes)]
        parts = [*own, *image_parts(recipe, shapes)]
    else:
        parts = received_parts(recipe, shapes)
    left_out: list[str] = []
    if collects:
        parts += [*ipc_parts(recipe, shapes, placement), *engine_parts(recipe, shapes, there, placement)]
        more, left_out = reward_model_parts(recipe, scoring or {}, placement, len(there.gpus))
        parts += more
    inside = inside_parts(recipe, shapes) if collects and _takes_share(recipe, there) else ()
    return Plan(tuple(parts), there, placement, inside, left_out=tuple(left_out))


def received_parts(recipe: Recipe, shapes: Shapes) -> list[Part]:
    """Of a collector on a host of its own: what came over the network, and the copy that vLLM's worker maps."""
    if not computes_here(recipe):
        return []
    (image,) = image_parts(recipe, shapes)
    parts = [Part("collector", "received weights", image.most, True, image.keys)]
    if isinstance(recipe.collector.engine, VllmEngine):
        parts.append(Part(SHARED, "copy for vLLM", image.most, True, image.keys))
    return parts


def ipc_parts(recipe: Recipe, shapes: Shapes, placement: Placement) -> list[Part]:
    """What the learner writes versions to on its GPU, where an engine that shares it takes them from there."""
    if not placement.ranks or not placement.engines:
        return []
    shared = isinstance(recipe.collector.engine, TransformersEngine) and set(placement.engines) == {placement.ranks[0]}
    if recipe.weights.transport != "cuda-ipc" and not (recipe.weights.transport == "auto" and shared):
        return []
    (image,) = image_parts(recipe, shapes)
    keys = ("weights.transport", *image.keys)
    return [Part(FIRST, f"{BUFFERS} buffers of cuda-ipc", BUFFERS * image.most, True, keys, on_gpu=True)]


def inside_parts(recipe: Recipe, shapes: Shapes) -> tuple[Part, ...]:
    """What vLLM must have room for in the share of a GPU that it takes, or it does not start: its weights, and keys and
    values of the longest row."""
    assert isinstance(recipe.collector.engine, VllmEngine)
    keys = ("model.dtype", "model.path")
    served = SIZE[recipe.model.dtype] * shapes.parameters
    row = recipe.collector.engine.max_model_len or row_tokens(recipe, shapes)
    cache = row * _token_bytes(recipe, shapes)
    return (
        Part("vLLM engine", "weights", served, True, ("collector.engine.gpu_memory_utilization", *keys)),
        Part("vLLM engine", f"keys and values of {row} tokens", cache, True, ("collector.engine.max_model_len",)),
    )


def _takes_share(recipe: Recipe, there: Machine) -> bool:
    engine = recipe.collector.engine
    return isinstance(engine, VllmEngine) and bool(there.gpus) and engine.kv_cache_memory_bytes is None


def _token_bytes(recipe: Recipe, shapes: Shapes) -> int:
    """Keys and values of one token."""
    return 2 * shapes.layers * shapes.kv_heads * shapes.head_dim * SIZE[recipe.model.dtype]


def engine_parts(recipe: Recipe, shapes: Shapes, there: Machine, placement: Placement) -> list[Part]:
    """Of the engines in one collector. A server that runs already, or a simulated engine, takes nothing here."""
    engine, count = recipe.collector.engine, recipe.collector.engines
    if not isinstance(engine, TransformersEngine | VllmEngine):
        return []
    process = Part("collector", "process", PROCESS, certain=False)
    served = SIZE[recipe.model.dtype] * shapes.parameters
    if isinstance(engine, TransformersEngine):
        return [*_transformers_parts(recipe, shapes, served, gpu=bool(there.gpus)), process]
    where = "vLLM engine"
    if _takes_share(recipe, there):
        keys = ("collector.engine.gpu_memory_utilization", "collector.engines")
        most = int(engine.gpu_memory_utilization * there.gpus[placement.engines[0]].total)
        what = f"{engine.gpu_memory_utilization:g} of the GPU"
        parts = [Part(where, what, most, certain=True, keys=keys, on_gpu=True, count=count)]
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
    token = _token_bytes(recipe, shapes)
    row = row_tokens(recipe, shapes)
    cache = slots * token * row * 3 // 2  # columns are had in advance, half as many again
    least = slots * token * min(recipe.collector.sampling.max_tokens, row)
    smaller = ("collector.engine.slots", "model.max_length", "collector.sampling.max_tokens")
    parts.append(Part(where, f"keys and values of {slots} slots", cache, False, smaller, True, count, least=least))
    return parts


def _need(name: str, room: Room, parts: Iterable[tuple[Part, int]]) -> Need | None:
    """Of parts, each so many times."""
    counted = [(part, *part.span(count)) for part, count in parts]
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
        largest_of_all=max(((part, least) for part, least, _ in counted if part.keys), key=lambda one: one[1]),
    )


def _named(gpus: Sequence[int]) -> str:
    return f"GPU {gpus[0]}" if len(gpus) == 1 else f"each of GPUs {', '.join(map(str, gpus))}"


def _span(least: int, most: int) -> str:
    texts = list(dict.fromkeys(size_about(nbytes) for nbytes in (least, most)))
    return " to ".join(texts)
