"""Requests that take all the capacity, and how long a quiet client waits beside them."""

from __future__ import annotations

import asyncio
import math
import re
import time
from bisect import bisect
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp

from benchmarks.attacks.attack import Attack, Figure
from benchmarks.attacks.service import Service

_ROUNDS = 10
_ASKED = 10
"""Requests of the quiet client in a round; alone, it makes as many as in all rounds."""
_WARM = 10
"""Requests before them, in which whatever is compiled or learned at first use is."""
_PAUSE = 0.1
_SETTLING = 4.0
"""Seconds until the abuser has all that it will get."""
_WATCHED = 2.0
"""Seconds before each round, and after the last, over which its steps are averaged."""
_LOOK = 0.05
"""Seconds between readings of a counter whose changes matter."""
_PATIENCE = 60.0
"""Seconds after which the quiet client gives up."""

_Ask = Callable[[aiohttp.ClientSession, int], Awaitable[float]]


@dataclass(frozen=True, slots=True)
class _Abuse:
    """What one key requests."""

    endpoint: str
    body: dict[str, Any]
    requests: int = 1
    with_keys: bool = False
    """Whether the abuser and the quiet client have a key each; otherwise neither has one."""


@dataclass(frozen=True, slots=True)
class _Answer:
    began: float
    """When it was requested."""
    wait: float
    """Milliseconds."""


@dataclass(slots=True)
class _Asked:
    """What came of requests of the quiet client, one after the other."""

    answers: list[_Answer] = field(default_factory=list)
    refused: int = 0
    unanswered: bool = False
    """The last one had no answer for a minute, or its connection was cut."""


@dataclass(frozen=True, slots=True)
class _Round:
    """Requests beside the abuser, and its steps meanwhile, in milliseconds."""

    asked: _Asked
    steps: list[float]
    met: list[float]
    """For each answer, the step that was under way when it was requested."""

    def without_steps(self) -> list[float]:
        """Time that each answer took beyond the step that it met."""
        return [answer.wait - step for answer, step in zip(self.asked.answers, self.met, strict=True)]


def _attack(name: str, title: str, text: str, abuse: _Abuse) -> Attack:
    async def run(service: Service) -> Sequence[Figure]:
        return await _beside(service, abuse)

    return Attack(name=name, title=title, text=text, run=run, backend="engine", seconds=400.0)


async def _beside(service: Service, abuse: _Abuse) -> list[Figure]:
    embeds = abuse.endpoint == "/v1/embeddings"
    ask: _Ask = _embedding if embeds else _first_token
    keys = [await _key(service, name) for name in ("abuser", "quiet")] if abuse.with_keys else [None, None]
    async with _session(service, keys[0]) as abuser, _session(service, keys[1]) as quiet:
        await _asked(ask, quiet, _WARM)
        alone = [each.wait for each in (await _asked(ask, quiet, _ROUNDS * _ASKED)).answers]
        answered: list[float] = []
        tasks = [asyncio.create_task(_abused(abuser, abuse, answered)) for _ in range(abuse.requests)]
        await asyncio.sleep(_SETTLING)
        rounds = await (_beside_batches if embeds else _beside_steps)(ask, quiet)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    steps = [step for each in rounds for step in each.steps]
    beside = [answer.wait for each in rounds for answer in each.asked.answers]
    rest = [wait for each in rounds for wait in each.without_steps()]
    twice = 2 * (_p99(alone) or 0.0)
    return [
        Figure("wait alone, p50", _median(alone), "ms"),
        Figure("wait alone, p99", _p99(alone), "ms"),
        Figure("a batch of the abuser" if embeds else "a step of the abuser", sum(steps) / len(steps), "ms"),
        Figure("the longest" if embeds else "of the slowest seconds", max(steps), "ms"),
        Figure("wait beside, p50", _median(beside), "ms"),
        Figure("wait beside, p99", _p99(beside), "ms"),
        Figure("wait beside without the step it met, p99", _p99(rest), "ms", twice),
        Figure("refused", sum(each.asked.refused for each in rounds), "", 0),
        Figure("not answered in a minute, upon which it gives up", int(rounds[-1].asked.unanswered), "", 0),
        Figure("requests of the abuser answered meanwhile", len(answered)),
    ]


