"""Every call, field and answer of the SGLang engine, compared with the source of the published package."""

from __future__ import annotations

import ast
import json
import typing
from typing import Any

import httpx2
import msgspec
import numpy as np
import pytest
import torch

from asyncrl.collectors.engines.base import Request, Sampling
from asyncrl.collectors.engines.sglang_request import ENDS, body_of
from asyncrl.collectors.engines.sglang_served import FUSED, PAD_ROWS, TILE, TILES, sha256, tiled
from asyncrl.collectors.engines.sglang_server import REQUIRED, SglangServer

from .conftest import Package, Source
from .kernels import gpu_tensor_hash

HTTP = "srt/entrypoints/http_server.py"
STRUCTS = "srt/managers/io_struct.py"
SCHEDULER = "srt/managers/scheduler.py"
TOKENIZER = "srt/managers/tokenizer_manager.py"
UPDATER = "srt/managers/scheduler_components/weight_updater.py"

REQUEST = Request("a", "g", "s", (1, 2, 3), Sampling(max_tokens=9, stop_token_ids=(7,)), seed=2**63 - 1)
BODY = {**body_of(REQUEST, "9f" * 16, limit=4090), "stream": True}

CALLS = {
    "info": ("GET", "/server_info"),
    "label": ("GET", "/model_info"),
    "pause": ("POST", "/pause_generation"),
    "load": ("POST", "/update_weights_from_disk"),
    "resume": ("POST", "/continue_generation"),
    "checksums": ("POST", "/weights_checker"),
    "abort": ("POST", "/abort_request"),
    "abort_all": ("POST", "/abort_request"),
}
ARGUMENTS: dict[str, tuple[str, ...]] = {"load": ("/folder/1-2", "1/2/aa"), "abort": ("9f" * 16,)}


async def recorded(name: str) -> tuple[str, str, dict[str, Any]]:
    """Method, route and body of a call, as they leave."""
    sent: list[httpx2.Request] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        sent.append(request)
        return httpx2.Response(200, json={"weight_version": "1/2/aa", "ranks": [{"checksums": {}}]})

    server = SglangServer("http://server")
    await server.close()
    server._http = httpx2.AsyncClient(transport=httpx2.MockTransport(answer), base_url="http://server")
    await getattr(server, name)(*ARGUMENTS.get(name, ()))
    await server.close()
    (request,) = sent
    return request.method, request.url.path, json.loads(request.content) if request.content else {}


def routes(source: Source) -> dict[tuple[str, str], ast.FunctionDef | ast.AsyncFunctionDef]:
    """(method, path) -> handler."""
    found = {}
    for node in source.tree.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for decorator in node.decorator_list:
            if not (isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Attribute)):
                continue
            if not (isinstance(decorator.func.value, ast.Name) and decorator.func.value.id == "app" and decorator.args):
                continue
            if not isinstance(decorator.args[0], ast.Constant):
                continue
            kind = decorator.func.attr
            methods = [kind.upper()]
            if kind == "api_route":
                (given,) = [keyword.value for keyword in decorator.keywords if keyword.arg == "methods"]
                methods = ast.literal_eval(given)
            found.update({(method, decorator.args[0].value): node for method in methods})
    return found


def body_class(handler: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """The class that a handler's `obj` is annotated with."""
    (argument,) = [argument for argument in handler.args.args if argument.arg == "obj"]
    names = [node.id for node in ast.walk(argument.annotation) if isinstance(node, ast.Name)]  # type: ignore[arg-type]
    (name,) = [name for name in names if name not in ("Annotated", "Optional", "Body")]
    return name


def constants(node: ast.AST) -> set[object]:
    return {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}


def calls(node: ast.AST) -> list[str]:
    """Names of what is called, in the order of the text."""
    found = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
    found.sort(key=lambda call: (call.lineno, call.col_offset))
    return [call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "") for call in found]


@pytest.mark.asyncio
@pytest.mark.parametrize("name", CALLS)
async def test_every_call_is_a_route_that_takes_its_body(sglang: Package, name: str) -> None:
    method, route, body = await recorded(name)
    assert (method, route) == CALLS[name]
    handler = routes(sglang[HTTP])[method, route]
    if not body:
        return
    fields = sglang[STRUCTS].fields(body_class(handler)) | sglang[STRUCTS].fields("BaseReq")
    for key, value in body.items():
        annotation = eval(ast.unparse(fields[key].annotation), vars(typing))
        msgspec.convert(value, annotation, strict=True)
    required = {key for key, field in fields.items() if field.value is None}
    assert required <= set(body)


