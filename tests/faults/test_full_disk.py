"""The learner's disk is full: a step that cannot be archived is not committed, and is made again once there is room; a
checkpoint that cannot be written is done without, unless it is the last one."""

from __future__ import annotations

import re
import resource
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from asyncrl.telemetry.metrics import read_metrics

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(400)]

RUN_S = 150.0  # the built-in model is made once, torch is imported twice on two busy cores


def learner_of(run: subprocess.Popen[str]) -> psutil.Process | None:
    return next((p for p in psutil.Process(run.pid).children(recursive=True) if "learner" in p.cmdline()), None)


def test_a_step_that_cannot_be_archived_is_not_committed(
    tmp_path: Path, spawn: Callable[..., subprocess.Popen[str]]
) -> None:
    folder = tmp_path / "out"
    settings = ("run.output_dir=out", "run.max_steps=400", "eval.at_start=false", "eval.at_end=false")
    run = spawn("run", "run", *(text for setting in settings for text in ("--set", setting)))
    deadline = time.monotonic() + RUN_S
    while len(parts := sorted((folder / "archive").glob("step-*.parquet"))) < 3:
        assert time.monotonic() < deadline, (tmp_path / "run.log").read_text()
        assert run.poll() is None, (tmp_path / "run.log").read_text()
        time.sleep(0.02)
    learner = learner_of(run)
    assert learner is not None
    most = parts[0].stat().st_size // 2
    # As on a full disk, writing fails with an error; here with EFBIG and for what exceeds half a part of the archive.
    _, hard = resource.prlimit(learner.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(learner.pid, resource.RLIMIT_FSIZE, (most, hard))

    assert run.wait(timeout=RUN_S) == 1
    said = (tmp_path / "run.log").read_text()
    assert re.search(r"Error: .*File too large", said), said
    assert "Traceback" not in said

    audited = spawn("full", "buffer", "audit", "out")
    assert audited.wait(timeout=60) == 0, (tmp_path / "full.log").read_text()
    full = (tmp_path / "full.log").read_text()
    committed = int(re.search(r"version (\d+)", full)[1])  # type: ignore[index]
    assert f"archive: {committed} steps" in full

    resumed = spawn("resumed", "run", "--resume", "out", "--set", f"run.max_steps={committed + 3}")
    assert resumed.wait(timeout=RUN_S) == 0, (tmp_path / "resumed.log").read_text()
    audited = spawn("audit", "buffer", "audit", "out")
    assert audited.wait(timeout=60) == 0, (tmp_path / "audit.log").read_text()
    steps = [record["step"] for record in read_metrics(folder / "metrics.jsonl") if "event" not in record]
    assert steps[-1] == committed + 3


def test_a_checkpoint_that_does_not_fit_is_done_without_unless_it_is_the_last(
    tmp_path: Path, spawn: Callable[..., subprocess.Popen[str]]
) -> None:
    folder = tmp_path / "out"
    settings = {
        "run.output_dir": "out",
        "run.max_steps": 120,
        "learner.checkpoint.every_steps": 2,
        "learner.groups_per_step": 4,
        "collector.group_size": 4,
        "eval.at_start": "false",
        "eval.at_end": "false",
    }
    run = spawn("run", "run", *(text for key, value in settings.items() for text in ("--set", f"{key}={value}")))

    def events(name: str) -> list[dict[str, object]]:
        path = folder / "metrics.jsonl"
        return [record for record in read_metrics(path) if record.get("event") == name] if path.exists() else []

    def wait_for(name: str, count: int) -> list[dict[str, object]]:
        deadline = time.monotonic() + RUN_S
        while len(found := events(name)) < count:
            assert time.monotonic() < deadline, (tmp_path / "run.log").read_text()
            assert run.poll() is None, (tmp_path / "run.log").read_text()
            time.sleep(0.02)
        return found

    wait_for("checkpoint", 1)
    learner = learner_of(run)
    assert learner is not None
    # The weights fit into a file of this size, and all else that a learner writes; the optimizer's state does not.
    limit, (_, hard) = 800_000, resource.prlimit(learner.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(learner.pid, resource.RLIMIT_FSIZE, (limit, hard))
    saved = len(events("checkpoint")) + 1  # one may be written by now
    told = str(wait_for("warning", 3)[2]["text"])
    assert re.search(
        r"\(3 in a row\): cannot write checkpoint \S+/version-\d+: .*File too large.* are free there", told
    )
    assert len(events("checkpoint")) <= saved

    resource.prlimit(learner.pid, resource.RLIMIT_FSIZE, (hard, hard))
    wait_for("checkpoint", saved + 1)
    resource.prlimit(learner.pid, resource.RLIMIT_FSIZE, (limit, hard))
    assert run.wait(timeout=RUN_S) == 1
    said = (tmp_path / "run.log").read_text()
    assert re.search(r"Error: .*cannot write checkpoint \S+/version-000120: .*File too large", said), said
    assert "Traceback" not in said
    newest = max(int(str(event["version"])) for event in events("checkpoint"))
    assert (folder / "checkpoints" / f"version-{newest:06d}" / "checkpoint.json").exists()

    resumed = spawn("resumed", "run", "--resume", "out")
    assert resumed.wait(timeout=RUN_S) == 0, (tmp_path / "resumed.log").read_text()
    assert events("checkpoint")[-1]["version"] == 120
    audited = spawn("audit", "buffer", "audit", "out")
    assert audited.wait(timeout=60) == 0, (tmp_path / "audit.log").read_text()


LIMITED = """
import resource, sys, torch
from pathlib import Path
from asyncrl.learners.checkpoint import CheckpointError
from asyncrl.learners.writing import save
from asyncrl.staleness import Weights
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
words = models.WordLevel({f"word{n}": n for n in range(20_000)}, unk_token="word0")
model, tokenizer = LlamaForCausalLM(config), PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words))
optimizer = {"moments": torch.zeros(1_000_000)}
for limit in (2_000_000, 100_000, 10_000):  # fits all but the moments, the weights only, and not even these
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        save(Path(sys.argv[1]), model=model, tokenizer=tokenizer, training={"optimizer": optimizer},
             weights=Weights(1, 1), forks={1: (0, 0)}, trained=[], tokens=0)
    except CheckpointError as error:
        print(error)
"""


def test_whatever_library_writes_the_file_that_does_not_fit_the_reason_is_the_disks(
    tmp_path: Path, spawn: Callable[..., subprocess.Popen[str]]
) -> None:
    limited = spawn("limited", str(tmp_path / "checkpoints"), program=("-c", LIMITED))
    assert limited.wait(timeout=RUN_S) == 0, (tmp_path / "limited.log").read_text()
    lines = [line for line in (tmp_path / "limited.log").read_text().splitlines() if line.startswith("cannot write")]
    assert len(lines) == 3
    assert all("File too large" in line and "version-000001: " in line for line in lines)
    assert not list((tmp_path / "checkpoints").iterdir())