async def _beside_steps(ask: _Ask, quiet: aiohttp.ClientSession) -> list[_Round]:
    """Rounds, each compared with the mean step in the seconds before and after it: steps grow with the contexts."""
    steps = [await _mean_step(quiet)]
    rounds: list[_Round] = []
    while len(rounds) < _ROUNDS and not (rounds and rounds[-1].asked.unanswered):
        asked = await _asked(ask, quiet, _ASKED)
        steps.append(await _mean_step(quiet))
        mean = sum(steps[-2:]) / 2
        rounds.append(_Round(asked, steps[-2:], [mean] * len(asked.answers)))
    return rounds


async def _beside_batches(ask: _Ask, quiet: aiohttp.ClientSession) -> list[_Round]:
    """One round, with each wait compared with the batch that was being computed when it began."""
    ends: list[float] = []
    watcher = asyncio.create_task(_watch_batches(quiet, ends))
    asked = await _asked(ask, quiet, _ROUNDS * _ASKED)
    watcher.cancel()
    await asyncio.gather(watcher, return_exceptions=True)
    batches = [after - before for before, after in pairwise(ends)]
    met = []
    for answer in asked.answers:
        at = bisect(ends, answer.began)
        met.append((batches[at - 1] if 0 < at <= len(batches) else 0.0) * 1e3)
    return [_Round(asked, [each * 1e3 for each in batches] or [0.0], met)]


async def _watch_batches(session: aiohttp.ClientSession, ends: list[float]) -> None:
    """Note the moments at which batches end, until cancelled."""
    seen = None
    while True:
        count = (await _metrics(session))("dispatches_total")
        if seen is not None and count != seen:
            ends.append(time.perf_counter())
        seen = count
        await asyncio.sleep(_LOOK)


@asynccontextmanager
async def _session(service: Service, key: str | None) -> AsyncIterator[aiohttp.ClientSession]:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    timeout = aiohttp.ClientTimeout(total=None, connect=_PATIENCE)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(service.url, headers=headers, timeout=timeout, connector=connector) as session:
        yield session


async def _key(service: Service, name: str) -> str | None:
    """A new key, made with the administrator's, which is made first; None if keys cannot be made this way."""
    key = _admin.get(service.url)
    async with _session(service, key) as session:
        if key is None:
            scopes = ["online", "batches", "metrics", "admin"]
            async with session.post("/v1/admin/keys", json={"name": "admin", "scopes": scopes}) as response:
                if response.status == 404:
                    return None
                response.raise_for_status()
                _admin[service.url] = str((await response.json())["secret"])
            return await _key(service, name)
        body = {"name": name, "tenant": name, "scopes": ["online", "metrics"]}
        async with session.post("/v1/admin/keys", json=body) as response:
            response.raise_for_status()
            return str((await response.json())["secret"])


_admin: dict[str, str] = {}


async def _asked(ask: _Ask, session: aiohttp.ClientSession, count: int) -> _Asked:
    """Results of `count` requests. One without an answer for a minute is the last."""
    asked = _Asked()
    for number in range(count):
        try:
            async with asyncio.timeout(_PATIENCE):
                began = time.perf_counter()
                asked.answers.append(_Answer(began, await ask(session, number) * 1e3))
        except aiohttp.ClientResponseError:
            asked.refused += 1
        except (aiohttp.ClientError, TimeoutError):
            asked.unanswered = True
            break
        await asyncio.sleep(_PAUSE)
    return asked


