"""What a learner and a collector process do: prepare, find each other in the store, work until told to stop.

Both are the same whether `asyncrl run` starts them or a person does. Each takes a `stop` event and returns when its
work is done or stopped; what a person can have caused before the work starts is raised as the error of its part.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import time
import uuid
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.buffers.base import BufferError, Member
from asyncrl.buffers.remote import RedisBuffer
from asyncrl.buffers.store import Store, StoreAway, open_store
from asyncrl.config.devices import VARIABLE, use_only
from asyncrl.config.errors import RecipeError, quoted
from asyncrl.config.identity import recipe_hash
from asyncrl.config.loading import recipe_from_document
from asyncrl.config.recipe import Recipe, SimulatedEngine, to_builtins
from asyncrl.config.secrets import masked
from asyncrl.data.errors import DataError
from asyncrl.learners.limits import limits_of
from asyncrl.learners.lost import RankLost
from asyncrl.runtime import engine_package, models
from asyncrl.runtime.launch import Launch, LaunchError
from asyncrl.runtime.launched import launched_ranks, note_folder
from asyncrl.runtime.preflight import is_listening, refuse_in_use
from asyncrl.runtime.ranks import meet_in, ranks_of
from asyncrl.runtime.sinks import Sinks
from asyncrl.runtime.tail import JsonLines
from asyncrl.tasks.base import TaskError
from asyncrl.telemetry.console import RunConsole

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 1.0
"""How often a collector looks for its run; nothing in a store can wake who waits for a run that does not exist."""

SAY_AGAIN_S = 5.0
SHOW_S = 0.5


class RunNotFound(Exception):
    """No run of this name appeared in time; names the store, the run and what is missing."""


class RunFailed(Exception):
    """The work itself failed, after everything a person can get wrong had been checked."""


def log_to_stderr() -> None:
    """Messages of this process: asyncrl's from INFO on, others' from WARNING on."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("asyncrl").setLevel(logging.INFO)


async def learner(
    recipe: Recipe, *, url: str, folder: Path, resume: bool, stop: asyncio.Event, launch: Launch | None = None
) -> None:
    """Train the run into `folder`: create it in the store at `url`, or continue it from its newest valid checkpoint.

    launch: its other ranks are there already, torchrun has started all of them. None: it starts them, if it has any.
    Raises RunInUse, BufferError, ModelError, LaunchError before the work, RunFailed after.
    """
    use_devices("learner.devices", recipe.learner.devices)  # its other ranks inherit it
    store = await open_store(url)
    try:
        # The run appears when its model is there: a collector on this host then finds the built-in one made.
        model_path = await asyncio.to_thread(models.resolve, recipe)
        beside = recipe.learner.ranks if launch is None else launch.local_size
        use_threads(model_path, beside, deterministic=recipe.run.deterministic)
        buffer = await _claim_run(store, recipe, model_path, resume=resume)
        if launch is not None:  # now that nobody else's run can be meant
            await asyncio.to_thread(note_folder, launch, folder)
        from asyncrl.learners.arithmetic import fix_order  # loads torch

        if recipe.run.deterministic:
            fix_order()

        async def work() -> None:
            async with (
                ranks_of(recipe, url=url, folder=folder, stop=stop)
                if launch is None or launch.size == 1
                else launched_ranks(recipe, launch, stop=stop)
            ) as ranks:
                from asyncrl.learners.service import learn

                if ranks is not None:
                    checkpoints = folder / "checkpoints" if resume else None
                    await learn(
                        recipe,
                        buffer,
                        run_dir=folder,
                        model_path=model_path,
                        resume=checkpoints,
                        stop=stop,
                        ranks=ranks,
                        recreate=partial(_create_run, store, recipe, model_path),
                    )

        await _work(work(), "the learner", bad_input=lambda: (_model_error(), LaunchError))
    finally:
        await store.close()


async def learner_rank(recipe: Recipe, *, url: str, rank: int, meeting: Path) -> None:
    """Be one of the other ranks of a learner, whose rank 0 has created the run and waits at `meeting`."""
    from asyncrl.learners.rank import follow

    async with _joined(recipe, url, neighbours=recipe.learner.ranks) as (buffer, model_path):
        ranks = await asyncio.to_thread(meet_in, meeting, recipe, rank)
        await _work(follow(recipe, buffer, ranks, model_path=model_path), f"learner rank {rank}", bad_input=tuple)
        ranks.close()


