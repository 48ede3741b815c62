"""Requests to the SGLang engine, against a double of a server, written from its source: no GPU, no SGLang here."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from asyncrl.collectors.engines import sglang as adapter
from asyncrl.staleness import Weights

from .letters import spelt
from .sglang_ready import PROMPT, long, ready
from .tiny_models import request

pytestmark = pytest.mark.asyncio


async def test_an_answer_has_tokens_logprobs_and_the_version_that_sampled_them(saved: Path, tmp_path: Path) -> None:
    async with ready(saved, tmp_path) as one:
        asked = long("a", seed=2**62, tokens=100)
        answer = await one.engine.generate(asked)
        assert (len(answer.token_ids), answer.finish_reason, answer.error) == (100, "length", "")
        assert all(one.sampled_by(asked, answer))
        (span,) = answer.spans
        assert (span.weights, span.checksum) == (Weights(1, 1), one.engine.checksum)
        assert 0 < answer.first_token <= answer.done
        assert one.engine.generated_tokens == 100
        assert one.engine.free_slots == 4


async def test_it_stops_at_a_token_of_the_request_which_is_part_of_the_answer(saved: Path, tmp_path: Path) -> None:
    async with ready(saved, tmp_path) as one:
        whole = await one.engine.generate(long("a", seed=3, tokens=30))
        stop = int(whole.token_ids[20])
        place = whole.token_ids.tolist().index(stop)
        answer = await one.engine.generate(request("b", PROMPT, seed=3, max_tokens=30, stop_token_ids=(stop,)))
        assert answer.finish_reason == "stop"
        assert answer.token_ids.tolist() == whole.token_ids.tolist()[: place + 1]


async def test_an_end_token_of_the_model_alone_ends_nothing(saved: Path, tmp_path: Path) -> None:
    async with ready(saved, tmp_path) as one:
        whole = await one.engine.generate(long("a", seed=3, tokens=30))
        one.double.eos = {int(whole.token_ids[5]), int(whole.token_ids[-1])}
        again = await one.engine.generate(long("b", seed=3, tokens=30))
        assert again.token_ids.tolist() == whole.token_ids.tolist()
        assert again.logprobs.tolist() == whole.logprobs.tolist()
        assert (again.finish_reason, len(again.spans)) == ("length", 1)


async def test_an_aborted_request_returns_what_it_has(saved: Path, tmp_path: Path) -> None:
    async with ready(saved, tmp_path) as one:
        asked = long("a", tokens=4000)
        running, other = one.begin(asked, long("b"))
        await one.until("a", 64)
        one.engine.abort(["a", "unknown"])
        answer = await running
        assert answer.finish_reason == "abort"
        assert 64 <= len(answer.token_ids) < 4000
        assert all(one.sampled_by(asked, answer))
        assert (await other).finish_reason == "length"


async def test_an_abort_ends_no_request_whose_name_only_begins_alike(saved: Path, tmp_path: Path) -> None:
    async with ready(saved, tmp_path) as one:
        short, longer = one.begin(long("r1", tokens=4000), long("r10"))
        await one.until("r10", 1)
        one.engine.abort(["r1"])
        assert ((await short).finish_reason, (await longer).finish_reason) == ("abort", "length")


async def test_an_abort_that_the_server_never_hears_ends_the_request_without_a_token(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "GIVE_UP_S", 1.0)
    async with ready(saved, tmp_path) as one:
        one.double.deaf = True
        (running,) = one.begin(long("a", tokens=4000))
        await one.until("a", 1)
        one.engine.abort(["a"])
        answer = await running
        assert (answer.finish_reason, len(answer.token_ids)) == ("abort", 0)


async def test_a_cancelled_request_frees_its_slot_and_ends_no_other(saved: Path, tmp_path: Path) -> None:
    async with ready(saved, tmp_path) as one:
        cancelled, other = one.begin(long("a", tokens=4000), long("b"))
        await one.until("a", 1)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert (await other).finish_reason == "length"


@pytest.mark.parametrize(
    ("sampling", "says"),
    [
        ({"temperature": 0.7}, "SGLANG_RETURN_ORIGINAL_LOGPROB"),
        ({"top_p": 0.9}, "top_p 0.9 .* not tried on a GPU"),
        ({"min_tokens": 2}, "end tokens of the model's own"),
        ({"stop": ("a",)}, "stop strings need the model's tokenizer"),
        ({"max_tokens": 0}, "nothing to sample"),
    ],
)
async def test_what_cannot_be_sampled_exactly_is_refused(
    saved: Path, tmp_path: Path, sampling: dict[str, Any], says: str
) -> None:
    async with ready(saved, tmp_path) as one:
        with pytest.raises(ValueError, match=says):
            await one.engine.generate(request("a", PROMPT, **sampling))
        assert not one.double.bodies


async def test_what_the_server_refuses_is_refused_with_its_reason(saved: Path, tmp_path: Path) -> None:
    async with ready(saved, tmp_path) as one:
        one.double.info["max_req_input_len"] = 3
        with pytest.raises(ValueError, match="longer than the model's context length"):
            await one.engine.generate(long("a"))


async def test_an_answer_ends_with_the_token_that_completes_a_stop_string(
    saved_with_letters: Path, tmp_path: Path
) -> None:
    async with ready(saved_with_letters, tmp_path) as one:
        whole = await one.engine.generate(long("a", seed=3))
        stop = spelt(whole.token_ids[98:101].tolist())
        end = spelt(whole.token_ids.tolist()).index(stop) + 3
        asked = request("b", PROMPT, seed=3, max_tokens=4000, stop=("nothing", stop))
        answer = await one.engine.generate(asked)
        assert (answer.finish_reason, answer.stopped_by) == ("stop", stop)
        assert answer.token_ids.tolist() == whole.token_ids.tolist()[:end]
        assert len(answer.logprobs) == len(answer.versions) == answer.spans[-1].end == end
        assert all(one.sampled_by(asked, answer))


async def test_while_it_runs_it_tells_what_has_come_and_after_an_update_what_had_come_before_it(
    saved: Path, tmp_path: Path
) -> None:
    async with ready(saved, tmp_path) as one:
        asked = long("a")
        (running,) = one.begin(asked)
        heard: list[int] = []
        await one.until("a", 1)
        one.engine.listen("a", lambda: heard.append(one.engine.progress("a")))
        await one.until("a", 64)
        partial = one.engine.partial("a")
        assert partial is not None
        assert partial.finish_reason == "abort"
        assert len(partial.token_ids) >= 64
        assert all(one.sampled_by(asked, partial))
        assert heard
        before = one.engine.progress("a")
        await one.serve(2)
        await one.until("a", before + 64)
        partial = one.engine.partial("a")
        assert partial is not None
        assert len(partial.token_ids) < one.engine.progress("a")  # what the server had when it paused is not known yet
        assert set(partial.versions.tolist()) == {1}
        assert all(one.sampled_by(asked, partial))
        assert len((await running).token_ids) == 400
        assert one.engine.partial("a") is None
