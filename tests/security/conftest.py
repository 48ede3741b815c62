"""A server that is built with TLS, and certificates made for the tests."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

START_S = 10.0
USER, PASSWORD = "trainer", "s3cret-of-trainer"

NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def program_path(name: str) -> str:
    """Where the system's program is. The server in the wheel is built without TLS."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} on PATH (Debian: apt-get install {name})")
    return found


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=20)


def signed(folder: Path, name: str, common_name: str) -> None:
    """`name`.key and `name`.crt, valid for this machine and signed by the folder's authority."""
    openssl(folder, "req", *NEW_KEY, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={common_name}")
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    authority = ("-CA", "authority.crt", "-CAkey", "authority.key", "-CAcreateserial")
    ends = ("-days", "2", "-extfile", "names")
    openssl(folder, "x509", "-req", "-in", f"{name}.csr", *authority, "-out", f"{name}.crt", *ends)


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """authority.crt, tls.crt, tls.key of a server at localhost, client.crt, client.key."""
    for program in ("redis-server", "openssl"):
        program_path(program)
    folder = tmp_path_factory.mktemp("certificates")
    of_authority = ("-keyout", "authority.key", "-out", "authority.crt", "-subj", "/CN=authority", "-days", "2")
    openssl(folder, "req", "-x509", *NEW_KEY, *of_authority)
    signed(folder, "tls", "localhost")
    signed(folder, "client", USER)
    return folder


@pytest.fixture
def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[list[str]], None]]:
    """Start the system's redis-server with these lines of configuration; it is ready, and ended after the test."""
    started: list[subprocess.Popen[bytes]] = []

    def serve(lines: list[str]) -> None:
        process = subprocess.Popen(
            [program_path("redis-server"), "-"], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        started.append(process)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n".join([*lines, 'save ""', ""]).encode())
        process.stdin.close()
        deadline = time.monotonic() + START_S
        for line in process.stdout:
            if b"Ready to accept connections" in line:
                return
            assert time.monotonic() < deadline, line
        raise AssertionError("the server ended at once")

    yield serve
    for process in started:
        process.kill()
        process.wait(timeout=10)
        assert process.stdout is not None
        process.stdout.close()
