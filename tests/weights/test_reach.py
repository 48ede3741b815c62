"""Which transport is chosen, and what decides it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.weights import reach
from asyncrl.weights.base import Transport
from asyncrl.weights.reach import Choice, Place, choose, here

places = st.builds(
    Place,
    host=st.sampled_from(["a", "b"]),
    memory=st.sampled_from(["1", "2"]),
    device=st.sampled_from(["cpu", "GPU-1", "GPU-2"]),
)


@given(places, places, st.sampled_from(get_args(Transport)))
def test_a_transport_that_is_named_is_taken(learner: Place, collector: Place, wanted: Any) -> None:
    assert choose(learner, collector, wanted) == Choice(wanted, "weights.transport")


@given(places, places)
def test_auto_never_takes_one_that_cannot_reach(learner: Place, collector: Place) -> None:
    found = choose(learner, collector, "auto")
    same_memory = learner.memory == collector.memory
    same_gpu = learner.device == collector.device != "cpu"
    assert found.transport == ("collective" if not same_memory else "cuda-ipc" if same_gpu else "shm")
    assert learner.host in found.why or learner.device in found.why
    assert choose(collector, learner, "auto").transport == found.transport


def test_processes_of_one_user_that_see_one_memory_are_in_one_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = here()
    assert here() == own
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    assert here().memory != own.memory
    monkeypatch.undo()
    monkeypatch.setattr(reach, "segment_folder", lambda: tmp_path)
    assert here().memory != own.memory
