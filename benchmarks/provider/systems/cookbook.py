"""The algorithm of OpenAI's `api_request_parallel_processor.py`, reimplemented.

<https://github.com/openai/openai-cookbook/blob/main/examples/api_request_parallel_processor.py>: capacities of requests
and tokens that begin full and are refilled linearly; one loop that looks every millisecond whether both suffice for the
next request, those to be tried again first; all is held up for 15 s after a rate limit error; `headers` are not read.

As its documentation advises, it is given 75% of the limits; if none are known, its defaults apply. Two things differ in
its favour: a rate limit error is known by its status (the script compares the error's code with `429`, which OpenAI's
is not), and tokens are counted as the provider counts them, since its tokenizer's file cannot be had offline.
"""

from __future__ import annotations

import asyncio
import importlib
import time
from collections import deque
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from benchmarks.provider.systems.protocol import MAX_ATTEMPTS, Answers, Task, serve

_HEADROOM = 0.75
_DEFAULT_RPM, _DEFAULT_TPM = 1500.0, 125_000.0
_PAUSE_SECONDS = 15.0
_LOOP_SECONDS = 0.001
_CHARACTERS_PER_TOKEN = 4
_RATE_LIMITED = 429


@dataclass(slots=True)
class _Request:
    name: str
    body: dict[str, Any]
    attempts_left: int = MAX_ATTEMPTS

    @property
    def tokens(self) -> int:
        characters = sum(len(message["content"]) for message in self.body["messages"])
        return -(-characters // _CHARACTERS_PER_TOKEN) + int(self.body["max_tokens"])


@dataclass(slots=True)
class _Capacity:
    per_minute: float
    left: float = 0.0
    updated: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.left = self.per_minute

    def refill(self) -> None:
        now = time.monotonic()
        self.left = min(self.left + self.per_minute * (now - self.updated) / 60.0, self.per_minute)
        self.updated = now


class _Processor:
    def __init__(self, task: Task, answers: Answers, session: Any) -> None:
        self._task, self._answers, self._session = task, answers, session
        self._again: deque[_Request] = deque()
        self._limited_at = float("-inf")
        self._calls: set[asyncio.Task[None]] = set()
        self._left = 0

    async def run(self) -> None:
        fresh = deque(_Request(name, body) for name, body in self._task.bodies())
        self._left = len(fresh)
        requests, tokens = _Capacity(_rpm(self._task)), _Capacity(_tpm(self._task))
        waiting: _Request | None = None
        while self._left:
            if waiting is None and (source := self._again or fresh):
                waiting = source.popleft()
            requests.refill()
            tokens.refill()
            if waiting is not None and requests.left >= 1 and tokens.left >= waiting.tokens:
                requests.left -= 1
                tokens.left -= waiting.tokens
                waiting.attempts_left -= 1
                call = asyncio.create_task(self._call(waiting))
                self._calls.add(call)
                call.add_done_callback(self._calls.discard)
                waiting = None
            await asyncio.sleep(_LOOP_SECONDS)
            pause = self._limited_at + _PAUSE_SECONDS - time.monotonic()
            if pause > 0:
                await asyncio.sleep(pause)

    async def _call(self, request: _Request) -> None:
        try:
            async with self._session.post(f"{self._task.url}/chat/completions", json=request.body) as response:
                if response.status == _RATE_LIMITED:
                    self._limited_at = time.monotonic()
                answer = await response.json()
            content = answer["choices"][0]["message"]["content"]
        except Exception:
            if request.attempts_left:
                self._again.append(request)
                return
            content = None
        self._answers.add(request.name, content)
        self._left -= 1


def _rpm(task: Task) -> float:
    return _DEFAULT_RPM if task.rpm is None else task.rpm * _HEADROOM


def _tpm(task: Task) -> float:
    return _DEFAULT_TPM if task.tpm is None else task.tpm * _HEADROOM


async def _run(task: Task, answers: Answers) -> None:
    aiohttp: Any = importlib.import_module("aiohttp")
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await _Processor(task, answers, session).run()


def run(task: Task, answers: Answers) -> str:
    asyncio.run(_run(task, answers))
    return f"{_rpm(task):g} requests and {_tpm(task):g} tokens per minute, {MAX_ATTEMPTS} attempts"


if __name__ == "__main__":
    serve(run, f"port, on aiohttp {version('aiohttp')}")
