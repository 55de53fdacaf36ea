"""Requests that may wait for fuller batches, beside those that may not."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from tests.long_form import examples

from batchwright import InferenceRequest
from batchwright.batcher import Batcher, PriorityBatcher
from batchwright.clock import ManualClock
from batchwright.policies import Backlog, Dispatch, Item, MaxWait, Reason, Wait, auto, simple

from .virtual import Noisy, play

_MS = 1e-3
_WAIT_MS = 200.0
_URGENT, _PATIENT = 1, 9


def _dispatched(waiting: Backlog, now: float) -> tuple[list[Item], Reason]:
    decision = waiting.decide(now)
    assert isinstance(decision, Dispatch)
    return list(decision.items), decision.reason


def _item(arrival: float, priority: int, **options: Any) -> Item:
    return Item(arrival, priority=priority, **options)


def test_patient_requests_gather_and_go_when_the_first_of_them_has_waited() -> None:
    waiting = Backlog(auto(8, timing=MaxWait({_PATIENT: 1.0})))
    items = [_item(0.1 * number, _PATIENT) for number in range(4)]
    for item in items:
        waiting.add([item])
        assert waiting.decide(item.arrival) == Wait(1.0)
    assert _dispatched(waiting, 1.0) == (items, Reason.MAX_WAIT)


def test_patient_requests_that_fill_a_batch_go_at_once() -> None:
    waiting = Backlog(auto(3, timing=MaxWait({_PATIENT: 1.0})))
    items = [_item(0.0, _PATIENT) for _ in range(3)]
    waiting.add(items)
    assert _dispatched(waiting, 0.0) == (items, Reason.FULL)


def test_patient_requests_ride_along_with_an_urgent_one() -> None:
    waiting = Backlog(auto(8, timing=MaxWait({_PATIENT: 1.0})))
    patient = [_item(0.0, _PATIENT) for _ in range(3)]
    urgent = _item(0.2, _URGENT)
    waiting.add(patient)
    waiting.add([urgent])
    assert _dispatched(waiting, 0.2) == ([urgent, *patient], Reason.IDLE)


def test_a_request_may_bring_its_own_wait() -> None:
    for policy in (auto(8), simple(8, 5.0), auto(8, timing=MaxWait({0: 5.0}))):
        waiting = Backlog(policy)
        waiting.add([_item(0.0, 5, max_wait=0.5)])
        assert waiting.decide(0.0) == Wait(0.5)
        assert _dispatched(waiting, 0.5)[1] == Reason.MAX_WAIT
    waiting.add([_item(1.0, 5, max_wait=0.0)])
    assert _dispatched(waiting, 1.0)[1] == Reason.IDLE


def test_the_shortest_wait_counts_though_others_came_first() -> None:
    waiting = Backlog(auto(8, timing=MaxWait({5: 0.2, 9: 1.0})))
    patient, quick = _item(0.0, 9), _item(0.1, 5)
    waiting.add([patient, quick])
    decision = waiting.decide(0.1)
    assert isinstance(decision, Wait)
    assert decision.until == pytest.approx(0.3)
    assert _dispatched(waiting, 0.3 + 1e-9)[0] == [quick, patient]


def test_priorities_between_those_listed_wait_as_the_more_urgent_one() -> None:
    timing = MaxWait({0: 0.0, 5: 0.02, 9: 0.5})
    releases = {priority: timing.release(_item(1.0, priority)) - 1.0 for priority in (-3, 0, 4, 5, 8, 9, 100)}
    assert [releases[each] for each in (-3, 0, 4)] == [float("-inf")] * 3
    assert [releases[each] for each in (5, 8, 9, 100)] == pytest.approx([0.02, 0.02, 0.5, 0.5])


def test_a_patient_request_of_another_length_leaves_when_its_time_is_up() -> None:
    """Batches of like length: the one chosen first is not always the one that holds it."""
    waiting = Backlog(auto(8, timing=MaxWait({_PATIENT: 1.0})))
    for cells, count in ((8, 8), (800, 1), (8000, 8), (100, 4)):
        waiting.observe(cells, cells, count, 0.001 + 1e-3 * cells)
    old = _item(0.0, _PATIENT, length=1000)
    waiting.add([old])
    waiting.add([_item(0.9, _PATIENT, length=10) for _ in range(3)])
    assert waiting.decide(0.95) == Wait(1.0)
    assert old in _dispatched(waiting, 1.0)[0]


@pytest.mark.parametrize(
    ("waits", "named"),
    [
        (-1, "max_wait_ms=-1"),
        (float("nan"), "max_wait_ms=nan"),
        ({5: -1}, r"max_wait_ms\[5\]=-1"),
        ({"low": 5}, "max_wait_ms: its keys are priorities"),
    ],
)
@pytest.mark.parametrize("kind", [Batcher, PriorityBatcher])
def test_waits_that_make_no_sense_are_refused_by_name(kind: type[Batcher], waits: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        kind(lambda prompts: prompts, max_wait_ms=waits)


def test_waits_and_a_policy_of_ones_own_are_refused_together() -> None:
    with pytest.raises(TypeError, match="max_wait_ms: it is for the policy 'auto'"):
        Batcher(lambda prompts: prompts, simple(8), max_wait_ms={9: 100})


def _mixed(
    make: Callable[[Any, ManualClock], Batcher], rate: float, seed: int, count: int
) -> tuple[list[float], list[float], Noisy]:
    """Latencies of urgent and of background requests, and the model: 20 ms + 1 ms a request, a tenth urgent."""
    model = Noisy(20 * _MS, 1 * _MS)
    rng = random.Random(seed)
    latencies: dict[str, list[float]] = {"urgent": [], "background": []}

    async def main(clock: ManualClock) -> None:
        batcher = make(model, clock)

        async def ask(kind: str) -> None:
            begin = clock.now()
            priority = _URGENT if kind == "urgent" else _PATIENT
            await batcher.add_request(InferenceRequest(kind, priority=priority))
            latencies[kind].append(clock.now() - begin)

        async with asyncio.TaskGroup() as callers:
            for _ in range(count):
                callers.create_task(ask("urgent" if rng.random() < 0.1 else "background"))
                await asyncio.sleep(rng.expovariate(rate))

    play(main)
    return latencies["urgent"], latencies["background"], model


PATIENT: dict[str, Callable[[Any, ManualClock], Batcher]] = {
    "default": lambda model, clock: Batcher(model, max_wait_ms={_PATIENT: _WAIT_MS}, clock=clock),
    "priority": lambda model, clock: PriorityBatcher(
        model, 64, max_wait_ms={_URGENT: 0, _PATIENT: _WAIT_MS}, clock=clock
    ),
}


@cache
def _default(rate: float, seed: int) -> float:
    """Return the median wait for urgent work in a batcher to which nothing was said."""
    urgent, _, _ = _mixed(lambda model, clock: Batcher(model, clock=clock), rate, seed, 3000)
    return statistics.median(urgent)


@pytest.mark.parametrize(
    "rate",
    [50.0, pytest.param(150.0, marks=pytest.mark.long), 300.0, pytest.param(450.0, marks=pytest.mark.long)],
)
@pytest.mark.parametrize("seed", range(examples(1, long=2)))
@pytest.mark.parametrize("make", PATIENT.values(), ids=PATIENT)
def test_background_work_fills_batches_and_does_not_delay_urgent_work(
    make: Callable[[Any, ManualClock], Batcher], seed: int, rate: float
) -> None:
    urgent, background, model = _mixed(make, rate, seed, 3000)
    sizes = [len(batch) for batch in model.batches if "background" in batch]
    assert statistics.median(urgent) <= 1.1 * _default(rate, seed)
    if rate * (_WAIT_MS * _MS) > 16:
        assert statistics.fmean(sizes) >= 8
    longest = 20 * _MS + 1 * _MS * max(map(len, model.batches))
    assert max(background) <= _WAIT_MS * _MS + longest + 1e-9
