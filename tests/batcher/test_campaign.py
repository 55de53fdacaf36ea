"""A campaign in virtual time: models that fail in every way, callers of every kind, policies of every kind.

Hypothesis chooses what happens next. Whatever it is: every caller is answered once and with its own answer, nothing is
computed for callers that have gone, no model is free beside a request that should go, and the model is called no more
often than the bars allow.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.policies.test_breaker import MOST_IN_VAIN

from batchwright import InferenceRequest, InferenceResponse, Overloaded
from batchwright.batcher import (
    AdaptiveBatcher,
    Batcher,
    LengthAwareBatcher,
    MemoryEfficientBatcher,
    ParallelBatchProcessor,
    PriorityBatcher,
    SimpleBatcher,
    TimeBasedBatcher,
)
from batchwright.batcher.dispatch_loop import DispatchLoop
from batchwright.errors import BatchwrightError
from batchwright.policies import FairShare, LikeLengths, MaxWait, Policy
from batchwright.testing import VirtualLoop

REQUESTS = 10_000
"""Least number of requests in the campaign."""
_INSTANT = 1e-6

Waits = Mapping[int, float] | float


@dataclass(frozen=True)
class Kind:
    """A batcher, and the seconds for which it may hold back a request of each priority."""

    make: Callable[..., Batcher]
    waits: Waits = 0.0

    def wait_of(self, priority: int) -> float:
        if isinstance(self.waits, float):
            return self.waits
        return max(((level, wait) for level, wait in self.waits.items() if level <= priority), default=(0, 0.0))[1]


KINDS: dict[str, Kind] = {
    "auto": Kind(Batcher),
    "auto, waits": Kind(lambda model, **more: Batcher(model, max_wait_ms={7: 200}, **more), {7: 0.2}),
    "simple": Kind(lambda model, **more: SimpleBatcher(model, 8, 100, **more), 0.1),
    "windows": Kind(lambda model, **more: TimeBasedBatcher(model, 50, 16, **more), 0.05),
    "adaptive": Kind(lambda model, **more: AdaptiveBatcher(model, 1, 32, 300, **more)),
    "priorities": Kind(
        lambda model, **more: PriorityBatcher(model, 16, {0: 0, 3: 50, 8: 500}, **more), {0: 0.0, 3: 0.05, 8: 0.5}
    ),
    "lengths": Kind(lambda model, **more: LengthAwareBatcher(model, 400, 16, **more)),
    "memory": Kind(lambda model, **more: MemoryEfficientBatcher(model, 9, 1000, **more)),
    "shares": Kind(
        lambda model, **more: Batcher(model, Policy(LikeLengths(8), order=FairShare(), timing=MaxWait(0.03)), **more),
        0.03,
    ),
}


@dataclass
class Campaign:
    """What all machines did together."""

    requests: int = 0
    fates: Counter[str] = field(default_factory=Counter)


@dataclass(eq=False)
class Caller:
    prompt: str
    kind: str
    priority: int
    arrived: float
    wait: float
    task: asyncio.Task[Any] | None = None
    told: int = 0
    is_gone: bool = False


class Model:
    """Computes, slowly or quickly, or fails as its mood says."""

    def __init__(self, machine: Machine, seed: int) -> None:
        self.machine = machine
        self.mood = "fine"
        self.calls = 0
        self.failed = 0
        self._rng = random.Random(seed)

    async def generate_batch(self, prompts: list[str]) -> list[Any]:
        self.calls += 1
        for prompt in prompts:
            caller = self.machine.callers[prompt]
            assert not caller.is_gone, f"{prompt} is computed for nobody"
            assert caller.task is not None
            assert not caller.task.done(), f"{prompt} is computed although it was answered"
        if self.mood == "dead":
            self.failed += 1
            return [ConnectionResetError("gone") for _ in prompts]
        usual = 0.02 + 0.001 * len(prompts)
        await asyncio.sleep(usual * self._rng.uniform(0.8, 1.2) * (20 if self.mood == "slow" else 1))
        if self.mood == "down" or any("poison" in prompt for prompt in prompts):
            self.failed += 1
            raise ConnectionError("down") if self.mood == "down" else ValueError("poison")
        outputs: list[Any] = [LookupError(prompt) if "odd" in prompt else prompt.upper() for prompt in prompts]
        if self.mood == "short" and self._rng.random() < 0.7:
            self.failed += 1
            return outputs[1:]
        return outputs


class Machine(RuleBasedStateMachine):
    campaign = Campaign()

    @initialize(
        kind=st.sampled_from(sorted(KINDS)),
        replicas=st.sampled_from([0, 0, 2, 3]),
        concurrency=st.sampled_from([1, 1, 2]),
        retries=st.sampled_from([0, 0, 2]),
        max_waiting=st.sampled_from([10_000, 10_000, 100]),
        seed=st.integers(0, 999),
    )
    def begin(self, kind: str, replicas: int, concurrency: int, retries: int, max_waiting: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.loop = VirtualLoop()
        self.callers: dict[str, Caller] = {}
        self.models = [Model(self, seed + number) for number in range(max(1, replicas))]
        options: dict[str, Any] = {"clock": self.loop.clock, "retries": retries, "max_waiting": max_waiting}
        self.kind = KINDS[kind] if not replicas else KINDS["auto"]
        self.retries = retries
        if replicas:
            self.batcher: Batcher = ParallelBatchProcessor(self.models, 16, **options).batcher
        else:
            self.batcher = self.kind.make(self.models[0], concurrency=concurrency, **options)
        self.outage: tuple[int, int] | None = None
        """Calls and whole batches when the only model went down."""

    # What happens

    @rule(
        count=st.integers(1, 60),
        priority=st.sampled_from([0, 3, 5, 9]),
        deadline=st.sampled_from([None, None, None, 0.03, 0.2, 2.0]),
        own_wait=st.sampled_from([None, None, None, 0.0, 0.1, 1.0]),
        evil=st.sampled_from(["", "", "poison", "odd"]),
    )
    def come(self, count: int, priority: int, deadline: float | None, own_wait: float | None, evil: str) -> None:
        for _ in range(count):
            is_evil = bool(evil) and self.rng.random() < 0.1
            prompt = f"{len(self.callers)} {evil if is_evil else 'fine'} {'x' * self.rng.randrange(1, 300)}"
            wait = self.kind.wait_of(priority) if own_wait is None else own_wait
            caller = Caller(prompt, evil if is_evil else "fine", priority, self.loop.time(), wait)
            self.callers[prompt] = caller
            caller.task = self.loop.create_task(self._call(caller, deadline, own_wait))
        type(self).campaign.requests += count
        self._turn()

    async def _call(self, caller: Caller, deadline: float | None, own_wait: float | None) -> str:
        def tell(response: InferenceResponse) -> None:
            caller.told += 1

        request = InferenceRequest(
            caller.prompt,
            priority=caller.priority,
            deadline=deadline,
            max_wait_ms=None if own_wait is None else own_wait * 1e3,
            max_tokens=1,
            callback=tell,
        )
        try:
            response = await self.batcher.add_request(request, tenant=len(caller.prompt) % 3)
        except Overloaded:
            return "overloaded"
        except BatchwrightError:
            assert deadline is not None
            return "refused"
        if response.error is None:
            assert response.output == caller.prompt.upper()
            assert caller.kind == "fine"
            return "answered"
        return type(response.error.__cause__ or response.error).__name__

    @rule(seconds=st.sampled_from([0.001, 0.01, 0.05, 0.2, 1.0, 5.0]))
    def wait(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))
        self._turn()

    @rule(share=st.sampled_from([0.1, 0.5, 1.0]))
    def leave(self, share: float) -> None:
        for caller in self.callers.values():
            if caller.task is not None and not caller.task.done() and self.rng.random() < share:
                caller.is_gone = True
                caller.task.cancel()
        self._turn()

    @rule(number=st.integers(0, 2), mood=st.sampled_from(["fine", "fine", "down", "slow", "short", "dead"]))
    def change(self, number: int, mood: str) -> None:
        self._end_outage()
        self.models[number % len(self.models)].mood = mood
        if mood == "down" and len(self.models) == 1:
            self.outage = (self.models[0].calls, self._whole_batches)

    # What holds

    @precondition(lambda self: hasattr(self, "batcher"))
    @invariant()
    def no_model_is_free_beside_a_request_that_should_go(self) -> None:
        core = self.batcher._core
        if core is None:
            return
        assert isinstance(core, DispatchLoop)
        free = core._runner.slots - len(core._groups)
        if free <= 0 or (core._retries.breaker.is_doubtful and core._groups):
            return
        now = self.loop.time()
        for request in self.batcher.queue:
            caller = self.callers[request.prompt]
            assert now <= caller.arrived + caller.wait + _INSTANT, f"{caller} waits beside a free model"
        assert not core._retries._searches, "a part of a batch that failed waits beside a free model"

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        try:
            self._end_outage()
            for model in self.models:
                model.mood = "fine"
            self.loop.run_until_complete(self.batcher.close())
            self.loop.run_until_complete(asyncio.sleep(0))
            self._check()
        finally:
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.run_until_complete(asyncio.sleep(0))
            self.loop.close()

    def _check(self) -> None:
        fates: Counter[str] = Counter()
        for caller in self.callers.values():
            assert caller.task is not None
            assert caller.task.done(), f"{caller} has no answer"
            fate = "gone" if caller.task.cancelled() else caller.task.result()
            assert caller.told == (0 if fate in ("overloaded", "refused") else 1), caller
            assert caller.kind != "poison" or fate != "answered"
            fates[fate] += 1
        stats = self.batcher.stats()
        assert (stats.waiting, stats.running) == (0, 0)
        assert stats.requests == stats.succeeded + stats.failed + stats.expired + stats.cancelled
        assert stats.requests + stats.overloaded + stats.refused == len(self.callers)
        assert sum(level.refused for level in stats.levels.values()) == stats.overloaded + stats.refused
        assert sum(level.succeeded for level in stats.levels.values()) == stats.succeeded
        type(self).campaign.fates.update(fates)

    @property
    def _whole_batches(self) -> int:
        stats = self.batcher.stats()
        return stats.batches - stats.reasons.get("retry", 0)

    def _end_outage(self) -> None:
        """Check what it cost to find out that the only model was down, and to find out that it still is."""
        if self.outage is None:
            return
        calls, batches = self.outage
        self.outage = None
        taken, needed = self.models[0].calls - calls, self._whole_batches - batches
        # Requests that are tried again by themselves are calls that somebody asked for.
        if not self.retries:
            assert taken <= 1.2 * needed + MOST_IN_VAIN, f"{taken} calls for {needed} batches of an outage"

    def _turn(self) -> None:
        """Let everything happen that happens now."""
        for _ in range(12):
            self.loop.run_until_complete(asyncio.sleep(0))


def _campaign(examples: int) -> Campaign:
    class Fresh(Machine):
        campaign = Campaign()

    chosen = settings(
        max_examples=examples,
        stateful_step_count=30,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(Fresh, settings=chosen)
    return Fresh.campaign


def test_ten_thousand_requests_of_all_kinds_to_models_in_every_mood() -> None:
    campaign = _campaign(400)
    assert campaign.requests >= REQUESTS
    # All of it did happen.
    fates = {"answered", "gone", "overloaded", "refused", "DeadlineExceeded"}
    assert fates | {"ConnectionError", "ValueError", "LookupError", "WrongOutputs"} <= set(campaign.fates)
