import pytest

from asyncrl.config.recipe import Model, Recipe
from asyncrl.runtime import models
from asyncrl.runtime.models import ModelError


def recipe(path: str) -> Recipe:
    return Recipe(model=Model(path=path))


@pytest.fixture
def complete(tmp_path):
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
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


def test_the_only_built_in_model_is_named_where_another_is_asked_for():
    with pytest.raises(ModelError, match="the only built-in model is builtin:tiny"):
        models.check(recipe("builtin:huge"))


def test_the_built_in_model_needs_no_folder_beforehand():
    assert models.check(recipe("builtin:tiny")) is None


def test_small_models_get_one_thread_unless_the_environment_says_otherwise(complete, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert models.threads(complete) == 1
    assert models.threads(None) == 1
    monkeypatch.setattr(models, "SMALL_WEIGHTS", 1)
    assert models.threads(complete) is None
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert models.threads(complete) == 3
