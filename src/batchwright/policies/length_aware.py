"""Batches of like length under a budget of padded tokens.

The idea: a batch is padded to its longest request, so unlike lengths in one batch waste the difference. Whenever the
model is free, the waiting requests are divided into batches that take the least model time in all (`lengths.py`), each
within `max_batch_tokens` of padded tokens and `max_batch_size` requests, and the one goes that holds the first request
in order. So lengths decide who goes along with it, never whether it goes: nothing is stranded because its length is
rare. A request longer than the whole budget goes alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from batchwright.policies.item import Item
from batchwright.policies.latency import LatencyModel
from batchwright.policies.lengths import PaddedLimits, divide
from batchwright.policies.policy import Order, Policy, Timing

_LOOK_AHEAD = 4
"""So many batches' worth of waiting requests are looked at."""


class LikeLengths(PaddedLimits):
    """Shape: the first in order, with those of like length."""

    def choose(self, items: Sequence[Item], now: float, latency: LatencyModel) -> tuple[Sequence[Item], bool]:
        seen = items[: _LOOK_AHEAD * self.max_batch_size]
        batches = divide(seen, self.max_batch_size, self.max_batch_tokens, latency)
        # It stands first in every batch that takes its length, of which there may be several.
        return max((batch for batch in batches if batch[0][0] is seen[0]), key=lambda batch: len(batch[0]))


def length_aware(
    max_batch_tokens: int | None = 4096,
    max_batch_size: int = 32,
    *,
    order: Order | None = None,
    timing: Timing | None = None,
) -> Policy:
    """Like lengths together, at most `max_batch_tokens` padded tokens and `max_batch_size` requests in a batch."""
    return Policy(LikeLengths(max_batch_size, max_batch_tokens), order=order, timing=timing)
