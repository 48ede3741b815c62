"""The tiny recipe over each transport that needs no GPU: how its weights travel changes nothing in what is trained."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from asyncrl.buffers.archive import Archive
from asyncrl.staleness import Weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

Cli = Callable[..., "subprocess.CompletedProcess[str]"]
Begin = Callable[..., "subprocess.Popen[str]"]

TRANSPORTS = ("shm", "file", "delta", "collective")
STEPS = 4
RUN_S = 180
SMALL = (
    "--set=run.deterministic=true",
    "--set=learner.groups_per_step=4",
    f"--set=run.max_steps={STEPS}",
    "--set=learner.checkpoint.every_steps=2",
    "--set=eval.at_start=false",
    "--set=eval.prompts=8",
)


def over(transport: str) -> tuple[str, ...]:
    url = (f"--set=weights.url=weights-{transport}",) if transport in ("file", "delta") else ()
    return (f"--set=weights.transport={transport}", *url)


def steps_of(run: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if "event" not in record]


def checkpoint(run: Path, version: int = STEPS) -> str:
    """The hash of weights of the run, of those that it ended with."""
    return xxhash.xxh3_64_hexdigest((run / f"checkpoints/version-{version:06}/model.safetensors").read_bytes())


def test_synchronous_runs_over_every_transport_end_with_the_same_reward_and_the_same_bits(
    cli: Cli, tmp_path: Path
) -> None:
    rewards, weights = {}, {}
    for transport in TRANSPORTS:
        more = ("--max-trajectory-age", "0", f"--set=run.output_dir={transport}")
        ran = cli("run", *SMALL, *over(transport), *more, timeout=RUN_S)
        assert ran.returncode == 0, ran.stderr
        steps = steps_of(tmp_path / transport)
        assert set(steps[-1]["weights/sent"]) == {transport} - {"shm"}, "it, and nothing but it, brought the weights"
        rewards[transport] = [step["reward/mean"] for step in steps]
        weights[transport] = checkpoint(tmp_path / transport)
    assert len(rewards["shm"]) == STEPS
    assert {transport: found for transport, found in rewards.items() if found != rewards["shm"]} == {}
    assert {transport: found for transport, found in weights.items() if found != weights["shm"]} == {}
    assert checkpoint(tmp_path / "shm", 2) != weights["shm"], "control: the hash tells weights apart"


LORA = ("--set=model.lora={r: 4, alpha: 8}", "--set=learner.learning_rate=1e-2", "--max-trajectory-age", "0")


def test_adapters_alone_make_the_same_run_as_merged_weights(cli: Cli, tmp_path: Path) -> None:
    rewards, weights, stamps = {}, {}, {}
    for way, transport in {"merged": "shm", "adapter": "collective"}.items():
        more = (f"--set=weights.lora={way}", f"--set=run.output_dir={way}")
        ran = cli("run", *SMALL, *LORA, *over(transport), *more, timeout=RUN_S)
        assert ran.returncode == 0, ran.stderr
        rewards[way] = [step["reward/mean"] for step in steps_of(tmp_path / way)]
        weights[way] = checkpoint(tmp_path / way)
        archive = Archive(tmp_path / way / "archive")
        stamps[way] = {stamp for step in archive.parts() for stamp in archive.stamps(step)}
        assert {weights for weights, checksum in stamps[way] if checksum} == {Weights(1, v) for v in range(STEPS)}
    assert rewards["adapter"] == rewards["merged"]
    assert weights["adapter"] == weights["merged"]
    assert stamps["adapter"] == stamps["merged"], "rows say what was served"


def test_a_collector_started_by_hand_gets_its_weights_over_it(begin: Begin, tmp_path: Path, server_url: str) -> None:
    transport = "collective"  # the one for which learner and collector must find each other
    named = (f"--set=run.name={transport}", "--set=run.output_dir=run")
    learner = begin("learner", "--buffer", server_url, *named, *SMALL, *over(transport))
    collector = begin("collector", "--buffer", server_url, "--run", transport, "--wait", "2m")
    _, err = learner.communicate(timeout=RUN_S)
    assert learner.returncode == 0, err
    _, err = collector.communicate(timeout=60)
    assert collector.returncode == 0, err
    assert f"serving (1, {STEPS}), checksum" in err
    steps = steps_of(tmp_path / "run")
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert set(steps[-1]["weights/sent"]) == {transport}