def test_all_calls_are_looked_at() -> None:
    public = {name for name, value in vars(SglangServer).items() if callable(value) and not name.startswith("_")}
    assert public - {"close", "generate"} == set(CALLS)


def contract(sglang: Package) -> Any:
    """The decoder by which the server itself judges the body of `/generate`."""
    names: dict[str, Any] = {"__name__": "api_types"}
    exec(compile(sglang["api/v1/api_types.py"].text, "api_types.py", "exec"), names)
    return names["GenerateRequest"]


def test_the_server_takes_the_body_of_generate(sglang: Package) -> None:
    assert ("POST", "/generate") in routes(sglang[HTTP])
    assert set(BODY) <= set(sglang[STRUCTS].fields("GenerateReqInput"))
    assert set(BODY["sampling_params"]) <= set(sglang["srt/sampling/sampling_params.py"].fields("SamplingParams"))
    taken = contract(sglang).from_json_value(json.loads(json.dumps(BODY))).to_json_value()
    sampling = taken.pop("sampling_params")
    assert all(taken[key] == value for key, value in BODY.items() if key != "sampling_params")
    assert all(sampling[key] == value for key, value in BODY["sampling_params"].items())
    # What is not said changes nothing of the distribution.
    assert (sampling["top_p"], sampling["min_p"], sampling["repetition_penalty"]) == (1.0, 0.0, 1.0)
    assert {sampling[key] for key in ("frequency_penalty", "presence_penalty", "min_new_tokens")} == {0}


def test_a_body_that_is_wrong_would_be_noticed(sglang: Package) -> None:
    """Negative control."""
    with pytest.raises(ValueError):
        contract(sglang).from_json_value({**BODY, "input_ids": "1 2 3"})
    with pytest.raises(ValueError):
        contract(sglang).from_json_value({**BODY, "sampling_params": {"max_new_token": 1}})


