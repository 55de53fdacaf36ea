"""A plain model of what the store holds, for `test_life.py`.

Who is claimed for, and with whom, is decided by the rules that the store uses; what they are asked is not.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from batchwright.limiting.shares import Claimant, place, turns, virtual_time
from batchwright.policies.suspects import REST, Suspects, at_once, first, worth_draining
from batchwright.store.records import BatchRecord


def position(number: int) -> int:
    """The position of a line of any batch."""
    return number * 5 % 3


@dataclass
class Line:
    state: str = "pending"
    attempt: int = 0
    worker: str | None = None
    sequence: int | None = None
    crashes: int = 0
    crash: int | None = None
    """Key of the crash for which it is under suspicion."""


@dataclass
class Batch:
    record: BatchRecord
    lines: dict[int, Line]
    status: str = "in_progress"
    ending: str | None = None
    paused: bool = False
    unfinished: int = 0
    finished: int = 0
    """Lines with a result."""
    file: str | None = None
    """Built when it ended."""
    removed: bool = False

    def of(self, state: str) -> list[int]:
        """In the order in which they are claimed."""
        ordered = sorted(self.lines, key=lambda number: (position(number), number))
        return [number for number in ordered if self.lines[number].state == state]


@dataclass
class Tenant:
    served: float = 0.0
    line_tokens: float = 0.0
    active: bool = False
    rests_until: float = 0.0
    finished_at: float = 0.0


@dataclass
class Crash:
    worker: str
    tenant: str
    since: float
    at_once: int
    taker: str | None = None


Place: TypeAlias = tuple[Batch, int]
"""A line, by its batch and number."""


@dataclass
class Model:
    batches: dict[str, Batch] = field(default_factory=dict)
    leases: dict[str, float] = field(default_factory=dict)
    tenants: dict[str, Tenant] = field(default_factory=lambda: {"t": Tenant(), "u": Tenant()})
    time: float = 0.0
    """Virtual time."""
    crashes: dict[int, Crash] = field(default_factory=dict)
    crash_keys: Iterator[int] = field(default_factory=itertools.count)
    trying: dict[str, int] = field(default_factory=dict)
    """By worker."""
    events: int = 0

    def claimable(self, now: float) -> list[Batch]:
        found = [
            batch
            for batch in self.batches.values()
            if batch.status == "in_progress" and not batch.ending and not batch.paused and batch.record.expires_at > now
        ]
        return sorted(found, key=lambda batch: batch.record.expires_at)  # stable: then by age

    def held(self, worker: str) -> list[Place]:
        """In the order of the rows."""
        return [
            (batch, number)
            for batch in self.batches.values()
            for number, line in sorted(batch.lines.items())
            if (line.state, line.worker) == ("claimed", worker)
        ]

    def in_work(self, worker: str) -> list[Place]:
        return [(batch, number) for batch, number in self.held(worker) if not self.given_up(batch.lines[number])]

    def given_up(self, line: Line) -> bool:
        return line.crash is not None and self.crashes[line.crash].at_once == 0

    def free(self, worker: str) -> int:
        held = self.held(worker)
        for batch, number in held:
            give_back(batch.lines[number])
        del self.leases[worker]
        self.trying.pop(worker, None)
        for crash in self.crashes.values():
            if crash.taker == worker:
                crash.taker = None
        return len(held)

    def die(self, worker: str, now: float, most: int) -> int:
        lines = self.in_work(worker)
        tried = self.crashes.get(self.trying.get(worker, -1))
        alone = tried is not None and tried.at_once == 1
        for tenant in sorted({batch.record.tenant for batch, _ in lines}):
            own = [batch.lines[number] for batch, number in lines if batch.record.tenant == tenant]
            before = max(line.crashes for line in own)
            key = next(self.crash_keys)
            self.crashes[key] = Crash(worker, tenant, now, at_once(before + 1, len(own), alone=alone, most=most))
            for line in own:
                line.state, line.worker, line.crashes, line.crash = "suspect", None, line.crashes + 1, key
            if before:
                self.tenants[tenant].rests_until = now + REST
        return len(lines) + self.free(worker)

    def clear(self, worker: str) -> None:
        keys = {key for key, crash in self.crashes.items() if crash.worker == worker}
        for batch in self.batches.values():
            for line in batch.lines.values():
                if line.crash in keys:
                    line.crashes -= 1
                    if not line.crashes:
                        line.crash = None
                        line.state = "pending" if line.state == "suspect" else line.state
        for key in keys:
            self.crashes[key].at_once = self.crashes[key].at_once or 1

    def forget_crashes(self) -> None:
        known = {line.crash for batch in self.batches.values() for line in batch.lines.values()}
        self.crashes = {key: crash for key, crash in self.crashes.items() if key in known}

    def groups(self, now: float) -> list[Suspects]:
        return [
            Suspects(key, crash.tenant, crash.since, crash.at_once, crash.taker, self.tenants[crash.tenant].rests_until)
            for key, crash in sorted(self.crashes.items(), key=lambda item: (item[1].since, item[0]))
            if self.suspects(key, now)
        ]

    def suspects(self, key: int, now: float) -> list[Place]:
        return [
            (batch, number)
            for batch in self.claimable(now)
            for number in batch.of("suspect")
            if batch.lines[number].crash == key
        ]

    def claim(self, worker: str, limit: int, now: float) -> list[Place]:
        groups = self.groups(now)
        given_up = [place for group in groups if not group.at_once for place in self.suspects(group.key, now)]
        claimed = self.take(worker, given_up[:limit])
        return claimed + self.claim_to_compute(worker, groups, limit - len(claimed), now)

    def claim_to_compute(self, worker: str, groups: list[Suspects], limit: int, now: float) -> list[Place]:
        held = len(self.in_work(worker))
        if worker in self.trying:
            tried = [group for group in groups if group.key == self.trying[worker] and group.at_once]
            if tried:
                room = max(0, min(limit, tried[0].at_once - held))
                return self.take(worker, self.suspects(tried[0].key, now)[:room])
            if held:
                return []
            del self.trying[worker]
            for crash in self.crashes.values():
                if crash.taker == worker:
                    crash.taker = None
            self.forget_crashes()
        if held:
            group = worth_draining(groups, worker, now)
            if group is None:
                return self.claim_shared(worker, limit, now, (False, True))
            self.crashes[group.key].taker = self.crashes[group.key].taker or worker
            return []
        for resting in (False, True):
            group = first(groups, now, resting=resting)
            if group is not None:
                self.trying[worker] = group.key
                self.crashes[group.key].taker = self.crashes[group.key].taker or worker
                return self.take(worker, self.suspects(group.key, now)[: min(limit, group.at_once)])
            if found := self.claim_shared(worker, limit, now, (resting,)):
                return found
        return []

    def claim_shared(self, worker: str, limit: int, now: float, resting: tuple[bool, ...]) -> list[Place]:
        self.look_who_works(now)
        claimed: list[Place] = []
        for rests in resting:
            while len(claimed) < limit:
                free = {
                    name: [place for batch in self.claimable(now) for place in pending_of(batch, name)]
                    for name, tenant in self.tenants.items()
                    if (tenant.rests_until > now) == rests
                }
                claimants = [self.claimant(name) for name, places in free.items() if places]
                if not claimants:
                    break
                [name] = turns(claimants, 1)
                claimed += self.take(worker, free[name][:1])
        return claimed

    def claimant(self, name: str) -> Claimant:
        tenant = self.tenants[name]
        in_flight = sum(len(batch.of("claimed")) for batch in self.batches.values() if batch.record.tenant == name)
        return Claimant(name, 1.0, tenant.served, tenant.line_tokens, in_flight)

    def look_who_works(self, now: float) -> None:
        working = {batch.record.tenant for batch in self.claimable(now)}
        active = {name: place(self.claimant(name)) for name, tenant in self.tenants.items() if tenant.active}
        if working == active.keys():
            return
        self.time = virtual_time(self.time, active, working)
        for name, tenant in self.tenants.items():
            if name in working and not tenant.active:
                tenant.served = max(tenant.served, self.time)
            tenant.active = name in working

    def take(self, worker: str, places: list[Place]) -> list[Place]:
        for batch, number in places:
            line = batch.lines[number]
            line.state, line.worker, line.attempt = "claimed", worker, line.attempt + 1
        return places

    def charge(self, tenant: str, lines: int) -> None:
        """For results with the usage that `result` gives them."""
        if not lines:
            return
        found, tokens = self.tenants[tenant], 4.0 * lines
        found.served += tokens
        found.line_tokens = (found.line_tokens * 100 + tokens) / (100 + lines) if found.line_tokens else tokens / lines


def give_back(line: Line) -> None:
    line.state, line.worker = "pending" if line.crash is None else "suspect", None


def pending_of(batch: Batch, tenant: str) -> list[Place]:
    return [(batch, number) for number in batch.of("pending") if batch.record.tenant == tenant]
