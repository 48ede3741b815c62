"""`asyncrl eval` with a real model, real engine and real verifier processes."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.collectors import episode
from asyncrl.collectors.engines.base import request_seed
from asyncrl.config.loading import load_recipe
from asyncrl.learners.writing import save
from asyncrl.runtime import folder as folders
from asyncrl.runtime.evaluation import Plan, evaluate, find_target
from asyncrl.staleness import Weights

SHORT = ("--set", "task.digits=[2, 2]", "--prompts", "8")


def document(folder: Path, name: str = "out.json") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / name).read_text())
    return found


def untimed(answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in answer.items() if not key.endswith("_s")} for answer in answers]


@pytest.fixture
def run_folder(tmp_path: Path, model: Path) -> Path:
    """A run folder as a training leaves it, whose one checkpoint holds the model."""
    recipe = load_recipe("tiny-reverse", overrides=["task.digits=[2, 2]"])
    folder = tmp_path / "runs" / "tiny-reverse-20260101-1"
    folder.mkdir(parents=True)
    folders.describe(folder, recipe)
    save(
        folder / "checkpoints",
        model=AutoModelForCausalLM.from_pretrained(model),
        tokenizer=AutoTokenizer.from_pretrained(model),
        training={"optimizer": {}},
        weights=Weights(1, 7),
        forks={1: (0, 0)},
        trained=[],
        tokens=0,
    )
    return folder


def test_a_recipe_is_evaluated_with_its_model_as_it_is(cli, tmp_path, model):
    truncated = ("--set", "collector.sampling.top_k=20")
    done = cli("eval", "tiny-reverse", "--set", f"model.path={model}", *truncated, *SHORT, "--json", "out.json")
    assert done.returncode == 0, done.stderr
    said = document(tmp_path)
    assert said["model"] == str(model)
    assert (said["sampling"]["top_k"], said["sampling"]["stop"]) == (20, [])
    assert "at temperature 1 with top_k 20" in " ".join(done.stdout.split())
    assert {"reward", "pass@1", "pass@2", "pass@4", "majority@4"} <= set(said["report"]["metrics"])
    assert len(said["answers"]) == 8 * 4
    assert said["report"]["metrics"]["pass@1"]["value"] <= said["report"]["metrics"]["pass@4"]["value"]
    lines = done.stdout.splitlines()
    assert lines[0].startswith("evaluated   recipe tiny-reverse, model ")
    assert [line for line in lines if line.startswith("pass@4")]
    assert sum(line.startswith("prompt ") for line in lines) == 3


def test_greedy_answers_are_those_of_transformers_own_generation(cli, tmp_path, model):
    options = ("--temperature", "0", "--set", f"model.path={model}", *SHORT)
    assert cli("eval", "tiny-reverse", *options, "--json", "out.json").returncode == 0
    tokenizer = AutoTokenizer.from_pretrained(model)
    plain = AutoModelForCausalLM.from_pretrained(model)
    for answer in document(tmp_path)["answers"]:
        messages = [{"role": "user", "content": answer["prompt"]}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
        ids = prompt["input_ids"] if not isinstance(prompt, torch.Tensor) else prompt
        made = plain.generate(ids, do_sample=False, max_new_tokens=8)[0, ids.shape[1] :]
        assert tokenizer.decode(made).removesuffix(tokenizer.eos_token) == answer["answer"]


def test_a_run_and_its_checkpoint_are_the_same_model(cli, tmp_path, run_folder):
    """The newest run by default, by name, by folder; its checkpoint's folder; against each other they do not differ."""
    checkpoint = run_folder / "checkpoints" / "version-000007"
    for target in ((), ("tiny-reverse",), (str(run_folder),), (str(checkpoint),)):
        done = cli("eval", *target, "--against", str(checkpoint), "--n", "2", *SHORT[2:], "--json", "out.json")
        assert done.returncode == 0, done.stderr
        found = document(tmp_path)
        assert found["model"] == str(checkpoint)
        assert untimed(found["answers"]) == untimed(found["against"]["answers"])
        for name, metric in found["difference"]["metrics"].items():
            if name == "tokens_per_success":  # nothing passes
                continue
            assert (metric["value"], metric["better"], metric["worse"], metric["equal"]) == (0.0, 0, 0, 8)


