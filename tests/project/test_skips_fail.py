"""A skipped test fails CI."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SKIPS = {
    "mark": "import pytest\n@pytest.mark.skip\ndef test_a(): pass\n",
    "call": "import pytest\ndef test_a(): pytest.skip('no reason')\n",
    "module": "import pytest\npytest.skip('no reason', allow_module_level=True)\n",
    "none": "",
}


@pytest.mark.parametrize(("kind", "ci"), [*((kind, "1") for kind in SKIPS), ("mark", "")])
def test_a_skip_fails_the_session_in_ci_only(
    root: Path, tmp_path: Path, clean_environ: dict[str, str], kind: str, ci: str
) -> None:
    shutil.copy(root / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_skip.py").write_text(SKIPS[kind])
    (tmp_path / "test_pass.py").write_text("def test_b(): pass\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path],
        cwd=tmp_path,
        env={**clean_environ, "CI": ci, "PYTHONPATH": str(root)},  # for the plugin that conftest.py names
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == (1 if ci and kind != "none" else 0), done.stdout
    assert ("in CI that is a failure" in done.stdout) == (bool(ci) and kind != "none")
