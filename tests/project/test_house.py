"""The layers contract, the links and the ban on bare imports hold, and would be noticed if they did not."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

LINKED = ("benchmarks", "buffers", "collectors", "configs", "learners")


@pytest.fixture
def copy(root: Path, tmp_path: Path) -> Path:
    """The house alone, links as links, to break things in."""
    for name in ("asyncrl", *LINKED):
        shutil.copytree(root / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(root / "pyproject.toml", tmp_path)
    return tmp_path


def _layers(folder: Path, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    script = Path(sys.executable).parent / "lint-imports"
    return subprocess.run(
        [script, "--no-cache"], cwd=folder, env=environ, capture_output=True, text=True, timeout=60, check=False
    )


def test_the_layers_hold(copy: Path, clean_environ: dict[str, str]) -> None:
    done = _layers(copy, clean_environ)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("file", "imported"),
    [
        ("asyncrl/config/broken.py", "asyncrl.buffers.base"),
        ("buffers/broken.py", "asyncrl.collectors"),
        ("collectors/broken.py", "asyncrl.learners"),
        ("learners/broken.py", "asyncrl.collectors"),
        ("benchmarks/broken.py", "asyncrl.cli"),
        ("asyncrl/rewards/broken.py", "asyncrl.tasks"),
        ("asyncrl/staleness.py", "asyncrl.schema"),
    ],
)
def test_a_broken_layer_is_noticed(copy: Path, clean_environ: dict[str, str], file: str, imported: str) -> None:
    with (copy / file).open("a") as stream:
        stream.write(f"\nimport {imported}\n")
    done = _layers(copy, clean_environ)
    assert done.returncode == 1, done.stdout
    top = ".".join(imported.split(".")[:2])
    assert f"is not allowed to import {top}" in " ".join(done.stdout.split())


def test_a_package_outside_the_house_is_noticed(copy: Path, clean_environ: dict[str, str]) -> None:
    (copy / "asyncrl" / "utils").mkdir()
    (copy / "asyncrl" / "utils" / "__init__.py").touch()
    assert _layers(copy, clean_environ).returncode == 1


def test_the_type_checker_sees_through_the_links(copy: Path, clean_environ: dict[str, str]) -> None:
    (copy / "configs" / "broken.py").write_text('def count() -> int:\n    return "one"\n')
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", "mypy", "--follow-imports", "skip", "-p", "asyncrl.configs"],
        cwd=copy,
        env=clean_environ,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 1
    assert "broken.py:2" in done.stdout


@pytest.mark.parametrize("name", LINKED)
def test_a_bare_import_is_banned(root: Path, name: str) -> None:
    command = [sys.executable, "-m", "ruff", "check", "--stdin-filename", str(root / "asyncrl" / "x.py"), "-"]
    for source, code in ((f"import {name}\n", 1), (f"from asyncrl import {name}\n", 1)):
        done = subprocess.run(command, input=source, cwd=root, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == code
        assert ("TID251" in done.stdout) == source.startswith("import")


@pytest.mark.parametrize("name", LINKED)
def test_each_top_folder_is_linked_into_the_package(root: Path, name: str) -> None:
    link = root / "asyncrl" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..") / name
    assert (root / name / "__init__.py").is_file()


def test_version_license_and_changelog_agree(root: Path) -> None:
    import asyncrl

    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert asyncrl.__version__ == project["version"]
    assert f"## [{project['version']}]" in (root / "CHANGELOG.md").read_text()
    assert project["license"] == "Apache-2.0"
    assert "Apache License" in (root / "LICENSE").read_text()
