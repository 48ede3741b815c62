import json
import os
import signal
import subprocess
import sys

import pytest

from asyncrl.telemetry.documents import write_document

KILLED = """
import os, pathlib, signal, sys
from asyncrl.telemetry.documents import write_document

whole = pathlib.Path.write_text
def half(path, text, **options):
    whole(path, text[: len(text) // 2], **options)
    os.kill(os.getpid(), signal.SIGKILL)

pathlib.Path.write_text = half
write_document(pathlib.Path(sys.argv[1]), {"step": 2})
"""


def test_it_is_strict_json_that_people_can_read(tmp_path):
    path = tmp_path / "summary.json"
    write_document(path, {"prompt": "größer", "reward": None})
    assert path.read_text(encoding="utf-8") == '{\n  "prompt": "größer",\n  "reward": null\n}\n'
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_document(path, {"reward": float("nan")})
    assert json.loads(path.read_bytes())["prompt"] == "größer"


def test_half_a_surrogate_pair_comes_back_as_it_was(tmp_path):
    """A row may hold one, and UTF-8 has no bytes for it."""
    path = tmp_path / "summary.json"
    write_document(path, {"prompt": "a\ud800\\b"})
    assert json.loads(path.read_bytes()) == {"prompt": "a\ud800\\b"}


@pytest.mark.faults
def test_a_writer_that_is_killed_in_the_middle_leaves_what_was_there(tmp_path):
    path = tmp_path / "summary.json"
    write_document(path, {"step": 1})
    killed = subprocess.run([sys.executable, "-c", KILLED, str(path)], timeout=60, check=False, env=dict(os.environ))
    assert killed.returncode == -signal.SIGKILL
    assert json.loads(path.read_bytes()) == {"step": 1}
    write_document(path, {"step": 3})
    assert json.loads(path.read_bytes()) == {"step": 3}
    assert [found.name for found in tmp_path.iterdir()] == ["summary.json"]
