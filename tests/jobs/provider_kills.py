"""`run --backend` killed at random, against a provider that writes down what it is asked and what is paid.

The long form: `python -m tests.jobs.provider_kills --kills 200 --lines 5000`, about five minutes.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from benchmarks.provider.answers import Law
from benchmarks.provider.ledger import Entry, Ledger
from benchmarks.provider.limits import Concurrency, Limits
from benchmarks.provider.provider import Provider
from benchmarks.provider.runs import ledger_of
from benchmarks.provider.server import MODEL, Server, listening

CONCURRENCY = 12
"""Most requests under way that the run is given."""
_ALLOWED = 8
"""Most requests under way that the provider admits, so that some are refused and tried again."""
_LAW = Law(first_token=0.03, first_token_spread=0.5, per_token=0.0005)
_MAX_TOKENS = 100
_POLL_SECONDS = 0.002


@contextmanager
def serving() -> Iterator[str]:
    """The address of a provider in a thread of this process."""
    started, stop, addresses = threading.Event(), threading.Event(), list[str]()

    async def serve() -> None:
        async with listening(Server(Provider(Limits(Concurrency("under way", _ALLOWED)), _LAW))) as address:
            addresses.append(address)
            started.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    started.wait()
    try:
        yield addresses[0]
    finally:
        stop.set()
        thread.join()


@dataclass(frozen=True, slots=True)
class Life:
    """One process."""

    key: str
    """Its API key, by which the ledger knows it."""
    finished_before: frozenset[int]
    """Lines whose results were in the output when it started."""
    finished_after: frozenset[int]
    """And when it was dead."""
    killed: bool


@dataclass(slots=True)
class Figures:
    """What came of a campaign."""

    lines: int
    kills: int
    asked: int
    """Requests."""
    refused: int
    paid: int
    paid_again: int
    """Payments beyond one for each line: what was under way at a kill."""
    most_at_a_kill: int
    """Of lines that were paid and whose results a kill destroyed."""


@dataclass(slots=True)
class Campaign:
    """A file of lines, and runs of it that are killed until it is finished."""

    folder: Path
    address: str
    lines: int
    kills: int
    seed: int = 1
    show: Callable[[int], None] = lambda _: None
    lives: list[Life] = field(default_factory=list)

    @property
    def _source(self) -> Path:
        return self.folder / "in.jsonl"

    @property
    def _output(self) -> Path:
        return self.folder / "out.jsonl"

    def run(self) -> Figures:
        """Run and kill, then let it finish, and check everything. Raises AssertionError for what does not hold."""
        self._write_source()
        chance = random.Random(self.seed)
        killed = 0
        while killed < self.kills:
            life = self._live(self._moment(chance, self.kills - killed))
            self.lives.append(life)
            assert life.killed, f"{len(life.finished_after)} of {self.lines} lines are finished before the last kill"
            killed += 1
            self.show(killed)
        self.lives.append(self._live(None))
        return self._check(ledger_of(self.address))

    def _write_source(self) -> None:
        with self._source.open("w") as file:
            for number in range(self.lines):
                message = {"role": "user", "content": f"Say something about the sea. [line {number}]"}
                body = {"model": MODEL, "messages": [message], "max_tokens": _MAX_TOKENS}
                line = {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
                file.write(json.dumps(line) + "\n")

    def _moment(self, chance: random.Random, kills_left: int) -> Callable[[int], bool]:
        """Whether a process is to be killed that has finished so many lines: by these, or by requests under way."""
        left = self.lines - len(self._finished())
        wanted = chance.randint(0, left // (kills_left + 1))
        if chance.random() < 0.5:
            return lambda finished: finished >= wanted
        asked = len(ledger_of(self.address)) + max(wanted, 1)
        return lambda finished: len(ledger_of(self.address)) >= asked

    def _live(self, killed_when: Callable[[int], bool] | None) -> Life:
        before = self._finished()
        key = f"life-{len(self.lives)}"
        process = self._start(key)
        while process.poll() is None:
            if killed_when is not None and killed_when(self._written() - len(before)):
                process.kill()
                break
            time.sleep(_POLL_SECONDS)
        _, errors = process.communicate()
        assert process.returncode in (0, -signal.SIGKILL), errors.decode()
        return Life(key, before, self._finished(), process.returncode != 0)

    def _start(self, key: str) -> subprocess.Popen[bytes]:
        options = ["--backend", f"{self.address}/v1", "--model", MODEL, "--quiet"]
        options += ["--backend-concurrency", str(CONCURRENCY)]
        return subprocess.Popen(
            [sys.executable, "-m", "batchwright", "run", self._source, "-o", self._output, *options],
            env=os.environ | {"BATCHWRIGHT_BACKEND_API_KEY": key},
            stderr=subprocess.PIPE,
        )

    def _written(self) -> int:
        return self._output.read_bytes().count(b"\n") if self._output.exists() else 0

    def _results(self) -> list[dict[str, Any]]:
        """The whole lines of the output."""
        if not self._output.exists():
            return []
        return [json.loads(line) for line in self._output.read_bytes().splitlines(keepends=True) if line[-1:] == b"\n"]

    def _finished(self) -> frozenset[int]:
        return frozenset(_number(result) for result in self._results())

    def _check(self, ledger: Ledger) -> Figures:
        results = self._results()
        assert Counter(map(_number, results)) == Counter(range(self.lines)), "a line has no result, or two"
        payments = ledger.payments()
        for result in results:
            assert result["error"] is None, result
            paid = payments[_number(result)][-1]
            assert result["response"]["body"]["usage"]["completion_tokens"] == paid.output_tokens
        by_life: dict[str, list[Entry]] = {life.key: [] for life in self.lives}
        for entry in ledger:
            by_life[entry.key].append(entry)
        most = max(self._check_life(life, by_life[life.key]) for life in self.lives)
        return Figures(
            lines=self.lines,
            kills=sum(life.killed for life in self.lives),
            asked=len(ledger),
            refused=len(ledger.refused),
            paid=len(ledger.paid),
            paid_again=len(ledger.paid) - self.lines,
            most_at_a_kill=most,
        )

    def _check_life(self, life: Life, asked: list[Entry]) -> int:
        """Check what one process asked for. Returns the lines that it paid and has no results of."""
        paid = Counter(entry.line for entry in asked if entry.paid)
        assert not life.finished_before & {entry.line for entry in asked}, "a finished line is asked again"
        assert set(paid.values()) <= {1}, "one process pays a line twice"
        lost = paid.keys() - life.finished_after
        assert len(lost) <= (CONCURRENCY if life.killed else 0), f"{len(lost)} answers are lost at a kill"
        return len(lost)


def _number(result: dict[str, Any]) -> int:
    return int(result["custom_id"].removeprefix("line-"))


def main(
    kills: Annotated[int, typer.Option(min=1)] = 200,
    lines: Annotated[int, typer.Option(min=1)] = 5000,
    seed: Annotated[int, typer.Option(help="Of the moments.")] = 1,
) -> None:
    """Kill `run --backend` so many times over one file, and print what was asked and paid."""

    def show(done: int) -> None:
        if done % 10 == 0:
            print(f"{done} of {kills} kills", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as folder, serving() as address:
        print(Campaign(Path(folder), address, lines, kills, seed, show).run())


if __name__ == "__main__":
    typer.run(main)
