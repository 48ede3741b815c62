"""TensorBoard's event files, in the run folder's tensorboard/. `tensorboard --logdir runs` shows all runs beside each
other."""

from __future__ import annotations

from pathlib import Path

from tensorboardX.writer import SummaryWriter

from asyncrl.telemetry.sinks.base import Point

FLUSH_S = 5
"""How far the files may be behind."""


class TensorboardSink:
    """One event file per start of the run. Implements Sink."""

    def __init__(self, folder: Path) -> None:
        """`folder`: the run's. The file is written by tensorboardX, which brings no server and no TensorFlow."""
        self._writer = SummaryWriter(logdir=str(folder / "tensorboard"), flush_secs=FLUSH_S)

    def log(self, point: Point) -> None:
        for name, value in point.values.items():
            self._writer.add_scalar(name, value, global_step=point.at, walltime=point.time)

    def close(self) -> None:
        self._writer.close()  # type: ignore[no-untyped-call]
