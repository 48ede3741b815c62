"""A tiny random model on disk, and groups as a collector would hand them over."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config

from asyncrl.schema import Group, Trajectory, VersionSpan
from asyncrl.staleness import Weights

torch.set_num_threads(1)
VOCABULARY = 24
INITIAL = Weights(1, 0)


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a two-layer Qwen3 of random weights (tied head) and a tokenizer of 24 words."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        initializer_range=0.3,
        tie_word_embeddings=True,
        pad_token_id=None,
        eos_token_id=0,
        bos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(VOCABULARY)}, unk_token="w1"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w0").save_pretrained(folder)
    return folder


@torch.no_grad()
def sample(
    model: PreTrainedModel, prompt: list[int], tokens: int, generator: torch.Generator
) -> tuple[list[int], list[float]]:
    """One token at a time, the whole sequence each time: slow and beyond doubt. Completion and its log-probs."""
    ids, logprobs = list(prompt), []
    for _ in range(tokens):
        row = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1].float(), -1)
        token = int(torch.multinomial(row.exp(), 1, generator=generator))
        ids.append(token)
        logprobs.append(float(row[token]))
    return ids[len(prompt) :], logprobs


def row(
    prompt: list[int],
    completion: list[int],
    logprobs: list[float],
    *,
    reward: float,
    weights: Weights = INITIAL,
    member: int = 0,
    failure: str = "",
    finish: str = "stop",
) -> Trajectory:
    """One trajectory, sampled by one version."""
    p, c = len(prompt), len(completion)
    return Trajectory(
        token_ids=np.array(prompt + completion, np.int32),
        loss_mask=np.array([0] * p + [1] * c, np.uint8),
        logprobs=np.array([0.0] * p + logprobs, np.float32),
        versions=np.array([-1] * p + [weights.version] * c, np.int32),
        member=member,
        prompt_length=p,
        spans=(VersionSpan(weights, p, p + c, f"{weights.version:016x}"),) if c else (),
        reward=reward,
        reward_parts={"exact": None if np.isnan(reward) else reward},
        finish_reason=finish,
        failure=failure,
    )


def group(rows: list[Trajectory], *, ticket: int = 0, attempt: int = 0, lineage: int = 1) -> Group:
    """A group of these trajectories."""
    return Group(
        ticket=ticket,
        attempt=attempt,
        lineage=lineage,
        task="test",
        row_id=f"row-{ticket}",
        collector="c",
        engine="e",
        sampling={"temperature": 1.0},
        issued=0.0,
        put=0.0,
        trajectories=rows,
    )


@pytest.fixture(scope="session")
def make_row() -> Callable[..., Trajectory]:
    return row


@pytest.fixture(scope="session")
def make_group() -> Callable[..., Group]:
    return group


@pytest.fixture(scope="session")
def draw() -> Callable[..., tuple[list[int], list[float]]]:
    return sample


@pytest.fixture(scope="session")
def scripted() -> ModuleType:
    """The module `scripted_collector`, which importlib mode does not put on the path."""
    return _load("scripted_collector")


@pytest.fixture(scope="session")
def reference() -> ModuleType:
    """The module `reference_step`."""
    return _load("reference_step")


@pytest.fixture(scope="session")
def ranked() -> ModuleType:
    """The module `ranked_steps`."""
    return _load("ranked_steps")


@pytest.fixture(scope="session")
def lean_ranks() -> ModuleType:
    """The module `lean_ranks`."""
    return _load("lean_ranks")


@pytest.fixture(scope="session")
def resharding() -> ModuleType:
    """The module `resharding`."""
    return _load("resharding")


@pytest.fixture(scope="session")
def broken_ranks() -> ModuleType:
    """The module `broken_ranks`."""
    return _load("broken_ranks")


@pytest.fixture(scope="session")
def forgetful() -> ModuleType:
    """The module `forgetful`."""
    return _load("forgetful")


@pytest.fixture(scope="session")
def gathered() -> ModuleType:
    """The module `gathered`."""
    return _load("gathered")


@pytest.fixture(scope="session")
def toy() -> ModuleType:
    """The module `toy_policy`."""
    return _load("toy_policy")


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
