"""The wheel carries all that the checkout has, claims no name but `asyncrl`, and runs where nothing else is."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def wheel(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # Without isolation: the build back end is among the pinned development packages, and nothing is downloaded.
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, root],
        check=True,
        capture_output=True,
        timeout=110,
    )
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_claims_no_name_but_asyncrl(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"asyncrl"}


def test_the_wheel_carries_every_file_of_the_house(wheel: Path, root: Path) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "asyncrl", "benchmarks", "buffers", "collectors", "configs", "learners"],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout.split()
    expected = {
        name if name.startswith("asyncrl/") else f"asyncrl/{name}" for name in tracked if not (root / name).is_symlink()
    }
    archive = zipfile.ZipFile(wheel)
    assert expected <= set(archive.namelist())
    for name in (
        "asyncrl/py.typed",
        "asyncrl/buffers/scripts/common.lua",
        "asyncrl/configs/tiny-reverse.yaml",
        "asyncrl/benchmarks/__init__.py",
    ):
        assert name in expected
    recipe = archive.read("asyncrl/configs/tiny-reverse.yaml")
    assert recipe == (root / "configs" / "tiny-reverse.yaml").read_bytes()  # a file, not the text of a link


@pytest.fixture
def fresh(wheel: Path, tmp_path: Path) -> Path:
    """A new environment with the wheel in it.

    The dependencies are this environment's, seen through a .pth file: installing torch again takes minutes and tests
    pip, not the wheel. A folder named in a .pth is a plain path: the .pth files in it are not read, so this
    environment's editable asyncrl stays out of sight.
    """
    environment = tmp_path / "fresh"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True, timeout=60)
    python = environment / "bin" / "python"
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout.strip()
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (Path(site) / "dependencies.pth").write_text("\n".join(sorted(paths)) + "\n")
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--ignore-installed", "-q", wheel],
        check=True,
        timeout=110,
    )
    return environment


@pytest.fixture
def decoys(tmp_path: Path) -> Path:
    """A working folder with folders of its own that are named like asyncrl's."""
    folder = tmp_path / "work"
    for name in ("benchmarks", "buffers", "collectors", "configs", "learners"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("raise RuntimeError('not asyncrl')\n")
    (folder / "configs" / "tiny-reverse.yaml").write_text("not: asyncrl\n")
    (folder / "buffers" / "scripts").mkdir()
    (folder / "buffers" / "scripts" / "common.lua").write_text("not asyncrl\n")
    return folder


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_wheel_runs_from_a_folder_with_the_same_names(
    fresh: Path, decoys: Path, clean_environ: dict[str, str]
) -> None:
    found = subprocess.run(
        [fresh / "bin" / "python", "-c", "import asyncrl.buffers, asyncrl.configs; print(asyncrl.buffers.__file__)"],
        cwd=decoys,
        env=clean_environ,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout
    assert Path(found.strip()).is_relative_to(fresh)

    done = subprocess.run(
        [fresh / "bin" / "asyncrl", "run", "--max-trajectory-age", "1", "--set", "run.max_steps=3"],
        cwd=decoys,
        env=clean_environ,
        capture_output=True,
        text=True,
        timeout=330,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (folder,) = (decoys / "runs").iterdir()
    assert json.loads((folder / "summary.json").read_text())["steps"] == 3
