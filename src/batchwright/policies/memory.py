"""Batches that fit in memory.

The idea: a batch is a rectangle that is padded to its longest prompt and grows by as many tokens as its longest answer
may have, so it needs

    MB = (longest prompt + most max_tokens) · items / tokens_per_mb

and as many requests go together as keep this within the limit. The formula is an estimate, so the limit in use is
learned: if a batch runs out of memory all the same, the limit falls to three quarters of the smallest size that failed,
and grows back by a two-hundredth of the configured limit with every batch that fitted and used at least half of it. It
never exceeds the configured limit. A size that failed while a larger one fitted says something about a request, not
about the size, and so does a request that failed alone: neither lowers the limit.

A request that exceeds the limit by itself is refused on arrival. One that exceeds only the limit in use goes alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from batchwright.errors import ContextLengthExceeded
from batchwright.policies.checks import check_time
from batchwright.policies.latency import LatencyModel
from batchwright.policies.orders import Urgency
from batchwright.policies.policy import Item, Order, Policy, Shape, Timing

_FALL = 0.75
_GROWTH = 0.005
"""Growth with every batch that fitted, as a share of the configured limit."""
_LOOK_AHEAD = 4
"""Number of requests that are considered, as a multiple of the first ones that fit."""
_SEEN_AT_LEAST = 128


class Memory:
    """Estimate of the MB that a batch needs, and the limit on them, which is learned.

    `max_memory_mb` is the memory that batches may take, `tokens_per_mb` the number of tokens of a padded batch that one
    MB holds. Raises ValueError, naming the setting, for one that is not a finite number above 0.
    """

    def __init__(self, max_memory_mb: float = 8000, tokens_per_mb: float = 1000) -> None:
        check_time("max_memory_mb", max_memory_mb, above_zero=True)
        check_time("tokens_per_mb", tokens_per_mb, above_zero=True)
        self.max_memory_mb = float(max_memory_mb)
        self.tokens_per_mb = tokens_per_mb
        self.limit_mb = self.max_memory_mb
        """Limit in use."""

    def megabytes(self, longest: int, most_generated: int, count: int) -> float:
        """Return the MB for `count` requests whose longest prompt and greatest `max_tokens` are given in tokens."""
        return (longest + most_generated) * count / self.tokens_per_mb

    def estimate(self, items: Sequence[Item]) -> float:
        """Return the MB that a batch of `items` needs; 0 for none."""
        longest = max((item.length for item in items), default=0)
        return self.megabytes(longest, max((item.max_tokens for item in items), default=0), len(items))

    def leading(self, items: Sequence[Item]) -> int:
        """Return how many of the first `items` fit together into the limit in use; at least one, if there are any."""
        longest = generated = 0
        for count, item in enumerate(items, 1):
            longest = max(longest, item.length)
            generated = max(generated, item.max_tokens)
            if self.megabytes(longest, generated, count) > self.limit_mb and count > 1:
                return count - 1
        return len(items)

    def admits(self, item: Item) -> bool:
        """Return whether `item` alone fits into the configured limit."""
        return self.megabytes(item.length, item.max_tokens, 1) <= self.max_memory_mb

    def check(self, item: Item) -> None:
        """Raise `ContextLengthExceeded` for an item that exceeds the limit even alone."""
        if self.admits(item):
            return
        alone = self.megabytes(item.length, item.max_tokens, 1)
        raise ContextLengthExceeded(
            f"prompt: with {item.length} tokens and up to {item.max_tokens} to generate it needs an estimated "
            f"{alone:.6g} MB alone, max_memory_mb is {self.max_memory_mb:.6g}: shorten it, lower max_tokens, or "
            "raise max_memory_mb"
        )

    def learn(self, fitted: Sequence[Sequence[Item]], failed: Sequence[Sequence[Item]]) -> None:
        """Learn which of the parts of one batch were computed, and which ran out of memory."""
        most = max(map(self.estimate, fitted), default=0.0)
        too_much = [size for part in failed if len(part) > 1 and (size := self.estimate(part)) > most]
        if too_much:
            self.limit_mb = min(self.limit_mb, max(most, _FALL * min(too_much)))
        elif 2 * most >= self.limit_mb:
            self.limit_mb = min(self.max_memory_mb, self.limit_mb + _GROWTH * self.max_memory_mb)


class WithinMemory(Shape):
    """Shape that takes as many requests of another shape's batch, or of all that wait, as fit in `memory`.

    The first in order always goes. If the other shape keeps the order, the first ones that fit go with it; otherwise
    those that enlarge the batch least, that is, similar lengths, but less urgent requests only after all others.
    """

    memory: Memory

    def __init__(self, memory: Memory, inner: Shape | None = None) -> None:
        self.memory = memory
        self.inner = inner
        self.keeps_order = inner is not None and inner.keeps_order

    @property
    def max_batch_tokens(self) -> int | None:
        return None if self.inner is None else self.inner.max_batch_tokens

    @property
    def max_batch_size(self) -> int:
        most = max(1, int(self.memory.limit_mb * self.memory.tokens_per_mb))
        return most if self.inner is None else min(most, self.inner.max_batch_size)

    def choose(self, items: Sequence[Item], now: float, latency: LatencyModel) -> tuple[Sequence[Item], bool]:
        full = False
        if self.inner is not None:
            items, full = self.inner.choose(items, now, latency)
        leading = self.memory.leading(items)
        if leading == len(items) or self.keeps_order:
            return items[:leading], full or leading < len(items)
        return self._like_the_first(items[: max(_LOOK_AHEAD * leading, _SEEN_AT_LEAST)]), True

    def _like_the_first(self, items: Sequence[Item]) -> Sequence[Item]:
        """Return the largest batch with the first of `items`, in order; nearly so if their `max_tokens` differ."""
        first = items[0]

        def growth(index: int) -> tuple[bool, int]:
            item = items[index]
            row = max(first.length, item.length) + max(first.max_tokens, item.max_tokens)
            return item.level > first.level, row

        nearest = sorted(range(len(items)), key=growth)
        chosen = nearest[: self.memory.leading([items[index] for index in nearest])]
        return [items[index] for index in sorted(chosen)]


def within_memory(
    max_memory_mb: float = 8000,
    tokens_per_mb: float = 1000,
    *,
    inner: Shape | None = None,
    order: Order | None = None,
    timing: Timing | None = None,
) -> Policy:
    """Return a policy that takes the most requests that fit into `max_memory_mb`, chosen by `inner` if given.

    The most urgent go first. `tokens_per_mb` is the number of tokens of a padded batch that one MB holds.
    """
    return Policy(WithinMemory(Memory(max_memory_mb, tokens_per_mb), inner), order=order or Urgency(), timing=timing)