def test_seeds_and_prompts_are_those_of_a_run(cli, tmp_path, run_folder, monkeypatch):
    """The first answer to each row has the seed that the collector gives the evaluations of a run."""
    seeds: list[int] = []
    monkeypatch.setattr(
        episode, "request_seed", lambda *key, **again: seeds.append(request_seed(*key, **again)) or seeds[-1]
    )
    monkeypatch.chdir(tmp_path)
    target = find_target(str(run_folder))
    plan = Plan(prompts=3, samples=1, ks=[1], temperature=None, max_tokens=None, seed=0, pass_above=0.0)
    asyncio.run(evaluate(target, None, plan, on_answer=lambda name, done, total: None))
    assert seeds == [request_seed("tiny-reverse/0/heldout", row, 0, 0, 0) for row in range(3)]


LEVELS = """
from asyncrl.rewards.base import Finding
from asyncrl.tasks.base import Row

class Levels:
    def rows(self, split):
        return [Row(id=str(n), prompt="12", answer=n, info={"level": n % 2}) for n in range(8)]

    def score(self, row, answer):
        right = row.info["level"] == 1
        return Finding({"even": float(right)}, "" if right else "odd", read=str(row.answer))
"""


@pytest.fixture
def levels(tmp_path: Path, model: Path) -> Path:
    """A recipe whose task says that each second row is answered rightly."""
    module = f"levels_{tmp_path.name}"  # of this test: those of others stay imported
    (tmp_path / f"{module}.py").write_text(LEVELS)
    recipe = tmp_path / "levels.yaml"
    recipe.write_text(
        f"model: {{path: {model}}}\ntask: {{type: '{module}:Levels'}}\n"
        "eval: {n: 2, sampling: {temperature: 0.5}, pass_above: 0.5, difficulty: level}\n"
    )
    return recipe


def test_the_recipe_says_how_often_and_how_rows_are_answered_and_by_what_they_are_shown(cli, tmp_path, levels):
    done = cli("eval", str(levels), "--json", "out.json")
    assert done.returncode == 0, done.stderr
    found = document(tmp_path)
    assert (found["report"]["samples"], found["report"]["pass_above"]) == (2, 0.5)
    assert found["sampling"]["temperature"] == 0.5
    values = {name: group["metrics"]["reward"]["value"] for name, group in found["report"]["by"]["difficulty"].items()}
    assert values == {"0": 0.0, "1": 1.0}
    assert found["report"]["wrong"] == {"odd": 8}
    assert (found["weights"], found["answers"][0]["version"]) == ([0, 0], 0)
    assert [answer["read"] for answer in found["answers"][:4]] == ["0", "0", "1", "1"]
    assert "difficulty" in done.stdout
    assert "wrong/odd" in done.stdout


@pytest.mark.parametrize(
    ("rules", "code", "said"),
    [
        ("pass@1 >= 50%; odd <= 0.5; unsafe <= 0", 0, "gate        holds"),
        ("pass@1 > 50%; odd <= 0.5", 1, "gate        fails: 1 of 2 rules does not hold"),
        ("reward better", 1, "gate        fails"),
        ("default", 1, "reward better"),
        ("reward/evn >= 1", 2, "reward/even"),
        ("reward bettr", 2, "is no rule"),
        ("pass@4 >= 1", 2, "--k 4"),
        ("gone.yaml", 2, "'gone.yaml' cannot be read: No such file"),
    ],
)
def test_a_gate_is_the_exit_code(cli, tmp_path, levels, rules, code, said):
    compared = ("--against", str(levels)) if "better" in rules or rules == "default" else ()
    done = cli("eval", str(levels), *compared, "--gate", rules, "--json", "out.json")
    assert done.returncode == code, done.stderr
    assert said in " ".join((done.stderr if code == 2 else done.stdout).splitlines())
    if code < 2:
        assert document(tmp_path)["gate"]["holds"] == (code == 0)
    assert (tmp_path / "out.json").exists() == (code < 2 or "evn" in rules), "what took minutes is kept"


