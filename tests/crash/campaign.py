"""Kill, start again, kill again: at random moments, and at each place that the code names."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path

from tests.crash.load import Client, Job, Load
from tests.crash.outside import Outside
from tests.crash.service import Service

import batchwright

_PACKAGE = Path(batchwright.__file__).parent
_POINT = re.compile(r'\bcrash_point\("([^"]+)"\)')
_WRITE = re.compile(r"\b_?write\(\w+_operations\.(\w+)")
_ANY = "any moment"
_CUSTOMERS = 2
"""Of each of several tenants at once."""
_LONGEST_LIFE = 1.0
"""Seconds from being ready to being killed at a random moment, at most."""
_QUOTAS = ("enqueued_lines=210", "enqueued_tokens=50000", "storage_bytes=1000000000000")
"""A batch has up to 200 lines; nearly all files stay."""
RARE = frozenset({
    "add_key", "add_webhook", "delete_webhook", "expire_batches", "forget_deliveries", "postpone", "reap", "release",
    "renew_lease", "retire_worker", "revoke_key", "rotate_key", "rotate_tenant_secret", "rotate_webhook",
    "set_identity", "set_tenant_quotas", "set_tenant_weight", "tenant_secrets", "update_key", "update_webhook",
    "worker_died",
})  # fmt: skip
"""Writes of the store that this load does not bring about, or not within seconds."""
_PASSING = 4.0
"""Seconds in which a place must be passed, or the kill is one at a random moment."""


def crash_points() -> list[str]:
    """Names of all places of a service, as they stand in its source; each write of the store has one on either side."""
    # Not with `ast`: a finalizer that runs while a tree is built and builds another, as logging an exception does,
    # fails the first with a SystemError.
    paths = [path for folder in ("service", "store") for path in (_PACKAGE / folder).rglob("*.py")]
    literal = {name for path in paths for name in _POINT.findall(path.read_text(encoding="utf-8"))}
    writes = writes_of_the_store() - RARE
    return sorted(literal | {f"store.{write}.{moment}_commit" for write in writes for moment in ("before", "after")})


def writes_of_the_store() -> set[str]:
    return set(_WRITE.findall((_PACKAGE / "store" / "store.py").read_text(encoding="utf-8")))


@dataclass
class Figures:
    """What a campaign came to."""

    kills: Counter[str] = field(default_factory=Counter)
    """By place; `_ANY` for the others."""
    batches: Counter[str] = field(default_factory=Counter)
    """By final status."""
    lines: int = 0
    calls: int = 0
    """Of the model: as many as lines, and those repeated."""
    messages: int = 0
    repeated_messages: int = 0
    refused: int = 0
    """Requests that a quota did not let in, and that were made again."""

    def __str__(self) -> str:
        named = {place: count for place, count in self.kills.items() if place != _ANY}
        batches = ", ".join(f"{count} {status}" for status, count in sorted(self.batches.items()))
        unreached = ", ".join(place for place in crash_points() if place not in named) or "none"
        return (
            f"{self.kills.total()} kills: {self.kills[_ANY]} at any moment, "
            f"{sum(named.values())} at {len(named)} of the {len(crash_points())} named places.\n"
            f"Named places without a kill: {unreached}.\n"
            f"{self.batches.total()} batches ({batches}), {self.lines} lines: each exactly once, all counts right.\n"
            f"{self.calls} calls of the model; {self.messages} webhook messages, {self.repeated_messages} repeated; "
            f"{self.refused} times a quota was full."
        )


@dataclass
class Campaign:
    """Kills `service` under load, and checks that nothing is lost. Raises `AssertionError` when something is."""

    service: Service
    outside: Outside
    seed: int
    on_kill: Callable[[int], None] = lambda done: None

    async def run(self, kills: int) -> Figures:
        draw, figures = random.Random(self.seed), Figures()
        places = cycle(draw.sample(points := crash_points(), len(points)))
        async with under_load(self.service, self.outside, self.seed) as load:
            for number, place in enumerate(islice(places, kills)):
                by_name = number % 2 == 1
                figures.kills[await (self._at(place, draw) if by_name else self._at_any_moment(draw))] += 1
                self.on_kill(number + 1)
            self.service.start()
        return self._summed_up(figures, load)

    async def _at_any_moment(self, draw: random.Random) -> str:
        self.service.start()
        await self.service.ready()
        await asyncio.sleep(draw.uniform(0.0, _LONGEST_LIFE))
        self.service.kill()
        return _ANY

    async def _at(self, place: str, draw: random.Random) -> str:
        self.service.start({"BATCHWRIGHT_CRASH_AT": f"{place}:{draw.choice((1, 1, 1, 2, 3))}"})
        if not await self.service.ready() or await self.service.killed(_PASSING):
            return place
        self.service.kill()
        return _ANY

    def _summed_up(self, figures: Figures, load: Crowd) -> Figures:
        figures.batches.update(job.record["status"] for job in load.jobs)
        figures.lines = sum(len(job.questions) for job in load.jobs)
        figures.calls = self.outside.calls.total()
        figures.messages = len(self.outside.events)
        figures.refused = sum(each.refused for each in load.loads)
        figures.repeated_messages = sum(len(told) > 1 for told in self.outside.events.values())
        return figures


class Crowd:
    """The customers of all tenants."""

    def __init__(self, loads: Sequence[Load]) -> None:
        self.loads = loads

    @property
    def jobs(self) -> list[Job]:
        return [job for load in self.loads for job in load.jobs]

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for load in self.loads:
                group.create_task(load.run())

    async def more_ends(self, count: int) -> None:
        """Wait until so many more batches of each tenant have ended."""
        await asyncio.gather(*(load.more_ends(count) for load in self.loads))

    async def check(self, outside: Outside) -> None:
        """Every line exactly once, right, and counted. Raises `AssertionError`."""
        for load in self.loads:
            await load.check_messages(outside)
            await load.check()
        asked = set().union(*(load.asked for load in self.loads))
        assert outside.calls.keys() <= asked, "the endpoint was asked what is in no input"


@asynccontextmanager
async def under_load(service: Service, outside: Outside, seed: int) -> AsyncIterator[Crowd]:
    """Customers at work while the block runs, which starts the service and leaves it running.

    After it, everything that they asked for must come out right, and the service must end well: raises
    `AssertionError` when not.
    """
    clients = [Client(service.url, key) for key in service.keys]
    if len(clients) == 1:
        crowd = Crowd([Load(clients[0], seed, limited=service.limited)])
    else:
        loads = [
            Load(client, seed + number, _CUSTOMERS, limited=service.limited) for number, client in enumerate(clients)
        ]
        crowd = Crowd(loads)
    customers = asyncio.create_task(crowd.run())
    try:
        yield crowd
        for load in crowd.loads:
            load.finish()
        await customers
        await crowd.check(outside)
        assert await service.stop() == 0, service.tail()
        assert not (left := temporary_files(service)), f"temporary files were left behind: {left}"
    finally:
        customers.cancel()
        await asyncio.gather(customers, return_exceptions=True)
        for client in clients:
            await client.close()
        service.kill()


def temporary_files(service: Service) -> list[Path]:
    """What uploads and outputs were written to, in its folder of files."""
    return [*(service.data / "files").rglob("*.tmp")]


def start_service(folder: Path, database: str, outside: Outside, *extra: str, tenants: Sequence[str] = ()) -> Service:
    """A service that is not started yet, on a data folder of its own, whose ends are told to `outside`.

    With `tenants` it asks for keys, and each of them has one.
    """
    data = folder / "data"
    data.mkdir(parents=True)
    there = f"http://127.0.0.1:{outside.port}"
    service = Service(data, database, f"{there}/v1", ["--webhook-allow", "127.0.0.1", *extra])
    webhook = ("webhooks", "create", f"{there}/hook", "--webhook-allow", "127.0.0.1")
    if not tenants:
        service.command(*webhook)
        return service
    service.keys.clear()
    for tenant in tenants:
        service.command(*webhook, "--tenant", tenant)
        scopes = "online,batches,metrics"
        service.keys.append(
            service.command("keys", "create", "customer", "--tenant", tenant, "--scopes", scopes).strip()
        )
    return service


def start_campaign_service(folder: Path, database: str, outside: Outside) -> Service:
    """A service for a `Campaign`: of two tenants, with quotas that keep one of their customers waiting at times.

    Killed so often from outside, lines that do no harm would be in progress at three deaths in a row.
    """
    tenants = ("first", "second")
    service = start_service(folder, database, outside, "--max-crashes", "100000", tenants=tenants)
    for tenant in tenants:
        service.command("quotas", "set", "--tenant", tenant, *_QUOTAS)
    service.limited = True
    return service
