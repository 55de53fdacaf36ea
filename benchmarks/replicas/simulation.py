"""Many devices in virtual time, with lines routed by `Router`, cut up beforehand, or handed out in blocks."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from batchwright.planning.arrangement import Caches, LineShape
from batchwright.planning.job_order import JobOrder
from batchwright.routing.prefixes import KEY_TOKENS
from batchwright.routing.router import Capacity, Router
from batchwright.routing.work import Work
from benchmarks.replicas.device import Device, Job, Speed

_WINDOW = 2
"""Lines that are held for each place of the devices, as `ReplicatedInference` does."""
_READ = 2
"""Lines that are read per line that is taken, as in a run."""
_BLOCK, _BLOCKS = 64, 8


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a job."""

    makespan: float
    reused: int
    """Tokens of prompts that were found in a cache."""
    longest_idle: float
    """Longest time for which a device had nothing before the end, in seconds."""


class Policy(Protocol):
    """Hands out lines."""

    def take(self, now: float) -> list[tuple[int, Job]]:
        """Return the lines that are handed out now, each with the number of its device."""

    def ended(self, device: int, job: Job) -> None:
        """Note the end of a line."""


class Routed(Policy):
    """Lines go where `Router` sends them, in the order of `JobOrder`, as in a run."""

    def __init__(self, jobs: Sequence[Job], devices: int, speed: Speed) -> None:
        self._router = Router[int]()
        self._order = JobOrder[Job](
            devices * speed.places,
            caches=Caches(devices, devices * speed.kv_tokens // KEY_TOKENS, KEY_TOKENS),
        )
        self._jobs, self._read = jobs, 0
        self._most = _WINDOW * devices * speed.places
        for number in range(devices):
            self._router.join(number, Capacity(speed.places, speed.kv_tokens))
            self._router.learn(number, speed.prefill, speed.full())

    def take(self, now: float) -> list[tuple[int, Job]]:
        while len(self._router) < self._most and (self._read < len(self._jobs) or len(self._order)):
            self._read_on()
            job = self._order.take(more=self._read < len(self._jobs))
            if job is not None:
                self._router.submit(job.number, Work(job.prompt, job.limit, prefixes=job.prefixes))
        return [(device, self._jobs[key]) for key, device in self._router.assign(now)]

    def ended(self, device: int, job: Job) -> None:
        self._router.finish(job.number, job.answer)
        self._order.ended(job.number, job.answer)

    def _read_on(self) -> None:
        for job in self._jobs[self._read : self._read + _READ]:
            if self._order.full:
                return
            shape = LineShape(job.prompt, job.limit, np.array(job.prefixes, np.int64))
            self._order.add(job.number, job, size=1, shape=shape)
            self._read += 1


class Static(Policy):
    """Each device has its own part of the file."""

    def __init__(self, jobs: Sequence[Job], devices: int, speed: Speed) -> None:
        size = -(-len(jobs) // devices)
        self._parts = [deque(jobs[number * size : (number + 1) * size]) for number in range(devices)]
        self._room = [speed.places + 8] * devices

    def take(self, now: float) -> list[tuple[int, Job]]:
        taken = []
        for number, part in enumerate(self._parts):
            while part and self._room[number]:
                self._room[number] -= 1
                taken.append((number, part.popleft()))
        return taken

    def ended(self, device: int, job: Job) -> None:
        self._room[device] += 1


class Blocks(Policy):
    """A device gets the next block of lines when all of one of its blocks have ended, as with Ray Data."""

    def __init__(self, jobs: Sequence[Job], devices: int, speed: Speed) -> None:
        self._blocks = deque(jobs[start : start + _BLOCK] for start in range(0, len(jobs), _BLOCK))
        self._held: list[int] = [0] * devices
        self._left: dict[int, int] = {}
        """Lines that have not ended, of each block under way."""

    def take(self, now: float) -> list[tuple[int, Job]]:
        taken = []
        while self._blocks and min(self._held) < _BLOCKS:
            device = self._held.index(min(self._held))
            block = self._blocks.popleft()
            self._held[device] += 1
            self._left[block[0].number // _BLOCK] = len(block)
            taken += [(device, job) for job in block]
        return taken

    def ended(self, device: int, job: Job) -> None:
        block = job.number // _BLOCK
        self._left[block] -= 1
        if not self._left[block]:
            del self._left[block]
            self._held[device] -= 1


POLICIES: dict[str, Callable[[Sequence[Job], int, Speed], Policy]] = {
    "router": Routed,
    "static": Static,
    "blocks": Blocks,
}


def simulate(jobs: Sequence[Job], devices: int, speed: Speed, policy: str = "router") -> Outcome:
    """Compute `jobs` on `devices` devices."""
    handing, all_devices = POLICIES[policy](jobs, devices, speed), [Device(speed) for _ in range(devices)]
    versions = [0] * devices
    events: list[tuple[float, int, int]] = []
    now, idle_since, longest_idle = 0.0, [0.0] * devices, 0.0

    def schedule(number: int) -> None:
        versions[number] += 1
        if (at := all_devices[number].next_end()) is not None:
            heapq.heappush(events, (at, number, versions[number]))

    def hand_out() -> None:
        nonlocal longest_idle
        changed = set()
        for number, job in handing.take(now):
            if not all_devices[number]:
                longest_idle = max(longest_idle, now - idle_since[number])
            all_devices[number].add(job, now)
            changed.add(number)
        for number in changed:
            schedule(number)

    hand_out()
    while events:
        now, number, version = heapq.heappop(events)
        if version != versions[number]:
            continue
        ended = all_devices[number].advance(now)
        for job in ended:
            handing.ended(number, job)
        schedule(number)
        if ended:
            if not all_devices[number]:
                idle_since[number] = now
            hand_out()
    return Outcome(now, sum(device.reused for device in all_devices), longest_idle)


def bound(jobs: Sequence[Job], devices: int, speed: Speed) -> float:
    """Return seconds that no order can beat: all work at full batches with every prefix cached, or the longest line."""
    seen: set[int] = set()
    work = 0.0
    for job in jobs:
        cached = job.prefix_keys * KEY_TOKENS if job.group in seen else 0
        seen.add(job.group)
        work += (job.prompt - cached) * speed.prefill + job.answer * speed.full()
    longest = max(
        (job.prompt - job.prefix_keys * KEY_TOKENS) * speed.prefill + job.answer * (speed.step + speed.row)
        for job in jobs
    )
    return max(work / devices, longest)


def most_reused(jobs: Sequence[Job]) -> int:
    """Return the tokens of prompts that one device with an infinite cache would find in it."""
    return sum(job.prefix_keys * KEY_TOKENS for job in jobs) - sum(
        {job.group: job.prefix_keys * KEY_TOKENS for job in jobs}.values()
    )
