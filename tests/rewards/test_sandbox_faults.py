"""Programs that do harm, and what keeps them from it: each is run once more without that wall, where it succeeds."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from asyncrl.rewards.sandbox import Sandbox
from asyncrl.rewards.sandbox_zygote import Given, Programs, Run, Settings
from asyncrl.rewards.time_limit import limit
from tests.rewards.walls import MEMORY, RunSource, last_line

pytestmark = pytest.mark.faults

Eventually = Callable[[float, Callable[[], object]], bool]


def test_a_fork_bomb_makes_no_process(run: RunSource) -> None:
    bounded = (
        "import os, time\n"
        "made = 0\n"
        "for _ in range(4):\n"
        "    try:\n"
        "        if os.fork() == 0: time.sleep(600)\n"
        "        made += 1\n"
        "    except PermissionError: pass\n"
        "print(made)"
    )
    assert run("import os\nwhile True: os.fork()").stderr.endswith(
        "PermissionError: [Errno 1] Operation not permitted\n"
    )
    assert run(bounded).stdout == "0\n"
    assert run(bounded, without="filter").stdout == "4\n"


@pytest.mark.parametrize("call", ["subprocess.run(['true'])", "os.execv('/bin/true', ['true'])"])
def test_no_other_program_is_started(run: RunSource, call: str) -> None:
    source = f"import os, subprocess\n{call}"
    assert last_line(run(source)) == "PermissionError: [Errno 1] Operation not permitted"
    assert run(source, without="both").stderr == ""


def test_processes_that_a_program_abandons_end_with_it(
    run: RunSource, sandboxes: Callable[[str], Sandbox], eventually: Eventually
) -> None:
    """Where the filter is left out; with it there can be none. A plain subprocess leaves them behind."""
    source = (
        "import os, sys, time\n"
        "read, write = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        os.write(write, str(os.getpid()).encode())\n"
        "        for n in range(3): os.close(n)\n"
        "        time.sleep(600)\n"
        "    os._exit(0)\n"
        "print(int(os.read(read, 20)), flush=True)\n"
    )
    orphan = int(run(source, without="filter").stdout)
    assert not psutil.pid_exists(orphan)
    assert not psutil.Process(sandboxes("filter").pid).children(recursive=True)
    plain = subprocess.run([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    left = psutil.Process(int(plain.stdout))
    left.kill()
    assert eventually(10, lambda: not left.is_running() or left.status() == psutil.STATUS_ZOMBIE)


@pytest.mark.parametrize(
    "source",
    [
        "while True: pass",
        "import time\ntime.sleep(600)",
        "input_ = open(0).read\nimport threading\nthreading.Event().wait()",
    ],
)
def test_a_program_without_end_is_ended_at_its_limit(run: RunSource, source: str) -> None:
    ended = run(source, limit_s=0.3)
    assert (ended.reason, ended.code) == ("timeout", None)
    assert run("import time\ntime.sleep(0.6)").reason == ""  # twice that limit, within its own


def test_a_program_cannot_put_off_its_end(run: RunSource) -> None:
    source = (
        "import signal\n"
        "for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}: signal.signal(number, signal.SIG_IGN)\n"
        "while True:\n"
        "    try: 2 ** 10_000_000\n"
        "    except BaseException: pass"
    )
    assert run(source, limit_s=0.3).reason == "timeout"


def test_a_program_that_reads_its_own_output_cannot_put_off_its_end(run: RunSource) -> None:
    """Where it runs as the user who started it, it can open the pipe a second time, and take what was to be taken."""
    source = (
        "import os, threading, time\n"
        "def eat():\n"
        "    own = os.open('/proc/self/fd/1', os.O_RDONLY | os.O_NONBLOCK)\n"
        "    while True:\n"
        "        try: os.read(own, 65536)\n"
        "        except BlockingIOError: pass\n"
        "threading.Thread(target=eat).start()\n"
        "for _ in range(2000):\n"
        "    os.write(1, b'x')\n"
        "    time.sleep(0.0001)\n"
        "time.sleep(600)"
    )
    assert run(source, without="user", limit_s=1.0).reason == "timeout"


def test_output_that_a_program_took_back_is_not_waited_for(tmp_path: Path) -> None:
    """What the program above tries to bring about, at the moment that it has to meet."""
    output = os.memfd_create("output")
    given = Given(source=-1, input=-1, output=output, errors=output, records=-1)
    programs = Programs(Settings([], [], 0, []), Run(False, 1, 1), given, tmp_path, None)
    programs._output, write = os.pipe()
    programs._counts, programs._opened = {programs._output: 0}, {programs._output}
    try:
        with limit(10):
            assert programs._take(programs._output) == 0
        os.write(write, b"x")
        assert programs._take(programs._output) == 1
        os.close(write)
        assert programs._opened == {programs._output}
        assert programs._take(programs._output) == 0
        assert programs._opened == set()  # its end
    finally:
        os.close(programs._output)
        os.close(output)


def test_memory_is_bounded(run: RunSource) -> None:
    source = f"held = bytearray({2 * MEMORY})\nprint(len(held))"
    assert last_line(run(source)) == "MemoryError"
    assert run(source, without="limits").stdout == f"{2 * MEMORY}\n"


def test_memory_that_is_shared_is_bounded_too(run: RunSource) -> None:
    source = f"import mmap\nprint(len(mmap.mmap(-1, {2 * MEMORY})))"
    assert "Cannot allocate memory" in last_line(run(source))
    assert run(source, without="limits").stdout == f"{2 * MEMORY}\n"


def test_output_is_bounded(run: RunSource) -> None:
    assert run("while True: print('x' * 1000)").reason == "output_flood"
    assert run("import sys\nwhile True: sys.stderr.write('x' * 1000)").reason == "output_flood"
    ended = run("print('x' * 5_000_000)", without="limits")
    assert (ended.reason, len(ended.stdout)) == ("", 5_000_001)


def test_a_large_file_cannot_be_written(run: RunSource) -> None:
    source = "with open('file', 'wb') as file:\n    for _ in range(100): file.write(bytes(1 << 20))\nprint('written')"
    assert last_line(run(source)) == "OSError: [Errno 27] File too large"
    assert run(source, without="limits").stdout == "written\n"


def test_many_files_cannot_be_written(run: RunSource) -> None:
    large = "import time\nfor n in range(10): open(str(n), 'wb').write(b'x' * (15 << 20))\ntime.sleep(600)"
    many = "import time\nfor n in range(1200): open(str(n), 'wb').close()\ntime.sleep(600)"
    assert run(large).reason == "disk_flood"
    assert run(many).reason == "disk_flood"
    assert run(many.replace("600", "0.3"), without="limits").reason == ""


@pytest.mark.parametrize(
    "hold",
    [
        "open_ = []\nfor n in range(9):\n    file = open('a', 'wb')\n    os.unlink('a')\n    open_.append(file)",
        "maps = []\nfor n in range(9):\n    file = open('a', 'w+b')\n    os.unlink('a')\n    file.write(bytes(4096))\n"
        "    file.flush()\n    maps.append(PAGE(file.fileno()))",
    ],
)
def test_files_without_a_name_fill_no_disk(run: RunSource, hold: str) -> None:
    """The second way keeps a page mapped, with no descriptor (of which mmap's would be limited)."""
    source = (
        "import ctypes, os, time\n"
        "mmap = ctypes.CDLL(None).mmap\n"
        "mmap.restype = ctypes.c_void_p\n"
        "mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]\n"
        "PAGE = lambda fd: mmap(None, 4096, 1, 1, fd, 0)\n"
        f"{hold}\n"
        "    for _ in range(15): file.write(bytes(1 << 20))\n"
        "    file.flush()\n"
        "time.sleep(TIME)"
    )
    assert run(source.replace("TIME", "600")).reason == "disk_flood"
    assert run(source.replace("TIME", "0.3"), without="limits").reason == ""


def test_many_threads_cannot_be_started(run: RunSource) -> None:
    source = (
        "import threading\n"
        "threading.stack_size(65536)\n"
        "done = threading.Event()\n"
        "for _ in range(100): threading.Thread(target=done.wait, args=(TIME,)).start()"
    )
    assert run(source.replace("TIME", "600")).reason == "thread_flood"
    assert run(source.replace("TIME", "0.3"), without="limits").reason == ""


def test_no_descriptor_is_inherited(run: RunSource) -> None:
    source = (
        "import os\n"
        "def is_open(n):\n"
        "    try: os.fstat(n)\n"
        "    except OSError: return False\n"
        "    return True\n"
        "print([n for n in range(2000) if is_open(n)])"
    )
    with open(os.devnull) as inherited:
        os.set_inheritable(inherited.fileno(), True)
        assert run(source).stdout == "[0, 1, 2]\n"


def test_no_socket_is_connected(run: RunSource) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        source = (
            f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}))\nprint('connected')"
        )
        assert last_line(run(source)).startswith("PermissionError")
        assert run(source, without="both").stdout == "connected\n"


