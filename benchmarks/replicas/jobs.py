"""Jobs for the simulation: lengths of a real chat service, or drawn like them, behind prefixes of a Zipf law."""

from __future__ import annotations

import csv
import random
from collections.abc import Sequence
from itertools import accumulate, cycle, islice
from pathlib import Path

from benchmarks.replicas.device import Job

LIMIT = 2048
"""`max_tokens` of each line."""
_SHARES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
_PROMPTS = (8, 181, 396, 1020, 1189, 4083, 4142, 14_050)
"""Tokens that these shares of the prompts of the Azure trace of conversations do not exceed; then of its answers."""
_ANSWERS = (2, 41, 85, 129, 395, 451, 601, 1000)
_PREFIX_KEYS = (8, 32)
"""Least and most keys of a prefix."""


def lengths(trace: Path | None, draw: random.Random) -> list[tuple[int, int]]:
    """Return tokens of prompts and answers, those of `trace`, or as many that are drawn with quantiles like its."""
    if trace is None:
        return [(_drawn(_PROMPTS, draw), _drawn(_ANSWERS, draw)) for _ in range(19_366)]
    with trace.open() as file:
        return [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(file)]


def _drawn(quantiles: Sequence[int], draw: random.Random) -> int:
    share = draw.random()
    position = max(index for index, each in enumerate(_SHARES[:-1]) if share >= each)
    (low, high), (start, end) = quantiles[position : position + 2], _SHARES[position : position + 2]
    return round(low + (high - low) * (share - start) / (end - start))


def make_jobs(
    pairs: Sequence[tuple[int, int]], count: int, *, groups: int, exponent: float = 1.0, seed: int = 0
) -> list[Job]:
    """Return `count` lines with the lengths in `pairs`, in order, each behind one of `groups` prefixes."""
    draw = random.Random(seed)
    weights = list(accumulate(1 / rank**exponent for rank in range(1, groups + 1)))
    keys = [draw.randint(*_PREFIX_KEYS) for _ in range(groups)]
    chosen = draw.choices(range(groups), cum_weights=weights, k=count)
    return [
        Job(number, prompt + keys[group] * 64, answer, LIMIT, group, keys[group])
        for number, (group, (prompt, answer)) in enumerate(zip(chosen, islice(cycle(pairs), count), strict=True))
    ]
