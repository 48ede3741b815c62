"""Several ranks take the step that one takes: real processes, FSDP2 over Gloo."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from asyncrl.config.objective import Preset
from asyncrl.learners.checkpoint import find_resumable
from asyncrl.learners.parallel import ALONE
from asyncrl.learners.shares import balance, share_of
from asyncrl.learners.step import accumulate
from asyncrl.learners.trained import load_trained
from asyncrl.schema import Support, encode
from asyncrl.staleness import Weights

LIMIT_S = 300.0
RATE = 1e-2
"""Of `ranked_steps.RECIPE`."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, model_path: Path, make_row: Any, make_group: Any) -> Path:
    """The model, and five groups whose lengths and rewards differ."""
    folder = tmp_path_factory.mktemp("ranks")
    shutil.copytree(model_path, folder / "model")
    (folder / "groups").mkdir()
    generator = np.random.default_rng(1)
    for ticket in range(5):
        rows = []
        for member in range(4):
            n = int(generator.integers(1, 12))
            completion, logprobs = generator.integers(0, 24, n).tolist(), generator.normal(-3, 0.5, n).tolist()
            rows.append(
                make_row(
                    [1, 2, 3],
                    completion,
                    logprobs,
                    reward=float(generator.integers(0, 3)),
                    weights=Weights(1, ticket % 2),
                    member=member,
                )
            )
        (folder / "groups" / f"{ticket}.arrow").write_bytes(encode(make_group(rows, ticket=ticket)))
    (folder / "segmented").mkdir()
    for ticket in range(3):
        rows = []
        for member in range(3):
            for segment in range(3 if ticket == 1 else 1):
                ids = generator.integers(0, 24, 4).tolist()
                row = make_row([1, 2, segment], ids, [-3.0] * 4, reward=float(member == ticket), member=member)
                masks = [(), (), (), *(sorted({id, 5, 9}) for id in ids)]
                rows.append(replace(row, segment=segment, support=Support.of(masks) if ticket == 1 else None))
        (folder / "segmented" / f"{ticket}.arrow").write_bytes(encode(make_group(rows, ticket=ticket)))
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path, ranked: Any) -> dict[str, Any]:
    whole = ranked.train(ALONE, folder, ranked.RECIPE)
    torch.save(whole["optimizer"], folder / "optimizer.pt")
    return dict(ranked.outcome(ALONE, folder))


def together(folder: Path, size: int, *, launched: bool) -> dict[str, Any]:
    """The outcome of `size` processes, which torchrun starts or nobody."""
    if launched:
        script = str(Path(__file__).with_name("ranked_steps.py"))
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
        assert subprocess.run([*torchrun, script, str(folder)], check=False, timeout=LIMIT_S).returncode == 0
    else:
        (folder / f"meeting-{size}").mkdir()
        run_ranks("ranked_steps.py", size, str(folder))
    found: dict[str, Any] = torch.load(folder / f"outcome-{size}.pt", weights_only=False)
    return found


def run_ranks(script: str, size: int, *arguments: str) -> None:
    """`python SCRIPT RANK SIZE ARGUMENTS` for each rank, until all have ended well."""
    command = [sys.executable, str(Path(__file__).with_name(script))]
    processes = [subprocess.Popen([*command, str(rank), str(size), *arguments]) for rank in range(size)]
    try:
        assert [process.wait(LIMIT_S) for process in processes] == [0] * size
    finally:
        for process in processes:
            process.kill()
            process.wait(10)


def close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, atol=1e-5, rtol=1e-5), name


