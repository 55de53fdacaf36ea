"""Lengths that answers may have, learned from those of similar requests while a job runs."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

_Bins = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
"""One or more histograms."""
_Histogram: TypeAlias = np.ndarray[tuple[int], np.dtype[np.float64]]
_Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
_Shares = np.ndarray[tuple[int, int], np.dtype[np.float64]]

_GROWTH = 1.15
"""Ratio of the greatest length in a bin of a histogram to that in the bin before."""
_BINS = 90
"""Bins: the last one ends beyond 200,000 tokens."""
_FINE, _COARSE = 1.05, 2.0
"""Ratio of the most to the fewest prompt tokens in a cluster, and in what it falls back on."""
_PRIOR = 4.0
"""Number of answers that everything known from beyond a cluster counts as."""
_SURE = 0.995
"""Share of the answers of a cluster that are not longer than its `Lengths.tails`."""
_MOST_CLUSTERS = 16_384
"""Most histograms that are remembered, those used last."""


class Template(NamedTuple):
    """What prompts begin with."""

    number: int
    """Equal for equal prefixes only."""
    blocks: int
    """Length, in blocks of the KV cache."""


class Cluster(NamedTuple):
    """Requests whose answers are expected to have similar lengths."""

    template: Template | None
    """What their prompts begin with; None if nothing is known to be shared."""
    size: int
    """Logarithm of the number of prompt tokens to the base 1.05, rounded."""
    broader: Template | None = None
    """Another prefix of theirs, with which more requests begin."""

    @property
    def blocks(self) -> int:
        """Length of the template; 0 if there is none."""
        return 0 if self.template is None else self.template.blocks


class Lengths(NamedTuple):
    """Lengths that answers may have, one of each kind for each answer."""

    means: _Floats
    tails: _Floats
    """Tokens that hardly any answer exceeds."""


class _Level(NamedTuple):
    """What answers have in common that are counted together."""

    template: Template | None = None
    coarse: int | None = None
    size: int | None = None


def _bin(tokens: int) -> int:
    return min(_BINS - 1, max(0, math.ceil(math.log(max(1.0, tokens)) / math.log(_GROWTH))))


_LENGTHS = _GROWTH ** np.arange(_BINS)
"""Greatest length in each bin."""


class ExpectedLengths:
    """Learns how long the answers to similar requests are, and predicts the lengths of others.

    Requests are similar if their prompts begin alike and are equally long: traffic made from templates shows in both.
    What is not known of a cluster is filled in from requests with the same prefix and about the same size, then from
    all with that prefix, then from those with the broader one, then from all, and then from the limits of the requests.
    Takes 720 bytes for each of these.
    """

    def __init__(self) -> None:
        self._counts: OrderedDict[_Level, _Histogram] = OrderedDict()
        self.observed = 0
        """Number of answers that were observed."""

    @staticmethod
    def cluster(prompt_tokens: int, template: Template | None = None, broader: Template | None = None) -> Cluster:
        """The cluster of a request with `prompt_tokens` tokens that begins with `template`."""
        return Cluster(template, round(math.log(max(1, prompt_tokens)) / math.log(_FINE)), broader)

    def observe(self, cluster: Cluster, tokens: int) -> None:
        """Learn the length of an answer."""
        self.observed += 1
        for key in _levels(cluster):
            if key is None:
                continue
            counts = self._counts.get(key)
            if counts is None:
                counts = self._counts[key] = np.zeros(_BINS)
            counts[_bin(tokens)] += 1.0
            self._counts.move_to_end(key)
        while len(self._counts) > _MOST_CLUSTERS:
            self._counts.popitem(last=False)

    def mean(self, cluster: Cluster, limit: int) -> float:
        """Mean number of tokens of an answer that can have at most `limit`."""
        shares: _Bins = np.zeros(_BINS)
        shares[_bin(limit)] = 1.0
        for key in reversed(_levels(cluster)):
            if key is not None and (counts := self._counts.get(key)) is not None:
                shares = _with(counts, shares)
        return float(shares @ np.minimum(_LENGTHS, limit))

    def of(self, answers: Sequence[tuple[Cluster, int]]) -> Lengths:
        """The lengths of answers of clusters, each with its limit."""
        shares = self._shares([cluster for cluster, _ in answers], [limit for _, limit in answers])
        limits = np.array([limit for _, limit in answers], np.int64)
        means = (shares * np.minimum(_LENGTHS, limits[:, None])).sum(axis=1)
        return Lengths(means, np.minimum(limits, _exceeded(shares, 1.0 - _SURE)))

    def _shares(self, clusters: Sequence[Cluster], limits: Sequence[int]) -> _Shares:
        """For each answer, the shares of the bins of lengths, of shape (answers, bins)."""
        shares = np.zeros((len(clusters), _BINS))
        shares[np.arange(len(clusters)), [_bin(limit) for limit in limits]] = 1.0
        # From what is known of all to what is known of each.
        for keys in reversed([*zip(*map(_levels, clusters), strict=True)]):
            known = {place: self._counts[key] for place, key in enumerate(keys) if key in self._counts}
            if known:
                places, counts = [*known], np.array([*known.values()])
                shares[places] = _with(counts, shares[places])
        return shares


def _with(counts: _Bins, shares: _Bins) -> _Bins:
    """The shares of bins once `counts` answers were observed in each, if `shares` was known before."""
    found: _Bins = (counts + _PRIOR * shares) / (counts.sum(axis=-1, keepdims=True) + _PRIOR)
    return found


def _exceeded(shares: _Shares, beyond: float) -> _Floats:
    """For each row of shares of bins, the length that the share `beyond` of answers exceeds."""
    longer = np.cumsum(shares[:, ::-1], axis=1)[:, ::-1]
    last = np.maximum(0, (longer > beyond).sum(axis=1) - 1)
    rows = np.arange(len(shares))
    # How much of the bin is beyond distinguishes clusters whose tails end in the same one.
    inside = (longer[rows, last] - beyond) / np.maximum(1e-12, shares[rows, last])
    found: _Floats = _LENGTHS[last] * (1.0 + (_GROWTH - 1.0) * np.minimum(1.0, inside)) / _GROWTH
    return found


def _levels(cluster: Cluster) -> tuple[_Level | None, ...]:
    """Keys of what is known of a cluster, from what concerns only it to what concerns all; None where it has none.

    The tuples of all clusters are equally long.
    """
    coarse = math.floor(cluster.size * math.log(_FINE) / math.log(_COARSE))
    template, broader = cluster.template, cluster.broader
    return (
        _Level(template, coarse, cluster.size),
        _Level(template, coarse),
        None if template is None else _Level(template),
        None if broader is None else _Level(broader, coarse),
        None if broader is None else _Level(broader),
        _Level(),
    )
