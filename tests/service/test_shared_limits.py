"""Processes of one store keep the limits of an endpoint together: the real exchange and store, in virtual time."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from tests.inference.test_endpoint_waits import Provider, call, endpoint_at, refusal
from tests.service.support import House, Model, in_house

from batchwright.errors import EndpointError
from batchwright.inference.endpoint import EndpointInference
from batchwright.inference.inference import learn_use, shared_use
from batchwright.inference.routing import RoutedInference
from batchwright.limiting.quotas import Quotas
from batchwright.pacing.limits import configured_limits
from batchwright.service.access.online_quotas import OnlineQuotas
from batchwright.service.access.peers import Peers
from batchwright.service.worker.worker import Worker

LIMIT = 120.0


class Process:
    """What of a service has to do with the limits of an endpoint."""

    def __init__(self, house: House, provider: Provider, rpm: float | None = LIMIT) -> None:
        self.house = house
        self.endpoint = endpoint_at(provider, limits=configured_limits(rpm=rpm), max_concurrency=100)
        # With aliases, as `serve` has it.
        self.computing = RoutedInference([self.endpoint])
        self.worker: Worker = house.worker(Model())
        quotas = OnlineQuotas(house.store, Quotas(), house.clock, house.now, others=lambda: self.peers)
        self.peers = Peers(
            house.store,
            quotas,
            lambda: self.worker.id,
            lambda: {"limits": shared_use(self.computing)},
            lambda others: learn_use(self.computing, others),
        )
        self.tasks: list[asyncio.Task[Any]] = []

    async def start(self) -> None:
        await self.worker.start()
        self.tasks.append(asyncio.create_task(self.peers.run()))

    def want(self, count: int) -> None:
        self.tasks += [asyncio.create_task(self.endpoint.answer(call())) for _ in range(count)]

    async def stop(self, *, killed: bool = False) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await (self.house.die(self.worker) if killed else self.worker.stop())


def most_in_a_minute(asked_at: list[float]) -> int:
    return max(sum(start <= at < start + 60.0 for at in asked_at) for start in asked_at)


@in_house
async def test_two_processes_keep_a_limit_together_and_one_that_is_killed_is_forgotten(house: House) -> None:
    providers = [Provider(house.clock, lambda _: 0.5) for _ in range(2)]
    first, second = processes = [Process(house, provider) for provider in providers]
    for process in processes:
        await process.start()
    await asyncio.sleep(2.0)
    assert [len(process.peers.others) for process in processes] == [1, 1]
    for process in processes:
        process.want(600)
    began = house.clock.now()
    await asyncio.sleep(180.0)
    sent = [len(provider.asked_at) for provider in providers]
    together = sorted(at for provider in providers for at in provider.asked_at)
    # Of so small a limit a request that one of them sends unseen may be too much.
    assert most_in_a_minute(together) <= LIMIT + 1
    assert sum(sent) >= 0.9 * LIMIT * 3
    assert min(sent) >= 0.8 * max(sent), "those that begin together have the same part"
    await first.stop(killed=True)
    # It is silent, and a minute later nothing counts of what it sent, nor is there a lease any more.
    await asyncio.sleep(120.0)
    assert not second.peers.others
    before = len(providers[1].asked_at)
    await asyncio.sleep(60.0)
    assert len(providers[1].asked_at) - before >= 0.9 * LIMIT
    assert house.clock.now() - began < 400.0
    await second.stop()


@in_house
async def test_a_process_that_comes_later_has_its_part_in_seconds_and_leaves_it_in_seconds(house: House) -> None:
    providers = [Provider(house.clock, lambda _: 0.5) for _ in range(2)]
    first, second = (Process(house, provider) for provider in providers)
    await first.start()
    first.want(1000)
    await asyncio.sleep(90.0)
    await second.peers.exchange()  # as a service does before its first request
    second.want(500)
    await second.start()
    began = house.clock.now()
    await asyncio.sleep(30.0)
    shares = [sum(began + 10.0 <= at < began + 30.0 for at in provider.asked_at) for provider in providers]
    assert min(shares) >= 0.8 * 20.0
    await second.stop()
    ended = house.clock.now()
    await asyncio.sleep(60.0)
    assert sum(at >= ended + 10.0 for at in providers[0].asked_at) >= 0.9 * 100.0
    assert most_in_a_minute(sorted(at for provider in providers for at in provider.asked_at)) <= LIMIT + 1
    await first.stop()


@in_house
async def test_a_number_at_once_that_the_provider_keeps_secret_is_found_and_shared(house: House) -> None:
    providers: list[Provider] = []

    def answer(_: Provider) -> EndpointError | float:
        return refusal() if sum(each.under_way for each in providers) > 20 else 1.0

    providers += [Provider(house.clock, answer) for _ in range(2)]
    processes = [Process(house, provider, None) for provider in providers]
    for process in processes:
        await process.start()
        process.want(3000)
        await asyncio.sleep(30.0)
    began, refused = house.clock.now(), sum(provider.refused for provider in providers)
    await asyncio.sleep(60.0)
    asked = [sum(at >= began for at in provider.asked_at) for provider in providers]
    assert sum(asked) >= 0.85 * 20 * 60
    assert min(asked) >= 0.8 * max(asked)
    assert sum(provider.refused for provider in providers) - refused <= 0.01 * sum(asked)
    for process in processes:
        await process.stop()


@in_house
async def test_a_process_that_is_alone_has_the_whole_limit_and_publishes_nothing(house: House) -> None:
    provider = Provider(house.clock, lambda _: 0.5)
    process = Process(house, provider)
    await process.start()
    process.want(200)
    await asyncio.sleep(60.0)
    assert len(provider.asked_at) >= 0.9 * LIMIT
    (peer,) = await house.store.peers()
    assert peer.snapshot is None
    await process.stop()


@in_house
async def test_what_another_version_publishes_ends_no_exchange(house: House) -> None:
    process = Process(house, Provider(house.clock, lambda _: 0.5))
    process.want(1)
    other = house.worker(Model())
    await other.start()
    await process.start()
    await asyncio.sleep(2.0)
    (name,) = process.endpoint.shared_use()
    for snapshot in (
        "{}",
        "[1]",
        '{"limits": null}',
        '{"limits": [1]}',
        json.dumps({"limits": {name: 3}}),
        json.dumps({"limits": {name: {"requests": "many"}}}),
        json.dumps({"limits": {name: {"requests": None, "other": 4}}}),
        json.dumps({"limits": {name: {"requests": float("inf")}}}),
        json.dumps({"limits": {name: {"requests": -5}}}),
        '{"limits": {"unknown": {"requests": 120}}}',
    ):
        await house.store.publish(other.id, snapshot)
        await process.peers.exchange()
        assert len(process.peers.others) == 1
        began = house.clock.now()
        await process.endpoint.answer(call())
        assert house.clock.now() - began <= 2.0, snapshot
        await asyncio.sleep(1.0)
    await house.store.publish(other.id, json.dumps({"limits": {name: {"requests": LIMIT}}}))
    await process.peers.exchange()
    process.want(1)
    await asyncio.sleep(10.0)
    assert not process.tasks[-1].done(), "the other one has used it up"
    await process.stop()
    await other.stop()


@in_house
async def test_who_has_another_key_shares_nothing_nor_does_who_is_idle(house: House) -> None:
    def endpoint(key: str, rpm: float | None, address: str = "https://api.openai.com/v1") -> EndpointInference:
        return EndpointInference(address, key, limits=configured_limits(rpm=rpm))

    ours, same, other_key, elsewhere, untold = (
        endpoint("a", 60.0),
        endpoint("a", 60.0),
        endpoint("b", 60.0),
        endpoint("a", 60.0, "https://api.groq.com/v1"),
        endpoint("a", None),
    )
    names = []
    for each in (ours, same, other_key, elsewhere, untold):
        each._client = Provider(house.clock, lambda _: 0.1, each._client.identity)  # type: ignore[assignment]
        await each.answer(call())
        names.append(each.shared_use())
    assert names[0].keys() == names[1].keys()
    assert len({name for use in names for name in use}) == 3
    assert names[4] == {}
    assert all("key" not in name and name.isalnum() for use in names for name in use)
