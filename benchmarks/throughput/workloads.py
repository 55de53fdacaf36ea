"""What is computed: prompts and forced output lengths, drawn from a fixed seed, the same for every system.

Lengths are the same in every round, tokens are not: what one round left in a prefix cache does not help the next.
"""

from __future__ import annotations

import csv
import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.throughput.workers.protocol import Job

SEED = 20260101
STANDARD = ("uniform-1", "uniform-16", "uniform-64", "uniform-256", "chat-64", "mixed-200", "shared-prefix")

_MOST_ROWS = 256
_TRACE_SCALE = 4
_MOST_PROMPT, _MOST_OUTPUT = 1500, 300
_UNIFORM = re.compile(r"uniform-(?P<count>\d+)(?::(?P<prompt>\d+)/(?P<output>\d+))?")


@dataclass(frozen=True, slots=True)
class Workload:
    """`lengths` are (prompt tokens, output tokens) of each request; the first `shared` prompt tokens are one text."""

    name: str
    description: str
    lengths: tuple[tuple[int, int], ...]
    shared: int = 0

    @property
    def rows(self) -> int:
        """Sequences that can be computed at once: the rows of the products that it is compared with."""
        return min(len(self.lengths), _MOST_ROWS)

    @property
    def prompt_tokens(self) -> int:
        return sum(prompt for prompt, _ in self.lengths)

    @property
    def generated(self) -> int:
        return sum(output for _, output in self.lengths)

    def job(self, round_number: int, vocab_size: int) -> Job:
        """The prompts of one round. Its tokens appear in no other round's."""
        draw = random.Random(f"{SEED}/{self.name}/{round_number}")
        ordinary = range(vocab_size // 40, vocab_size)  # the lowest ids are control tokens
        prefix = draw.choices(ordinary, k=self.shared)
        prompts = [prefix + draw.choices(ordinary, k=length - self.shared) for length, _ in self.lengths]
        return {"prompts": prompts, "outputs": [output for _, output in self.lengths]}

    def warm_up(self, vocab_size: int) -> Job:
        """A round that is not measured, with short outputs: every shape is met once, nothing is left to compile."""
        job = self.job(-1, vocab_size)
        return {"prompts": job["prompts"], "outputs": [min(output, 8) for output in job["outputs"]]}


def find_workload(name: str, trace: Path | None = None) -> Workload:
    """The workload called `name`; `trace` replaces the drawn lengths of `mixed-200`.

    Raises ValueError for an unknown name, or a trace that cannot be used.
    """
    if match := _UNIFORM.fullmatch(name):
        count, prompt, output = (int(match[key] or default) for key, default in _UNIFORM_DEFAULTS)
        if not (count and prompt and output):
            raise ValueError(f"workload {name!r}: its numbers must be at least 1")
        return Workload(name, f"{count} at once, {prompt} in, {output} out", ((prompt, output),) * count)
    if name == "mixed-200" and trace is not None:
        return _traced(name, trace)
    if name not in _NAMED:
        raise ValueError(
            f"workload {name!r}: must be one of {', '.join(STANDARD)}, uniform-N, or uniform-N:IN/OUT (such as "
            "uniform-8:100/20)"
        )
    return _NAMED[name](name)


_UNIFORM_DEFAULTS = (("count", 0), ("prompt", 16), ("output", 128))


def _chat(name: str) -> Workload:
    draw = random.Random(f"{SEED}/{name}")
    lengths = tuple((draw.randint(30, 150), draw.randint(32, 160)) for _ in range(64))
    return Workload(name, "64 chat prompts, 30 to 150 in, 32 to 160 out", lengths)


def _mixed(name: str) -> Workload:
    draw = random.Random(f"{SEED}/{name}")
    lengths = tuple(
        (_log_normal(draw, 150, 0.9, _MOST_PROMPT), _log_normal(draw, 50, 0.8, _MOST_OUTPUT)) for _ in range(200)
    )
    return Workload(name, f"200 of log-normal lengths, {_means(lengths)}", lengths)


def _shared_prefix(name: str) -> Workload:
    draw = random.Random(f"{SEED}/{name}")
    lengths = tuple((800 + draw.randint(20, 60), 32) for _ in range(200))
    return Workload(name, "200 questions of 20 to 60 behind one prefix of 800, 32 out", lengths, shared=800)


_NAMED: dict[str, Callable[[str], Workload]] = {"chat-64": _chat, "mixed-200": _mixed, "shared-prefix": _shared_prefix}


def _traced(name: str, trace: Path) -> Workload:
    with trace.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if len(rows) < 200 or not {"ContextTokens", "GeneratedTokens"} <= rows[0].keys():
        raise ValueError(f"{trace}: needs at least 200 rows with columns ContextTokens and GeneratedTokens")
    chosen = rows[:: len(rows) // 200][:200]
    lengths = tuple(
        (_scaled(row["ContextTokens"], _MOST_PROMPT), _scaled(row["GeneratedTokens"], _MOST_OUTPUT)) for row in chosen
    )
    return Workload(name, f"200 of the lengths in {trace.name} / {_TRACE_SCALE}, {_means(lengths)}", lengths)


def _scaled(tokens: str, most: int) -> int:
    return min(most, max(1, int(tokens) // _TRACE_SCALE))


def _log_normal(draw: random.Random, median: float, sigma: float, most: int) -> int:
    return min(most, max(1, round(draw.lognormvariate(math.log(median), sigma))))


def _means(lengths: tuple[tuple[int, int], ...]) -> str:
    count = len(lengths)
    return f"on average {sum(p for p, _ in lengths) // count} in, {sum(o for _, o in lengths) // count} out"
