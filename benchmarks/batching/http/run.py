"""The runs, and their results."""

from __future__ import annotations

import contextlib
import json
import math
import random
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.batching.device import Cost
from benchmarks.batching.goodput import capacity
from benchmarks.batching.http.load import Load
from benchmarks.batching.http.server import ROOT, Server, ServerFailed
from benchmarks.batching.http.systems import HttpSystem
from benchmarks.batching.workload import Workload

COST = Cost(alpha=0.02, beta=4e-5)
"""Slow enough for full batches at some 310 requests a second (fixed lengths), far below what any of the servers can
take in, so that what is compared is their batching and not their HTTP."""
LOADS = (0.5, 0.75, 0.9, 1.1)
"""Shares of the rate that greedy full batches, in order of arrival, would keep up with."""
_WARM_UP_S = 1.5
_WARM_UP_SEED = 1_000_000


@dataclass(frozen=True, slots=True)
class Scenario:
    """A load that every system is given."""

    lengths: str
    load: float
    faults: bool = False

    @property
    def workload(self) -> Workload:
        return Workload(lengths=self.lengths, faults=self.faults)

    @property
    def rate(self) -> float:
        """Requests per second."""
        return self.load * capacity(COST, self.lengths, None)


SCENARIOS = (
    *(Scenario("fixed", load) for load in LOADS),
    Scenario("fixed", LOADS[0], faults=True),
    *(Scenario("lognormal", load) for load in LOADS),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """One system with one setting in one scenario, over all seeds."""

    system: str
    settings: Mapping[str, Any]
    scenario: Scenario
    requests: int
    in_time: list[float]
    """The share answered correctly within the SLO, for each seed."""
    p50: float | None
    """Seconds over all seeds; None if that many were not answered correctly."""
    p99: float | None
    errors: dict[str, int]
    lag: float
    """The longest delay, in seconds, with which the generator sent a request."""
    generator: float
    """The largest share of its core that the generator used."""

    @property
    def mean(self) -> float:
        return sum(self.in_time) / len(self.in_time)


def summarise(system: str, settings: Mapping[str, Any], scenario: Scenario, loads: Sequence[Load]) -> Measured:
    """Combine the seeds."""
    latencies = sorted(math.inf if each is None else each for load in loads for each in load["latencies"])
    errors: Counter[str] = Counter()
    for load in loads:
        errors.update(load["errors"])

    def within(share: float) -> float | None:
        latency = latencies[math.ceil(share * len(latencies)) - 1]
        return latency if math.isfinite(latency) else None

    return Measured(
        system,
        settings,
        scenario,
        len(latencies),
        [load["in_time"] for load in loads],
        within(0.5),
        within(0.99),
        dict(errors),
        max(load["lag"][1] for load in loads),
        max(load["cpu"] for load in loads),
    )


def python_of(system: HttpSystem) -> Path:
    """The interpreter of the system's environment; it may not be there."""
    return ROOT / ".bench" / system.environment / "bin" / "python"


def free_port() -> int:
    """A port that nothing uses, at any address of this machine.

    It lies below the ports that systems give to outgoing connections, so that none of those takes it in the meantime.
    """
    for port in random.SystemRandom().sample(range(20_000, 32_768), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise OSError("no free port among 100 between 20000 and 32767")


def compare(
    systems: Sequence[HttpSystem],
    scenarios: Sequence[Scenario],
    seeds: int,
    seconds: float,
    say: Callable[[str], None],
) -> Iterator[Measured]:
    """Measure each system with each of its settings, one server after the other.

    A system that is not installed, or fails, is left out, and the output says so.
    """
    for system in systems:
        python = python_of(system)
        if not python.exists():
            say(f"{system.name} is skipped: no {python}, make it with benchmarks/setup_batching.sh")
            continue
        for settings in system.settings:
            say(f"{system.name} {json.dumps(settings)}")
            try:
                with Server(system, python, COST, settings, free_port()) as server:
                    yield from _measure(system.name, settings, server, scenarios, seeds, seconds)
            except ServerFailed as error:
                say(f"{system.name} {json.dumps(settings)} failed: {error}")


def _measure(
    name: str, settings: Mapping[str, Any], server: Server, scenarios: Sequence[Scenario], seeds: int, seconds: float
) -> Iterator[Measured]:
    warm: set[str] = set()
    for scenario in scenarios:
        rate = scenario.rate
        if scenario.lengths not in warm:
            # Some learn how long batches take; that phase must not count against them.
            server.load(Workload(lengths=scenario.lengths), rate, math.ceil(rate * _WARM_UP_S), _WARM_UP_SEED)
            warm.add(scenario.lengths)
        loads = []
        for seed in range(seeds):
            server.settle()
            loads.append(server.load(scenario.workload, rate, math.ceil(rate * seconds), seed))
        yield summarise(name, settings, scenario, loads)