def test_no_socket_of_this_host_is_reached(run: RunSource, open_folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(open_folder / "socket"))
        (open_folder / "socket").chmod(0o777)
        server.listen()
        source = (
            f"import socket\nsocket.socket(socket.AF_UNIX).connect({str(open_folder / 'socket')!r})\nprint('connected')"
        )
        assert last_line(run(source)).startswith("PermissionError")
        assert run(source, without="both").stdout == "connected\n"


def test_no_process_gets_a_signal(run: RunSource) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        for call in (f"os.kill({child.pid}, 9)", "os.kill(-1, 9)", "os.kill(os.getppid(), 9)", "os.killpg(0, 9)"):
            assert last_line(run(f"import os\n{call}")) == "PermissionError: [Errno 1] Operation not permitted"
        assert child.poll() is None
    finally:
        child.kill()
        child.wait(10)


def test_nothing_is_left_of_twenty_programs_without_end(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(open_folder))
    with Sandbox(memory_bytes=MEMORY) as sandbox:
        zygote = psutil.Process(sandbox.pid)
        before = len(psutil.Process().children(recursive=True))
        for _ in range(20):
            ended = sandbox.run("open('a', 'w').write('a')\nwhile True: pass", "", limit_s=0.1)
            assert ended.reason == "timeout"
        assert zygote.children(recursive=True) == []  # zombies would be among them
        assert len(psutil.Process().children(recursive=True)) == before
        (home,) = open_folder.iterdir()
        assert eventually(10, lambda: list(home.iterdir()) == [])
    assert list(open_folder.iterdir()) == []