def test_what_a_server_is_asked_about_itself_has_these_names_and_defaults(sglang: Package) -> None:
    declared = {
        node.target.id: node.value
        for source in sglang.below("srt/arg_groups/fields/")
        for cls in ast.walk(source.tree)
        if isinstance(cls, ast.ClassDef)
        for node in cls.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    info = sglang[HTTP].define("server_info")
    for key, allowed in REQUIRED.items():
        if key in declared:
            assert isinstance(declared[key], ast.Constant), key
            assert declared[key].value in allowed, key
        else:
            assert {key, *allowed} <= constants(info)
    assert "device" in declared
    assert "version" in constants(info)
    assert "build_server_info" in calls(info)
    assert "max_req_input_len" in constants(sglang[SCHEDULER].function("get_init_info", "Scheduler"))
    assert "weight_version" in constants(sglang[HTTP].define("model_info"))


def test_an_answer_has_the_keys_that_are_read(sglang: Package) -> None:
    tokenizer = sglang[TOKENIZER]
    batch = constants(tokenizer.function("_handle_batch_output", "TokenizerManager"))
    aborted = constants(tokenizer.function("_handle_abort_req", "TokenizerManager"))
    for written in (batch, aborted):
        assert {"output_ids", "meta_info", "finish_reason"} <= written
    logprobs = tokenizer.function("add_logprob_to_meta_info", "TokenizerManager")
    assert "output_token_logprobs" in constants(logprobs)
    triple = tokenizer.function("detokenize_logprob_tokens", "TokenizerManager")
    assert "(logprob, token_id, None)" in ast.unparse(triple)
    ranks = constants(sglang[HTTP].define("check_weights"))
    assert "ranks" in ranks
    assert "checksums" in sglang[STRUCTS].fields("ChecksumInfo")


def test_a_stream_ends_as_it_is_read(sglang: Package) -> None:
    text = ast.unparse(sglang[HTTP].define("serve_generate_request"))
    assert r"""yield (b'data: ' + dumps_json(out) + b'\n\n')""" in text
    assert r"""yield b'data: [DONE]\n\n'""" in text
    assert {"error", "message"} <= constants(sglang[HTTP].define("serve_generate_request"))


def finish_reasons(sglang: Package) -> dict[str, dict[str, Any]]:
    names: dict[str, Any] = {"Union": typing.Union, "List": list}
    source = sglang["srt/managers/schedule_batch.py"]
    for name in ("BaseFinishReason", "FINISH_MATCHED_TOKEN", "FINISH_MATCHED_STR", "FINISH_LENGTH", "FINISH_ABORT"):
        exec(compile(ast.Module([source.define(name)], []), "schedule_batch.py", "exec"), names)  # type: ignore[list-item]
    return {
        "token": names["FINISH_MATCHED_TOKEN"](7).to_json(),
        "text": names["FINISH_MATCHED_STR"]("NaN happened").to_json(),
        "length": names["FINISH_LENGTH"](9).to_json(),
        "abort": names["FINISH_ABORT"]().to_json(),
        "failed": names["FINISH_ABORT"]("too long", 400).to_json(),
    }


def test_answers_end_in_the_ways_that_are_told_apart(sglang: Package) -> None:
    reasons = finish_reasons(sglang)
    assert {name: ENDS[reason["type"]] for name, reason in reasons.items()} == {
        "token": "stop",
        "text": "stop",
        "length": "length",
        "abort": "abort",
        "failed": "abort",
    }
    assert reasons["token"]["matched"] == 7
    assert isinstance(reasons["text"]["matched"], str)
    assert (reasons["abort"]["status_code"], reasons["failed"]["status_code"]) == (None, 400)


def test_spans_are_by_tokens_and_have_these_keys(sglang: Package) -> None:
    names: dict[str, Any] = {"dataclasses": __import__("dataclasses"), "msgspec": msgspec}
    text = sglang["srt/utils/weight_versions.py"].text
    body = [
        node
        for node in ast.parse(text).body
        if not isinstance(node, ast.If | ast.ImportFrom) or getattr(node, "module", "") == "typing"
    ]
    names.update({"msgspec_struct_pydantic_core_schema": None, "annotations": None})
    module = ast.Module([ast.parse("from __future__ import annotations").body[0], *body], [])
    exec(compile(module, "weight_versions.py", "exec"), names)
    event = names["WeightVersionEvent"]
    spans = names["compute_weight_version_spans"]([event("1/1/aa", 3), event("1/2/bb", 3)], "1/3/cc", 5)
    meta: dict[str, Any] = {}
    names["add_weight_versions_to_meta_info"](meta, spans, num_output_tokens=5)
    assert meta["weight_versions"] == [
        {"version": "1/1/aa", "start": 0, "end": 3},
        {"version": "1/3/cc", "start": 3, "end": 5},
    ]


def test_a_retraction_counts_the_last_steps_tokens_before_it_ends_and_in_place_does_not(sglang: Package) -> None:
    """Why `keep` is refused: once this fails, it may be possible."""
    pause = sglang[SCHEDULER].function("pause_generation", "Scheduler")
    (in_place,) = [node for node in pause.body if isinstance(node, ast.If) and "in_place" in constants(node.test)]
    assert isinstance(in_place.body[-1], ast.Return)
    assert "process_batch_result" not in calls(in_place)
    after = calls(ast.Module(pause.body[pause.body.index(in_place) + 1 :], []))
    assert after.index("process_batch_result") < after.index("retract_all")


def test_a_load_labels_and_then_drops_all_keys_and_values(sglang: Package) -> None:
    update = calls(sglang[UPDATER].function("update_weights_from_disk", "SchedulerWeightUpdaterManager"))
    order = ["update_weights_from_disk", "record_weight_version_after_update", "flush_cache_after_weight_update"]
    assert sorted(order, key=update.index) == order
    relabel = ast.unparse(sglang[SCHEDULER].function("record_weight_version_change", "Scheduler"))
    assert "self.waiting_queue" in relabel
    assert "tree_cache.reset" in ast.unparse(sglang[SCHEDULER].function("flush_cache", "Scheduler"))
    pausing = ast.unparse(sglang[TOKENIZER].function("update_weights_from_disk", "TokenizerManager"))
    assert "if not is_paused else nullcontext()" in pausing  # else it would wait for running requests


def test_an_abort_goes_by_prefix(sglang: Package) -> None:
    """Why ids of requests have one length."""
    assert "startswith" in calls(sglang[SCHEDULER].function("abort_request", "Scheduler"))


def test_logprobs_depend_on_the_environment_at_other_temperatures_only(sglang: Package) -> None:
    """Why other temperatures than 1 are refused, and 0 is served: greedy sampling is temperature 1 with top_k 1."""
    text = sglang["srt/layers/sampler.py"].text
    assert 'get_bool_env_var("SGLANG_RETURN_ORIGINAL_LOGPROB")' in text
    params = ast.unparse(sglang["srt/sampling/sampling_params.py"].function("__post_init__", "SamplingParams"))
    assert "self.temperature = 1.0\n    self.top_k = 1" in params.replace("        ", "    ")


def test_a_least_number_of_tokens_holds_back_end_tokens_that_the_server_does_not_name(sglang: Package) -> None:
    """Why min_tokens is refused: a mask of the request's own stop tokens would be another one."""
    held_back = ast.unparse(sglang["srt/sampling/penaltylib/min_new_tokens.py"].define("_prepare"))
    assert "req.eos_token_ids" in held_back
    assert "req.tokenizer.additional_stop_token_ids" in held_back


def test_masks_of_truncated_draws_can_be_asked_for_and_are_not_yet(sglang: Package) -> None:
    """What could serve top_k, top_p and min_p once it has been compared on a GPU."""
    assert {"return_sampling_mask", "sampling_logprobs_mode"} <= set(sglang[STRUCTS].fields("GenerateReqInput"))
    assert "return_sampling_mask" not in BODY


def test_what_is_fused_and_padded_is_what_the_loader_fuses_and_pads(sglang: Package) -> None:
    loader = sglang["srt/model_loader/auto_loader.py"]
    mappings: dict[str, list[str]] = {}
    for node in loader.tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in (
            "STANDARD_QKV_MAPPING",
            "STANDARD_GATE_UP_MAPPING",
        ):
            assert isinstance(node.value, ast.Call)
            for fused, part, _ in ast.literal_eval(node.value.keywords[0].value):
                mappings.setdefault(fused, []).append(part)
    assert {fused: tuple(parts) for fused, parts in mappings.items()} == FUSED
    embedding = sglang["srt/layers/vocab_parallel_embedding.py"]
    assert f"DEFAULT_VOCAB_PADDING_SIZE = {PAD_ROWS}\n" in embedding.text
    assert "param[loaded_weight.shape[0]:].data.fill_(0)" in ast.unparse(embedding.define("VocabParallelEmbedding"))


def test_checksums_are_of_the_raw_tensors_in_hex(sglang: Package) -> None:
    checker = sglang["srt/utils/weight_checker.py"]
    assert "return f'{tensor_hash(t):016x}'" in ast.unparse(checker.define("_hash_tensor"))
    raw = sglang["srt/utils/weight_checker_comparator.py"].function("dequantize", "RawComparable")
    assert ast.unparse(raw.body[-1]) == "return self.tensor"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_on_a_cpu_has_sglangs_checksum(sglang: Package, dtype: torch.dtype) -> None:
    names: dict[str, Any] = {"torch": torch, "hashlib": __import__("hashlib")}
    function = sglang["srt/managers/mm_utils.py"].define("tensor_hash")
    exec(compile(ast.Module([function], []), "mm_utils.py", "exec"), names)  # type: ignore[list-item]
    tensor = torch.randn(33, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    parts = [part.view(torch.uint8).numpy().reshape(-1) for part in tensor.split([10, 23])]
    assert sha256(parts) == names["tensor_hash"](tensor)


@pytest.mark.parametrize(
    "size", [0, 1, 3, 4, 4096, 4 * TILE, 4 * TILE + 2, 4 * TILE * 3 - 4, 4 * TILE * (TILES + 1) + 8]
)
def test_a_tensor_on_a_gpu_has_the_checksum_of_sglangs_kernel(sglang: Package, size: int) -> None:
    """The kernel itself, of the package, run on a CPU (`kernels.py`)."""
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    kernel = gpu_tensor_hash(sglang["kernels/ops/memory/gpu_tensor_hash.py"].text)
    assert tiled([data]) == (kernel(data.tobytes()) if size else 0)
