"""Stores behind TLS, passwords and ACL users: they work, and what lacks a right is told which."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.buffers.base import BufferError
from asyncrl.buffers.server import EmbeddedServer
from asyncrl.buffers.store import ACL_RULES, open_store
from asyncrl.buffers.tls import Tls
from tests.faults.runs import recipe_of, whole_run
from tests.security.conftest import PASSWORD, USER

Serve = Callable[[list[str]], None]


def folder_with(certificates: Path, folder: Path, *, authority: bool) -> Path:
    """What `buffer serve --tls` takes."""
    folder.mkdir()
    for name in ("tls.crt", "tls.key"):
        shutil.copy(certificates / name, folder / name)
    if authority:
        shutil.copy(certificates / "authority.crt", folder / "ca.crt")
    return folder


async def refused(url: str) -> str:
    with pytest.raises(BufferError) as caught:
        await open_store(url)
    return str(caught.value)


async def accepted(url: str) -> None:
    store = await open_store(url)
    assert await store.runs() == []
    await store.close()


@pytest.mark.asyncio
async def test_a_store_that_serves_tls_is_reached_by_who_trusts_it_and_has_the_password(
    tmp_path: Path, certificates: Path, free_port: int
) -> None:
    tls = Tls.of(folder_with(certificates, tmp_path / "tls", authority=False))
    trusted = f"?ssl_ca_certs={certificates}/authority.crt"
    at = f"localhost:{free_port}/0"
    async with EmbeddedServer(
        tmp_path / "store", listen=("127.0.0.1", free_port), password=PASSWORD, tls=tls
    ) as server:
        assert server.url == f"rediss://127.0.0.1:{free_port}/0"
        await accepted(f"rediss://:{PASSWORD}@{at}{trusted}")
        assert "shows a certificate that is not trusted here" in await refused(f"rediss://:{PASSWORD}@{at}")
        assert "refused the login" in await refused(f"rediss://{at}{trusted}")
        assert "is unreachable" in await refused(f"redis://:{PASSWORD}@{at}")


@pytest.mark.asyncio
async def test_buffer_serve_says_where_it_serves_tls(tmp_path: Path, certificates: Path, free_port: int) -> None:
    folder = folder_with(certificates, tmp_path / "tls", authority=False)
    options = ("--listen", f"127.0.0.1:{free_port}", "--tls", str(folder), "--dir", str(tmp_path / "store"))
    served = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "asyncrl.cli.main", "buffer", "serve", *options, stdout=asyncio.subprocess.PIPE
    )
    assert served.stdout is not None
    try:
        async with asyncio.timeout(30):
            assert (await served.stdout.readline()).startswith(f"store rediss://127.0.0.1:{free_port}/0 ".encode())
            await accepted(f"rediss://127.0.0.1:{free_port}/0?ssl_ca_certs={certificates}/authority.crt")
            served.terminate()
            assert await served.wait() == 0
    finally:
        if served.returncode is None:
            served.kill()


@pytest.mark.asyncio
async def test_with_an_authority_a_client_needs_a_certificate_and_no_password(
    tmp_path: Path, certificates: Path, free_port: int
) -> None:
    tls = Tls.of(folder_with(certificates, tmp_path / "tls", authority=True))
    url = f"rediss://localhost:{free_port}/0?ssl_ca_certs={certificates}/authority.crt"
    own = f"&ssl_certfile={certificates}/client.crt&ssl_keyfile={certificates}/client.key"
    async with EmbeddedServer(tmp_path / "store", listen=("0.0.0.0", free_port), tls=tls):
        await accepted(url + own)
        assert "is unreachable" in await refused(url)


def test_tls_alone_keeps_nobody_out_and_is_refused_on_an_address_that_others_reach(
    tmp_path: Path, certificates: Path
) -> None:
    tls = Tls.of(folder_with(certificates, tmp_path / "tls", authority=False))
    with pytest.raises(BufferError, match=r"--password-env NAME, or put a ca\.crt into the folder of --tls"):
        EmbeddedServer(tmp_path / "store", listen=("0.0.0.0", 1), tls=tls)


def test_what_a_folder_of_certificates_lacks_is_named(tmp_path: Path, certificates: Path) -> None:
    folder = folder_with(certificates, tmp_path / "tls", authority=True)
    (folder / "tls.key").chmod(0o640)
    with pytest.raises(BufferError, match=r"others can read tls\.key; run `chmod 600"):
        Tls.of(folder)
    (folder / "tls.key").unlink()
    with pytest.raises(BufferError, match=r"there is no tls\.key"):
        Tls.of(folder)


@pytest.mark.asyncio
async def test_a_certificate_that_the_server_cannot_use_is_its_own_words(
    tmp_path: Path, certificates: Path, free_port: int
) -> None:
    folder = folder_with(certificates, tmp_path / "tls", authority=False)
    shutil.copy(certificates / "client.crt", folder / "tls.crt")
    with pytest.raises(BufferError, match=r"ended at once, code 1: .*key values mismatch"):
        await EmbeddedServer(tmp_path / "store", listen=("127.0.0.1", free_port), tls=Tls.of(folder)).start()


@pytest.mark.asyncio
async def test_without_a_server_that_is_built_with_tls_the_error_says_what_to_install(
    tmp_path: Path, certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = Tls.of(folder_with(certificates, tmp_path / "tls", authority=False))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BufferError, match="needs a server on PATH that is built with TLS"):
        await EmbeddedServer(tmp_path / "store", listen=("127.0.0.1", 1), tls=tls).start()


@pytest.mark.asyncio
async def test_a_run_needs_no_more_rights_than_the_documented_ones(
    tmp_path: Path, certificates: Path, free_port: int, serve: Serve
) -> None:
    """Over TLS, as an ACL user: what a host's or a managed store looks like."""
    users = [f"user {USER} on >{PASSWORD} {ACL_RULES}", "user reader on >r ~asyncrl:* +@read +info", "user default off"]
    (tmp_path / "users.acl").write_text("\n".join([*users, ""]))
    lines = ["bind 127.0.0.1", "port 0", f"tls-port {free_port}", "tls-auth-clients no", "aclfile users.acl"]
    serve([*lines, f"tls-cert-file {certificates}/tls.crt", f"tls-key-file {certificates}/tls.key"])
    at = f"localhost:{free_port}/0?ssl_ca_certs={certificates}/authority.crt"

    report = await whole_run(f"rediss://{USER}:{PASSWORD}@{at}", recipe_of("acl", steps=4), tmp_path)
    assert report.problems == []
    assert report.stats.version == 4

    assert "refused the login" in await refused(f"rediss://{at}")
    assert f"give this user the rules {ACL_RULES}" in await refused(f"rediss://reader:r@{at}")


@pytest.mark.asyncio
async def test_another_applications_keys_are_out_of_reach(tmp_path: Path, free_port: int, serve: Serve) -> None:
    """The negative control of the rules: they do keep something out."""
    (tmp_path / "users.acl").write_text(f"user {USER} on >{PASSWORD} {ACL_RULES}\nuser default off\n")
    serve(["bind 127.0.0.1", f"port {free_port}", "aclfile users.acl"])
    store = await open_store(f"redis://{USER}:{PASSWORD}@127.0.0.1:{free_port}/0")
    async with asyncio.timeout(10):
        for command in (("SET", "theirs", "1"), ("FLUSHALL",), ("KEYS", "*"), ("CONFIG", "GET", "*")):
            with pytest.raises(Exception, match=r"has no permissions|No permissions"):
                await store.client.execute_command(*command)
        await store.client.set("asyncrl:ours", "1")
    await store.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("option", ["ssl_cert_reqs=none", "password=x", "socket_timeout=1"])
async def test_a_url_turns_off_nothing_that_protects(option: str) -> None:
    said = await refused(f"rediss://localhost/0?{option}")
    assert f"?{option.split('=')[0]}= is unknown; it may have db, ssl_ca_certs" in said
    assert "password=x" not in said
