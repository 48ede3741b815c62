"""Programs in the sandbox that do nothing wrong, and machines that have none."""

from __future__ import annotations

import mmap
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from asyncrl.rewards import sandbox_filter, sandbox_walls
from asyncrl.rewards.sandbox import Sandbox, SandboxError
from asyncrl.rewards.sandbox_folder import Folders, held, remove, remove_abandoned, usage
from asyncrl.rewards.sandbox_walls import Unprotected
from asyncrl.rewards.sandbox_zygote import read_frame, write_frame

LIMIT_S = 30.0  # of programs that end by themselves: never reached


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(memory_bytes=256 << 20) as sandbox:
        yield sandbox


def test_a_program_reads_its_input_and_prints(sandbox: Sandbox) -> None:
    ended = sandbox.run(
        "n = int(input())\nprint(sum(int(input()) for _ in range(n)), 'ä')", "2\n20\n22", limit_s=LIMIT_S
    )
    assert (ended.reason, ended.code, ended.stdout, ended.stderr) == ("", 0, "42 ä\n", "")


def test_a_program_ends_as_a_script_does(sandbox: Sandbox) -> None:
    source = (
        "import atexit, sys, threading\n"
        "atexit.register(lambda: print('at exit'))\n"
        "threading.Thread(target=lambda: print('in a thread')).start()\n"
        "if __name__ == '__main__': sys.exit('bye')"
    )
    ended = sandbox.run(source, "", limit_s=LIMIT_S)
    assert (ended.code, ended.stdout, ended.stderr) == (1, "in a thread\nat exit\n", "bye\n")


def test_a_program_has_a_folder_of_its_own_which_is_empty_and_then_gone(
    sandbox: Sandbox, eventually: Callable[[float, Callable[[], object]], bool]
) -> None:
    source = (
        "import os, tempfile\n"
        "print(os.listdir(), os.getcwd() == os.environ['HOME'] == tempfile.gettempdir())\n"
        "os.makedirs('a/b')\n"
        "open('a/b/c', 'w').write('kept')\n"
        "os.rename('a/b/c', 'd')\n"
        "print(open('d').read(), os.getcwd())"
    )
    outputs = [sandbox.run(source, "", limit_s=LIMIT_S).stdout.split() for _ in range(2)]
    assert [words[:3] for words in outputs] == [["[]", "True", "kept"]] * 2
    assert eventually(10, lambda: not any(Path(words[3]).exists() for words in outputs))


def test_the_standard_library_works(sandbox: Sandbox) -> None:
    source = (
        "import asyncio, bz2, ctypes, dataclasses, decimal, hashlib, logging, lzma, multiprocessing, sqlite3, ssl\n"
        "import unittest, uuid, zlib, concurrent.futures\n"
        "with concurrent.futures.ThreadPoolExecutor(4) as pool: print(*pool.map(abs, [-1, -2]))\n"
        "async def main(): return await asyncio.sleep(0, 3)\n"
        "print(asyncio.run(main()))\n"
        "print(sqlite3.connect('a.db').execute('select 4').fetchone())\n"
        "print(hashlib.sha256(b'').hexdigest()[:4], len(str(uuid.uuid4())))"
    )
    ended = sandbox.run(source, "", limit_s=LIMIT_S)
    assert (ended.stdout, ended.stderr) == ("1 2\n3\n(4,)\ne3b0 36\n", "")


