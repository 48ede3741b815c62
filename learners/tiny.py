"""`builtin:tiny`: a 140,224-parameter model that is made on this machine, warm-started, and cached.

The warm start leaves a model that *knows* its task and often answers wrongly: greedy success is high, sampled success
about 0.2. From there reinforcement learning moves within seconds on one core. Two supervised phases make it: clean
answers until the skill is there, then a short phase on data in which most answers are spoiled. A model stopped early
in a single phase has the same sampled success without the skill, and learns from it slowly or not at all; hence the
start is judged by both numbers, and another sub-seed is tried when they are outside the good region.
"""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from asyncrl.config.recipe import ReverseTask
from asyncrl.learners.cache import BuiltinModelError, ensure, tiny_name
from asyncrl.learners.forward import pack_attention, token_logprobs
from asyncrl.learners.sft import Example, SftConfig, SftStep, pack_examples, train_supervised
from asyncrl.learners.tiny_tokenizer import VOCABULARY, build_tokenizer
from asyncrl.tasks.base import Task
from asyncrl.tasks.build import build_task
from asyncrl.tasks.chat import render

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

PARAMETERS = 140_224
MAX_LENGTH = 512
MAX_ATTEMPTS = 4

CLEAN = SftConfig(
    max_steps=400,  # 90-170 are usual
    learning_rate=6e-3,
    warmup_steps=20,
    betas=(0.9, 0.98),
)
SPOILED = SftConfig(max_steps=40, learning_rate=2e-3, betas=(0.9, 0.98))
CLEAN_SUCCESS = 0.90  # sampled, on CHECK_PROMPTS prompts, ends the clean phase
CHECK_EVERY_STEPS = 10
CHECK_PROMPTS = 128
JUDGE_PROMPTS = 256  # standard error 0.025 at 0.2
SPOILED_SHARE = 0.6
MIN_GREEDY = 0.70  # below: the skill is not there, reinforcement learning would have to find it
SAMPLED = (0.10, 0.60)
"""Below: groups without a success teach nothing. Above: the spoiling did not take. The default task lands at 0.15-0.3;
shorter strings land near the share of answers left right, 0.4, plus what is right by luck (an echoed palindrome)."""


@dataclass(frozen=True, slots=True)
class WarmStart:
    """How a warm start went. `sampled` (temperature 1) and `greedy` are shares of prompts solved at its end."""

    seed: int
    attempt: int
    clean_steps: int
    sampled: float
    greedy: float
    seconds: float

    @property
    def good(self) -> bool:
        return self.clean_steps > 0 and self.greedy >= MIN_GREEDY and SAMPLED[0] <= self.sampled <= SAMPLED[1]


def ensure_tiny(seed: int, *, digits: tuple[int, int] = (3, 6)) -> Path:
    """The folder of the model and tokenizer warm-started with `seed` on reversing `digits[0]` to `digits[1]` digits.

    Made on the first call (10-20 s of one core), then taken from `$ASYNCRL_CACHE` or `~/.cache/asyncrl`; a damaged one
    is made again. Loads with `AutoModelForCausalLM` and `AutoTokenizer` from the path. Of several processes that call
    at once one builds and the others wait. Raises BuiltinModelError: no attempt succeeded, or as `cache.ensure`.
    """
    return ensure(tiny_name(seed, digits), lambda folder: build_tiny(folder, seed=seed, digits=digits))


# --- making one -------------------------------------------------------------------------------------------------------


def build_tiny(folder: Path, *, seed: int, digits: tuple[int, int] = (3, 6)) -> WarmStart:
    """Make the warm-started model into the empty `folder`. The weights are a function of the arguments on one machine.

    Only rows of the train split are seen. Raises BuiltinModelError if no attempt ends in the good region.
    """
    task = build_task(ReverseTask(digits=digits), seed=seed)
    tokenizer = build_tokenizer(MAX_LENGTH)
    with _one_thread(), torch.random.fork_rng(devices=[]):
        for attempt in range(MAX_ATTEMPTS):
            logger.info("making the built-in model, seed %d: about 15 s of one core, once", seed)
            model, start = _warm_start(task, tokenizer, seed=seed, attempt=attempt)
            if start.good:
                break
            logger.warning("warm start %s is outside the good region; trying the next sub-seed", start)
        else:
            raise BuiltinModelError(
                f"no warm start of {MAX_ATTEMPTS} for seed {seed} and {digits[0]}-{digits[1]} digits learnt its task "
                f"(last: {start}): use another run.seed, or shorter strings (task.digits)"
            )
    logger.info("warm start: %s", start)
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        # plain sampling: left to itself, `generate` cuts to the 50 likeliest tokens
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
        top_k=0,
    )
    with _quiet():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    (folder / "warm_start.json").write_text(json.dumps(asdict(start), indent=1))
    return start


