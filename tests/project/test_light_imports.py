"""What a person waits for before anything happens: `import asyncrl` and `asyncrl --help` load no model library."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "transformers", "pyarrow")

WATCH = """
import sys
{statement}
print("loaded:", *(name for name in {heavy} if name in sys.modules))
"""

HELP = """
import asyncrl.cli.main
sys.argv = ["asyncrl", {arguments}]
try:
    asyncrl.cli.main.main()
except SystemExit as end:
    assert end.code == 0, end.code
"""


def _loaded(statement: str, environ: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", WATCH.format(statement=statement, heavy=HEAVY)],
        capture_output=True,
        text=True,
        timeout=60,
        env=environ,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "statement",
    [
        "import asyncrl; dir(asyncrl)",
        HELP.format(arguments='"--help"'),
        HELP.format(arguments='"--version"'),
        HELP.format(arguments='"run", "--help"'),
        "import asyncrl.config.recipe",
    ],
    ids=["import", "help", "version", "run help", "recipe"],
)
def test_nothing_heavy_is_loaded(statement: str, clean_environ: dict[str, str]) -> None:
    assert _loaded(statement, clean_environ) == "loaded:"


def test_the_watch_sees_what_is_loaded(clean_environ: dict[str, str]) -> None:
    assert _loaded("import pyarrow", clean_environ) == "loaded: pyarrow"


def test_the_console_script_answers(clean_environ: dict[str, str]) -> None:
    script = Path(sys.executable).parent / "asyncrl"
    said = subprocess.check_output([script, "--help"], text=True, timeout=60, env=clean_environ)
    assert "run" in said
