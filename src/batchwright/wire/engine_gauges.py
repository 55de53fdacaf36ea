"""What engines report of the requests that they compute, that wait in them, and that they can compute at once.

Names of metrics are those of vLLM, SGLang, llama.cpp's server, text-generation-inference and batchwright itself.
llama.cpp's server has no metrics unless they are switched on, but reports its slots.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

_RUNNING = frozenset(
    {
        "vllm:num_requests_running",
        "sglang:num_running_reqs",
        "llamacpp:requests_processing",
        "tgi_batch_current_size",
        "batchwright_engine_running_sequences",
    }
)
_WAITING = frozenset(
    {
        "vllm:num_requests_waiting",
        "sglang:num_queue_reqs",
        "llamacpp:requests_deferred",
        "tgi_queue_size",
        "batchwright_engine_waiting_sequences",
    }
)
_SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{.*\})?\s+([0-9.eE+-]+)", re.ASCII)


class Queue(NamedTuple):
    """Requests in an engine."""

    running: float
    waiting: float


class _Properties(msgspec.Struct):
    total_slots: int


def slots_of(properties: str) -> int | None:
    """Return how many requests llama.cpp's server computes at once, as its `/props` say; None: they do not."""
    try:
        slots = msgspec.json.decode(properties, type=_Properties).total_slots
    except msgspec.DecodeError:
        return None
    return slots if slots > 0 else None


def queue_of(metrics: str) -> Queue | None:
    """Return the requests in the engine with these metrics, in Prometheus's text format; None: they do not say.

    The figures of several models, ranks or classes of traffic are added up.
    """
    running = waiting = 0.0
    found = False
    for line in metrics.splitlines():
        if line.startswith("#") or (match := _SAMPLE.match(line)) is None:
            continue
        name, text = match.groups()
        if name in _RUNNING or name in _WAITING:
            try:
                value = float(text)
            except ValueError:
                continue
            found = found or name in _WAITING
            running += value if name in _RUNNING else 0.0
            waiting += value if name in _WAITING else 0.0
    return Queue(running, waiting) if found else None
