"""Adapters: only they are trained, engines and checkpoints get the sum, a resumed one goes on as if never stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedModel

from asyncrl.config.recipe import Buffer, Checkpoint, Collector, Eval, Learner, Lora, Model, Recipe, Run
from asyncrl.learners.forward import token_logprobs
from asyncrl.learners.lora import attach, has_adapter, load_adapter, save_model, served_weights
from asyncrl.learners.model import ModelError, load_model
from asyncrl.learners.optimize import Optimizer
from asyncrl.learners.service import learn
from asyncrl.staleness import Weights
from asyncrl.telemetry.metrics import read_metrics, surviving_steps
from asyncrl.weights.image import Images
from asyncrl.weights.manifest import check_fits, combined_checksum, model_tensors
from asyncrl.weights.shm import ShmReceiver, shm_offer

LIMIT_S = 60.0
LORA = Lora(r=4, alpha=8)
IDS = torch.arange(1, 13)
CU_SEQLENS = torch.tensor([0, 5, 12])


def adapted(path: Path, lora: Lora = LORA, *, seed: int = 0, noise: bool = False) -> PreTrainedModel:
    """The model with an adapter; `noise`: one that changes something, as after training."""
    model = load_model(path, "float32", "auto")
    attach(model, lora, seed=seed, base=str(path))
    if noise:
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    return model


def train(model: PreTrainedModel, optimizer: Optimizer, steps: int) -> None:
    for _ in range(steps):
        (-token_logprobs(model, IDS, CU_SEQLENS).sum()).backward()
        optimizer.step(10)


def plain(path: Path) -> PreTrainedModel:
    return load_model(path, "float32", "sdpa")


def equal(one: PreTrainedModel, other: PreTrainedModel) -> bool:
    """Whether both serve the same, bit for bit, under the same names in the same order."""
    left, right = served_weights(one), served_weights(other)
    if [name for name, *_ in left.parts] != [name for name, *_ in right.parts] or left.tied != right.tied:
        return False
    return all(torch.equal(a, b) for (_, a), (_, b) in zip(left, right, strict=True))


def test_a_fresh_adapter_changes_nothing_and_is_random_by_its_seed_alone(model_path: Path) -> None:
    before = torch.get_rng_state()
    one, same, other = adapted(model_path), adapted(model_path), adapted(model_path, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert equal(one, plain(model_path))
    assert torch.equal(token_logprobs(one, IDS, CU_SEQLENS), token_logprobs(plain(model_path), IDS, CU_SEQLENS))

    def a(model: PreTrainedModel) -> list[torch.Tensor]:
        return [parameter for parameter in model.parameters() if parameter.requires_grad]

    assert all(torch.equal(x, y) for x, y in zip(a(one), a(same), strict=True))
    assert not all(torch.equal(x, y) for x, y in zip(a(one), a(other), strict=True))


def test_only_the_adapter_is_trained(model_path: Path) -> None:
    model = adapted(model_path)
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    optimizer = Optimizer(model, Learner(learning_rate=1e-2, warmup_steps=0))
    train(model, optimizer, 3)
    for name, tensor in model.named_parameters():
        assert tensor.requires_grad == (".lora_" in name)
        assert torch.equal(tensor, before[name]) != tensor.requires_grad, name
    trained = sum(tensor.numel() for tensor in model.parameters() if tensor.requires_grad)
    assert trained == sum(
        4 * sum(module.weight.shape)
        for key, module in plain(model_path).named_modules()
        if isinstance(module, torch.nn.Linear) and key != "lm_head"
    )


def test_what_is_served_computes_what_the_learner_computes(model_path: Path) -> None:
    model, served = adapted(model_path, noise=True), plain(model_path)
    difference = token_logprobs(model, IDS, CU_SEQLENS) - token_logprobs(served, IDS, CU_SEQLENS)
    assert difference.abs().max() > 1e-2  # the adapter does something
    served.load_state_dict(dict(served_weights(model)), strict=False)
    difference = token_logprobs(model, IDS, CU_SEQLENS) - token_logprobs(served, IDS, CU_SEQLENS)
    assert difference.abs().max() < 1e-5


def test_what_is_published_is_a_whole_model_without_adapters(model_path: Path) -> None:
    model, engine = adapted(model_path, noise=True), plain(model_path)
    served = served_weights(model)
    tensors, tied = model_tensors(engine)
    assert tied == served.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    images, receiver = Images("lora-test"), ShmReceiver()
    try:
        offer = shm_offer(images.write(Weights(1, 0), served, tied=served.tied))
        staged = receiver.stage(offer, deadline_s=10.0)
        check_fits(engine, staged)
        assert staged.checksum == combined_checksum(served) != combined_checksum(tensors)
    finally:
        receiver.close()
        images.close()


def test_a_saved_model_loads_merged_and_its_adapter_loads_with_peft(model_path: Path, tmp_path: Path) -> None:
    model = adapted(model_path, noise=True)
    save_model(model, tmp_path)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not has_adapter(merged)
    assert equal(merged, model)
    alone = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_path), str(tmp_path / "adapter"))
    with torch.no_grad():
        difference = alone(IDS[None]).logits - merged(IDS[None]).logits
    assert difference.abs().max() < 1e-4


def test_a_resumed_adapter_goes_on_as_if_never_stopped(model_path: Path, tmp_path: Path) -> None:
    config = Learner(learning_rate=1e-2, warmup_steps=4)
    straight = adapted(model_path)
    train(straight, Optimizer(straight, config), 4)

    model = adapted(model_path)
    optimizer = Optimizer(model, config)
    train(model, optimizer, 2)
    save_model(model, tmp_path)
    resumed = adapted(model_path, seed=7)
    load_adapter(resumed, tmp_path)
    assert equal(resumed, model)
    other = Optimizer(resumed, config)
    other.load_state_dict(optimizer.state_dict())
    train(resumed, other, 2)
    assert equal(resumed, straight)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["q_proj", "wqkv"], '"wqkv", but Qwen3ForCausalLM has no such module'),
        (["proj"], '"proj", but Qwen3ForCausalLM has no such module'),  # whole parts of a name, not its end
        (["embed_tokens"], "no linear layer: Embedding"),
        (["self_attn"], "no linear layer: Qwen3Attention"),
        (["lm_head"], "the head, tied to the embedding"),
    ],
)
def test_a_module_that_cannot_have_an_adapter_is_named_with_those_that_can(
    model_path: Path, names: list[str], said: str
) -> None:
    with pytest.raises(ModelError) as caught:
        adapted(model_path, Lora(target_modules=names))
    assert said in str(caught.value)
    assert "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj" in str(caught.value)


def test_modules_can_be_named_by_their_last_parts(model_path: Path) -> None:
    model = adapted(model_path, Lora(target_modules=["self_attn.q_proj", "model.layers.1.mlp.up_proj"]))
    found = [name for name, tensor in model.named_parameters() if tensor.requires_grad and "lora_A" in name]
    assert found == [
        "model.layers.0.self_attn.q_proj.lora_A.default.weight",
        "model.layers.1.self_attn.q_proj.lora_A.default.weight",
        "model.layers.1.mlp.up_proj.lora_A.default.weight",
    ]


def test_an_adapter_is_continued_on_its_own_model_only(model_path: Path, tmp_path: Path) -> None:
    bare, saved, other = tmp_path / "bare", tmp_path / "saved", tmp_path / "other"
    for folder in (bare, saved):
        folder.mkdir()
    save_model(plain(model_path), bare)
    save_model(adapted(model_path), saved)
    changed = AutoModelForCausalLM.from_pretrained(model_path)
    changed.model.norm.weight.data += 1
    changed.save_pretrained(other)
    with pytest.raises(ModelError, match="has no adapter: it was trained without one"):
        load_adapter(adapted(model_path), bare)
    for lora in (msgspec.structs.replace(LORA, r=2), msgspec.structs.replace(LORA, target_modules=["q_proj"])):
        with pytest.raises(ModelError, match=r"does not fit model\.lora"):
            load_adapter(adapted(model_path, lora), saved)
    with pytest.raises(ModelError, match=f"was trained on {model_path}"):
        load_adapter(adapted(other), saved)


@pytest.mark.asyncio
async def test_a_run_with_an_adapter_trains_serves_checkpoints_and_resumes(
    tmp_path: Path,
    model_path: Path,
    draw: Callable[..., Any],
    make_row: Callable[..., Any],
    make_group: Callable[..., Any],
    scripted: Any,
) -> None:
    recipe = Recipe(
        run=Run(name="lora-run", max_steps=6),
        model=Model(lora=LORA),
        buffer=Buffer(max_trajectory_age=0),
        collector=Collector(group_size=4),
        learner=Learner(
            groups_per_step=3, learning_rate=3e-2, warmup_steps=1, checkpoint=Checkpoint(every_steps=1, keep_last=9)
        ),
        eval=Eval(at_start=False, at_end=False),
    )
    buffer = scripted.StoppingBuffer(recipe, at=3)
    worker = scripted.ScriptedCollector(buffer, model_path, sample=draw, make_row=make_row, make_group=make_group)

    async def stopped_and_resumed() -> None:
        await learn(recipe, buffer, run_dir=tmp_path, model_path=model_path, resume=None, stop=buffer.stop)
        folder = tmp_path / "checkpoints"
        await learn(recipe, buffer, run_dir=tmp_path, model_path=model_path, resume=folder, stop=asyncio.Event())

    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        group.create_task(worker.run())
        group.create_task(stopped_and_resumed())
    steps = surviving_steps(read_metrics(tmp_path / "metrics.jsonl"))
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    # The engine computes x (W + B A), the learner x W + x A B: equal to float32 rounding, at every version.
    assert all(step["mismatch/age0"] < 1e-5 for step in steps)
    assert any(step["grad_norm"] > 0 for step in steps)
    # At age 0 the last step needs groups of version 5, so that these weights were served; of 6 nobody need be.
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoints" / "version-000005")
    served = worker.served[Weights(2, 5)]
    assert all(torch.equal(tensor, served[name]) for name, tensor in model_tensors(saved)[0])
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(served[name], plain(model_path).state_dict()[name])
