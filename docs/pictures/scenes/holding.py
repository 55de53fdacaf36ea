"""When batches go: fixed size, windows, and at once."""

from __future__ import annotations

import random

from batchwright import Batcher, SimpleBatcher, TimeBasedBatcher
from pictures.scenes.recording import Arrival, Run, poisson, record

MODEL_SECONDS = 0.05
WINDOW_SECONDS = 0.05


def simple() -> Run:
    """Two full batches, two that wait their 100 ms."""
    return record(
        _at_ms(5, 15, 25, 40, 60, 78, 95, 110, 150, 185, 330),
        lambda model, clock: SimpleBatcher(model, batch_size=4, clock=clock),
        MODEL_SECONDS,
    )


def simple_working() -> Run:
    """200 requests/s, which fill eight places in 40 ms."""
    return record(poisson(200, 5), lambda model, clock: SimpleBatcher(model, clock=clock), 0.02, 1e-5)


def simple_misused() -> Run:
    """10 requests/s, which do not fill them in 100 ms."""
    return record(poisson(10, 20), lambda model, clock: SimpleBatcher(model, clock=clock), 0.02, 1e-5)


def window() -> Run:
    """Windows that begin with a request, one of them while the model is busy."""
    return record(
        _at_ms(10, 22, 38, 71, 95, 108, 118, 124, 150, 240, 262, 330),
        lambda model, clock: TimeBasedBatcher(model, clock=clock),
        0.035,
    )


def window_working() -> Run:
    """300 requests/s, about fifteen to a window."""
    return record(poisson(300, 5), lambda model, clock: TimeBasedBatcher(model, clock=clock), 0.02, 1e-5)


def window_misused() -> Run:
    """5 requests/s: a window for each."""
    return record(poisson(5, 20), lambda model, clock: TimeBasedBatcher(model, clock=clock), 0.02, 1e-5)


def auto() -> Run:
    """Alone when the model is free, together when it is busy."""
    return record(
        _at_ms(10, 25, 33, 41, 52, 64, 70, 81, 90, 103, 118, 230, 300, 318),
        lambda model, clock: Batcher(model, clock=clock),
        MODEL_SECONDS,
    )


def auto_working() -> Run:
    """300 requests/s of unlike lengths."""
    return record(
        poisson(300, 5, arrival=_unlike),
        lambda model, clock: Batcher(model, clock=clock),
        0.02,
        1e-5,
    )


def auto_misused() -> Run:
    """One caller, whose next request comes when the one before has been answered."""
    return record(
        [Arrival(number * 0.025) for number in range(200)], lambda model, clock: Batcher(model, clock=clock), 0.02, 1e-5
    )


def _unlike(at: float, draw: random.Random) -> Arrival:
    return Arrival(at, round(draw.lognormvariate(4.6, 0.5)))


def _at_ms(*moments: float) -> list[Arrival]:
    return [Arrival(moment / 1e3) for moment in moments]
