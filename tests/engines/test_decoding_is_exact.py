"""What is sampled and with which log-probability, checked against plain forwards without slots, padding or batches."""

from __future__ import annotations

from functools import wraps

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, MambaConfig, MambaForCausalLM

from asyncrl.collectors.engines.base import Completion, EngineError, Request
from asyncrl.collectors.engines.decode import Decoder, Generation
from asyncrl.collectors.engines.live import LiveModel
from asyncrl.collectors.engines.spans import Served
from asyncrl.staleness import Weights

from .tiny_models import ARCHITECTURES, full_forward, make_model, replay, request, staged

SERVED = Served(Weights(1, 0), "checksum")
PROMPTS = [(5,), (1, 2, 3), (9, 8, 7, 6, 5, 4, 3), (1, 2, 3), tuple(range(20, 40))]


@torch.inference_mode()
def run(decoder: Decoder, arrivals: dict[int, list[Request]], served: Served = SERVED) -> dict[str, Completion]:
    """Decode until all is done; `arrivals` says which requests join before which step."""
    done: list[Generation] = []
    last = max(arrivals)
    for step in range(10_000):
        if newcomers := [Generation(r, budget=r.sampling.max_tokens) for r in arrivals.get(step, [])]:
            done += decoder.join(newcomers, served)
        if decoder.running:
            done += decoder.step(served)
        elif step >= last:
            return {g.request.id: g.completion() for g in done}
    raise AssertionError("the decoder does not come to an end")