@pytest.mark.parametrize(
    ("source", "printed"),
    [
        ("print(1)\nexit()", "1"),
        ("print(1)\nquit(0)", "1"),
        ("def f(x: int): pass\nprint(f.__annotations__)", "{'x': <class 'int'>}"),  # not this project's futures
        ("import os\nprint(os.path.basename(__file__))", "answer.py"),
        ("import os\nos.posix_fallocate(os.open('a', 66), 0, 9999)\nprint(os.stat('a').st_size)", "9999"),
        ("import os\nos.closerange(3, 60)\nprint(1)", "1"),
        ("import resource as r\nr.setrlimit(r.RLIMIT_STACK, (1 << 28, -1))\nprint(1)", "1"),
        ("import resource as r\nprint(r.getrlimit(r.RLIMIT_CORE))", "(1, 1)"),  # 0 would not keep a pipe from a dump
        pytest.param(
            "import sys\nfrom functools import lru_cache\nsys.setrecursionlimit(10**6)\n"
            "@lru_cache(None)\ndef f(n): return n and 1 + f(n - 1)\nprint(f(50_000))",
            "50000",  # 30 MB of stack
            marks=pytest.mark.skipif(
                sys.version_info >= (3, 12), reason="Python 3.12 limits calls through C by itself"
            ),
        ),
        (
            "import threading\ngo = threading.Event()\n"
            "threads = [threading.Thread(target=lambda: go.wait() and bytes(10_000)) for _ in range(20)]\n"
            "for thread in threads: thread.start()\ngo.set()\n"
            "for thread in threads: thread.join()\nprint(len(threads))",
            "20",
        ),
    ],
)
def test_a_script_runs_as_it_does_elsewhere(sandbox: Sandbox, source: str, printed: str) -> None:
    ended = sandbox.run(source, "", limit_s=LIMIT_S)
    assert (ended.stdout, ended.stderr) == (printed + "\n", "")


def test_the_same_program_prints_the_same(sandbox: Sandbox) -> None:
    source = "print({str(n) for n in range(50)}, hash('a'))"
    assert len({sandbox.run(source, "", limit_s=LIMIT_S).stdout for _ in range(2)}) == 1
    with Sandbox(memory_bytes=256 << 20) as other:
        assert other.run(source, "", limit_s=LIMIT_S).stdout == sandbox.run(source, "", limit_s=LIMIT_S).stdout


def test_text_that_no_encoding_has_is_run_all_the_same(sandbox: Sandbox) -> None:
    assert sandbox.run("print(len(input()), '\ud800')", "\udfff", limit_s=LIMIT_S).stdout == "1 ?\n"


def test_a_module_that_is_named_can_be_imported_and_no_other(sandbox: Sandbox) -> None:
    source = "import numpy\nprint(numpy.dot([1, 2], [3, 4]))"
    with Sandbox(memory_bytes=256 << 20, modules=["numpy"]) as other:
        assert other.run(source, "", limit_s=LIMIT_S).stdout == "11\n"
    assert "ModuleNotFoundError" in sandbox.run(source, "", limit_s=LIMIT_S).stderr


def test_a_module_that_does_not_exist_is_named_when_the_sandbox_starts() -> None:
    with pytest.raises(SandboxError, match="No module named 'no_such_module'"):
        Sandbox(memory_bytes=256 << 20, modules=["no_such_module"])


def test_a_sandbox_whose_process_died_is_started_again(sandbox: Sandbox) -> None:
    with Sandbox(memory_bytes=256 << 20) as other:
        assert other.pid is not None
        os.kill(other.pid, 9)
        with pytest.raises(SandboxError, match=r"ended|does not answer"):
            other.run("", "", limit_s=LIMIT_S)
        assert other.run("print(1)", "", limit_s=LIMIT_S).stdout == "1\n"


def test_a_verifier_that_died_with_a_reply_unread_is_at_its_end() -> None:
    verifier, zygote = socket.socketpair()
    with zygote:
        with verifier:
            write_frame(zygote, {"reason": ""})
        assert read_frame(zygote) == (b"", [])


def test_nothing_runs_on_a_machine_without_a_filter_for_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(Unprotected, match="on Linux"):
        Sandbox(memory_bytes=256 << 20)


def test_nothing_runs_on_another_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(Unprotected, match="not darwin"):
        Sandbox(memory_bytes=256 << 20)


def test_nothing_runs_on_a_kernel_without_landlock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_walls, "CREATE_RULESET", 9999)  # what it would answer to an unknown call
    with pytest.raises(Unprotected, match="no Landlock"):
        Sandbox(memory_bytes=256 << 20)


def test_nothing_runs_on_a_kernel_without_filters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_filter, "SECCOMP_GET_ACTION_AVAIL", 9999)
    with pytest.raises(Unprotected, match="no seccomp"):
        Sandbox(memory_bytes=256 << 20)


