"""Batchers with fixed policies, under names and settings that are common in the field."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

from batchwright.batcher.batcher import Batcher, in_seconds, waits_in_seconds
from batchwright.batcher.model import Model
from batchwright.policies import adaptive, length_aware, priority, simple, window
from batchwright.policies.adaptive import TargetLatency
from batchwright.policies.checks import check_size
from batchwright.request import InferenceRequest, InferenceResponse, Prompt


class SimpleBatcher(Batcher):
    """Batcher that waits for `batch_size` requests, or until the oldest has waited `max_wait_ms`.

    Use it if you know the size that suits your model and requests come steadily. If few come, each waits `max_wait_ms`
    although the model is free; with `Batcher(model)` none ever does.
    """

    def __init__(self, model: Model, batch_size: int = 8, max_wait_ms: float = 100, **options: Any) -> None:
        check_size("batch_size", batch_size)
        super().__init__(model, simple(batch_size, in_seconds("max_wait_ms", max_wait_ms)), **options)
        self.batch_size: Final = batch_size
        self.max_wait_ms: Final = max_wait_ms


class TimeBasedBatcher(Batcher):
    """Batcher with windows of `window_ms`: all requests that arrive in a window are computed together when it ends.

    Use it if a small fixed delay is acceptable and you want few, full batches. A batch has at most `max_batch_size`
    requests, and is dispatched before the window ends once that many have arrived.
    """

    def __init__(self, model: Model, window_ms: float = 50, max_batch_size: int = 32, **options: Any) -> None:
        super().__init__(model, window(in_seconds("window_ms", window_ms), max_batch_size), **options)
        self.window_ms: Final = window_ms
        self.max_batch_size: Final = max_batch_size


class AdaptiveBatcher(Batcher):
    """Batcher of the largest batches that keep answers within `target_latency_ms`, as learned from the model.

    Use it if you know how long an answer may take, but not how large batches should be. It never holds back a request
    while the model is free. It starts with `min_batch_size` and at most doubles from batch to batch.
    """

    def __init__(
        self,
        model: Model,
        min_batch_size: int = 1,
        max_batch_size: int = 32,
        target_latency_ms: float = 100,
        **options: Any,
    ) -> None:
        target_latency = in_seconds("target_latency_ms", target_latency_ms, above_zero=True)
        policy = adaptive(target_latency, min_batch_size, max_batch_size)
        self._shape = cast(TargetLatency, policy.shape)
        super().__init__(model, policy, **options)
        self.min_batch_size: Final = min_batch_size
        self.max_batch_size: Final = max_batch_size
        self.target_latency_ms: Final = target_latency_ms

    @property
    def current_batch_size(self) -> int:
        """Maximum number of requests in a batch now."""
        return self._shape.largest_size(self._backlog.latency)

    @property
    def latency_history(self) -> list[float]:
        """Milliseconds that each of the last hundred batches took in the model, the most recent last."""
        return list(self._stats.recent_model_ms)


@dataclass(order=True, slots=True)
class PrioritizedRequest:
    """A request with a priority that overrides its own, for `PriorityBatcher`. Ordered by priority."""

    priority: int
    request: InferenceRequest | Prompt = field(compare=False)


class PriorityBatcher(Batcher):
    """Batcher that computes the most urgent requests first: `add_request(request, priority=0)` precedes the default 5.

    Within one priority the order is first come, first served, except that requests whose deadline is near go first. A
    waiting request gains one step of priority every ten seconds, so nothing waits forever. A batch is dispatched when
    `batch_size` requests are waiting, or one has waited `max_wait_ms`, which may be a mapping: with `{0: 0, 5: 20, 9:
    500}` priorities 0 to 4 do not wait, 5 to 8 wait up to 20 ms, and those from 9 on up to 500 ms.
    """

    def __init__(
        self, model: Model, batch_size: int = 16, max_wait_ms: float | Mapping[int, float] = 100, **options: Any
    ) -> None:
        check_size("batch_size", batch_size)
        super().__init__(model, priority(batch_size, waits_in_seconds(max_wait_ms)), **options)
        self.batch_size: Final = batch_size
        self.max_wait_ms: Final = max_wait_ms

    async def add_request(
        self,
        request: InferenceRequest | Prompt | PrioritizedRequest,
        priority: int | None = None,
        *,
        deadline: float | None = None,
        tenant: Hashable = None,
    ) -> InferenceResponse:
        """Do as `Batcher.add_request`; `priority` may be the second argument, or come from a `PrioritizedRequest`."""
        if isinstance(request, PrioritizedRequest):
            priority = request.priority if priority is None else priority
            request = request.request
        return await super().add_request(request, priority=priority, deadline=deadline, tenant=tenant)


class LengthAwareBatcher(Batcher):
    """Batcher that puts requests of similar length together, because a batch is padded to its longest request.

    Use it if lengths differ much. A batch has at most `max_batch_size` requests and `max_batch_tokens` tokens including
    padding; a longer request is computed alone. Whenever the model is free, the oldest request is dispatched, with
    others that suit it, so a rare length waits no longer than others. Lengths are tokens if the model has a `tokenizer`
    or prompts are token ids; otherwise set `length=` to measure them, or choose the budget in characters.
    """

    def __init__(self, model: Model, max_batch_tokens: int = 4096, max_batch_size: int = 32, **options: Any) -> None:
        super().__init__(model, length_aware(max_batch_tokens, max_batch_size), **options)
        self.max_batch_tokens: Final = max_batch_tokens
        self.max_batch_size: Final = max_batch_size
