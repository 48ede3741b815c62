"""Programs that do harm, and what keeps them from it: each is run once more without that wall, where it succeeds."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from asyncrl.rewards.sandbox import Ended, Sandbox
from asyncrl.rewards.sandbox_zygote import Given, Programs, Run, Settings
from asyncrl.rewards.time_limit import limit

pytestmark = pytest.mark.faults

LIMIT_S = 30.0  # of programs that end by themselves: never reached
MEMORY = 128 << 20
SECRET = "the secret of this test"
WITHOUT = {
    # Landlock keeps from files and programs and, since its fourth version, from networks; as root, the other user too.
    "filter": frozenset({"filter"}),
    "files": frozenset({"files", "user"}),
    "both": frozenset({"filter", "files"}),
    "limits": frozenset({"limits"}),
    "user": frozenset({"user"}),
}

RunSource = Callable[..., Ended]
Eventually = Callable[[float, Callable[[], object]], bool]


@pytest.fixture(scope="module")
def sandboxes() -> Iterator[Callable[[str], Sandbox]]:
    """By the wall that is left out; "" for none."""
    made: dict[str, Sandbox] = {}

    def sandbox(without: str) -> Sandbox:
        if without not in made:
            made[without] = Sandbox(memory_bytes=MEMORY, _without=WITHOUT.get(without, frozenset()))
        return made[without]

    yield sandbox
    for sandbox_ in made.values():
        sandbox_.close()


@pytest.fixture
def run(sandboxes: Callable[[str], Sandbox]) -> RunSource:
    def run(source: str, *, without: str = "", limit_s: float = LIMIT_S) -> Ended:
        return sandboxes(without).run(source, "", limit_s=limit_s)

    return run


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """One that every user may write to."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


def last_line(ended: Ended) -> str:
    return ended.stderr.strip().splitlines()[-1]


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


def test_nothing_is_written_outside_of_its_folder(run: RunSource, open_folder: Path) -> None:
    target = open_folder / "file"
    source = f"open({str(target)!r}, 'w').write('there')"
    assert "Permission denied" in last_line(run(source))
    assert not target.exists()
    run(source, without="files")
    assert target.read_text() == "there"


@pytest.mark.parametrize(
    "harm",
    [
        *("os.remove(PATH)", "os.rename(PATH, 'mine')", "os.truncate(PATH, 0)", "os.chmod(PATH, 0o600)"),
        *("os.utime(PATH, (0, 0))", "os.open(PATH, os.O_RDONLY | os.O_TRUNC)", "os.link(PATH, 'mine')"),
        *("os.mkfifo(PATH + '2')", "os.symlink('a', PATH + '2')", "os.mkdir(PATH + '2')", "os.rmdir(PATH[:-5])"),
    ],
)
def test_files_of_others_are_not_changed(run: RunSource, open_folder: Path, harm: str) -> None:
    target = open_folder / "file"
    target.write_text("kept")
    target.chmod(0o666)
    before = target.stat()
    ended = run(f"import os\nPATH = {str(target)!r}\n{harm}")
    assert last_line(ended).startswith(("PermissionError", "OSError: [Errno 18]"))
    after = target.stat()
    assert (after.st_mode, after.st_mtime, after.st_nlink) == (before.st_mode, before.st_mtime, before.st_nlink)
    assert [path.name for path in open_folder.iterdir()] == ["file"]
    assert target.read_text() == "kept"


@pytest.mark.parametrize(
    "way",
    ["open(PATH)", "os.symlink(PATH, 'a') or open('a')", "os.symlink(os.path.dirname(PATH), 'a') or open('a/file')"],
)
def test_secrets_in_files_are_not_read(run: RunSource, open_folder: Path, way: str) -> None:
    target = open_folder / "file"
    target.write_text(SECRET)
    target.chmod(0o644)
    source = f"import os\nPATH = {str(target)!r}\nprint(({way}).read())"
    ended = run(source)
    assert (ended.stdout, last_line(ended)[:15]) == ("", "PermissionError")
    assert run(source, without="files").stdout == SECRET + "\n"


