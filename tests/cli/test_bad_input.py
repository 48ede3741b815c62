"""What a person can get wrong: exit code 2 and one to three lines that name it, before any process starts."""

import json
import socket
from pathlib import Path

import pytest
import redis.asyncio

from asyncrl.buffers.server import EmbeddedServer
from asyncrl.config.loading import load_recipe
from asyncrl.config.recipe import to_builtins

DATA = """
run: {name: mine}
model: {path: builtin:tiny}
task: {type: single-turn, data: {train: rows.jsonl}}
"""


def refused(done, *said: str) -> None:
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("Error: "), done.stderr
    assert 1 <= len(done.stderr.splitlines()) <= 3, done.stderr
    assert "Traceback" not in done.stderr
    for words in said:
        assert words in done.stderr


def write(folder: Path, recipe: str, rows: str | None = None) -> None:
    (folder / "mine.yaml").write_text(recipe)
    if rows is not None:
        (folder / "rows.jsonl").write_text(rows)


def row(**fields: object) -> str:
    return json.dumps(fields) + "\n"


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ("run: {max_stepz: 3}", ["run.max_stepz", "max_steps"]),
        ("collector: {num_generations: 4}", ["num_generations", "collector.group_size"]),
        ("run: {max_steps: many}", ["run.max_steps", "many"]),
        ("run: {max_steps: 1}\nrun: {max_steps: 2}", ["run", "twice"]),
        ("collector: {group_size: 1}", ["collector.group_size is 1"]),
        ("buffer: {max_trajectory_age: -1}", ["buffer.max_trajectory_age is -1"]),
        ("model: {path: ./no-such-folder}", ["./no-such-folder"]),
        ("model: {path: no-such-org/no-such-model}", ["no-such-org/no-such-model"]),
        ("buffer: {url: 'redis://127.0.0.1:1/0'}", ["redis://127.0.0.1:1/0", "unreachable"]),
        ("buffer: {url: 'memory://'}", ["memory://"]),
        ("task: {type: single-turn, data: {train: no.jsonl}}", ["no.jsonl"]),
    ],
)
def test_a_recipe_that_cannot_be_run(cli, tmp_path, recipe, said):
    write(tmp_path, recipe)
    refused(cli("run", "./mine.yaml"), *said)
    assert not (tmp_path / "runs").exists(), "nothing was begun"


@pytest.mark.parametrize("arguments", [["run", "nope"], ["run", "./nope.yaml"], ["learner", "./nope.yaml"]])
def test_a_recipe_that_is_not_there(cli, arguments):
    refused(cli(*arguments), "nope")


def test_an_exponent_without_a_dot_is_the_number_it_looks_like(cli, tmp_path):
    write(tmp_path, "learner: {learning_rate: 1e-6}")
    done = cli("run", "./mine.yaml", "--dry-run")
    assert done.returncode == 0
    assert "learning_rate: 1e-6" in done.stdout


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (row(prompt="a", answer="b") + row(prompt="c"), ["rows.jsonl", "2", "answer"]),
        ("", ["rows.jsonl"]),
        (row(prompt="a", answer="b") + "{", ["rows.jsonl", "2"]),
    ],
)
def test_data_that_cannot_be_used_is_named_by_file_and_row(cli, tmp_path, rows, said):
    write(tmp_path, DATA, rows)
    refused(cli("run", "./mine.yaml"), *said)


def test_a_model_folder_without_a_tokenizer(cli, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"")
    refused(cli("run", "--set", "model.path=./model"), "model", "no tokenizer")


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "--max-trajectory-age", "-1"],
        ["run", "--max-trajectory-age", "1.5"],
        ["run", "--no-such-flag"],
        ["run", "--set", "learning_rate"],
        ["run", "--resume"],
        ["run", "--resume", "no-such-run"],
        ["learner"],
        ["collector", "--run", "x"],
        ["collector", "--run", "x", "--buffer", "redis://127.0.0.1:1/0", "--wait", "soon"],
        ["buffer", "serve", "--listen", "nowhere"],
        ["buffer", "serve", "--listen", "0.0.0.0:6379"],
        ["buffer", "serve", "--password-env", "NOT_SET"],
        ["no-such-command"],
    ],
)
def test_arguments_that_cannot_be_used(cli, arguments):
    refused(cli(*arguments))