def test_a_gate_without_another_side_to_compare_with_is_refused_before_anything_is_sampled(cli, levels):
    done = cli("eval", str(levels), "--gate", "default")
    assert done.returncode == 2
    assert "--against TARGET" in done.stderr
    assert not done.stdout


def test_held_out_rows_may_come_from_another_file(cli, tmp_path, model):
    for name in ("train", "aime"):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"prompt": "{n}", "answer": "{n}"}}\n' for n in range(4)))
    (tmp_path / "recipe.yaml").write_text(
        f"model: {{path: {model}}}\ntask: {{type: single-turn, data: {{train: train.jsonl}}}}\n"
        "eval: {data: aime.jsonl, prompts: 2}\n"
    )
    done = cli("eval", "recipe.yaml", "--n", "1", "--json", "out.json")
    assert done.returncode == 0, done.stderr
    assert [answer["row_id"] for answer in document(tmp_path)["answers"]] == ["aime.jsonl:1", "aime.jsonl:2"]


TASK = """
from asyncrl.tasks.base import Row

class Faulty:
    def rows(self, split):
        return [Row(id=str(n), prompt="12", answer=n) for n in range(4)]

    def score(self, row, answer):
        return [1.0, 0.0, float("nan"), 1 / 0 if row.answer == 3 else 0.0][row.answer]
"""


def test_what_could_not_be_scored_is_counted_under_its_own_name(cli, tmp_path, model):
    (tmp_path / "faulty.py").write_text(TASK)
    (tmp_path / "recipe.yaml").write_text(f"model: {{path: {model}}}\ntask: {{type: 'faulty:Faulty'}}\n")
    done = cli("eval", "recipe.yaml", "--n", "2", "--json", "out.json")
    assert done.returncode == 0, done.stderr
    found = document(tmp_path)["report"]
    assert (found["answers"], found["unscored"]) == (8, 4)
    assert sorted(found["failures"].values()) == [2, 2]
    assert found["metrics"]["pass@1"]["value"] == 0.5
    assert "8, 4 unscored (" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nothing-of-that-name",), "nothing-of-that-name is no run folder"),
        ((), "no run in"),
        (("{model}",), "--recipe RECIPE"),
        (("--recipe", "tiny-reverse"), "has a recipe of its own: leave it out"),
        (
            ("tiny-reverse", "--recipe", "tiny-reverse"),
            "tiny-reverse is none. Leave it out if that is a run or a recipe",
        ),
        (("Qwen/Qwen3-0.6B", "--recipe", "tiny-reverse"), "asyncrl eval tiny-reverse --set model.path=Qwen/Qwen3-0.6B"),
        (("{model}", "--recipe", "tiny-reverse", "--set", "model.path=builtin:tiny"), "--set model.path"),
        (("tiny-reverse", "--temperature", "0", "--n", "2"), "greedy"),
        (("tiny-reverse", "--k", "8", "--n", "4"), "--n 8"),
        (("tiny-reverse", "--k", "0"), "whole numbers"),
        (("tiny-reverse", "--pass-above", "nan"), "nan is no number"),
        (("tiny-reverse", "--temperature", "nan"), "nan is no number"),
        (("tiny-reverse", "--by", "levle"), "--by) is 'levle', a key that the info of no heldout row has"),
        (("tiny-reverse", "--json", "nowhere/out.json"), "there is no folder nowhere"),
        (("tiny-reverse", "--set", "collector.engine={type: simulated}"), "no model"),
        (("tiny-reverse", "--set", "model.path=./nowhere"), "model.path"),
    ],
)
def test_bad_input_is_one_clear_error(cli, model, arguments, said):
    done = cli("eval", *(argument.replace("{model}", str(model)) for argument in arguments))
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 3


