"""A device of known speed, with continuous batching and a prefix cache, in virtual time."""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from dataclasses import dataclass

from batchwright.routing.prefixes import KEY_TOKENS


@dataclass(frozen=True, slots=True)
class Job:
    """A line of a job, as only the simulation knows it."""

    number: int
    prompt: int
    """Tokens, including those of the prefix."""
    answer: int
    limit: int
    group: int
    """Number of its prefix; lines with the same number begin alike."""
    prefix_keys: int
    """Keys of its prefix, of `KEY_TOKENS` each."""

    @property
    def prefixes(self) -> tuple[int, ...]:
        return tuple(self.group << 12 | index for index in range(self.prefix_keys))


@dataclass(frozen=True, slots=True)
class Speed:
    """Times of a device in seconds."""

    prefill: float
    """Seconds per prompt token."""
    step: float
    """Seconds of a step that computes one token for each sequence."""
    row: float
    """Additional seconds per sequence in a step."""
    places: int
    kv_tokens: int

    def full(self) -> float:
        """Return the seconds of a token of an answer in a full batch."""
        return self.step / self.places + self.row


ACCELERATOR = Speed(prefill=50e-6, step=8e-3, row=30e-6, places=128, kv_tokens=400_000)
"""About an 8B model in bfloat16 on one large GPU."""

CORES = Speed(prefill=1e-3, step=10e-3, row=2e-3, places=16, kv_tokens=120_000)
"""About a 0.5B model on two cores."""


class Device:
    """Computes prompts one after the other as they come, and in between a token for each of its sequences a step."""

    def __init__(self, speed: Speed, capacity: int | None = None) -> None:
        """`capacity`: tokens of its prefix cache, if not those of its KV cache."""
        self.speed = speed
        self.reused = 0
        """Tokens of prompts that were found in the cache."""
        self._capacity = speed.kv_tokens if capacity is None else capacity
        self._now = 0.0
        self._steps = 0.0
        """Steps since the beginning; each sequence ends at a number of them."""
        self._running: list[tuple[float, int, Job]] = []
        self._waiting: deque[Job] = deque()
        self._prompt: tuple[float, Job] | None = None
        """The prompt that is computed, and when it will be done."""
        self._cache: OrderedDict[int, int] = OrderedDict()
        self._cached = 0
        self._answers = 0

    def __len__(self) -> int:
        return len(self._running) + len(self._waiting) + (self._prompt is not None)

    def add(self, job: Job, now: float) -> None:
        """Give it a line."""
        self.advance(now)
        self._waiting.append(job)
        self._begin_prompt()

    def next_end(self) -> float | None:
        """Return when the state changes next; None: never, if nothing is added."""
        if self._prompt is not None:
            return self._prompt[0]
        return self._now + (self._running[0][0] - self._steps) * self._step_seconds() if self._running else None

    def advance(self, now: float) -> list[Job]:
        """Compute until `now`, no later than `next_end`, and return the lines that ended."""
        if self._prompt is not None:
            self._now = now
            if now >= self._prompt[0]:
                job = self._prompt[1]
                self._prompt = None
                heapq.heappush(self._running, (self._steps + job.answer, job.number, job))
                self._begin_prompt()
            return []
        if not self._running:
            self._now = now
            return []
        ends = self._now + (self._running[0][0] - self._steps) * self._step_seconds()
        if now < ends:
            self._steps += (now - self._now) / self._step_seconds()
            self._now = now
            return []
        self._steps, self._now = self._running[0][0], now
        ended = []
        while self._running and self._running[0][0] <= self._steps:
            job = heapq.heappop(self._running)[2]
            self._answers += 1
            self._note(-self._answers, job.answer)
            ended.append(job)
        self._begin_prompt()
        return ended

    def _step_seconds(self) -> float:
        return self.speed.step + self.speed.row * len(self._running)

    def _begin_prompt(self) -> None:
        if self._prompt is not None or not self._waiting or len(self._running) >= self.speed.places:
            return
        job = self._waiting.popleft()
        keys = job.prefixes
        known = next((index for index, key in enumerate(keys) if key not in self._cache), len(keys))
        for key in reversed(keys):
            self._note(key, KEY_TOKENS)
        self.reused += known * KEY_TOKENS
        self._prompt = self._now + (job.prompt - known * KEY_TOKENS) * self.speed.prefill, job

    def _note(self, key: int, tokens: int) -> None:
        if key in self._cache:
            self._cache.move_to_end(key)
            return
        self._cache[key] = tokens
        self._cached += tokens
        while self._cached > self._capacity:
            self._cached -= self._cache.popitem(last=False)[1]
