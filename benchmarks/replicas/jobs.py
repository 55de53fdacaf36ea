"""Jobs for the simulation: lengths of a real chat service, or drawn like them, behind prefixes of a Zipf law."""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Sequence
from itertools import accumulate, cycle, islice
from pathlib import Path

from benchmarks.replicas.device import Job

_LIMIT = 2048
"""`max_tokens` of each line."""
_PREFIX_KEYS = (8, 32)
"""Least and most keys of a prefix."""


def lengths(trace: Path | None, draw: random.Random) -> list[tuple[int, int]]:
    """Return tokens of prompts and answers, those of `trace`, or as many that are drawn with its quartiles."""
    if trace is None:
        prompts = [min(14_000, max(8, int(draw.lognormvariate(math.log(1020), 0.8)))) for _ in range(19_366)]
        return [(prompt, min(1_000, max(2, int(draw.lognormvariate(math.log(170), 0.8))))) for prompt in prompts]
    with trace.open() as file:
        return [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(file)]


def make_jobs(
    pairs: Sequence[tuple[int, int]], count: int, *, groups: int, exponent: float = 1.0, seed: int = 0
) -> list[Job]:
    """Return `count` lines with the lengths in `pairs`, in order, each behind one of `groups` prefixes."""
    draw = random.Random(seed)
    weights = list(accumulate(1 / rank**exponent for rank in range(1, groups + 1)))
    keys = [draw.randint(*_PREFIX_KEYS) for _ in range(groups)]
    chosen = draw.choices(range(groups), cum_weights=weights, k=count)
    return [
        Job(number, prompt + keys[group] * 64, answer, _LIMIT, group, keys[group])
        for number, (group, (prompt, answer)) in enumerate(zip(chosen, islice(cycle(pairs), count), strict=True))
    ]
