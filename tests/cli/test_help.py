import subprocess
import sys

import pytest

import asyncrl
from asyncrl.cli.main import COMMANDS

HEAVY = ("torch", "transformers", "pyarrow", "redis", "numpy", "rich", "tokenizers")


def imported_by(*arguments: str) -> list[str]:
    """Which of HEAVY a command has imported when it ends."""
    code = f"""
import sys
sys.argv = ["asyncrl", *{list(arguments)!r}]
from asyncrl.cli.main import main
try:
    main()
finally:
    print("IMPORTED", *[name for name in {HEAVY!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60)
    return done.stdout.rpartition("IMPORTED")[2].split()


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)])
def test_help_loads_nothing_heavy(arguments):
    assert imported_by(*arguments) == []


def test_a_dry_run_loads_no_torch():
    assert not {"torch", "transformers"} & set(imported_by("run", "--dry-run"))


def test_the_version_is_the_packages(cli):
    assert cli("--version").stdout.split()[-1] == asyncrl.__version__


@pytest.mark.parametrize("name", COMMANDS)
def test_the_line_in_the_overview_is_how_the_commands_own_help_begins(cli, name):
    done = cli(name, "--help")
    assert done.returncode == 0
    assert f"{name} " in done.stdout
