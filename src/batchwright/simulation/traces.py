"""Traces: requests with times and lengths, in the forms in which services publish them, and drawn ones.

Three forms are told apart by their first line:

- CSV with `TIMESTAMP`, `ContextTokens` and `GeneratedTokens`: Azure's traces of LLM inference.
- JSON Lines with `timestamp` (milliseconds), `input_length`, `output_length` and `hash_ids`, one for each 512 tokens of
  the prompt: Mooncake's traces. Equal ids in equal places are equal beginnings.
- JSON Lines with `at` (seconds), `prompt_tokens` and `output_tokens`, and perhaps `cached_tokens`, `max_tokens` and
  `class` (online or batch): the service's own log of requests (the setting `trace_log`).
"""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice
from typing import Any

import msgspec

from batchwright.errors import InputError, shown
from batchwright.simulation.requests import SimulatedRequest

_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MOONCAKE = ("timestamp", "input_length", "output_length")
_LOGGED = ("at", "prompt_tokens", "output_tokens")
_HASHED_TOKENS = 512
_CACHED_BLOCK = 16


def read_trace(lines: Iterable[str], name: str, most: int | None = None) -> list[SimulatedRequest]:
    """Return the requests of a trace in the order of their arrival, the first `most` lines of it if that is given.

    Times count from the first request. `name`: of the file, for errors. Raises `InputError` for a trace that is not of
    a known form, or has no request; answers without tokens are left out.
    """
    rows = islice(_rows(iter(lines), name), most)
    found = [request for request in rows if request is not None]
    if not found:
        raise InputError(f"{name} has no request with an answer")
    return shifted(found)


def shifted(requests: Sequence[SimulatedRequest]) -> list[SimulatedRequest]:
    """Return requests by their arrival, the first of which is at 0."""
    ordered = sorted(requests, key=lambda each: each.arrived_at)
    first = ordered[0].arrived_at
    return [replace(each, arrived_at=each.arrived_at - first) for each in ordered]


def rate_of(requests: Sequence[SimulatedRequest]) -> float:
    """Return how many requests a second arrive on average; infinity if all arrive at once."""
    seconds = max(each.arrived_at for each in requests)
    return max(1, len(requests) - 1) / seconds if seconds > 0.0 else math.inf


def with_rate(requests: Sequence[SimulatedRequest], rate: float) -> list[SimulatedRequest]:
    """Return requests whose times are stretched or shrunk so that `rate` of them arrive a second."""
    factor = rate_of(requests) / rate
    if factor == math.inf:
        return [replace(each, arrived_at=number / rate) for number, each in enumerate(requests)]
    return [replace(each, arrived_at=each.arrived_at * factor) for each in requests]


def poisson(requests: Iterable[SimulatedRequest], rate: float, seed: int) -> list[SimulatedRequest]:
    """Return requests in the same order that arrive at random, `rate` a second."""
    draw, now, found = random.Random(seed), 0.0, []
    for each in requests:
        now += draw.expovariate(rate)
        found.append(replace(each, arrived_at=now))
    return found


def drawn_lengths(count: int, prompt: float, output: float, seed: int) -> list[SimulatedRequest]:
    """Return requests with random lengths of these means: exponential ones, about as wide as those of chats."""
    draw = random.Random(seed)
    return [
        SimulatedRequest(prompt_tokens=_length(draw, prompt), output_tokens=_length(draw, output)) for _ in range(count)
    ]


def _length(draw: random.Random, mean: float) -> int:
    return max(1, round(draw.expovariate(1.0 / mean)))


def _rows(lines: Iterator[str], name: str) -> Iterator[SimulatedRequest | None]:
    first = next(lines, "")
    if first.lstrip().startswith("{"):
        yield from _json_rows(_chain(first, lines), name)
        return
    yield from _csv_rows(_chain(first, lines), name)


def _chain(first: str, lines: Iterator[str]) -> Iterator[str]:
    yield first
    yield from lines


def _csv_rows(lines: Iterator[str], name: str) -> Iterator[SimulatedRequest | None]:
    rows = csv.DictReader(lines)
    try:
        columns = rows.fieldnames or ()
        if missing := [each for each in _AZURE if each not in columns]:
            raise InputError(
                f"{name} is no trace: it has no column {missing[0]}; known are CSV with {', '.join(_AZURE)}, and JSON "
                f"Lines with {', '.join(_MOONCAKE)} or {', '.join(_LOGGED)}"
            )
        for row in rows:
            yield _azure(row)
    except UnicodeDecodeError:
        raise  # of the file, which is read in pieces: it says nothing of this line
    except (csv.Error, TypeError, ValueError) as error:
        raise InputError(f"{name}, line {rows.reader.line_num}: {error}") from None


def _json_rows(lines: Iterator[str], name: str) -> Iterator[SimulatedRequest | None]:
    for number, line in enumerate(lines, 1):
        # A line without its end was being written when a machine went down.
        if not line.rstrip().endswith("}"):
            continue
        try:
            row = msgspec.json.decode(line)
            if not isinstance(row, dict):
                raise ValueError(f"{shown(row)}: must be an object")
            yield _mooncake(row) if "input_length" in row else logged(row)
        except (TypeError, ValueError) as error:
            raise InputError(f"{name}, line {number}: {error}") from None


def _azure(row: Mapping[str, str | None]) -> SimulatedRequest | None:
    at, prompt, output = (_cell(row, each) for each in _AZURE)
    # What a second has beyond six digits is left out.
    moment = datetime.fromisoformat(at)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return _request(moment.timestamp(), int(prompt), int(output))


def _cell(row: Mapping[str, str | None], name: str) -> str:
    if (cell := row[name]) is None:
        raise ValueError(f"it has no {name}: a row must have a value for each column that the first line names")
    return cell


def _mooncake(row: Mapping[str, Any]) -> SimulatedRequest | None:
    at, prompt, output = (_number(row, each) for each in _MOONCAKE)
    ids = row.get("hash_ids", [])
    if not isinstance(ids, list) or not all(isinstance(each, int) for each in ids):
        raise ValueError(f"hash_ids={shown(ids)}: must be a list of whole numbers")
    return _request(at / 1e3, int(prompt), int(output), blocks=tuple(ids), block_tokens=_HASHED_TOKENS)


def logged(row: Mapping[str, Any]) -> SimulatedRequest | None:
    """Return the request of a line of the service's log; None if it got no answer. Raises ValueError."""
    at, prompt, output = (_number(row, each) for each in _LOGGED)
    if (traffic := row.get("class", "online")) not in ("online", "batch"):
        raise ValueError(f"class={shown(traffic)}: must be online or batch")
    cached = int(_number(row, "cached_tokens")) if "cached_tokens" in row else 0
    limit = int(_number(row, "max_tokens")) if "max_tokens" in row else 0
    # What was found in the cache is known by its length alone: it counts as the same beginning for all.
    blocks = tuple(range(min(cached, int(prompt)) // _CACHED_BLOCK))
    return _request(
        at, int(prompt), int(output), blocks=blocks, block_tokens=_CACHED_BLOCK, max_tokens=limit, traffic=traffic
    )


def _number(row: Mapping[str, Any], name: str) -> float:
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"{name}={shown(value)}: must be a number of at least 0")
    return value


def _request(at: float, prompt: int, output: int, **more: Any) -> SimulatedRequest | None:
    return (
        SimulatedRequest(arrived_at=at, prompt_tokens=prompt, output_tokens=output, **more)
        if prompt and output
        else None
    )
