"""Tokens per second of a job at an endpoint: with fixed numbers of requests under way, and with ours."""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec

from benchmarks.provider.clients import ROOT
from benchmarks.provider.endpoints import Endpoint

CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64, 128)
FIRST = 0.1
"""The share of the tokens after which the right number must have been found."""
_SHORTEST, _LONGEST = 16, 64
_POLL_SECONDS = 0.02
_FEWER_BELOW = 8
"""Number of requests under way below which a job is so slow that a part of it has to show the rate."""
_WORDS = (
    *("sea", "wind", "sand", "light", "evening", "north", "boat", "bell"),
    *("letter", "late", "harbour", "rope", "tide", "gull", "salt"),
)


@dataclass(frozen=True, slots=True)
class Timeline:
    """Times at which the answers of a job arrived."""

    times: Sequence[float]
    """Time of each answer, in seconds of some clock, in their order."""
    tokens: Sequence[int]
    """Tokens that each had."""

    @property
    def rate(self) -> float:
        """Tokens per second after the first tenth of all tokens."""
        total, had = sum(self.tokens), 0
        for time_of, tokens in zip(self.times, self.tokens, strict=True):
            had += tokens
            if had >= FIRST * total:
                return (total - had) / (self.times[-1] - time_of)
        raise ValueError("a job of no answers has no rate")


@dataclass(slots=True)
class Swept:
    """Results of one endpoint."""

    title: str
    fixed: dict[int, list[float]]
    """Tokens per second of each round, by the number of requests under way."""
    ours: list[float]

    @property
    def best(self) -> int:
        """The number of requests under way with the highest median."""
        return max(self.fixed, key=lambda each: statistics.median(self.fixed[each]))

    @property
    def ratio(self) -> float:
        """Ours over the best of the fixed, medians."""
        return statistics.median(self.ours) / statistics.median(self.fixed[self.best])


def bodies(model: str, lines: int, seed: int) -> list[dict[str, object]]:
    """Chats whose answers have lengths that are known: the end of the text is ignored."""
    chance = random.Random(seed)
    made: list[dict[str, object]] = []
    for number in range(lines):
        words = " ".join(chance.choices(_WORDS, k=chance.randint(8, 40)))
        made.append({
            "model": model,
            "messages": [{"role": "user", "content": f"Tell a story, number {number}, with these words: {words}"}],
            "max_tokens": chance.randint(_SHORTEST, _LONGEST),
            "temperature": 0.0,
            "ignore_eos": True,
        })  # fmt: skip
    return made


def fixed(endpoint: Endpoint, requests: Sequence[dict[str, object]], concurrency: int) -> Timeline:
    """A loop around aiohttp with `concurrency` requests under way. Raises for any answer but a correct one."""
    return asyncio.run(_fixed(endpoint, requests, concurrency))


async def _fixed(endpoint: Endpoint, requests: Sequence[dict[str, object]], concurrency: int) -> Timeline:
    waiting = iter(requests)
    times: list[float] = []
    tokens: list[int] = []

    async def work(session: aiohttp.ClientSession) -> None:
        for body in waiting:
            async with session.post(f"{endpoint.url}/chat/completions", json=body) as response:
                response.raise_for_status()
                answer = await response.json()
            times.append(time.monotonic())
            tokens.append(answer["usage"]["completion_tokens"])

    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        await asyncio.gather(*(work(session) for _ in range(concurrency)))
    return Timeline(times, tokens)


class _Line(msgspec.Struct):
    """The parts of a result that are read."""

    response: _Response | None


class _Response(msgspec.Struct):
    body: _Body


class _Body(msgspec.Struct):
    usage: _Usage


class _Usage(msgspec.Struct):
    completion_tokens: int


def ours(endpoint: Endpoint, requests: Sequence[dict[str, object]]) -> Timeline:
    """`batchwright run --backend` without a concurrency setting; its results are read as they are written."""
    with tempfile.TemporaryDirectory(prefix="batchwright-sweep-") as folder:
        source, output = Path(folder) / "in.jsonl", Path(folder) / "out.jsonl"
        source.write_bytes(b"".join(_batch_line(number, body) for number, body in enumerate(requests)))
        command = [sys.executable, "-m", "batchwright", "run", str(source), "-o", str(output), "--quiet"]
        command += ["--backend", endpoint.url, "--model", endpoint.model]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}
        process = subprocess.Popen(command, env=environment)
        timeline = _watched(process, output)
    if process.returncode or len(timeline.tokens) != len(requests):
        raise RuntimeError(f"`run` ended with {process.returncode} after {len(timeline.tokens)} of {len(requests)}")
    return timeline


def _batch_line(number: int, body: dict[str, object]) -> bytes:
    named = {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
    return msgspec.json.encode(named) + b"\n"


def _watched(process: subprocess.Popen[bytes], output: Path) -> Timeline:
    decode = msgspec.json.Decoder(_Line).decode
    times: list[float] = []
    tokens: list[int] = []
    read = 0
    ended = False
    while not ended:
        # Read once more after its end.
        ended = process.poll() is not None
        now = time.monotonic()
        if output.exists():
            with output.open("rb") as file:
                file.seek(read)
                whole, _, _ = file.read().rpartition(b"\n")
            read += len(whole) + 1 if whole else 0
            for line in whole.splitlines():
                response = decode(line).response
                if response is not None:
                    times.append(now)
                    tokens.append(response.body.usage.completion_tokens)
        if not ended:
            time.sleep(_POLL_SECONDS)
    return Timeline(times, tokens)


def sweep(
    title: str,
    endpoint: Endpoint,
    *,
    lines: int,
    rounds: int,
    concurrencies: Sequence[int],
    say: Callable[[str], None],
) -> Swept:
    """All fixed numbers and ours in turn, so many rounds, with other prompts in each."""
    swept = Swept(title, {each: [] for each in concurrencies}, [])
    fixed(endpoint, bodies(endpoint.model, max(concurrencies), seed=0), max(concurrencies))
    seed = 0
    for number in range(rounds):
        for concurrency in concurrencies:
            seed += 1
            few = max(lines * concurrency // max(concurrencies), min(lines, 16))
            requests = bodies(endpoint.model, few if concurrency < _FEWER_BELOW else lines, seed)
            swept.fixed[concurrency].append(fixed(endpoint, requests, concurrency).rate)
            say(f"round {number + 1}, {concurrency} under way: {swept.fixed[concurrency][-1]:,.0f} tokens/s")
        seed += 1
        swept.ours.append(ours(endpoint, bodies(endpoint.model, lines, seed)).rate)
        say(f"round {number + 1}, ours: {swept.ours[-1]:,.0f} tokens/s")
    return swept
