from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from asyncrl.config.derived import derive
from asyncrl.config.identity import identity_differences, recipe_hash
from asyncrl.config.loading import Loaded, load_recipe
from asyncrl.config.merge import differing_keys, flatten, merge
from asyncrl.config.objective import Objective
from asyncrl.config.overrides import nested, override_document
from asyncrl.config.recipe import Recipe, to_builtins
from asyncrl.config.resolved import dump, resolved_yaml
from asyncrl.config.secrets import masked
from asyncrl.config.sizes import size_bytes, size_text
from asyncrl.config.yaml_text import number, parse, scalar
from asyncrl.schema import max_group_bytes

Load = Callable[..., Loaded]

names = st.from_regex(r"[a-z_]{1,6}", fullmatch=True).filter(lambda name: name != "type")
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**9), 10**9), st.floats(allow_nan=False, width=32), st.text(max_size=12)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)
documents = st.dictionaries(names, values, max_size=4)


@given(documents, documents)
def test_what_lies_on_top_wins_key_by_key(base: dict[str, object], over: dict[str, object]) -> None:
    merged = flatten(merge(base, over))
    for key, value in flatten(over).items():
        if value != {}:
            assert merged[key] == value
    assert merge(merge(base, over), over) == merge(base, over)
    assert merge(base, {}) == base


@given(documents, documents, documents)
def test_merging_is_associative(a: dict[str, object], b: dict[str, object], c: dict[str, object]) -> None:
    # A scalar on top of a mapping forgets it, so the order of brackets matters only where kinds differ.
    kinds = [{key: isinstance(value, dict) for key, value in flatten_all(d).items()} for d in (a, b, c)]
    for key in set().union(*kinds):
        if len({kind[key] for kind in kinds if key in kind}) > 1:
            return
    assert merge(merge(a, b), c) == merge(a, merge(b, c))


def flatten_all(document: object, prefix: str = "") -> dict[str, object]:
    """Every dotted key, inner ones too."""
    flat: dict[str, object] = {}
    if isinstance(document, dict):
        for key, value in document.items():
            flat[prefix + key] = value
            flat |= flatten_all(value, f"{prefix}{key}.")
    return flat


@given(documents)
def test_overrides_and_flattening_are_inverse(document: dict[str, object]) -> None:
    rebuilt: dict[str, object] = {}
    for key, value in flatten(document).items():
        rebuilt = merge(rebuilt, nested(key, value))
    assert rebuilt == document
    assert differing_keys(rebuilt, document) == []


@given(st.lists(names, min_size=1, max_size=3), values)
def test_an_override_reads_back_what_yaml_writes(path: list[str], value: object) -> None:
    text = dump({"v": [value]}).removeprefix("v: ").strip()
    assert override_document([f"{'.'.join(path)}={text}"]) == nested(".".join(path), [value])


@example({"a": ["?0", "\x85", "- b", "#c", "d: e", "1e-6", "true", "", " f", "*g", "&h", "!i", "%j"]})
@given(documents)
def test_dumped_documents_read_back(document: dict[str, object]) -> None:
    assert (parse(dump(document)) or {}) == document


@given(st.floats(allow_nan=False))
def test_numbers_read_back_as_written(value: float) -> None:
    assert scalar(number(value)) == value


@given(st.integers(1, 1 << 50))
def test_sizes_read_back_as_written(count: int) -> None:
    assert size_bytes(size_text(count)) == count


@pytest.mark.parametrize("bad", ["", "4", "GiB", "4 gib", "-4GiB", "0GiB", "1.5B", "1e9B", 0, -1])
def test_a_bad_size_is_refused(bad: str | int) -> None:
    with pytest.raises(ValueError, match="size is"):
        size_bytes(bad)


