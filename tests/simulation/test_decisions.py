"""The twin decides as the engine does: the same plans for the same requests, step by step, at the same times."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tests.engine.support import TINY, tiny_model

from batchwright import Engine, InferenceRequest
from batchwright.clock import ManualClock
from batchwright.engine_config import EngineConfig
from batchwright.request import Flow, Traffic
from batchwright.scheduling import Scheduler, StepPlan
from batchwright.scheduling.slo import StepShape
from batchwright.scheduling.step_costs import StepCosts
from batchwright.simulation.replica import Served, SimulatedReplica
from batchwright.simulation.requests import SimulatedRequest

COSTS = StepCosts((10e-3, 0.3e-3, 4e-7, 0.2e-3, 2e-6, 0.1e-3, 0.1e-3, 0.1e-3))
_SIZES: dict[str, Any] = {"max_batch_tokens": 48, "max_num_seqs": 6, "device": "cpu", "dtype": "float32"}
Plan = tuple[float, tuple[tuple[int, int, int], ...]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model(folder, "llama", **TINY)
    return folder


def drawn(seed: int, *, flows: bool) -> list[SimulatedRequest]:
    """Requests of both classes, in bursts, some with a common prefix."""
    draw, at, found = random.Random(seed), 0.0, []
    for number in range(40):
        at += draw.choice((0.0, 0.0, 0.02, 0.3))
        traffic: Traffic = draw.choice(("online", "batch"))
        flow = Flow(f"owner{draw.randrange(3)}", f"r{number}") if flows and traffic == "online" else None
        found.append(
            SimulatedRequest(
                arrived_at=at,
                prompt_tokens=draw.choice((1, 9, 40, 100, 130)),
                output_tokens=draw.randint(1, 20),
                traffic=traffic,
                blocks=(draw.randrange(1, 3),) * draw.randrange(3),
                block_tokens=16,
                flow=flow,
            )
        )
    return found


def noted(scheduler: Scheduler) -> list[Plan]:
    """Have a scheduler note its plans."""
    plans: list[Plan] = []
    schedule = scheduler.schedule

    def noting(now: float) -> StepPlan:
        plan = schedule(now)
        if plan.chunks:
            plans.append(
                (round(now, 9), tuple((each.sequence.ordinal, each.start, each.count) for each in plan.chunks))
            )
        return plan

    scheduler.schedule = noting  # type: ignore[method-assign]
    return plans


def engine_plans(model: Path, config: EngineConfig, requests: list[SimulatedRequest]) -> list[Plan]:
    """The plans of the engine, whose clock goes on by what a step costs when it has been computed."""
    clock = ManualClock()
    with Engine(model, config, clock=clock) as engine:
        scheduler = engine.core.scheduler
        plans, commit, draw = noted(scheduler), scheduler.commit, random.Random(0)

        def committed(plan: StepPlan) -> None:
            clock.advance(COSTS.seconds(StepShape.of(plan.chunks)))
            commit(plan)

        scheduler.commit = committed  # type: ignore[method-assign]
        arrived = 0
        while arrived < len(requests) or engine.unfinished:
            while arrived < len(requests) and requests[arrived].arrived_at <= clock.now():
                each = requests[arrived]
                tokens = [block for block in each.blocks for _ in range(16)][: each.prompt_tokens // 16 * 16]
                tokens += [draw.randrange(10, 199) for _ in range(each.prompt_tokens - len(tokens))]
                engine.core.add(
                    InferenceRequest(
                        tokens, max_tokens=each.output_tokens, ignore_eos=True, traffic=each.traffic, flow=each.flow
                    ),
                    submitted_at=each.arrived_at,
                )
                arrived += 1
            if engine.unfinished:
                engine.step()
            else:
                clock.advance(max(0.0, requests[arrived].arrived_at - clock.now()) + 1e-12)
    return plans


def twin_plans(model: Path, config: EngineConfig, requests: list[SimulatedRequest]) -> list[Plan]:
    """The plans of the twin."""
    with Engine(model, config) as engine:
        sizes = engine.facts.sizes(config)
        rows = engine.core.scheduler.max_scored
    replica = SimulatedReplica(
        sizes.scheduler(config, max_scored=rows), COSTS, max_model_len=sizes.max_model_len, seed=None
    )
    plans, now, arrived = noted(replica.scheduler), 0.0, 0
    while arrived < len(requests) or len(replica):
        while arrived < len(requests) and requests[arrived].arrived_at <= now:
            replica.add(Served(requests[arrived], arrived))
            arrived += 1
        if (end := replica.begin(now)) is None:
            now = max(now, requests[arrived].arrived_at) + 1e-12
        else:
            now = end
            replica.end(now)
    return plans


@pytest.mark.parametrize(
    "options",
    [{}, {"tpot_ms": 18.0, "ttft_ms": 60.0}, {"kv_memory": "160KiB"}, {"prefix_caching": False, "batch_share": 0.3}],
    ids=["plain", "slo", "little memory", "no cache"],
)
@pytest.mark.parametrize("flows", [False, True], ids=["one flow", "several"])
def test_plans_are_the_same(model: Path, options: dict[str, Any], flows: bool) -> None:
    config = EngineConfig(drafting=False, **_SIZES, **options)
    requests = drawn(1, flows=flows)
    assert twin_plans(model, config, requests) == engine_plans(model, config, requests)