def crowd(**sampling: object) -> dict[int, list[Request]]:
    """Requests of all lengths that join at different steps and leave at different ones."""
    arrivals: dict[int, list[Request]] = {}
    for n in range(12):
        prompt = PROMPTS[n % len(PROMPTS)]
        joined = request(f"r{n}", prompt, seed=1000 + n, **{"max_tokens": 3 + 5 * (n % 4), **sampling})
        arrivals.setdefault((n // 3) * 2, []).append(joined)
    return arrivals


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_behaviour_logprobs_equal_a_plain_forward_for_every_architecture(architecture: str, temperature: float) -> None:
    model, arrivals = make_model(architecture), crowd(temperature=temperature)
    completions = run(Decoder(model, slots=12), arrivals)
    assert len(completions) == 12
    for r in (r for group in arrivals.values() for r in group):
        completion = completions[r.id]
        assert len(completion.token_ids) == r.sampling.max_tokens
        assert completion.finish_reason == "length"
        expected = full_forward(model, r.token_ids, completion, temperature=temperature)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_request_samples_the_same_alone_and_in_a_crowd(architecture: str) -> None:
    model, arrivals = make_model(architecture), crowd()
    together = run(Decoder(model, slots=12), arrivals)
    for r in (r for group in arrivals.values() for r in group):
        alone = run(Decoder(model, slots=1), {0: [r]})[r.id]
        assert alone.token_ids.tolist() == together[r.id].token_ids.tolist()
        np.testing.assert_allclose(alone.logprobs, together[r.id].logprobs, atol=1e-5)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_equals_generate_whatever_joins_and_leaves(architecture: str) -> None:
    """And reports the logprobs at temperature 1."""
    model, arrivals = make_model(architecture), crowd(temperature=0.0)
    completions = run(Decoder(model, slots=12), arrivals)
    model.generation_config = GenerationConfig(do_sample=False, max_new_tokens=18)  # ends at no token, as the requests
    for r in (r for group in arrivals.values() for r in group):
        ids = torch.tensor([r.token_ids])
        generated = model.generate(ids, attention_mask=torch.ones_like(ids))[0, len(r.token_ids) :]
        completion = completions[r.id]
        assert completion.token_ids.tolist() == generated[: r.sampling.max_tokens].tolist()
        np.testing.assert_allclose(completion.logprobs, full_forward(model, r.token_ids, completion), atol=1e-5)


def test_members_of_a_group_share_a_prompt_and_differ_by_seed() -> None:
    members = [request(f"m{n}", (4, 5, 6), seed=n) for n in range(8)]
    completions = run(Decoder(make_model(), slots=8), {0: members})
    assert len({tuple(c.token_ids.tolist()) for c in completions.values()}) == 8


def test_a_stop_token_ends_the_answer_and_is_part_of_it() -> None:
    model = make_model()
    free = run(Decoder(model, slots=1), {0: [request("a", seed=3)]})["a"]
    stop = int(free.token_ids[4])
    first = free.token_ids.tolist().index(stop)
    stopped = run(Decoder(model, slots=1), {0: [request("a", seed=3, stop_token_ids=(60, stop))]})["a"]
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids.tolist() == free.token_ids.tolist()[: first + 1]
    assert len(stopped.logprobs) == len(stopped.versions) == first + 1


def test_rows_move_and_buffers_grow_over_a_long_run_of_short_and_long_requests() -> None:
    model = make_model()
    generator = np.random.default_rng(0)
    arrivals: dict[int, list[Request]] = {}
    for n in range(60):
        prompt = generator.integers(0, 61, size=int(generator.integers(1, 60))).tolist()
        r = request(f"r{n}", prompt, seed=n, max_tokens=int(generator.integers(1, 90)))
        arrivals.setdefault(3 * n, []).append(r)
    completions = run(Decoder(model, slots=60), arrivals)
    for r in (r for group in arrivals.values() for r in group):
        expected = full_forward(model, r.token_ids, completions[r.id])
        np.testing.assert_allclose(completions[r.id].logprobs, expected, atol=1e-5)


@torch.inference_mode()
def versions_change_on_the_way(kv: str) -> tuple[dict[int, object], list[tuple[Request, Completion]]]:
    """Three requests, weights 3 after three steps and 4 after two more."""
    models = {version: make_model(seed=version) for version in (2, 3, 4)}
    live = LiveModel(make_model(seed=99))
    live.stage(staged(models[2], 1, 2))
    served = live.activate()
    decoder = Decoder(live.model, slots=4)
    requests = [request(f"r{n}", PROMPTS[n], seed=n) for n in range(3)]
    done = decoder.join([Generation(r, budget=12) for r in requests], served)
    for version, steps in ((3, 3), (4, 2)):
        for _ in range(steps):
            done += decoder.step(served)
        live.stage(staged(models[version], 1, version))
        served = live.activate()
        if kv == "recompute":
            decoder.rebuild(served)
    while decoder.running:
        done += decoder.step(served)
    return dict(models), [(g.request, g.completion()) for g in done]


def test_under_keep_each_logprob_is_that_of_its_stamped_version_over_the_mixed_kv() -> None:
    models, completions = versions_change_on_the_way("keep")
    for r, completion in completions:
        assert completion.versions.tolist() == [2] * 4 + [3] * 2 + [4] * 6
        assert [(s.weights, s.start, s.end) for s in completion.spans] == [
            (Weights(1, 2), 0, 4),
            (Weights(1, 3), 4, 6),
            (Weights(1, 4), 6, 12),
        ]
        assert [s.checksum for s in completion.spans] == [staged(models[v], 1, v).checksum for v in (2, 3, 4)]
        np.testing.assert_allclose(completion.logprobs, replay(models, r.token_ids, completion), atol=1e-5)
        # Negative control: one version off anywhere, or KV that was rebuilt, gives other numbers.
        swapped = {2: models[3], 3: models[4], 4: models[2]}
        off = np.abs(completion.logprobs - replay(swapped, r.token_ids, completion).numpy())
        assert np.all(off > 1e-3)
        assert np.any(np.abs(completion.logprobs - full_forward(models[4], r.token_ids, completion).numpy())[6:] > 1e-3)


def test_under_recompute_each_logprob_is_that_of_a_full_forward_under_its_stamped_version() -> None:
    models, completions = versions_change_on_the_way("recompute")
    for r, completion in completions:
        assert completion.versions.tolist() == [2] * 4 + [3] * 2 + [4] * 6
        plain = {v: full_forward(models[v], r.token_ids, completion).numpy() for v in models}
        stamped = np.array([plain[v][t] for t, v in enumerate(completion.versions.tolist())])
        np.testing.assert_allclose(completion.logprobs, stamped, atol=1e-5)
        # Negative control: the neighbouring versions, and the KV that `keep` would have used, give other numbers.
        for t, version in enumerate(completion.versions.tolist()):
            assert all(abs(completion.logprobs[t] - plain[v][t]) > 1e-3 for v in models if v != version)
        kept = replay(models, r.token_ids, completion).numpy()
        assert np.any(np.abs(completion.logprobs - kept)[4:] > 1e-3)


def test_weights_that_are_not_finite_end_requests_with_an_error_and_leave_no_trace() -> None:
    live, good = LiveModel(make_model(seed=99)), make_model(seed=1)
    decoder = Decoder(live.model, slots=4)
    broken = make_model(seed=1)
    broken.model.norm.weight.fill_(float("nan"))
    broken.model.embed_tokens.weight.fill_(float("nan"))
    live.stage(staged(broken, 1, 1))
    long = [request(f"bad{n}", range(20)) for n in range(4)]
    for completion in run(decoder, {0: long}, live.activate()).values():
        assert completion.finish_reason == "error"
        assert "(1, 1)" in completion.error
        assert len(completion.token_ids) == len(completion.logprobs) == len(completion.versions) == 0
    live.stage(staged(good, 1, 2))
    served = live.activate()
    arrivals = {0: [request("long", range(20))], 2: [request("short", (1, 2))]}
    for id, completion in run(decoder, arrivals, served).items():
        assert (completion.finish_reason, len(completion.token_ids)) == ("length", 12)
        prompt = range(20) if id == "long" else (1, 2)
        np.testing.assert_allclose(completion.logprobs, full_forward(good, prompt, completion), atol=1e-5)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_check_at_start_passes_for_what_is_supported(architecture: str) -> None:
    with torch.inference_mode():
        Decoder(make_model(architecture), slots=1).check_exact()


def test_a_recurrent_architecture_is_refused_at_start() -> None:
    model = MambaForCausalLM(MambaConfig(vocab_size=61, hidden_size=16, num_hidden_layers=2, state_size=4)).eval()
    with torch.inference_mode(), pytest.raises(EngineError, match="MambaForCausalLM"):
        Decoder(model, slots=2).check_exact()


def test_a_model_that_ignores_padding_is_refused_at_start() -> None:
    model = make_model()
    forward = model.forward

    @wraps(forward)
    def attend_to_all(*, attention_mask: torch.Tensor, **rest: object) -> object:
        return forward(attention_mask=torch.ones_like(attention_mask), **rest)

    model.forward = attend_to_all  # type: ignore[method-assign]
    with torch.inference_mode(), pytest.raises(EngineError, match="decodes differently"):
        Decoder(model, slots=2).check_exact()
