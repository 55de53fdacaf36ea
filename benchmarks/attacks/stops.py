"""Ten thousand stop strings in one request, and how long the tokens of others then take.

As a program it measures only the matching, with whichever batchwright is imported: nanoseconds per character.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import string
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import httpx

from batchwright.stop_strings import StopStrings
from benchmarks.attacks.attack import Attack, Figure
from benchmarks.attacks.service import ROOT, Service

_STOPS = 10_000
_ALLOWED, _LENGTH = 16, 256
"""Number of stop strings that the service accepts, and of their characters."""
_TOKENS = 64
_ATTACK_TOKENS = 512
_CHARACTERS = 1_000_000
_PIECE = 4
"""Characters per token."""
_ROUNDS = 5
_MATCHING_SECONDS = 10.0
"""Seconds after which a text is not read to its end."""


async def _run(service: Service) -> Sequence[Figure]:
    # They begin like the text, so each nearly matches again and again.
    many = [f" the {number:05d}" for number in range(_STOPS)]
    allowed = [(" the" * _LENGTH)[: _LENGTH - 2] + f"{number:02d}" for number in range(_ALLOWED)]
    async with httpx.AsyncClient(base_url=service.url, timeout=60) as client:
        await _token_ms(client)  # compiles what is compiled at first use
        alone = await _token_ms(client)
        status, answer_ms, beside_many = await _beside(client, many)
        _, _, beside_allowed = await _beside(client, allowed)
    matching = await asyncio.to_thread(_matching, service)
    return [
        Figure("status of the request", status),
        Figure("its first byte", answer_ms, "ms"),
        Figure("a token of another stream, alone", alone, "ms"),
        Figure("beside the request", beside_many, "ms", 2 * alone),
        Figure(f"beside one with {_ALLOWED} of {_LENGTH} characters", beside_allowed, "ms", 2 * alone),
        Figure(f"matching a character, {_ALLOWED} strings", matching[0], "µs"),
        Figure(f"matching a character, {_STOPS:,} strings", matching[1], "µs", 1.5 * matching[0]),
    ]


async def _beside(client: httpx.AsyncClient, stops: list[str]) -> tuple[int, float, float]:
    """Status of a stream with these stop strings, the time to it, and the time per token of another stream."""
    answered: asyncio.Future[tuple[int, float]] = asyncio.get_running_loop().create_future()

    async def attack() -> None:
        began = time.perf_counter()
        async with client.stream("POST", "/v1/completions", json=_body(_ATTACK_TOKENS, stop=stops)) as response:
            answered.set_result((response.status_code, (time.perf_counter() - began) * 1e3))
            async for _ in response.aiter_lines():
                pass

    attacking = asyncio.create_task(attack())
    try:
        status, seconds = await answered
        return status, seconds, await _token_ms(client)
    finally:
        attacking.cancel()
        await asyncio.gather(attacking, return_exceptions=True)


async def _token_ms(client: httpx.AsyncClient) -> float:
    """Milliseconds from one token of a stream to the next, on average."""
    first = last = 0.0
    async with client.stream("POST", "/v1/completions", json=_body(_TOKENS)) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                last = time.perf_counter()
                first = first or last
    return (last - first) / (_TOKENS - 1) * 1e3


def _body(tokens: int, **more: Any) -> dict[str, Any]:
    text = "The days of the week are the Monday, the Tuesday,"
    return {"prompt": text, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True, **more}


def _matching(service: Service) -> tuple[float, float]:
    """Microseconds per character in the code that the service runs, with few strings and with many."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(service.source / "src"), str(ROOT)))}
    command = [sys.executable, "-m", "benchmarks.attacks.stops"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    few, many = json.loads(done.stdout)
    return few, many


def _character_us(count: int) -> float:
    """Microseconds per character of a text of words beside `count` phrases of the same words: the least of several."""
    chosen = random.Random(1)
    words = ["".join(chosen.choices(string.ascii_lowercase, k=chosen.randint(2, 8))) for _ in range(2000)]
    text = " ".join(chosen.choices(words, k=_CHARACTERS // 5))[:_CHARACTERS]
    phrases = [" ".join(chosen.choices(words, k=3)) + "." for _ in range(count)]
    least, over = float("inf"), time.perf_counter() + _MATCHING_SECONDS
    stop_strings, share = StopStrings(phrases), _CHARACTERS // _ROUNDS
    for start in range(0, _CHARACTERS, share):
        began = time.process_time()
        for at in range(start, start + share, _PIECE):
            stop_strings.push(text[at : at + _PIECE])
            if time.perf_counter() > over:
                return min(least, (time.process_time() - began) / (at + _PIECE - start) * 1e6)
        least = min(least, (time.process_time() - began) / share * 1e6)
    return least


ATTACK = Attack(
    name="stops",
    title="10,000 stop strings",
    text=f"A stream with {_STOPS:,} stop strings, nearly met by its text again and again, beside another stream; then "
    f"one with as much as the service takes. Matching alone: {_CHARACTERS:,} characters in pieces of {_PIECE}, "
    "processor time.",
    run=_run,
    backend="engine",
)

if __name__ == "__main__":
    print(json.dumps([_character_us(_ALLOWED), _character_us(_STOPS)]))
