"""What holds for every test: one thread a process, no network for models, property tests without a clock, no skips."""

from __future__ import annotations

import os
import signal

import hypothesis
import pytest

pytest_plugins = ["tests.commands", "tests.processes"]

# Before anything imports torch. Processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Members of a broadcast that leave or die, as tests have them do, make torch's store warn whoever waits for them, with
# a stack of C++. What comes of it is an error in Python, which the tests look at; torch's own errors are still printed.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

# A shell that starts the tests in the background has them ignore Ctrl-C, and so would every process that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A loaded machine makes an example slow, not wrong.
hypothesis.settings.register_profile("asyncrl", deadline=None, print_blob=True)
hypothesis.settings.load_profile("asyncrl")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """In CI a skipped test fails the session: a test that does not run proves nothing."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter else []
    if os.environ.get("CI") and skipped and exitstatus == pytest.ExitCode.OK:
        reporter.write_line(f"{len(skipped)} skipped: in CI that is a failure", red=True, bold=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