def test_a_damaged_checkpoint_is_refused_and_an_older_sound_one_is_taken_for_the_run(cli, tmp_path, run_folder):
    sound = run_folder / "checkpoints" / "version-000007"
    damaged = run_folder / "checkpoints" / "version-000009"
    shutil.copytree(sound, damaged)
    (damaged / "model.safetensors").write_bytes(b"torn")
    done = cli("eval", str(damaged), *SHORT)
    assert done.returncode == 2
    assert "damaged" in done.stderr
    done = cli("eval", "--n", "1", *SHORT, "--json", "out.json")
    assert done.returncode == 0, done.stderr
    assert document(tmp_path)["model"] == str(sound)


def test_a_supervised_training_is_told_from_a_run(cli, tmp_path, run_folder, model):
    """Its recipe has no task, so its model is evaluated by another recipe's."""
    (run_folder / "recipe.yaml").write_text("model: {path: x}\ndata: {train: x}\nsft: {}\n")
    checkpoint = run_folder / "checkpoints" / "version-000007"
    for arguments in ((), (str(run_folder),), (str(checkpoint),)):
        done = cli("eval", *arguments)
        assert done.returncode == 2
        assert "--recipe RECIPE" in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert find_target(str(checkpoint), recipe="tiny-reverse").recipe.model.path == str(checkpoint)


def test_a_folder_may_have_any_name(tmp_path, model):
    """Its path is a value of the recipe on the way: neither YAML nor variables may be seen in it."""
    folder = tmp_path / "ab: 'c' \"${HOME}\" # größer \U0001f600"
    shutil.copytree(model, folder)
    target = find_target(str(folder), recipe="tiny-reverse")
    assert Path(target.recipe.model.path) == folder


def test_answers_are_shown_also_where_the_file_cannot_be_written(cli, tmp_path, model):
    options = ("--set", f"model.path={model}", *SHORT, "--n", "1", "--json", "/dev/full")
    done = cli("eval", "tiny-reverse", *options)
    assert done.returncode != 0
    assert "No space left" in done.stderr
    assert sum(line.startswith("prompt ") for line in done.stdout.splitlines()) == 3


def test_a_run_without_a_checkpoint_says_what_can_be_evaluated_instead(cli, run_folder):
    shutil.rmtree(run_folder / "checkpoints")
    done = cli("eval")
    assert done.returncode == 2
    assert str(run_folder / "recipe.yaml") in done.stderr


@pytest.mark.faults
def test_an_interrupt_ends_it_with_its_verifiers(begin, descendants, eventually, is_alive, model):
    settings = ("--set", f"model.path={model}", "--set", "task.digits=[3, 6]", "--prompts", "4000")
    process = begin("eval", "tiny-reverse", *settings)
    assert eventually(60, lambda: descendants(process.pid) or process.poll() is not None)
    verifiers = [child.pid for child in descendants(process.pid)]
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert verifiers
    assert eventually(20, lambda: not [pid for pid in verifiers if is_alive(pid)])


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_runs_last_checkpoint_gives_the_runs_last_evaluation(cli, tmp_path):
    asked = {
        "run.max_steps": 4,
        "eval.every_steps": 2,
        "eval.prompts": 64,
        "eval.n": 3,
        "eval.sampling.temperature": 0.8,
    }
    done = cli("run", *(option for key, value in asked.items() for option in ("--set", f"{key}={value}")))
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    written = {path.stem: json.loads(path.read_text()) for path in (folder / "eval").iterdir()}
    assert {"eval-1-0", "eval-1-4"} <= set(written) <= {"eval-1-0", "eval-1-2", "eval-1-4"}
    for name, result in written.items():
        assert {f"eval-1-{answer['version']}" for answer in result["answers"]} == {name}, "one version, by its name"
        assert (result["sampling"]["temperature"], result["report"]["samples"]) == (0.8, 3)
    assert cli("eval", "--json", "out.json").returncode == 0
    ours, last = document(tmp_path), written["eval-1-4"]
    assert ours["weights"] == last["weights"] == [1, 4]
    assert ours["report"]["metrics"]["reward"] == last["report"]["metrics"]["reward"]
    assert [answer["seed"] for answer in ours["answers"]] == [answer["seed"] for answer in last["answers"]]
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["success_after"], summary["eval_n"]) == (last["success"], 64)
