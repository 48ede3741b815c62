import os
import signal
import subprocess
import sys

import pytest

PARENT = """
import subprocess, sys
from asyncrl.runtime.tether import command
argv = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]
child = subprocess.Popen(command(argv) if {tied} else argv, stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""


@pytest.mark.faults
@pytest.mark.parametrize("tied", [True, False])
def test_only_a_tethered_child_dies_with_a_parent_that_is_killed(start, is_alive, eventually, tied):
    parent = start("-c", PARENT.format(tied=tied))
    child = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait(timeout=10)
    try:
        assert eventually(10 if tied else 1, lambda: not is_alive(child)) == tied
    finally:
        if is_alive(child):
            subprocess.run(["kill", "-9", str(child)], check=True)


def test_a_tethered_command_gets_its_arguments_input_and_exit_code(start):
    code = "import sys; print(sys.argv[1:], sys.stdin.read()); sys.exit(7)"
    command = [
        sys.executable,
        "-m",
        "asyncrl.runtime.tether",
        str(os.getpid()),
        "--",
        sys.executable,
        "-c",
        code,
        "a b",
    ]
    done = subprocess.run(command, check=False, input="text", capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout) == (7, "['a b'] text\n")


def test_a_command_whose_parent_is_already_gone_is_not_started():
    command = [sys.executable, "-m", "asyncrl.runtime.tether", "1", "--", sys.executable, "-c", "print('started')"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=20)
    assert done.returncode == 1
    assert "started" not in done.stdout
    assert "the parent 1 is gone" in done.stderr


def test_the_watcher_for_other_systems_ends_its_command_when_the_parent_is_not_there():
    code = f"""
import sys, time
from asyncrl.runtime import tether
sys.exit(tether._watch([{sys.executable!r}, "-c", "import time; time.sleep(60)"], parent=1))
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=20)
    assert done.returncode == 128 + signal.SIGKILL, done.stderr
