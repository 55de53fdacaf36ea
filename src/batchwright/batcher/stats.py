"""What a batcher did, and why: the figures behind "why didn't it batch?"."""

from __future__ import annotations

from dataclasses import dataclass, field

from batchwright.metrics import Histogram


@dataclass(slots=True)
class BatcherStats:
    """Counted since the batcher was made. Requests are counted once, where they end; times are milliseconds."""

    waiting: int = 0
    """Now, in the queue."""
    running: int = 0
    """Now, in the model."""
    requests: int = 0
    """Taken into the queue."""
    succeeded: int = 0
    failed: int = 0
    """Answered with an error of the model, or because the batcher was closed."""
    expired: int = 0
    """Their deadline passed while they waited or were computed."""
    cancelled: int = 0
    """Their callers went away."""
    overloaded: int = 0
    """Not taken: the queue was full."""
    refused: int = 0
    """Not taken: they were certain to miss their deadline."""
    batches: int = 0
    """Dispatched."""
    reasons: dict[str, int] = field(default_factory=dict)
    """Batches by why they were dispatched when they were."""
    splits: int = 0
    """Batches that failed and were computed again in two halves."""
    items: int = 0
    """Requests in dispatched batches."""
    tokens: int = 0
    """Lengths of the requests that the model computed, without padding."""
    cells: int = 0
    """The same with padding: for each batch its longest times its requests."""
    generated_tokens: int = 0
    """By the model's tokenizer; 0 when it has none."""
    model_seconds: float = 0.0
    """In the model, for batches that succeeded."""
    queue_ms: Histogram = field(default_factory=Histogram)
    """From submission to dispatch, of dispatched requests."""
    model_ms: Histogram = field(default_factory=Histogram)
    """Of a batch in the model."""
    latency_ms: Histogram = field(default_factory=Histogram)
    """From submission to the answer, of requests that succeeded."""

    @property
    def occupancy(self) -> float:
        """Mean number of requests in a batch."""
        return self.items / self.batches if self.batches else 0.0

    @property
    def padding_efficiency(self) -> float:
        """Lengths over padded lengths: 1.0 means that nothing was spent on padding."""
        return self.tokens / self.cells if self.cells else 1.0

    @property
    def tokens_per_second(self) -> float:
        """Lengths computed and tokens generated for each second in the model."""
        return (self.tokens + self.generated_tokens) / self.model_seconds if self.model_seconds else 0.0