async def launched_rank(recipe: Recipe, *, url: str, launch: Launch, stop: asyncio.Event) -> None:
    """Be one of the other ranks of a learner whose ranks torchrun has started. `stop` is passed on to rank 0, which
    decides when all of them end.

    Raises RunNotFound, BufferError, ModelError, LaunchError before the work, RunFailed after; rank 0 is told.
    """
    use_devices("learner.devices", recipe.learner.devices)

    async def work() -> None:
        async with launched_ranks(recipe, launch, stop=stop) as ranks:
            from asyncrl.learners.rank import follow

            if ranks is not None:  # rank 0 has created the run
                async with _joined(recipe, url, neighbours=launch.local_size) as (buffer, model_path):
                    await follow(recipe, buffer, ranks, model_path=model_path)

    bad_input = (RunNotFound, BufferError, models.ModelError, LaunchError)
    await _work(work(), f"learner rank {launch.rank}", bad_input=lambda: (*bad_input, _model_error()))


@asynccontextmanager
async def _joined(recipe: Recipe, url: str, *, neighbours: int) -> AsyncIterator[tuple[RedisBuffer, Path]]:
    """What one of the other ranks works with: the run, and the model's folder here. neighbours: ranks on this host."""
    store = await open_store(url)
    try:
        model_path = await asyncio.to_thread(models.resolve, recipe)
        use_threads(model_path, neighbours)
        buffer = await store.find_run(recipe.run.name)
        if buffer is None:
            raise RunNotFound(f"the store at {masked(url)} has no run {recipe.run.name!r}")
        yield buffer, model_path
    finally:
        await store.close()


async def collector(
    *, url: str, run: str, name: str, wait_s: float, overrides: Sequence[str], stop: asyncio.Event
) -> None:
    """Collect for `run`, whose recipe comes from the store at `url`; waits `wait_s` seconds for both to be there.

    `overrides`: `--set` texts for keys of this host. Raises RunNotFound, RecipeError, BufferError, ModelError before
    the work, RunFailed after.
    """
    use_only(None)  # which GPUs, only the recipe says: nobody may have asked CUDA for them before
    from asyncrl.collectors.service import collect

    found = await _wait_for_run(url, run, wait_s, stop)
    if found is None:
        return
    store, buffer = found
    try:
        recipe = recipe_from_document(buffer.recipe, overrides=overrides)
        use_devices("collector.devices", recipe.collector.devices)
        engine_package.check(recipe.collector.engine)
        model_path: Path | None = None
        if not isinstance(recipe.collector.engine, SimulatedEngine):
            model_path = await asyncio.to_thread(models.resolve, recipe)
            use_threads(model_path, deterministic=recipe.run.deterministic)
        member = Member(name=name, incarnation=uuid.uuid4().hex)
        await _work(
            collect(recipe, buffer, member, model_path=model_path, stop=stop),
            f"collector {name}",
            bad_input=lambda: (DataError, TaskError, _model_error()),
        )
    finally:
        await store.close()


async def show_steps(recipe: Recipe, folder: Path, *, resume: bool) -> None:
    """What a supervisor does for a learner it started, for one without: print the run's steps as they are written, and
    feed its sinks. Ends when cancelled, once they are closed."""
    metrics = JsonLines(folder / "metrics.jsonl", from_end=resume)
    console = RunConsole(recipe.run.max_steps, terminal=False, file=sys.stdout)
    sinks = Sinks(recipe, folder, resume=resume)
    try:
        await sinks.start()
        while True:
            for record in metrics.read():
                console.on_record(record)
            for line in sinks.news():
                console.note(line)
            await asyncio.sleep(SHOW_S)
    finally:
        for record in metrics.read():
            console.on_record(record)
        for line in await sinks.close():
            console.note(line)
        console.close()


def default_name() -> str:
    """A collector's name where none is given: unique among the processes of all hosts."""
    return f"{socket.gethostname()}-{os.getpid()}"