def test_a_folder_that_nobody_gets_to_is_named_with_what_to_do(tmp_path: Path) -> None:
    """As in a container whose root has a TMPDIR of its own, and no right to pass by modes."""
    source = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from asyncrl.rewards.sandbox_walls import _shut_files\n"
        "if os.getuid() == 0: os.setresuid(65534, 65534, 65534)\n"
        "try: _shut_files(Path(sys.argv[1]), [])\n"
        "except PermissionError as error: print(error)"
    )
    (tmp_path / "closed" / "folder").mkdir(parents=True)
    (tmp_path / "closed").chmod(0)
    command = [sys.executable, "-c", source, str(tmp_path / "closed" / "folder")]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=True).stdout
    (tmp_path / "closed").chmod(0o700)
    assert said.endswith("closed/folder: set TMPDIR to a folder with a way for all\n")


def test_a_folder_is_removed_however_deep_and_closed_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    here = os.getcwd()
    try:
        os.chdir(folder)
        for _ in range(60):
            os.mkdir("x" * 200)
            os.chdir("x" * 200)
            os.symlink(tmp_path, "link")
    finally:
        os.chdir(here)
    (folder / "closed").mkdir()
    (folder / "closed" / "file").write_text("")
    (folder / "closed").chmod(0)
    (tmp_path / "other").write_text("kept")
    remove(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_a_folder_is_removed_whatever_the_names_in_it_are(tmp_path: Path) -> None:
    """Those that folders get while it is removed are taken already, by files, folders and links."""
    folder = tmp_path / "folder"
    for n in range(0, 9, 3):
        (folder / f".{n}.removed" / "inner").mkdir(parents=True)
        (folder / f".{n + 1}.removed").write_text("")
        (folder / f".{n + 2}.removed").symlink_to("/nowhere")
        (folder / f"line\n{n}").mkdir()
    remove(folder)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_thousands_of_folders_is_removed(tmp_path: Path) -> None:
    """So many that what is moved comes up among what is still to be read."""
    for n in range(3000):
        (tmp_path / "folder" / str(n)).mkdir(parents=True)
    remove(tmp_path / "folder")
    assert list(tmp_path.iterdir()) == []


def test_a_link_to_a_folder_is_not_taken_for_an_abandoned_one(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("")
    os.utime(kept, (0, 0))
    (tmp_path / "asyncrl-sandbox-link").symlink_to(kept)
    remove_abandoned(tmp_path)
    assert (kept / "file").exists()


def test_files_without_a_name_are_counted_as_long_as_they_are_held(tmp_path: Path) -> None:
    largest = 1 << 20
    assert held(os.getpid(), tmp_path, None, largest) == 0
    with open(tmp_path / "opened", "wb") as opened, open(tmp_path / "mapped", "w+b") as mapped:
        for file in (opened, mapped):
            file.write(b"x" * 100_000)
            file.flush()
        page = mmap.mmap(mapped.fileno(), 4096)
        assert held(os.getpid(), tmp_path, None, largest) == 0  # they have names
        (tmp_path / "opened").unlink()
        assert 100_000 <= held(os.getpid(), tmp_path, None, largest) < 200_000
    (tmp_path / "mapped").unlink()
    os.close(os.open(tmp_path / "other", os.O_CREAT))
    assert held(os.getpid(), tmp_path, None, largest) >= 100_000
    page.close()
    assert held(os.getpid(), tmp_path, None, largest) == 0
    assert held(2**22 + 1, tmp_path, None, largest) == 0  # no process has this number


def test_what_cannot_be_counted_is_too_much(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 100_000)
    assert 100_000 <= usage(tmp_path) < 200_000
    for n in range(1000):
        (tmp_path / str(n)).touch()
    assert usage(tmp_path) == float("inf")
    assert usage(tmp_path / "gone") == 0


def test_folders_of_dead_processes_are_removed_and_those_of_living_ones_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folders = Folders()
    folders.new(None)
    abandoned, young = tmp_path / "asyncrl-sandbox-abandoned", tmp_path / "asyncrl-sandbox-young"
    for path in (abandoned, young, tmp_path / "another"):
        path.mkdir()
    old = time.time() - 3600
    for path in tmp_path.iterdir():
        if path != young:
            os.utime(path, (old, old))
    remove_abandoned(tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert "asyncrl-sandbox-abandoned" not in left
    assert {"asyncrl-sandbox-young", "another"} < left
    assert len(left) == 3
    folders.close()
    assert len(list(tmp_path.iterdir())) == 2
