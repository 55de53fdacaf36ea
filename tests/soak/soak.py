"""One soak: the service, those who use it, the faults, and what is seen of all this."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Literal

import httpx
from benchmarks.endure.beside import beside
from benchmarks.endure.probe import HealthProbe, Probed
from benchmarks.endure.watch import Sample, look
from tests.crash.campaign import temporary_files
from tests.crash.load import Client, Load
from tests.crash.models import Engine, Model, Oracle
from tests.crash.outside import Outside
from tests.crash.service import Service, ServiceDied
from tests.postgres import PostgresServer
from tests.soak.faults import Fault, World, faults_for, in_order
from tests.soak.hostile import HOSTILE
from tests.soak.logs import LogFigures, read_log
from tests.soak.online import ONLINE, Asked, Online, Watcher
from tests.soak.timeline import Timeline

Database = Literal["sqlite", "postgresql"]
Backend = Literal["engine", "scripted"]

TENANTS = ("amber", "birch", "cedar")
_SAMPLED_EVERY = 0.5
_FIRST = 0.3
"""Periods before the first fault."""
_END = 900.0
"""Seconds in which everything that was asked for must have ended."""
_REST = 60.0
"""Seconds in which the service must have let go of what it held for its clients."""
_SPARE_DESCRIPTORS, _SPARE_THREADS = 16, 16
"""That the service may hold at rest beyond what it held before its first client: connections to the database; idle
threads of the event loop's pool, of the tokenizer and of OpenMP."""
_ENDPOINT_CONNECTIONS = 64
"""That it may keep to the endpoint: as many as its setting `backend_concurrency`."""
_HELD = re.compile(
    r"^(batchwright_(?:calls_in_flight|engine_(?:waiting|running)_sequences|engine_kv_blocks_used)\S*) (\S+)$", re.M
)


@dataclass(frozen=True)
class Plan:
    """What is run."""

    seconds: float
    """Of faults. A soak takes longer, by its start and its end, and by what faults take beyond their period."""
    seed: int
    database: Database = "sqlite"
    backend: Backend = "scripted"
    period: float = 60.0
    """Seconds from one fault to the next."""
    fault_seconds: float = 20.0
    """How long a fault lasts that has no end of its own."""
    settling: float = 10.0
    """Seconds after a fault in which its effects are borne with."""
    lease: float = 5.0
    clients: int = 12
    """Online."""
    customers: int = 2
    """Of each tenant."""
    watchers: int = 3
    tenants: int = 3
    only: tuple[str, ...] = ()
    """Names of faults; empty: all that are possible."""

    @property
    def faults(self) -> int:
        """How many: the same ones for a seed, however slow the machine is."""
        return max(1, round(self.seconds / self.period))

    @property
    def model(self) -> Model:
        return Engine() if self.backend == "engine" else Oracle()

    @property
    def flags(self) -> list[str]:
        """Of the service."""
        flags = ["--webhook-allow", "127.0.0.1", "--lease", str(self.lease), "--log-format", "json"]
        if self.backend == "engine":
            flags += ["--max-model-len", str(Engine.max_model_len), "--kv-memory", "256MiB"]
        return flags


@dataclass
class Seen:
    """What there is to report about."""

    plan: Plan
    timeline: Timeline
    asked: list[Asked] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    probed: list[Probed] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    calls: int = 0
    """Of the scripted model."""
    requests: int = 0
    """HTTP requests of all customers and clients."""
    messages: int = 0
    repeated_messages: int = 0
    first_rest: Sample | None = None
    """Before the first client."""
    last_rest: Sample | None = None
    """When all of them have gone."""
    held: dict[str, float] = field(default_factory=dict)
    """Metrics of what was in progress then and is not zero."""
    temporary: list[Path] = field(default_factory=list)
    log: LogFigures = field(default_factory=LogFigures)
    failure: str | None = None
    """Why it ended early."""


async def soak(plan: Plan, folder: Path, say: Callable[[str], None] = lambda line: None) -> Seen:
    """Run it, with everything that it needs in `folder`. What went wrong stands in the result."""
    seen = Seen(plan, Timeline(plan.settling))
    async with AsyncExitStack() as opened:
        world = await _world(plan, folder, opened)
        opened.callback(world.service.kill)
        probe = HealthProbe(world.service.port, folder / "health.jsonl")
        try:
            await _run(plan, world, seen, probe, say)
        except* Exception as group:
            seen.failure = "; ".join(_reasons(group))
        finally:
            seen.probed = probe.read()
        if world.endpoint is not None:
            seen.calls = world.endpoint.calls.total()
        seen.messages = len(world.receiver.events)
        seen.repeated_messages = sum(len(told) > 1 for told in world.receiver.events.values())
        seen.log = read_log(world.service.log)
    return seen


def _reasons(group: BaseExceptionGroup[BaseException]) -> list[str]:
    found = []
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            found += _reasons(error)
        else:
            found.append(f"{type(error).__name__}: {error}")
    return found


async def _world(plan: Plan, folder: Path, opened: AsyncExitStack) -> World:
    receiver = await opened.enter_async_context(Outside())
    endpoint = await opened.enter_async_context(Outside()) if plan.backend == "scripted" else None
    postgres = opened.enter_context(PostgresServer()) if plan.database == "postgresql" else None
    data = folder / "data"
    data.mkdir(parents=True)
    service = Service(
        data,
        str(data / "batchwright.db") if postgres is None else postgres.new_database(),
        "engine" if endpoint is None else f"http://127.0.0.1:{endpoint.port}/v1",
        plan.flags,
    )
    tenants = TENANTS[: plan.tenants]
    keys = [await asyncio.to_thread(_add_tenant, service, tenant, receiver) for tenant in tenants]
    return World(
        service=service,
        model=plan.model,
        receiver=receiver,
        endpoint=endpoint,
        postgres=postgres,
        keys=keys,
        flags=plan.flags,
        seconds=plan.fault_seconds,
        lease=plan.lease,
        draw=random.Random(plan.seed),
    )