@pytest.mark.parametrize(
    "path", ["/proc/self/environ", "/proc/1/cmdline", "/etc/passwd", "/root", "/home", "/tmp", "/dev/shm", "/"]
)
def test_no_place_of_the_machine_is_open(run: RunSource, path: str) -> None:
    read = f"os.listdir({path!r})" if Path(path).is_dir() else f"open({path!r}).read()"
    assert last_line(run(f"import os\nprint({read})")).startswith("PermissionError")


def test_secrets_in_the_environment_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in its own, nor in its memory, nor in that of other processes."""
    monkeypatch.setenv("SECRET_X", SECRET)
    source = (
        "import ctypes, os\n"
        "print(os.environ.get('SECRET_X'), ctypes.CDLL(None).getenv(b'SECRET_X'))\n"
        "for path in ('self', OTHER):\n"
        "    try: print('SECRET_X' in open(f'/proc/{path}/environ').read())\n"
        "    except PermissionError: print('refused')\n"
    )
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    source = source.replace("OTHER", str(other.pid))
    try:
        with Sandbox(memory_bytes=MEMORY) as sandbox, Sandbox(memory_bytes=MEMORY, _without=WITHOUT["files"]) as bare:
            assert sandbox.run(source, "", limit_s=LIMIT_S).stdout.split() == ["None", "0", "refused", "refused"]
            assert bare.run(source, "", limit_s=LIMIT_S).stdout.split() == ["None", "0", "False", "True"]
    finally:
        other.kill()
        other.wait(10)


def test_nothing_of_earlier_programs_is_in_the_memory_of_later_ones(sandboxes: Callable[[str], Sandbox]) -> None:
    """Read in full, which the wall around files forbids. What is looked for is written as a pattern, which is not
    itself; what the program has itself is found."""
    sandbox = sandboxes("files")
    sandbox.run(f"print(input(), '{SECRET}')", SECRET, limit_s=LIMIT_S)
    expected = [["call", "f()", SECRET], ["test", f"assert f() == {SECRET!r}"]]
    records = sandbox.test("def f(): return 1", expected, limit_s=LIMIT_S, total_s=LIMIT_S).records
    assert all(SECRET in detail for _, detail in records[1:])
    source = (
        "import re\n"
        "own = ''.join(['a mark', ' of its own']).encode()\n"
        "patterns = [re.compile(line.encode()) for line in iter(input, '')]\n"
        "found = [0] * len(patterns)\n"
        "memory = open('/proc/self/mem', 'rb', buffering=0)\n"
        "for line in open('/proc/self/maps').readlines():\n"
        "    start, end = (int(address, 16) for address in line.split()[0].split('-'))\n"
        "    try: content = memory.seek(start) and memory.read(end - start)\n"
        "    except (OSError, OverflowError): continue\n"
        "    found = [count + bool(pattern.search(content)) for count, pattern in zip(found, patterns)]\n"
        "print(*map(bool, found))"
    )
    patterns = "the[ ]secret of this test\na[ ]mark of its own\n\n"
    assert sandbox.run(source, patterns, limit_s=LIMIT_S).stdout == "False True\n"


def test_what_is_expected_is_not_read_through_another_process(sandboxes: Callable[[str], Sandbox]) -> None:
    """What a process has open has a name in /proc, of files without a place too, which Landlock does not know. Whose
    process it is, it knows."""
    source = (
        "import json, os\n"
        "def f():\n"
        "    own = os.getpid()\n"
        f"    for pid in ({os.getpid()}, os.getppid(), *range(own + 1, own + 9)):\n"
        "        for n in range(300):\n"
        "            try: content = os.pread(os.open(f'/proc/{pid}/fd/{n}', os.O_RDONLY | os.O_NONBLOCK), 9999, 0)\n"
        "            except OSError: continue\n"
        "            if content.startswith(b'[[\"call\", '): return json.loads(content)[0][2]\n"
    )
    tests = [["call", "f()", "what is expected"]]
    found = [sandboxes(wall).test(source, tests, limit_s=LIMIT_S, total_s=LIMIT_S).records[1] for wall in ("", "files")]
    assert (found[0][0], found[1]) == ("wrong_output", ("", ""))


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
