"""The reward part `judge`: a language model behind an OpenAI-compatible server says how good an answer is.

| what                                                        | the answer                                         |
|-------------------------------------------------------------|----------------------------------------------------|
| a reply that can be read                                    | scored, from the scale to [0, 1]                   |
| one that cannot, also when the judge was asked again        | unscored: `judge_unreadable`                       |
| no reply: down, late, 429 and 5xx until `retries` are spent | unscored: `judge_unavailable`                      |
| it refuses this question: too long, its content             | unscored: `judge_refused`                          |
| the budget is spent                                         | BudgetSpent, which ends the run                    |
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.config.rewards import Judge, part_name
from asyncrl.config.secrets import HIDDEN
from asyncrl.rewards import judge_question
from asyncrl.rewards.base import Finding, Unscored
from asyncrl.rewards.judge_cache import ReplyCache, key_of
from asyncrl.rewards.judge_limits import Budget, Pace
from asyncrl.rewards.judge_question import sendable
from asyncrl.rewards.judge_reply import Unreadable, verdict
from asyncrl.rewards.parts import short
from asyncrl.rewards.pool import VerifierError

if TYPE_CHECKING:
    from openai import AsyncOpenAI

logger = logging.getLogger(__name__)

UNAVAILABLE = "judge_unavailable"
UNREADABLE = "judge_unreadable"
REFUSED = "judge_refused"
POOR = "judged_poor"
"""Class of what is wrong with an answer in the lower half of the scale."""

REFUSALS = (400, 413, 422)
"""Statuses that say something of one question; any other is about the server or the key."""

SHOWN = 200
"""Characters of the end of a reply that are shown: there it says what it thinks."""

AWAY_S = 5.0
"""Between two looks whether a server that is gone is there again."""

Chat = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back. unfinished: why no text of it is a verdict, "" if it was ended by the judge itself. tokens: of
    question and reply by the judge's own count, None if it does not count."""

    text: str
    unfinished: str
    tokens: int | None