def equal(found: Any, expected: Any) -> bool:
    """Of what a record holds: numbers to rounding, all else exactly."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(equal(found[key], value) for key, value in expected.items())
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(equal, found, expected))
    if isinstance(expected, float):
        return bool(np.isclose(found, expected, atol=1e-5, rtol=1e-3, equal_nan=True))
    return bool(found == expected)


@pytest.mark.parametrize(("size", "launched"), [(2, False), pytest.param(4, True, marks=pytest.mark.slow)])
@pytest.mark.timeout(400)
def test_ranks_take_the_step_that_one_takes(folder: Path, alone: dict[str, Any], size: int, launched: bool) -> None:
    found = together(folder, size, launched=launched)
    for kind in ("whole", "adapted"):
        assert max(float(g.abs().max()) for g in alone[kind]["gradients"].values()) > 1e-3
        close(found[kind]["gradients"], alone[kind]["gradients"])
        close(found[kind]["weights"], alone[kind]["weights"])
        close(found[kind]["served"], alone[kind]["served"])
        for one, other in zip(found[kind]["accounts"], alone[kind]["accounts"], strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5, rtol=1e-4)
        mine, theirs = found[kind]["optimizer"], alone[kind]["optimizer"]
        assert (mine["updates"], mine["adam"]["param_groups"]) == (theirs["updates"], theirs["adam"]["param_groups"])
        for index, moments in theirs["adam"]["state"].items():
            close(mine["adam"]["state"][index], moments)

    # Several updates a step are several on every rank, and the same ones.
    assert found["several"]["counts"] == alone["several"]["counts"] == (5, 3)
    np.testing.assert_allclose(found["several"]["norms"], alone["several"]["norms"], rtol=1e-3)
    close(found["several"]["weights"], alone["several"]["weights"])

    # A rate that follows the answers follows those of all ranks, and is the same on each to the bit.
    np.testing.assert_allclose(found["paced"]["ess"], alone["paced"]["ess"], rtol=1e-4)
    np.testing.assert_allclose(found["paced"]["rates"], alone["paced"]["rates"], rtol=1e-4)
    assert min(alone["paced"]["rates"]) < 0.7 * RATE
    assert len(set(found["paced"]["averages"])) == 1
    close(found["paced"]["weights"], alone["paced"]["weights"])

    # Every rank asks the same versions, of its own part of the weights, for the log-probs of its own groups.
    for one, other in zip(found["asking"]["accounts"], alone["asking"]["accounts"], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5, rtol=1e-4)
    close(found["asking"]["weights"], alone["asking"]["weights"])
    assert found["asking"]["held"][0] == alone["asking"]["held"][0] == (4, 3, 2, 1)
    assert found["asking"]["held"][1] < 0.75 * alone["asking"]["held"][1]

    # Under every preset, and each number that a step's record has of its data.
    assert alone["presets"].keys() == set(get_args(Preset))
    for preset, one in alone["presets"].items():
        several = found["presets"][preset]
        close(several["weights"], one["weights"])
        assert equal(several["record"], one["record"]), (preset, several["record"], one["record"])
        assert one["idle"] == 0
    assert any(several["idle"] for several in found["presets"].values()), "ranks have as many micro-batches"

    # A pass that only one rank needs, for the log-probs of what is in its other micro-batches, is taken along by all.
    assert found["segmented"]["units"] == alone["segmented"]["units"] == 9
    np.testing.assert_allclose(found["segmented"]["norm"], alone["segmented"]["norm"], rtol=1e-3)
    assert alone["segmented"]["norm"] > 1e-3
    close(found["segmented"]["weights"], alone["segmented"]["weights"])

    # Of an adapter A and B are trained, and engines are given the sum, under the names of a model without one.
    assert {name.rpartition(".lora_")[2][0] for name in found["adapted"]["gradients"]} == {"A", "B"}
    assert found["adapted"]["served"].keys() == found["whole"]["served"].keys()

    # A gradient that is not finite on one rank is skipped by all.
    assert found["skipped"]["reason"].startswith("the gradient's norm is")
    assert found["skipped"]["state"] == {}
    start = alone["skipped"]["weights"]
    assert all(torch.equal(found["skipped"]["weights"][name], tensor) for name, tensor in start.items())

    # What one rank has saved, several go on from.
    assert found["resumed"]["updates"] == alone["resumed"]["updates"] == 4
    close(found["resumed"]["weights"], alone["resumed"]["weights"])


def test_these_groups_can_tell_a_denominator_of_each_ranks_own(
    folder: Path, alone: dict[str, Any], ranked: Any
) -> None:
    """Negative control: the mean of two ranks' means is another gradient."""
    groups = ranked.groups_of(folder)
    batch, _ = share_of(groups, version=1, recipe=ranked.RECIPE)
    model = load_trained(ranked.RECIPE.model, folder / "model", None, seed=ranked.RECIPE.run.seed)
    for share in balance(ranked.loads(batch), 2):
        own, worth = share_of([groups[n] for n in share], version=1, recipe=ranked.RECIPE)
        before = {name: 0 if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
        seen = accumulate(model, own, worth, **ranked.OBJECTIVE)
        for name, p in model.named_parameters():
            assert p.grad is not None
            p.grad = before[name] + (p.grad - before[name]) / (2 * seen.tokens)
    right = alone["whole"]["gradients"]
    assert max(float((p.grad - right[name]).abs().max()) for name, p in model.named_parameters()) > 1e-4


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_any_number_of_ranks_goes_on_from_a_checkpoint_with_all_of_its_bits(folder: Path, resharding: Any) -> None:
    """From one rank to two, four and one again, a step each. What is loaded, whole or cut, is what was saved."""
    resharding.go_on(ALONE, folder, None)
    source = folder / "after-1"
    for size in (2, 4):
        (folder / f"resharding-{size}").mkdir()
        run_ranks("resharding.py", size, str(folder), str(source))
        assert_loaded_as_saved(folder / f"again-{size}", source, ranks=size)
        source = folder / f"after-{size}"
    resharding.go_on(ALONE, folder, source)
    assert_loaded_as_saved(folder / "again-1", source, ranks=1)
    for name in resharding.RECIPES:
        last = find_resumable(folder / "after-1" / name)
        assert last is not None
        assert last.weights.version == 4
        assert last.training_state()["optimizer"]["updates"] == 8


def assert_loaded_as_saved(again: Path, source: Path, *, ranks: int) -> None:
    for name in ("whole", "adapted"):
        before, after = find_resumable(source / name), find_resumable(again / name)
        assert before is not None
        assert after is not None
        assert before.weights == after.weights
        for path in before.folder.rglob("*.safetensors"):
            saved, loaded = load_file(path), load_file(after.folder / path.relative_to(before.folder))
            assert saved.keys() == loaded.keys()
            assert all(torch.equal(tensor, loaded[key]) for key, tensor in saved.items()), (again, path)
        old, new = before.training_state(), after.training_state()
        moments, same = old["optimizer"].pop("adam")["state"], new["optimizer"].pop("adam")["state"]
        assert old["optimizer"] == new["optimizer"]
        assert moments.keys() == same.keys()
        for index, kept in moments.items():
            assert float(kept["exp_avg_sq"].abs().max()) > 0
            assert all(torch.equal(tensor, same[index][key]) for key, tensor in kept.items()), (again, index)
        # Each rank goes on with its random numbers; where there are more than before, the others begin their own.
        both = min(len(old["rng"]), len(new["rng"]))
        assert all(torch.equal(old["rng"][rank]["cpu"], new["rng"][rank]["cpu"]) for rank in range(both))
        assert len(new["rng"]) == ranks
        assert len({tuple(state["cpu"].tolist()) for state in old["rng"]}) == len(old["rng"])