def tiny_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    """The architecture. head_dim 32 is the smallest that every engine's attention takes; an initializer range of 0.06
    (not 0.02) halves the supervised steps at this width."""
    return Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        initializer_range=0.06,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _warm_start(
    task: Task, tokenizer: PreTrainedTokenizerFast, *, seed: int, attempt: int
) -> tuple[PreTrainedModel, WarmStart]:
    """Both phases with one sub-seed. `clean_steps` 0 = the clean phase did not reach its goal."""
    began = time.process_time()
    rng = random.Random(f"tiny/{seed}/{attempt}")
    torch.manual_seed(rng.getrandbits(63))
    model: PreTrainedModel = Qwen3ForCausalLM(tiny_config(tokenizer))
    reason = pack_attention(model)
    if reason is not None:
        logger.warning("the warm start runs one sequence at a time, minutes instead of seconds: %s", reason)

    clean = _examples(task, tokenizer, rng, str)
    clean_steps = 0

    def learnt(step: SftStep) -> bool:
        nonlocal clean_steps
        if step.step % CHECK_EVERY_STEPS == 0 and success(model, list(islice(clean, CHECK_PROMPTS))) >= CLEAN_SUCCESS:
            clean_steps = step.step
        return clean_steps > 0

    train_supervised(model, clean, CLEAN, after_step=learnt)
    if clean_steps:
        train_supervised(model, _examples(task, tokenizer, rng, lambda answer: spoil(answer, rng)), SPOILED)
    judged = list(islice(clean, JUDGE_PROMPTS))
    return model, WarmStart(
        seed=seed,
        attempt=attempt,
        clean_steps=clean_steps,
        sampled=round(success(model, judged), 4),
        greedy=round(success(model, judged, temperature=GREEDY), 4),
        seconds=round(time.process_time() - began, 1),
    )


def spoil(answer: str, rng: random.Random) -> str:
    """With probability SPOILED_SHARE one of four errors a model makes: the input echoed, the last digit forgotten, one
    digit wrong, another format."""
    if rng.random() >= SPOILED_SHARE:
        return answer
    wrong = rng.randrange(len(answer))
    digit = (int(answer[wrong]) + rng.randint(1, 9)) % 10
    return rng.choice([answer[::-1], answer[:-1], f"{answer[:wrong]}{digit}{answer[wrong + 1 :]}", f"={answer}"])


def _examples(
    task: Task, tokenizer: PreTrainedTokenizerFast, rng: random.Random, corrupt: Callable[[str], str]
) -> Iterator[Example]:
    """Without end: random train rows with their answers, `corrupt`ed, each followed by the end mark."""
    rows = task.rows("train")
    while True:
        row = rows[rng.randrange(len(rows))]
        answer = tokenizer.encode(corrupt(row.answer), add_special_tokens=False)
        yield Example.of(render(tokenizer, task.messages(row)), [*answer, tokenizer.eos_token_id])


# --- judging one ------------------------------------------------------------------------------------------------------

GREEDY = 1e-4
"""A temperature at which only the likeliest token is left: logits 0.01 apart differ by a factor e^100."""


@torch.no_grad()
def success(model: PreTrainedModel, examples: Sequence[Example], *, temperature: float = 1.0) -> float:
    """Expected share of prompts that the model answers rightly at `temperature`, where each has one right answer.

    The chance that a sampled answer is the right one is exp(sum of its tokens' log-probs, the end mark's included), so
    this needs no sampling, and has only the noise of the choice of prompts.
    """
    (batch,) = pack_examples(examples, sum(len(e.token_ids) for e in examples))
    logprobs = token_logprobs(model, batch.token_ids, batch.cu_seqlens, temperature=temperature, asked=batch.answer)
    answers = logprobs.cumsum(0, dtype=torch.float64)  # 0 where nothing was asked for
    # A sequence starts with its prompt, where the running sum stands still: it is the sum of all answers before.
    return float(answers[batch.cu_seqlens[1:] - 1].diff(prepend=answers.new_zeros(1)).exp().mean())


@contextmanager
def _one_thread() -> Iterator[None]:
    """At this size a second thread gains little and costs much on shared cores; and sums keep their order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bar for writing half a megabyte."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
