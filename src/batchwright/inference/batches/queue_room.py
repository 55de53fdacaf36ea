"""`QueueRoom`: how much more a provider's queue accepts, for each model."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection

from batchwright.inference.batches.held import OpenBatch
from batchwright.submitting.enqueueing import EnqueuedTokens, named_limit

_log = logging.getLogger(__name__)
_FEWEST = 8
"""Lines of a batch that is not split further, even if the provider says that too much is enqueued."""


class QueueRoom:
    """The limits of enqueued tokens, learned from what the provider accepts. `full_for`: see `BatchTimes`."""

    def __init__(self, batches: Collection[OpenBatch], full_for: float) -> None:
        """`batches`: the current batches that are sealed but not collected."""
        self._batches = batches
        self._full_for = full_for
        self._limits: dict[str | None, EnqueuedTokens] = {}
        """By model."""

    def most_of_one(self, model: str | None, now: float) -> float:
        """Return how many tokens a new batch may have."""
        return self._limit(model).most_of_one(now)

    def takes(self, batch: OpenBatch, now: float) -> bool:
        """Whether a batch may be submitted, or may have been already."""
        model = batch.entry.model
        return batch.may_exist or self._limit(model).has_room(batch.entry.tokens, self._enqueued(model), now)

    def opens_at(self, batch: OpenBatch, now: float) -> float:
        """Return when a batch without room may be tried again, if no other batch ends before."""
        closed_until = self._limit(batch.entry.model).closed_until
        return closed_until if closed_until > now else math.inf

    def took(self, batch: OpenBatch, now: float) -> None:
        """Record that the provider is computing a batch, whose input it has checked."""
        model = batch.entry.model
        accepted = (each.entry.tokens for each in self._batches if each.entry.model == model and each.is_accepted)
        self._limit(model).took(sum(accepted), now)

    def ended(self, batch: OpenBatch) -> None:
        """Record that a batch has ended."""
        self._limit(batch.entry.model).ended()

    def refused(self, batch: OpenBatch, message: str, now: float) -> bool:
        """Record that the provider would accept a batch if less were enqueued. True if it is too large by itself."""
        model, tokens = batch.entry.model, batch.entry.tokens
        limit = self._limit(model)
        others = self._enqueued(model) - (tokens if batch.may_exist else 0.0)
        limit.refuse(tokens, others, now, named_limit(message))
        too_large = tokens > limit.most_of_one(now) and batch.entry.lines > _FEWEST
        if others <= 0 and not too_large:
            limit.closed_until = now + self._full_for
        _log.info("the provider has as much enqueued as it takes: %s", message)
        return too_large

    def _limit(self, model: str | None) -> EnqueuedTokens:
        return self._limits.setdefault(model, EnqueuedTokens())

    def _enqueued(self, model: str | None) -> float:
        """Return the tokens of a model's batches that may be at the provider."""
        return sum(each.entry.tokens for each in self._batches if each.entry.model == model and each.may_exist)
