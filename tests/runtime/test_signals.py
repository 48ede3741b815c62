import signal

import pytest

PROCESS = """
import asyncio, logging, subprocess, sys, time
from asyncrl.runtime.signals import run

logging.basicConfig(level=logging.INFO)

async def main(stop):
    child = subprocess.Popen(["sleep", "60"])
    print(child.pid, flush=True)
    if {blocks}:
        while True:
            time.sleep(0.05)
    await stop.wait()
    print("stopping", flush=True)
    if {hangs}:
        await asyncio.sleep(60)
    child.kill()
    child.wait()
    return 0

sys.exit(run(main, grace_s={grace}, echo_s={echo}))
"""


def begin(start, *, grace: float = 60.0, hangs: bool = False, blocks: bool = False, echo: float = 0.0):
    process = start("-c", PROCESS.format(grace=grace, hangs=hangs, blocks=blocks, echo=echo))
    return process, int(process.stdout.readline())


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_first_signal_lets_the_work_stop_and_is_the_exit_code(start, number, code):
    process, _ = begin(start)
    process.send_signal(number)
    assert process.stdout.readline() == "stopping\n"
    assert process.wait(timeout=10) == code


@pytest.mark.parametrize("blocks", [False, True])
def test_the_second_signal_ends_the_process_and_its_children_now(start, is_alive, eventually, blocks):
    process, child = begin(start, hangs=True, blocks=blocks)
    process.send_signal(signal.SIGTERM)
    # Two signals at once would be one: the second is sent when the first has been taken.
    assert "stopping within" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == 143
    assert eventually(5, lambda: not is_alive(child))


def test_a_second_signal_that_is_an_echo_of_the_first_changes_nothing(start):
    """A launcher passes on what the scheduler has sent to everybody."""
    process, _ = begin(start, grace=1.0, hangs=True, echo=60.0)
    process.send_signal(signal.SIGTERM)
    assert "stopping within" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == 143
    assert "not stopped after 1 s of grace" in process.stderr.read()


@pytest.mark.parametrize("blocks", [False, True])
def test_after_the_grace_it_ends_even_if_its_loop_is_blocked(start, is_alive, eventually, blocks):
    process, child = begin(start, grace=0.3, hangs=True, blocks=blocks)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == 143
    assert eventually(5, lambda: not is_alive(child))


def test_a_hangup_that_nohup_ignores_stays_ignored(start):
    code = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + PROCESS
    process = start("-c", code.format(grace=60, hangs=False, blocks=False, echo=0))
    process.stdout.readline()
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == 143, "the hangup did not count as the first signal (that would be 129)"
