from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from asyncrl.data.bad_rows import BadRows
from asyncrl.data.conversations import Conversation, read_conversations
from asyncrl.data.files import open_files
from asyncrl.learners.tiny import tiny_config
from asyncrl.learners.tiny_tokenizer import build_tokenizer

Read = Callable[..., list[Conversation]]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(512)


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A model folder with random weights: it knows nothing, and is there at once."""
    folder = tmp_path_factory.mktemp("random") / "model"
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(tiny_config(tokenizer))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Conversations of a file with this content; `bad` decides about the others."""

    def _read(content: bytes, bad: BadRows | None = None) -> list[Conversation]:
        path = tmp_path / "rows.jsonl"
        path.write_bytes(content)
        bad = bad or BadRows("error", key="data.bad_rows")
        files = open_files(str(path), "auto", key="data.train")
        return read_conversations(files, messages="messages", prompt="prompt", answer="answer", bad=bad)

    return _read


def turns(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in pairs]


def jsonl(rows: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def reversing(count: int) -> str:
    """Rows of a task that has something to learn; every prompt is another."""
    return jsonl([{"prompt": f"say {n:03} backwards", "answer": f"{n:03}"[::-1]} for n in range(count)])
