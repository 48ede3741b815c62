"""Programs that read or change what is not theirs; each is run once more without the wall that keeps it from that."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.rewards.sandbox import Sandbox
from tests.rewards.walls import LIMIT_S, MEMORY, SECRET, WITHOUT, RunSource, last_line

pytestmark = pytest.mark.faults


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
