"""Figures of what computes in this process, if anything does, whichever `Inference` holds it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from batchwright.inference.inference import Inference

if TYPE_CHECKING:
    from batchwright.batcher.batcher_stats import BatcherStats
    from batchwright.engine.engine_stats import EngineStats


def engine_stats(inference: Inference) -> EngineStats | None:
    """Return the figures of the engine that generates; None where none does."""
    engine: Any = next((part.engine for part in _parts(inference) if hasattr(part, "engine")), None)
    return None if engine is None else engine.stats


def batcher_stats(inference: Inference) -> list[BatcherStats]:
    """Return the figures of the batchers of embeddings."""
    return [part.batcher.stats() for part in _parts(inference) if hasattr(part, "batcher")]


def dispatch_reasons(inference: Inference) -> Mapping[str, int]:
    """Return the number of batches by the reason for which they were dispatched."""
    reasons: Counter[str] = Counter()
    for stats in batcher_stats(inference):
        reasons.update(stats.reasons)
    return reasons


def _parts(inference: Inference) -> Iterator[Any]:
    """Return the implementations behind a routed one, or the one itself."""
    routes = getattr(inference, "routes", None)
    yield from routes if routes is not None else (inference,)
