"""`asyncrl doctor` with real stores."""

import asyncio
import contextlib

import pytest
import redis.asyncio

from asyncrl.buffers.base import BufferError
from asyncrl.buffers.limits import Limits
from asyncrl.buffers.server import EmbeddedServer
from asyncrl.buffers.store import ACL_RULES, open_store
from asyncrl.runtime import doctor


def test_the_embedded_store_of_this_machine_is_well_and_its_loss_window_named(cli):
    ended = cli("doctor")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = {line.split(maxsplit=1)[1].split("  ")[0]: line for line in ended.stdout.splitlines() if line[0] != " "}
    assert set(lines) == {
        *("packages", "open files", "shared memory", "devices"),
        *("store", "server", "eviction", "memory", "loss window", "round trip", "clock"),
    }
    assert "appendfsync everysec: up to about 1 s after a power cut; nothing after kill -9" in lines["loss window"]
    assert lines["server"].startswith("ok")


@contextlib.asynccontextmanager
async def serving(folder, **settings):
    """A store with these settings, and an ACL user `weak` that may ask for INFO and nothing of CONFIG."""
    async with EmbeddedServer(folder) as server, redis.asyncio.from_url(server.url) as client:
        for name, value in settings.items():
            await client.config_set(name.replace("_", "-"), value)
        await client.execute_command("ACL", "SETUSER", "weak", "on", ">pw", *ACL_RULES.split())
        yield server.url


@pytest.mark.asyncio
async def test_a_store_that_would_lose_trajectories_is_an_error_with_its_fix(cli, tmp_path):
    async with serving(tmp_path / "s", maxmemory="64mb", maxmemory_policy="allkeys-lru", appendonly="no") as url:
        ended = await asyncio.to_thread(cli, "doctor", "--buffer", url, "--run", "nobody")
    assert ended.returncode == 1
    assert "error    eviction" in ended.stdout
    assert "fix: CONFIG SET maxmemory-policy noeviction" in ended.stdout
    assert "error    memory" in ended.stdout
    assert "no append-only file, no snapshots: everything" in ended.stdout
    assert "error    run" in ended.stdout
    assert "Traceback" not in ended.stderr


@pytest.mark.asyncio
async def test_a_run_is_found_and_compared_with_its_own_bound(tmp_path):
    limits = Limits(max_age=0, groups_per_step=1, max_steps=1, group_bytes=1 << 10, max_bytes=1 << 20)
    async with serving(tmp_path / "s") as url:
        opened = await open_store(url)
        await opened.create_run("mine", recipe={}, recipe_hash="h", limits=limits)
        await opened.close()
        found = {finding.what: finding for finding in await doctor.store(url, "mine")}
    assert found["run"].says == "mine: running, lineage 0, version 0, 0 collectors"
    assert "buffer.max_bytes is 1MiB" in found["memory"].says


@pytest.mark.asyncio
async def test_what_a_weak_user_may_not_read_is_said(tmp_path):
    async with serving(tmp_path / "s") as url:
        found = await doctor.store(url.replace("unix://", "unix://weak:pw@"), None)
    said = {finding.what: finding for finding in found}
    assert "cannot be read (CONFIG is not allowed)" in said["loss window"].says
    assert said["eviction"].level == "ok"
    assert "weak:***@" in said["store"].says


@pytest.mark.asyncio
async def test_a_store_that_nobody_serves_cannot_be_asked():
    with pytest.raises(BufferError, match=r"cannot be asked.*asyncrl buffer serve"):
        await doctor.store("redis://127.0.0.1:1/0", None)


def test_a_run_that_is_not_here_is_bad_usage(cli):
    ended = cli("doctor", "--run", "x")
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert "no run 'x'" in ended.stderr
