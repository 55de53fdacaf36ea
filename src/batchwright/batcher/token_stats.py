"""What a batcher that computes token by token did, beside the figures of every batcher."""

from __future__ import annotations

from dataclasses import dataclass, field

from batchwright.batcher.batcher_stats import BatcherStats
from batchwright.histograms import Histogram


@dataclass(slots=True)
class ContinuousStats(BatcherStats):
    """`BatcherStats` in which a batch is a step, and `occupancy` the mean number of sequences in a step.

    A step's reason is "full" when every slot was taken, and "idle" when nobody else waited. `tokens` are the lengths of
    the prompts that were begun, `generated_tokens` those of the outputs of requests that succeeded.
    """

    ttft_ms: Histogram = field(default_factory=Histogram)
    """From submission to the first token."""
    tpot_ms: Histogram = field(default_factory=Histogram)
    """Between two tokens of a sequence, its mean; of sequences that ended with at least two."""