async def _claim_run(store: Store, recipe: Recipe, model_path: Path, *, resume: bool) -> RedisBuffer:
    if resume and (buffer := await store.find_run(recipe.run.name)) is not None:
        return buffer
    await refuse_in_use(store, recipe)
    return await _create_run(store, recipe, model_path)


async def _create_run(store: Store, recipe: Recipe, model_path: Path) -> RedisBuffer:
    document = to_builtins(recipe)
    document["buffer"]["url"] = masked(recipe.buffer.url)  # who reads this has a URL of its own, with its own password
    from asyncrl.learners.model import longest_sequence

    try:
        longest = longest_sequence(
            model_path, limit=recipe.model.max_length, trust_remote_code=recipe.model.trust_remote_code
        )
        limits = limits_of(recipe, max_length=longest)
    except ValueError as error:
        raise RecipeError(str(error)) from None
    return await store.create_run(recipe.run.name, recipe=document, recipe_hash=recipe_hash(recipe), limits=limits)


def _model_error() -> type[Exception]:
    """Loads torch and transformers for seconds, of which a simulated collector has no use."""
    from asyncrl.learners.model import ModelError

    return ModelError


async def _wait_for_run(url: str, run: str, wait_s: float, stop: asyncio.Event) -> tuple[Store, RedisBuffer] | None:
    """The run, once store and run are there; None if stopped meanwhile. Raises RunNotFound after `wait_s` seconds."""
    started = time.monotonic()
    said = -SAY_AGAIN_S
    store: Store | None = None
    while not stop.is_set():
        missing = f"a store at {masked(url)}: nothing listens there"
        try:
            if store is None and await is_listening(url):
                store = await open_store(url)
            if store is not None:
                if (buffer := await store.find_run(run)) is not None:
                    return store, buffer
                missing = f"run {run!r} in the store at {masked(url)}: no learner has created it"
        except StoreAway as error:  # it reads its data, or is just being started again
            missing = f"a store that serves: {error}"
        _model_error()  # most runs have a model: its libraries are imported while the learner gets ready
        waited = time.monotonic() - started
        if waited >= wait_s:
            if store is not None:
                await store.close()
            raise RunNotFound(f"gave up after {wait_s:.0f} s of waiting for {missing}")
        if waited - said >= SAY_AGAIN_S:
            said = waited
            log.info("waiting for %s (%.0f of %.0f s)", missing, waited, wait_s)
        try:
            await asyncio.wait_for(stop.wait(), LOOK_AGAIN_S)
        except TimeoutError:
            continue
    if store is not None:
        await store.close()
    return None


async def _work(work: Awaitable[None], what: str, *, bad_input: Callable[[], tuple[type[Exception], ...]]) -> None:
    """`bad_input`: what only the work itself can find out to be wrong with the recipe; passes unchanged. Asked for once
    there is an error, since its classes take long to import."""
    try:
        await work
    except RankLost as error:  # says all there is to say; where it was noticed tells nothing
        raise RunFailed(f"{what} failed: {error}") from error
    except Exception as error:
        if isinstance(error, bad_input()):
            raise
        log.exception("%s failed", what)
        raise RunFailed(f"{what} failed: {type(error).__name__}: {error}") from error


def use_devices(key: str, devices: Sequence[int] | None) -> None:
    """Have this process, and those that it starts, see these GPUs only; None: all. Raises RecipeError if torch does not
    find them."""
    use_only(devices)
    if devices is None:
        return
    import torch

    if (found := torch.cuda.device_count()) != len(devices):
        raise RecipeError(
            f"{key} is {quoted(list(devices))}, of which torch finds {found} here "
            f"(CUDA_VISIBLE_DEVICES={os.environ[VARIABLE]}). `asyncrl doctor` shows what there is, and "
            f"--set {key}=null takes that"
        )


def use_threads(model_path: Path | None, ranks: int = 1, *, deterministic: bool = False) -> None:
    """Give torch in this process the threads that suit the model (`models.threads`), shared by a learner's ranks; with
    `deterministic` one, since several add in an order of their own."""
    import torch

    torch.set_num_threads(1 if deterministic else max(1, models.threads(model_path) // ranks))