def _add_tenant(service: Service, tenant: str, receiver: Outside) -> str:
    """Its key."""
    hook = f"http://127.0.0.1:{receiver.port}/hook"
    service.command("webhooks", "create", hook, "--tenant", tenant, "--webhook-allow", "127.0.0.1")
    return service.command("keys", "create", "soak", "--tenant", tenant, "--scopes", "online,batches,metrics").strip()


async def _run(plan: Plan, world: World, seen: Seen, probe: HealthProbe, say: Callable[[str], None]) -> None:
    await world.start()
    seen.first_rest = look(world.service.pid)
    async with AsyncExitStack() as opened:
        clients = [Client(world.service.url, key) for key in world.keys]
        for client in clients:
            opened.push_async_callback(client.close)
        most_lines = 40 if plan.backend == "engine" else 200
        seen.loads = [
            Load(client, plan.seed + number, plan.customers, model=world.model, most_lines=most_lines, cleared=0.3)
            for number, client in enumerate(clients)
        ]
        opened.enter_context(probe)
        await opened.enter_async_context(beside(_watch(world, seen)))
        try:
            await _work(plan, world, seen, say)
        finally:
            seen.requests = len(seen.asked) + sum(client.calls for client in clients)
    await _rest(world, seen)
    world.expected_down = True
    status = await world.service.stop()
    assert status == 0, f"status {status} after SIGTERM:\n{world.service.tail()}"
    seen.temporary = temporary_files(world.service)


async def _work(plan: Plan, world: World, seen: Seen, say: Callable[[str], None]) -> None:
    """All at once: customers, clients and faults; at the end everything must come out right."""
    async with asyncio.timeout(None) as limit:
        async with asyncio.TaskGroup() as customers:
            for load in seen.loads:
                customers.create_task(load.run())
            async with beside(*_online(plan, world, seen)):
                await _faults(plan, world, seen, say)
            say("no new work; what there is comes to its end")
            limit.reschedule(asyncio.get_running_loop().time() + _END)
            for load in seen.loads:
                load.finish()
        for load in seen.loads:
            await load.check_messages(world.receiver)
            await load.check()
    if world.endpoint is not None:
        asked = set[str]().union(*(load.asked for load in seen.loads))
        stray = {each for each in world.endpoint.calls if not each.startswith((ONLINE, HOSTILE))} - asked
        assert not stray, f"the endpoint was asked what is in no input: {sorted(stray)[:5]}"


def _online(plan: Plan, world: World, seen: Seen) -> Iterator[Coroutine[Any, Any, None]]:
    url, model, tell = world.service.url, world.model, seen.asked.append
    for number, key in enumerate(islice(cycle(world.keys), plan.clients)):
        yield Online(url, key, model, f"{plan.seed}/{number}", tell).run()
    for key in islice(cycle(world.keys), plan.watchers):
        yield Watcher(url, key, tell).run()


async def _faults(plan: Plan, world: World, seen: Seen, say: Callable[[str], None]) -> None:
    """One each period, each after the one before has settled."""
    possible = [fault for fault in faults_for(world) if not plan.only or fault.name in plan.only]
    began = time.monotonic()
    for number, fault in enumerate(in_order(possible, plan.faults, world.draw)):
        due = began + plan.period * (number + _FIRST)
        if seen.timeline.eras:
            due = max(due, seen.timeline.eras[-1].settled + plan.settling)
        await asyncio.sleep(due - time.monotonic())
        await _strike(fault, world, seen.timeline, say)
    ends = max(began + plan.seconds, seen.timeline.eras[-1].settled + plan.settling)
    await asyncio.sleep(ends - time.monotonic())


async def _strike(fault: Fault, world: World, timeline: Timeline, say: Callable[[str], None]) -> None:
    timeline.begin(fault.name, fault.allowed, began := time.monotonic())
    await fault.strike(world)
    timeline.end(ended := time.monotonic())
    say(f"{fault.name}: {ended - began:.1f} s")


async def _watch(world: World, seen: Seen) -> None:
    """Take samples; the service must be there unless it is being ended. Raises `ServiceDied`."""
    while True:
        if not world.service.alive and not world.expected_down:
            raise ServiceDied(f"it ended by itself:\n{world.service.tail()}")
        sample = look(world.service.pid)
        if sample is not None:
            seen.samples.append(sample)
        await asyncio.sleep(_SAMPLED_EVERY)


async def _rest(world: World, seen: Seen) -> None:
    """Wait until it has let go of what it held for its clients; what it has not by then stands in `seen`."""
    limit = time.monotonic() + _REST
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {world.keys[0]}"}, timeout=30) as client:
        while True:
            answer = await client.get(f"{world.service.url}/metrics")
            held = _HELD.findall(answer.text)
            assert held, f"/metrics does not say what is in progress: {answer.status_code} {answer.text[:300]}"
            seen.held = {name: float(value) for name, value in held if float(value)}
            seen.last_rest = look(world.service.pid)
            if (not seen.held and not grown(seen)) or time.monotonic() > limit:
                return
            await asyncio.sleep(1.0)


def grown(seen: Seen) -> bool:
    """Whether more descriptors or threads are held at rest than before the first client."""
    first, last = seen.first_rest, seen.last_rest
    if first is None or last is None:
        return True
    spare = _SPARE_DESCRIPTORS + (_ENDPOINT_CONNECTIONS if seen.plan.backend == "scripted" else 0)
    return last.descriptors > first.descriptors + spare or last.threads > first.threads + _SPARE_THREADS
