"""Lengths that answers may have, learned from those of like requests while a job runs."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import NamedTuple, TypeAlias

import numpy as np

_Histogram: TypeAlias = np.ndarray[tuple[int], np.dtype[np.float64]]

_GROWTH = 1.15
"""Ratio of the greatest length in a bin of a histogram to that in the bin before."""
_BINS = 90
"""Bins: the last one ends beyond 200,000 tokens."""
_FINE, _COARSE = 1.05, 2.0
"""Ratio of the most to the fewest prompt tokens in a cluster, and in what it falls back on."""
_PRIOR = 4.0
"""Answers as which all is counted that is known of a cluster from beyond it."""
_SURE = 0.995
"""Share of the answers of a cluster that are not longer than its `tail`."""
_MOST_CLUSTERS = 16_384
"""Clusters that are remembered, those used last."""


class Cluster(NamedTuple):
    """Requests whose answers are expected to have like lengths."""

    template: int | None
    """What their prompts begin with, by any number; None if nothing is known to be shared."""
    size: int
    """Prompt tokens, to within 5%."""


def _bins(tokens: float) -> int:
    return min(_BINS - 1, max(0, math.ceil(math.log(max(1.0, tokens)) / math.log(_GROWTH))))


_LENGTHS = _GROWTH ** np.arange(_BINS)
"""Greatest length in each bin."""


class ExpectedLengths:
    """Learns how long the answers to like requests are, and says how long others are going to be.

    Like are requests whose prompts begin alike and are equally long: traffic that is made by templates shows in both.
    What is not known of a cluster is filled in from requests with the same beginning and about the size, then from all
    with that beginning, then from all, and then from the limits of the requests. Takes 720 bytes for each cluster.
    """

    def __init__(self) -> None:
        self._counts: OrderedDict[tuple[int | None, int | None, int | None] | None, _Histogram] = OrderedDict()
        self.observed = 0
        """Number of answers that were observed."""

    @staticmethod
    def cluster(prompt_tokens: int, template: int | None = None) -> Cluster:
        """The cluster of a request with so many prompt tokens, which begins with `template`."""
        return Cluster(template, round(math.log(max(1, prompt_tokens)) / math.log(_FINE)))

    def observe(self, cluster: Cluster, tokens: int) -> None:
        """Learn the length of an answer."""
        self.observed += 1
        for key in _levels(cluster):
            counts = self._counts.get(key)
            if counts is None:
                counts = self._counts[key] = np.zeros(_BINS)
            counts[_bins(tokens)] += 1.0
            self._counts.move_to_end(key)
        while len(self._counts) > _MOST_CLUSTERS:
            self._counts.popitem(last=False)

    def mean(self, cluster: Cluster, limit: int) -> float:
        """Tokens that an answer has on average, which can have `limit`."""
        return float(self._shares(cluster, limit) @ np.minimum(_LENGTHS, limit))

    def tail(self, cluster: Cluster, limit: int) -> float:
        """Tokens that hardly any answer exceeds, which can have `limit`."""
        longer = np.cumsum(self._shares(cluster, limit)[::-1])[::-1]
        beyond = 1.0 - _SURE
        last = int(np.flatnonzero(longer > beyond)[-1]) if longer[0] > beyond else 0
        # How much of the bin is beyond tells clusters apart whose tails end in the same one.
        inside = (longer[last] - beyond) / max(1e-12, longer[last] - (longer[last + 1] if last + 1 < _BINS else 0.0))
        return min(float(limit), float(_LENGTHS[last] * (1.0 + (_GROWTH - 1.0) * min(1.0, inside)) / _GROWTH))

    def _shares(self, cluster: Cluster, limit: int) -> _Histogram:
        """The share of answers in each bin of lengths."""
        shares = np.zeros(_BINS)
        shares[_bins(limit)] = 1.0
        for key in reversed(_levels(cluster)):
            counts = self._counts.get(key)
            if counts is not None:
                shares = (counts + _PRIOR * shares) / (counts.sum() + _PRIOR)
        return shares


def _levels(cluster: Cluster) -> list[tuple[int | None, int | None, int | None] | None]:
    """Keys of what is known of a cluster, from all that concerns only it to what concerns all."""
    coarse = math.floor(cluster.size * math.log(_FINE) / math.log(_COARSE))
    template = cluster.template
    levels: list[tuple[int | None, int | None, int | None] | None] = [
        (template, coarse, cluster.size),
        (template, coarse, None),
    ]
    if template is not None:
        levels.append((template, None, None))
    return [*levels, None]
