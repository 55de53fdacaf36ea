"""Which requests go together: by length, and by memory."""

from __future__ import annotations

import random

from batchwright import LengthAwareBatcher, MemoryEfficientBatcher, SimpleBatcher
from pictures.scenes.recording import Arrival, Run, poisson, record

REQUESTS = 48
BATCH_SIZE = 8
MEMORY_MB = 800.0
SHORTAGE = (6.0, 10.0)
"""Seconds between which another program takes memory away."""
MB_LEFT = 480.0


def length_aware() -> Run:
    """32 requests of unlike lengths at once."""
    return record(_at_once(), lambda model, clock: LengthAwareBatcher(model, 4096, BATCH_SIZE, clock=clock), 0.01, 1e-5)


def as_they_come() -> Run:
    """The same requests, in the order in which they came."""
    return record(_at_once(), lambda model, clock: SimpleBatcher(model, BATCH_SIZE, clock=clock), 0.01, 1e-5)


def length_aware_working() -> Run:
    """500 requests/s of unlike lengths."""
    return record(
        poisson(500, 4, arrival=lambda at, draw: Arrival(at, round(draw.lognormvariate(4.6, 0.8)))),
        lambda model, clock: LengthAwareBatcher(model, clock=clock),
        0.01,
        1e-5,
    )


def length_aware_misused() -> Run:
    """The same for a second, with lengths in characters, four to a token, and the budget meant for tokens."""
    return record(
        poisson(500, 1, arrival=lambda at, draw: Arrival(at, 4 * round(draw.lognormvariate(4.6, 0.8)))),
        lambda model, clock: LengthAwareBatcher(model, max_batch_tokens=512, clock=clock),
        0.01,
        2.5e-6,
    )


def memory() -> Run:
    """Batches under a limit of 800 MB, of which another program takes 320 MB for four seconds."""

    def fault(start: float, cells: int) -> Exception | None:
        left = MB_LEFT if SHORTAGE[0] <= start < SHORTAGE[1] else MEMORY_MB
        return MemoryError("out of memory") if cells > left else None

    return record(
        poisson(70, 35, arrival=_long),
        lambda model, clock: MemoryEfficientBatcher(model, MEMORY_MB, 1, clock=clock),
        0.05,
        2.5e-4,
        fault=fault,
    )


def memory_misused() -> Run:
    """`tokens_per_mb` four times too high: batches may be four times what fits."""

    def fault(start: float, cells: int) -> Exception | None:
        return MemoryError("out of memory") if cells > MEMORY_MB else None

    return record(
        poisson(70, 35, arrival=_long),
        lambda model, clock: MemoryEfficientBatcher(model, MEMORY_MB, 4, clock=clock),
        0.05,
        2.5e-4,
        fault=fault,
    )


def _long(at: float, draw: object) -> Arrival:
    return Arrival(at, 50)


def _at_once() -> list[Arrival]:
    draw = random.Random(5)
    return [Arrival(0.0, round(draw.lognormvariate(4.3, 0.7))) for _ in range(REQUESTS)]