def test_the_resolved_text_reads_back_as_the_same_recipe(load: Load, tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").touch()
    for text in (
        "",
        "learner: {learning_rate: 1e-6}\nbuffer: {max_bytes: 5000000000}",
        "task: {type: single-turn, data: {train: d.jsonl}, system_prompt: \"a: b\\n'c' # d\"}",
        "task: {type: 'm:C', args: {x: [1, {y: null}], z: {}}}\ncollector: {engine: {type: simulated}}",
    ):
        recipe = load(text).recipe
        assert load(resolved_yaml(recipe)).recipe == recipe


def test_the_resolved_text_names_every_key_and_marks_what_is_derived(load: Load) -> None:
    loaded = load("extends: tiny-reverse\nbuffer: {url: 'redis://:secret@h/0'}")
    text = resolved_yaml(loaded.recipe)
    shown = flatten(parse(text))
    assert shown == {key: value for key, value in flatten(masked(loaded.document)).items() if key != "extends"}
    assert "secret" not in text
    assert text.startswith("# extends tiny-reverse, merged in below\n")
    derived = [line.split("#")[0].split(":")[0].strip() for line in text.splitlines() if "# derived: " in line]
    assert derived == ["output_dir", "lookahead", "max_bytes", "slots", "max_concurrent_groups", "groups_per_step"]
    assert "output_dir: null  # derived: runs/x-1\n" in resolved_yaml(loaded.recipe, run_folder="runs/x-1")


def test_a_preset_that_follows_from_the_age_is_marked_and_one_that_is_named_is_not(load: Load) -> None:
    for text, shown in (
        ("", "preset: async  # derived: the default where buffer.max_trajectory_age is 1\n"),
        ("objective: {preset: null, epsilon: 0.5}\nbuffer: {max_trajectory_age: 0}", "preset: grpo  # derived: "),
        ("objective: {preset: async}", "preset: async\n"),
        ("extends: tiny-reverse", "preset: grpo\n"),
    ):
        loaded = load(text)
        assert shown in resolved_yaml(loaded.recipe, names_preset=loaded.names_preset)


def test_what_follows_from_filters_and_uses_is_said_where_they_are_set(load: Load) -> None:
    text = resolved_yaml(load("buffer: {dynamic_sampling: true, max_uses: 2}\ncollector: {min_members: 6}").recipe)
    assert "max_uses: 2  # derived: 8 of a step's 16 groups are fresh, or more\n" in text
    assert "max_empty_fills: 10 # derived: 160 groups in a row\n" in text
    assert "min_members: 6  # derived: of 8\n" in text
    assert "min_fresh: 0.0\n" in text
    assert "updates_per_step: 1\n" in text
    text = resolved_yaml(load("buffer: {max_uses: 2, min_fresh: 0.4}").recipe)
    assert "min_fresh: 0.4 # derived: 7 of a step's groups, at least\n" in text
    for updates, groups in ((2, "8"), (3, "5 or 6")):
        text = resolved_yaml(load(f"learner: {{updates_per_step: {updates}}}").recipe)
        assert f"updates_per_step: {updates} # derived: each by {groups} of a step's groups\n" in text


def test_derived_numbers_follow_from_the_recipe(load: Load) -> None:
    tiny = derive(Recipe())
    assert (tiny.trajectories_per_step, tiny.engine_slots, tiny.max_bytes) == (128, 256, 4 << 30)
    assert tiny.reserved_bytes == 32 * tiny.group_bytes
    age0 = derive(load("", flags={"max_trajectory_age": 0}).recipe)
    assert age0.engine_slots == 128
    two = derive(load("collector: {engines: 3, group_size: 4}\nlearner: {groups_per_step: 4}").recipe)
    assert two.engine_slots == 11  # 2 x 4 x 4 = 32 requests over 3 engines
    long = derive(load("model: {max_length: 40960}\ncollector: {group_size: 16}").recipe)
    assert long.group_bytes == max_group_bytes(16, 40960)
    for sampling, ids in (("top_k: 5, top_p: 0.9, min_tokens: 1", 5), ("min_tokens: 1", 16)):
        masked = derive(load(f"model: {{max_length: 40}}\ncollector: {{sampling: {{{sampling}}}}}").recipe)
        assert masked.group_bytes == max_group_bytes(8, 40, support=ids)
    own = derive(load("model: {max_length: 40}\ntask: {type: 'my:Own'}\ncollector: {max_turns: 3}").recipe)
    assert own.group_bytes == max_group_bytes(8, 40, segments=3)
    assert derive(load("collector: {engine: {slots: 4}}").recipe).engine_slots == 4
    one = load("run: {deterministic: true}", flags={"max_trajectory_age": 0})
    assert derive(one.recipe).engine_slots == 1
    assert derive(load("run: {deterministic: true}").recipe).engine_slots == 256


def test_what_is_to_be_deterministic_is_trained_in_order_unless_the_recipe_says_otherwise(load: Load) -> None:
    def shown(text: str) -> tuple[float, str]:
        loaded = load(text)
        line = next(line for line in resolved_yaml(loaded.recipe).splitlines() if "lookahead" in line)
        return derive(loaded.recipe).lookahead, line.strip()

    assert shown("run: {deterministic: true}") == (1.0, "lookahead: null # derived: 1, strictly in order")
    assert shown("") == (1.5, "lookahead: null # derived: 1.5")
    assert shown("run: {deterministic: true}\nbuffer: {lookahead: 2}") == (2.0, "lookahead: 2.0")


def test_the_hash_is_of_what_the_run_is_not_of_where_it_lies(load: Load) -> None:
    one = load("buffer: {url: 'redis://:a@h/0'}\nobjective: {preset: grpo}").recipe
    for same in (
        "extends: tiny-reverse\nbuffer: {url: 'redis://:b@other/0', max_bytes: 4096MiB}",
        "extends: tiny-reverse\nrun: {output_dir: /tmp/x}",
        "extends: tiny-reverse\nmodel: {path: some/model}",
        "extends: tiny-reverse",
    ):
        other = load(same).recipe
        assert recipe_hash(other) == recipe_hash(one) == recipe_hash(to_builtins(one))
        assert identity_differences(one, other) == []
    for differs, key in (
        ("run: {seed: 1}", "run.seed"),
        ("task: {type: 'a:B'}", "task.digits"),
        ("objective: {preset: dapo}", "objective.preset"),
    ):
        other = load(f"extends: tiny-reverse\n{differs}").recipe
        assert recipe_hash(other) != recipe_hash(one)
        assert key in identity_differences(one, to_builtins(other))


def test_the_hash_of_the_default_does_not_change_by_accident() -> None:
    assert len(recipe_hash(load_recipe(None, environ={}).recipe)) == 16
    assert recipe_hash(load_recipe(None, environ={}).recipe) == recipe_hash(Recipe(objective=Objective(preset="grpo")))


def test_secrets_are_masked_wherever_they_stand() -> None:
    assert masked("redis://u:p@h/0") == "redis://u:***@h/0"
    assert masked("https://h/x?api_key=abc&n=1") == "https://h/x?api_key=***&n=1"
    assert masked({"a": [{"api_key": "k", "wandb_api_key": "w", "password": "", "tokens": "t"}]}) == {
        "a": [{"api_key": "***", "wandb_api_key": "***", "password": "", "tokens": "t"}]
    }
    assert masked("redis://h:6379/0") == "redis://h:6379/0"