async def _first_token(session: aiohttp.ClientSession, number: int) -> float:
    began, first = time.perf_counter(), None
    text = f"Name three rivers of country number {number}, and the seas that they flow into."
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4, "stream": True}
    async with session.post("/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if first is None and b'"content":"' in line and b'"content":""' not in line:
                first = time.perf_counter() - began
    return time.perf_counter() - began if first is None else first


async def _embedding(session: aiohttp.ClientSession, number: int) -> float:
    began = time.perf_counter()
    async with session.post(
        "/v1/embeddings", json={"input": f"A short text, which has the number {number}."}
    ) as answer:
        answer.raise_for_status()
        await answer.read()
    return time.perf_counter() - began


async def _abused(session: aiohttp.ClientSession, abuse: _Abuse, answered: list[float]) -> None:
    """Send requests forever; `answered` gets the time of each answer."""
    while True:
        async with session.post(abuse.endpoint, json=abuse.body) as response:
            async for _ in response.content.iter_chunked(2**16):
                pass
            if response.ok:
                answered.append(time.perf_counter())
        await asyncio.sleep(_PAUSE)


async def _mean_step(session: aiohttp.ClientSession) -> float:
    """Milliseconds."""
    before = await _metrics(session)
    await asyncio.sleep(_WATCHED)
    after = await _metrics(session)
    steps = after("engine_steps_total") - before("engine_steps_total")
    seconds = after("engine_step_seconds_total") - before("engine_step_seconds_total")
    return seconds / steps * 1e3 if steps else _WATCHED * 1e3


async def _metrics(session: aiohttp.ClientSession) -> Callable[[str], float]:
    async with session.get("/metrics") as response:
        text = await response.text()

    def value(name: str) -> float:
        return sum(float(each) for each in re.findall(rf"^batchwright_{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))

    return value


def _median(waits: list[float]) -> float | None:
    return sorted(waits)[len(waits) // 2] if waits else None


def _p99(waits: list[float]) -> float | None:
    """99th percentile by nearest rank."""
    return sorted(waits)[math.ceil(0.99 * len(waits)) - 1] if waits else None


_STORIES = [f"Tell me a long story about the number {number}." for number in range(16)]
_LONG = [f"Chapter {number}. " + f"word{number} " * 1200 for number in range(100)]
_TEXTS = [f"{number} " + "word " * 200 for number in range(2048)]
_BAR = "Bar: twice the wait alone, and one step as it is in those seconds."

ATTACKS = (
    _attack(
        "crowd-completions",
        "One request for 2,048 completions",
        "16 prompts with n = 128 and 256 tokens each. A quiet client asks for a chat; its wait for the first token is "
        f"taken {_ROUNDS * _ASKED} times alone and as often beside that. Nobody has a key. {_BAR}",
        _Abuse("/v1/completions", {"prompt": _STORIES, "n": 128, "max_tokens": 256, "ignore_eos": True}),
    ),
    _attack(
        "crowd-streams",
        "One stream of 896 completions",
        f"7 prompts with n = 128, as one stream. {_BAR}",
        _Abuse(
            "/v1/completions",
            {"prompt": _STORIES[:7], "n": 128, "max_tokens": 512, "ignore_eos": True, "stream": True},
        ),
    ),
    _attack(
        "crowd-prompts",
        "A hundred long prompts",
        f"100 prompts of some 3,600 tokens in one request. {_BAR}",
        _Abuse("/v1/completions", {"prompt": _LONG, "max_tokens": 64}),
    ),
    _attack(
        "crowd-requests",
        "Six hundred requests with one key",
        f"600 requests of one key, each for 512 tokens, beside a quiet client with another key. {_BAR}",
        _Abuse(
            "/v1/completions",
            {"prompt": _STORIES[0], "max_tokens": 512, "ignore_eos": True},
            requests=600,
            with_keys=True,
        ),
    ),
    _attack(
        "crowd-embeddings",
        "One request for 2,048 embeddings",
        "2,048 texts of 200 words, beside a quiet client's short ones. Bar: twice the wait alone, and the batch "
        "that was being computed when it asked.",
        _Abuse("/v1/embeddings", {"input": _TEXTS}),
    ),
)
