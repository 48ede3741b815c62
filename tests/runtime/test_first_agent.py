"""`docs/first-agent.md`: its commands are run as they stand there, and lead where it says."""

from __future__ import annotations

import doctest
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "first-agent.md"
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LIMIT_S = 600  # of a command, on a machine that is busy


def commands() -> list[str]:
    blocks = BLOCK.findall(PAGE.read_text("utf-8"))
    return [line.removeprefix("$ ") for block in blocks for line in block.splitlines() if line.startswith("$ ")]


def run(command: str, folder: Path) -> str:
    """What a command prints that is typed in the folder; it has to end with exit code 0."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path}
    done = subprocess.run(
        ["sh", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, f"$ {command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return found


def test_the_verifier_says_of_answers_by_hand_what_the_page_says() -> None:
    (block,) = [block for block in PYTHON.findall(PAGE.read_text("utf-8")) if "judged(" in block]
    examples = doctest.DocTestParser().get_doctest(block, {}, PAGE.name, str(PAGE), 0)
    assert doctest.DocTestRunner(verbose=False).run(examples) == (0, len(examples.examples))


@pytest.mark.slow
@pytest.mark.timeout(3600)  # four minutes of a core; on a machine that does eight other things, sixteen
def test_the_walk_through_leads_from_no_call_to_calls_that_pass_the_gate(tmp_path: Path) -> None:
    printed = {command: run(command, tmp_path) for command in commands()}

    def of(part: str) -> str:
        return next(text for command, text in printed.items() if part in command)

    # the baseline: nothing but what is no call, and told so
    assert "not yet" in of("--out baseline")
    assert "malformed:64" in of("--out baseline")
    # supervised: better than the baseline, with mistakes of several classes
    sft = read(tmp_path / "sft.json")["report"]
    assert 0.05 < sft["metrics"]["pass@1"]["value"] < 0.85
    assert {"malformed", "wrong_arguments"} <= sft["wrong"].keys()
    assert "verdict     train" in of("--out after-sft")
    # trained: better on held-out rows than chance explains, and nothing that must not happen happens more often
    trained = read(tmp_path / "rl.json")
    assert trained["report"]["metrics"]["pass@1"]["value"] > sft["metrics"]["pass@1"]["value"] + 0.1
    for wrong in ("unsafe", "malformed"):
        assert trained["report"]["wrong"].get(wrong, 0) <= sft["wrong"].get(wrong, 0)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_model_that_is_no_better_does_not_pass_the_gate(tmp_path: Path) -> None:
    gate = next(command for command in commands() if "--gate" in command)
    rules = gate[gate.index("--gate") :].partition(" --json")[0]
    with pytest.raises(AssertionError, match="pass@1 better"):
        run(f"asyncrl eval tool-call --against tool-call {rules}", tmp_path)