class JudgePart:
    """Asks the judge; many answers at once. A Remote."""

    def __init__(self, part: Judge) -> None:
        self._part = part
        self._name = part_name(part)
        self._key = ""
        self._client: AsyncOpenAI | None = None
        self._cache: ReplyCache | None = None
        self._cache_lock = asyncio.Lock()
        self._places = asyncio.Semaphore(part.at_once)  # freed by calls, each of which has its limit
        self._started = False
        self._silent = False  # to the last question nothing came back
        self._pace = Pace(part.requests_per_minute)
        self._budget = Budget(self._name, part.max_calls, part.max_total_tokens)

    async def start(self) -> None:
        """Ask it once, which shows that address, key, model and settings are right. Raises VerifierError."""
        part = self._part
        try:
            from openai import AsyncOpenAI, DefaultAsyncHttpxClient  # of an extra, which only judges and agents need
        except ImportError:
            raise VerifierError(f"the judge {self._name!r} needs openai: pip install 'asyncrl[judge]'") from None
        self._key = "" if part.api_key_env is None else os.environ.get(part.api_key_env, "")
        if part.api_key_env is not None and not self._key:
            raise VerifierError(
                f"the judge {self._name!r}: api_key_env names the environment variable {part.api_key_env}, which is "
                f"not set here; export {part.api_key_env}=..., or leave the key out if the server wants none"
            )
        if odd := next((c for c in self._key if not "!" <= c <= "~"), None):
            raise VerifierError(
                f"the judge {self._name!r}: the environment variable {part.api_key_env} holds {odd!r}, which no key "
                f"has; export {part.api_key_env}=... without quotes, white space or line ends"
            )
        self._cache = None if part.cache is None else await self._opened(Path(part.cache))
        self._client = AsyncOpenAI(
            base_url=part.url,
            api_key=self._key or "none",  # else it would send OPENAI_API_KEY, which is for another server
            timeout=part.timeout_s,
            max_retries=part.retries,
            http_client=DefaultAsyncHttpxClient(event_hooks={"request": [self._retried]}),
        )
        try:
            reply = await self._ask([{"role": "user", "content": judge_question.trial(part)}])
        except Unscored as error:
            mend = "Start it, or mend url, model and api_key_env"
            if error.failure == REFUSED:
                mend = (
                    "Mend its settings: temperature: null and max_tokens: null are not sent, and extra_body is, as in "
                    "{max_completion_tokens: 2000}; or model and api_key_env"
                )
            raise VerifierError(
                f"the judge {self._name!r}, {part.model} at {part.url}, cannot be asked: {error.detail}\n"
                f"{mend} of this part of task.rewards"
            ) from None
        if part.max_total_tokens is not None and reply.tokens is None:
            raise VerifierError(
                f"the judge {self._name!r} has max_total_tokens {part.max_total_tokens}, but its server at {part.url} "
                "does not say how many tokens it used. Limit max_calls instead"
            )
        self._started = True

    async def verify(self, row: Mapping[str, Any], answer: Mapping[str, Any]) -> Finding:
        """See Remote. Raises Unscored, BudgetSpent."""
        chat: Chat = [{"role": "user", "content": judge_question.question(self._part, row, answer)}]
        key = key_of({"url": self._part.url, **self._request(chat)})
        if (kept := await self._kept(key)) is not None:
            with suppress(Unreadable):  # only another version of asyncrl could read it
                return self._finding(kept)
        reply = await self._ask(chat)
        try:
            finding = self._read(reply)
        except Unreadable as error:
            if reply.text:  # else it is asked the same: many servers refuse a message without text
                chat += [
                    {"role": "assistant", "content": reply.text},
                    {"role": "user", "content": judge_question.again(str(error), self._part)},
                ]
            reply = await self._ask(chat)
            try:
                finding = self._read(reply)
            except Unreadable as second:
                ending = f"; the reply ends: {reply.text[-SHOWN:]!r}" if reply.text else ""
                raise Unscored(UNREADABLE, f"{second}{ending}") from None
        await self._keep(key, reply.text)
        return finding

    async def close(self) -> None:
        """Calls in flight fail: their connections are closed."""
        if self._client is not None:
            await self._client.close()
        if self._cache is not None:
            async with self._cache_lock:
                # In a thread: a call that was given up may still wait for another process.
                await asyncio.to_thread(self._cache.close)
                self._cache = None

    # --- asking -----------------------------------------------------------------------------------------------------

    def _request(self, chat: Chat) -> dict[str, Any]:
        part = self._part
        said = {"temperature": part.temperature, "max_tokens": part.max_tokens}
        given = {name: value for name, value in said.items() if value is not None}
        return {"model": part.model, "messages": chat, **given, "extra_body": part.extra_body}

    async def _retried(self, request: Any) -> None:
        """Before each request of the client's: those that it makes again by itself wait for their turn as well."""
        if request.headers.get("x-stainless-retry-count", "0") != "0":
            await self._pace.turn()

    async def _ask(self, chat: Chat) -> Reply:
        """One question, asked until it is answered or `retries` are spent. Raises Unscored, BudgetSpent."""
        import openai

        if self._client is None:
            raise VerifierError(f"the judge {self._name!r} was not started")
        async with self._places:
            await self._pace.turn()
            self._budget.call()
            limit_s = self._part.timeout_s if self._silent else self._part.longest_s
            try:
                # One that sends a byte now and then is never late by the client's own limit.
                async with asyncio.timeout(limit_s):
                    completion: Any = await self._completion(self._client, chat)
                self._silent = False
            except TimeoutError:
                self._silent = True
                raise Unscored(UNAVAILABLE, f"no reply within {limit_s:g} s") from None
            except openai.APIStatusError as error:
                self._silent = False
                failure = REFUSED if error.status_code in REFUSALS else UNAVAILABLE
                raise Unscored(failure, self._without_key(error.message)) from None
            except openai.APIConnectionError as error:
                self._silent = True
                cause = error.__cause__ or error
                why = f"{error.message} ({type(cause).__name__}: {cause})"  # refused, no such host, its certificate
                raise Unscored(UNAVAILABLE, self._without_key(why)) from None
            except (openai.OpenAIError, ValueError, RecursionError) as error:  # a body that is no JSON
                raise Unscored(UNREADABLE, self._without_key(f"no chat completion came back: {error}")) from None
        tokens = getattr(getattr(completion, "usage", None), "total_tokens", None)
        tokens = tokens if isinstance(tokens, int) else None
        self._budget.used(tokens)  # also for what is no reply
        try:
            return _reply(completion, tokens)
        except Unscored as error:
            raise Unscored(error.failure, self._without_key(error.detail)) from None

    async def _completion(self, client: AsyncOpenAI, chat: Chat) -> Any:
        """What comes back. A server that was there and is gone, as one that is started anew, is waited for. Raises what
        the client raises."""
        import openai

        # To a server that is silent each question goes once: as many wait behind it as there are answers in work.
        client = client.with_options(max_retries=0) if self._silent else client
        while True:
            try:
                return await client.chat.completions.create(**self._request(chat))
            except openai.APIConnectionError as error:
                gone = type(error.__cause__).__name__ == "ConnectError"  # of httpx, or of httpx2 with openai 3
                if self._silent or not self._started or not gone:
                    raise
            await asyncio.sleep(AWAY_S)
            await self._pace.turn()

    def _without_key(self, text: str) -> str:
        """Some servers say which key they refused."""
        return short(text.replace(self._key, HIDDEN) if self._key else text)

    # --- reading ----------------------------------------------------------------------------------------------------

    def _read(self, reply: Reply) -> Finding:
        if reply.unfinished:  # 1 may be the beginning of 10
            raise Unreadable(reply.unfinished)
        return self._finding(reply.text)

    def _finding(self, text: str) -> Finding:
        value = verdict(text, self._part.reply, self._part.scale)
        # A violation is below 0, and none is 0: only the best verdict finds nothing wrong.
        part = value - 1.0 if self._part.role == "violation" else value
        return Finding({self._name: part}, POOR if value < 0.5 else "", text[-SHOWN:])

    # --- what was asked before --------------------------------------------------------------------------------------

    async def _opened(self, folder: Path) -> ReplyCache:
        try:
            return await asyncio.to_thread(ReplyCache, folder)
        except (OSError, sqlite3.Error) as error:
            raise VerifierError(
                f"the judge {self._name!r} cannot keep replies in {folder} ({error}): give another folder for cache, "
                "or leave it out"
            ) from None

    async def _kept(self, key: bytes) -> str | None:
        return None if self._cache is None else await self._filed(self._cache.get, key)

    async def _keep(self, key: bytes, reply: str) -> None:
        if self._cache is not None:
            await self._filed(self._cache.put, key, reply)

    async def _filed(self, call: Callable[..., str | None], *arguments: object) -> str | None:
        """A call of the cache's, in a thread: it may wait for the disk, and for another process. A cache that fails
        costs money, but no score: there is none from then on."""
        async with self._cache_lock:  # one connection, so one call at a time
            if self._cache is None:
                return None
            try:
                return await asyncio.to_thread(call, *arguments)
            except sqlite3.Error as error:
                logger.warning("the judge %r keeps no more replies: %s", self._name, error)
                self._cache.close()
                self._cache = None
                return None


def _reply(completion: Any, tokens: int | None) -> Reply:
    """What a server sent, of which the client only checks that it is JSON. Raises Unscored."""
    try:
        choice = completion.choices[0]
        text, ended, refusal = choice.message.content, choice.finish_reason, getattr(choice.message, "refusal", None)
    except (AttributeError, IndexError, TypeError):
        said = getattr(completion, "error", None) or completion  # some gateways send their errors as 200
        raise Unscored(UNREADABLE, f"no chat completion came back: {said!r:.200}") from None
    unfinished = ""
    if ended == "length":
        unfinished = "it was cut off (max_tokens)"
    elif ended not in ("stop", None):  # None: not said
        unfinished = f"it was not ended by the judge (finish_reason {ended!r:.40})"
    elif not isinstance(text, str):
        unfinished = f"the judge refused: {refusal:.200}" if isinstance(refusal, str) else "it has no text"
    return Reply(sendable(text) if isinstance(text, str) else "", unfinished, tokens)
