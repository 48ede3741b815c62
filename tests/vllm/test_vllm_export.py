"""What `asyncrl export` writes is served by vLLM as it stands: weights, tokenizer, chat template, generation config."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.config.loading import load_recipe
from asyncrl.learners.tiny import tiny_config
from asyncrl.learners.tiny_tokenizer import build_tokenizer
from asyncrl.learners.writing import save
from asyncrl.runtime import folder as folders
from asyncrl.staleness import Weights

CONVERSATION = [{"role": "user", "content": "reverse 4711"}]
TOKENS = 24

SERVE = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(sys.argv[1], dtype=sys.argv[4], enforce_eager=True, max_model_len=256, kv_cache_memory_bytes=64 << 20)
    greedy = SamplingParams(temperature=0, max_tokens=int(sys.argv[3]), skip_special_tokens=False)
    answer = llm.chat(json.loads(sys.argv[2]), greedy)[0]
    own = llm.get_default_sampling_params()
    tokens = list(answer.outputs[0].token_ids)
    found = {"prompt": answer.prompt_token_ids, "answer": tokens, "temperature": own.temperature}
    print("found " + json.dumps(found))
"""


@pytest.fixture(params=["float32", "bfloat16"])
def exported(
    request: pytest.FixtureRequest, tmp_path: Path, cli: Callable[..., subprocess.CompletedProcess[str]]
) -> Path:
    """An export of a run of the built-in model's shape, before any training, with answers that differ."""
    tokenizer = build_tokenizer(48)
    torch.manual_seed(0)
    config = tiny_config(tokenizer)
    config.initializer_range = 0.3
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config.update(eos_token_id=tokenizer.eos_token_id, do_sample=True, temperature=0.7)
    run = tmp_path / "run"
    run.mkdir()
    folders.describe(run, load_recipe("tiny-reverse", overrides=[f"model.dtype={request.param}"]))
    save(
        run / "checkpoints",
        model=model,
        tokenizer=tokenizer,
        training={"optimizer": {}},
        weights=Weights(1, 7),
        forks={1: (0, 0)},
        trained=[],
        tokens=0,
    )
    done = cli("export", str(run), "--output", "out")
    assert done.returncode == 0, done.stderr
    return tmp_path / "out"


@pytest.mark.timeout(900)
def test_vllm_answers_from_an_export_as_transformers_does(exported: Path, tmp_path: Path) -> None:
    (tmp_path / "serve.py").write_text(SERVE)
    dtype = json.loads((exported / "config.json").read_bytes())["dtype"]  # vLLM's `auto` rounds float32 to 16 bits
    done = subprocess.run(
        [sys.executable, "serve.py", str(exported), json.dumps(CONVERSATION), str(TOKENS), dtype],
        check=False,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=780,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("found ")]
    found = json.loads(line.removeprefix("found "))
    tokenizer, model = AutoTokenizer.from_pretrained(exported), AutoModelForCausalLM.from_pretrained(exported)
    prompt = tokenizer.apply_chat_template(
        CONVERSATION, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    assert found["prompt"] == prompt["input_ids"][0].tolist()
    assert found["temperature"] == pytest.approx(0.7)
    with torch.inference_mode():
        ids = torch.tensor([[*found["prompt"], *found["answer"]]])
        logits = model(ids).logits[0, len(found["prompt"]) - 1 : -1].float()
    chosen = logits.gather(1, ids[0, len(found["prompt"]) :, None]).squeeze(1)
    # Kernels add in another order: a token may be the second best by as much as the type rounds.
    tolerance = 1e-3 if dtype == "float32" else 0.2
    assert (logits.max(dim=1).values - chosen).max() < tolerance
