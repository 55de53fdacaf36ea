"""Who goes first, and how many, under more load than usual."""

from __future__ import annotations

import random

from batchwright import AdaptiveBatcher, Batcher, PriorityBatcher
from batchwright.policies import BySize, FairShare, Fifo, Order, Policy
from pictures.scenes.recording import Arrival, Run, poisson, record

TARGET_SECONDS = 0.1
BURST = (2.0, 4.0)
SECOND_TENANT_COMES = 5.0


def adaptive() -> Run:
    """75 requests/s, and four times as many for two seconds."""
    begin, end = BURST
    arrivals = poisson(75, begin) + poisson(300, end, since=begin, seed=2) + poisson(75, 6, since=end, seed=3)
    return record(arrivals, lambda model, clock: AdaptiveBatcher(model, clock=clock), 0.03, 2e-5)


def adaptive_misused() -> Run:
    """A target that not even one request alone can keep."""
    return record(
        poisson(75, 2),
        lambda model, clock: AdaptiveBatcher(model, target_latency_ms=30, clock=clock),
        0.03,
        2e-5,
    )


def priority() -> Run:
    """For a minute a fifth more work than the model can do."""
    return record(
        poisson(16 * 1.2, 60, arrival=_of_three),
        lambda model, clock: PriorityBatcher(model, clock=clock),
        0.5,
        3.125e-4,
    )


def priority_misused() -> Run:
    """Few requests: each waits for others, however urgent it is, though the model is free."""
    return record(
        poisson(8, 20, arrival=_of_three), lambda model, clock: PriorityBatcher(model, clock=clock), 0.02, 1e-5
    )


def fair(*, shared: bool = True) -> Run:
    """Tenant A sends 160 requests at once; B comes later, with 40."""
    order: Order = FairShare() if shared else Fifo()
    arrivals = [Arrival(0.0, tenant="A") for _ in range(160)]
    arrivals += [Arrival(SECOND_TENANT_COMES, tenant="B") for _ in range(40)]
    return record(
        arrivals,
        lambda model, clock: Batcher(model, Policy(BySize(8), order=order), clock=clock),
        0.2,
        1e-3,
    )


def first_come() -> Run:
    """The same requests, first come, first served."""
    return fair(shared=False)


def _of_three(at: float, draw: random.Random) -> Arrival:
    return Arrival(at, priority=draw.choices((0, 5, 7), (1, 7, 2))[0])
