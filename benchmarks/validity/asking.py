"""Answers of a model to many schemas, and their outcomes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from batchwright import Engine, InvalidRequest, SamplingParams
from benchmarks.validity.refusals import keyword_of
from benchmarks.validity.sources import Source
from benchmarks.validity.validators import Validators

_AT_ONCE = 100
"""Schemas of one call: fewer than the engine keeps compiled."""


@dataclass(slots=True)
class Outcome:
    """Outcomes of the schemas of one source, and of the answers."""

    accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """Number of refusals by keyword."""
    refusals: list[str] = field(default_factory=list)
    """Name and reason of each."""
    unreadable: int = 0
    """Accepted schemas that neither validator can read."""
    whole: int = 0
    cut: int = 0
    failed: list[str] = field(default_factory=list)
    checked: int = 0
    """Complete answers that at least one validator has judged."""
    rejected: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """Processor time to compile or refuse each schema."""

    def compile_ms(self) -> tuple[float, float, float]:
        """Return the median, the 99th percentile and the greatest time of a schema in milliseconds."""
        half, most, all_of_them = np.percentile(self.seconds or [0.0], [50, 99, 100]) * 1e3
        return float(half), float(most), float(all_of_them)


def ask(
    engine: Engine,
    source: Source,
    outcome: Outcome,
    samples: int,
    max_tokens: int,
    bias: Mapping[int, float],
) -> Iterator[None]:
    """Add to `outcome` what becomes of the schemas, and yield after each part of them."""
    seeds = count()
    for start in range(0, len(source.schemas), _AT_ONCE):
        some = source.schemas[start : start + _AT_ONCE]
        prompts: list[str] = []
        params: list[SamplingParams] = []
        asked: list[tuple[str, dict[str, Any]]] = []
        for name, schema in some:
            own = _compiled(engine, name, schema, outcome)
            for _ in range(samples if own is not None else 0):
                prompts.append(f"An example of {str(schema.get('title') or name)[:80]} as JSON:\n")
                params.append(
                    SamplingParams(
                        schema=schema, max_tokens=max_tokens, temperature=1.0, seed=next(seeds), logit_bias=bias
                    )
                )
                asked.append((name, schema))
        if prompts:
            _judge(outcome, asked, engine.generate(prompts, params))
        yield


def _compiled(engine: Engine, name: str, schema: dict[str, Any], outcome: Outcome) -> Any:
    """Compile a schema, which the engine then keeps. Return its matcher, None if it is refused."""
    began = time.thread_time()
    try:
        constraint = SamplingParams(schema=schema).constraint
        assert constraint is not None
        matcher = engine.core.grammars.matcher(constraint)
    except InvalidRequest as error:
        outcome.refused[keyword_of(str(error))] += 1
        outcome.refusals.append(f"{name}: {error}")
        matcher = None
    else:
        outcome.accepted += 1
    outcome.seconds.append(time.thread_time() - began)
    return matcher


def _judge(outcome: Outcome, asked: Sequence[tuple[str, dict[str, Any]]], responses: Sequence[Any]) -> None:
    known: dict[str, Validators] = {}
    for (name, schema), response in zip(asked, responses, strict=True):
        if name not in known:
            known[name] = Validators.of(schema)
            outcome.unreadable += known[name].reference is None and known[name].other is None
        if response.error is not None:
            outcome.failed.append(f"{name}: {response.error}")
        elif response.finish_reason == "length":
            outcome.cut += 1
        else:
            outcome.whole += 1
            outcome.checked += known[name].reference is not None or known[name].other is not None
            outcome.rejected += [
                f"{name}: {rejection}\n    {response.output}"
                for rejection in known[name].rejections(response.output)[:1]
            ]