def test_a_folder_that_cannot_be_written(cli):
    refused(cli("run", "--set", "run.output_dir=/proc/self/mine"), "/proc/self/mine", "run.output_dir")


def test_a_run_folder_that_is_in_use(cli, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "summary.json").touch()
    refused(cli("run", "--set", "run.output_dir=mine"), "mine", "not empty")


def test_a_model_without_a_chat_template(cli, tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (base / name).write_text("{}")
    write(tmp_path, "model: {path: ./base}")
    refused(cli("run", "./mine.yaml"), "model.path base has no chat template", "instruct version")
    assert not (tmp_path / "runs").exists(), "nothing was begun"


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_an_adapter_on_a_module_that_does_not_exist(cli, tmp_path):
    write(tmp_path, "model: {lora: {target_modules: [q_proj, wqkv]}}")
    done = cli("run", "./mine.yaml", timeout=150)  # only the model itself knows its modules
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 2, done.stderr
    assert 'model.lora.target_modules has "wqkv", but Qwen3ForCausalLM has no such module' in done.stderr
    assert "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj" in done.stderr


@pytest.mark.slow
def test_a_collector_that_waits_in_vain_says_for_what(cli):
    done = cli("collector", "--run", "x", "--buffer", "redis://127.0.0.1:1/0", "--wait", "1s")
    assert done.returncode == 2
    assert "nothing listens there" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.asyncio
async def test_a_store_that_may_evict_and_one_with_another_runs_name_or_schema(cli, tmp_path):
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        address = found.getsockname()
    async with EmbeddedServer(tmp_path, listen=address) as server, redis.asyncio.from_url(server.url) as client:

        def run(*overrides: str):
            chosen = [argument for override in overrides for argument in ("--set", override)]
            return cli("run", "--set", f"buffer.url={server.url}", *chosen)

        from asyncrl.buffers.store import open_store
        from asyncrl.learners.limits import limits_of

        store = await open_store(server.url)
        recipe = load_recipe(None, overrides=["run.name=taken"]).recipe
        limits = limits_of(recipe, max_length=64)
        await store.create_run("taken", recipe=to_builtins(recipe), recipe_hash="another", limits=limits)
        refused(run("run.name=taken", "run.max_steps=7"), "taken", "in use", "run.max_steps")

        key = "asyncrl:{taken}:run"
        document = json.loads(await client.hget(key, "document"))
        await client.hset(key, "document", json.dumps({**document, "schema": 99}))
        refused(run("run.name=taken"), "schema version 99")

        await client.config_set("maxmemory-policy", "allkeys-lru")
        refused(run(), "may evict", "allkeys-lru")
        await store.close()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (None, ["no module mine"]),
        ("import torch_is_not_here", ["torch_is_not_here"]),
        ("class Other: pass", ["has no class Task"]),
        ("class Task:\n    def __init__(self): raise ValueError('cannot')", ["constructor raised ValueError: cannot"]),
        ("import os\nos._exit(9)", ["ended its process with code 9"]),
        ("import os\nos._exit(0)", ["ended its process with code 0"]),
        ("import sys\nsys.exit()", ["importing mine raised SystemExit"]),
        ("class Task:\n    def rows(self, split): return []", ["no method score: add `def score(self, row, answer)`"]),
    ],
)
def test_a_task_of_ones_own_that_cannot_be_built(cli, tmp_path, code, said):
    if code is not None:
        (tmp_path / "mine.py").write_text(code)
    refused(cli("run", "--set", "task={type: 'mine:Task'}"), "mine:Task", *said)


def test_a_task_in_a_file_that_is_named_like_a_library(cli, tmp_path):
    (tmp_path / "random.py").write_text("class Task: pass")
    refused(cli("run", "--set", "task={type: 'random:Task'}"), "random:Task", "which hides", "my_random")
