"""`asyncrl buffer replay`: a run's folder, its recipe and its initial weights, handed to `learners/replay.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from asyncrl.config.loading import recipe_from_document
from asyncrl.config.yaml_text import parse
from asyncrl.learners.arithmetic import fix_order
from asyncrl.learners.model import load_tokenizer
from asyncrl.learners.recording import read_recording
from asyncrl.learners.replay import Compared, replay
from asyncrl.runtime import models


def replay_run(
    folder: Path,
    *,
    start: int,
    out: Path | None,
    overrides: Sequence[str],
    on_line: Callable[[str], None],
) -> bool:
    """Replay the run in `folder` from version `start` on, telling each version in a line; whether all it left is the
    same, the weights that the replay started from aside.

    overrides: `--set` texts for keys of this host. out: where the last version is written. Raises RecipeError,
    ModelError, ReplayError, CheckpointError.
    """
    recipe = recipe_from_document(parse((folder / "recipe.yaml").read_text()), overrides=overrides)
    fix_order()
    recording = read_recording(folder, recipe)
    for note in recording.notes:
        on_line(f"note: {note}")
    model_path = models.resolve(recipe)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)  # not only after hours
    seen: list[Compared] = []

    def on_version(compared: Compared) -> None:
        seen.append(compared)
        on_line(line_of(compared))

    replayed = replay(recording, recipe, model_path, start=start, on_version=on_version)
    if out is not None:
        tokenizer = load_tokenizer(model_path, trust_remote_code=recipe.model.trust_remote_code)
        on_line(f"wrote {replayed.save(out, tokenizer=tokenizer)}")
    on_line(verdict(seen))
    return all(compared.equal is not False for compared in seen) and any(compared.equal for compared in seen[1:])


def line_of(compared: Compared) -> str:
    """
    >>> line_of(Compared(20, "ab", stamps=True, checkpoint=True, apart=0.0))
    'version 20  xxh3 ab  equal: stamps, checkpoint'
    """
    found = {"stamps": compared.stamps, "checkpoint": compared.checkpoint}
    equal = ", ".join(name for name, same in found.items() if same)
    different = ", ".join(name for name, same in found.items() if same is False)
    parts = [f"equal: {equal}"] * bool(equal) + [f"DIFFERENT: {different}"] * bool(different)
    if compared.checkpoint is False:
        parts.append(f"by at most {compared.apart:.2g}")
    return f"version {compared.version}  xxh3 {compared.checksum}  {', '.join(parts) or 'the run left no trace of it'}"


def verdict(seen: Sequence[Compared]) -> str:
    """What all of it comes to: where it differs first, and which steps can have made it.

    >>> verdict([Compared(0, "a", stamps=True), Compared(1, "b"), Compared(2, "c", stamps=False)])
    '2 steps replayed: equal up to version 0, DIFFERENT from version 2 on: one of the steps 0 to 1 is not as recorded'
    """
    steps = f"{len(seen) - 1} steps replayed"
    traced = [compared for compared in seen if compared.equal is not None]
    first = next((compared for compared in traced if not compared.equal), None)
    if first is None:
        kept = sum(compared.checkpoint is not None for compared in traced)
        return f"{steps}: all {len(traced)} versions that left a trace are equal bit for bit, {kept} checkpoints too"
    last = max((compared.version for compared in traced if compared.version < first.version), default=None)
    if last is None:
        return f"{steps}: DIFFERENT from version {first.version} on, the first that left a trace"
    where = f"step {last}" if last == first.version - 1 else f"one of the steps {last} to {first.version - 1}"
    return f"{steps}: equal up to version {last}, DIFFERENT from version {first.version} on: {where} is not as recorded"
