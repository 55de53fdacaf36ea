"""Traces: requests with times and lengths, in the forms in which services publish them, or drawn at random.

The first line tells CSV from JSON Lines, and in these `input_length` tells one form from the other:

- CSV with `TIMESTAMP`, `ContextTokens` and `GeneratedTokens`: Azure's traces of LLM inference.
- JSON Lines with `timestamp` (milliseconds), `input_length`, `output_length` and `hash_ids`, one for each 512 tokens of
  the prompt: Mooncake's traces. Equal ids in equal places are equal prefixes.
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
from itertools import accumulate, count, islice
from typing import Any

import msgspec

from batchwright.errors import InputError, shown
from batchwright.scheduling.sizes import BLOCK_SIZE
from batchwright.simulation.requests import SimulatedRequest

_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MOONCAKE = ("timestamp", "input_length", "output_length")
_LOGGED = ("at", "prompt_tokens", "output_tokens")
_KNOWN = (
    f"known are CSV with {', '.join(_AZURE)}, and JSON Lines with {', '.join(_MOONCAKE)} or {', '.join(_LOGGED)}; "
    "prompts are a --job"
)
_HASHED_TOKENS = 512
_TRUNCATED = "Input data was truncated"
"""What msgspec says about an incomplete JSON text."""
_MOST_SECONDS = 1e12
MOST_TOKENS = 2**24
"""Most tokens of a prompt or an answer, more than any model takes: a larger number is not a length."""


def read_trace(lines: Iterable[str], name: str, most: int | None = None) -> list[SimulatedRequest]:
    """Return the requests of a trace in the order of their arrival, the first `most` of its lines with an answer.

    Times count from the first request. `name`: of the file, for errors. Raises `InputError` for a trace that is not of
    a known form, or has no request; answers without tokens are left out.
    """
    found = [*islice((request for request in _rows(iter(lines), name) if request is not None), most)]
    if not found:
        raise InputError(f"{name} has no request with an answer")
    return shifted(found)


def shifted(requests: Sequence[SimulatedRequest]) -> list[SimulatedRequest]:
    """Return requests sorted by their arrival, the first at 0."""
    ordered = sorted(requests, key=lambda each: each.arrived_at)
    first = ordered[0].arrived_at
    return [replace(each, arrived_at=each.arrived_at - first) for each in ordered]


def rate_of(requests: Sequence[SimulatedRequest]) -> float:
    """Return how many online requests a second arrive on average; infinity if all arrive at once.

    Of a trace that has none, all requests count.
    """
    times = _online_times(requests)
    seconds = max(times) - min(times)
    return max(1, len(times) - 1) / seconds if seconds > 0.0 else math.inf


def _online_times(requests: Sequence[SimulatedRequest]) -> list[float]:
    times = [each.arrived_at for each in requests]
    return [each.arrived_at for each in requests if each.traffic == "online"] or times


def with_rate(requests: Sequence[SimulatedRequest], rate: float) -> list[SimulatedRequest]:
    """Return requests whose times are stretched or shrunk so that `rate` online ones arrive a second.

    If those all arrive at once, they come one after the other instead, and others at their own times.
    """
    factor = rate_of(requests) / rate
    if factor == math.inf:
        return _online_at(requests, (number / rate for number in count()))
    return [replace(each, arrived_at=each.arrived_at * factor) for each in requests]


def poisson(requests: Sequence[SimulatedRequest], rate: float, seed: int) -> list[SimulatedRequest]:
    """Return requests of which the online ones arrive at random, in the same order, `rate` a second."""
    draw = random.Random(f"arrivals {seed}")
    return _online_at(requests, accumulate(draw.expovariate(rate) for _ in requests))


def _online_at(requests: Sequence[SimulatedRequest], times: Iterator[float]) -> list[SimulatedRequest]:
    """Return requests of which the online ones, or all if there are none, arrive at `times`."""
    moved = {each.traffic for each in requests} - {"batch"} or {"batch"}
    return [replace(each, arrived_at=next(times)) if each.traffic in moved else each for each in requests]


def drawn_lengths(requests: int, prompt: float, output: float, seed: int) -> list[SimulatedRequest]:
    """Return requests with random lengths of these means: exponential ones, about as wide as those of chats."""
    draw = random.Random(f"lengths {seed}")
    return [
        SimulatedRequest(prompt_tokens=_length(draw, prompt), output_tokens=_length(draw, output))
        for _ in range(requests)
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
            raise InputError(f"{name} is no trace: it has no column {missing[0]}; {_KNOWN}")
        for row in rows:
            yield _azure(row)
    except UnicodeDecodeError:
        raise  # of the file, which is read in pieces: it says nothing of this line
    except (csv.Error, TypeError, ValueError) as error:
        raise InputError(f"{name}, line {rows.reader.line_num}: {error}") from None


def _json_rows(lines: Iterator[str], name: str) -> Iterator[SimulatedRequest | None]:
    for number, text in enumerate(lines, 1):
        line = text.strip()
        if not line or "\0" in line:  # as a power failure leaves it
            continue
        try:
            row = msgspec.json.decode(line)
            if not isinstance(row, dict):
                raise ValueError(f"{shown(row)}: must be an object")
            if "input_length" not in row and row.keys().isdisjoint(_LOGGED):
                raise InputError(f"{name} is no trace: line {number} has no field of one; {_KNOWN}")
            yield _mooncake(row) if "input_length" in row else logged(row)
        except (TypeError, ValueError) as error:
            if not _is_torn(line, str(error)):
                raise InputError(f"{name}, line {number}: {error}") from None


def _is_torn(line: str, error: str) -> bool:
    """Return whether a line begins as one and has no end: it was being written when a machine went down."""
    torn_number = f"invalid number (byte {len(line.encode())})"
    return line.startswith("{") and (error == _TRUNCATED or error.endswith(torn_number))


def _azure(row: Mapping[str, str | None]) -> SimulatedRequest | None:
    at, *lengths = _AZURE
    prompt, output = (_whole_cell(row, each) for each in lengths)
    cell = _cell(row, at)
    try:
        # Digits of a second beyond the sixth are left out.
        moment = datetime.fromisoformat(cell)
    except ValueError:
        example = "2023-11-16 18:15:46.680590"
        raise ValueError(f"{at}={shown(cell)}: must be a date with a time, such as {example}") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return _request(moment.timestamp(), prompt, output)


def _cell(row: Mapping[str, str | None], name: str) -> str:
    if (cell := row[name]) is None:
        raise ValueError(f"it has no {name}: a row must have a value for each column that the first line names")
    return cell


def _whole_cell(row: Mapping[str, str | None], name: str) -> int:
    cell = _cell(row, name).strip()
    if not (cell.isascii() and cell.isdecimal()) or len(cell) > len(str(MOST_TOKENS)) or int(cell) > MOST_TOKENS:
        raise ValueError(f"{name}={shown(cell)}: must be a whole number of tokens, at most {MOST_TOKENS:,}")
    return int(cell)


def _mooncake(row: Mapping[str, Any]) -> SimulatedRequest | None:
    at, prompt, output = _times_and_lengths(row, _MOONCAKE, 1e3 * _MOST_SECONDS)
    ids = row.get("hash_ids", [])
    if not isinstance(ids, list) or not all(isinstance(each, int) for each in ids):
        raise ValueError(f"hash_ids={shown(ids)}: must be a list of whole numbers")
    if ids and len(ids) != (needed := -(-prompt // _HASHED_TOKENS)):
        raise ValueError(
            f"hash_ids={shown(ids)}: must be {needed:,} of them, not {len(ids):,}: one for each {_HASHED_TOKENS} "
            f"tokens of input_length={prompt}; or leave it out"
        )
    return _request(at / 1e3, prompt, output, blocks=tuple(ids), block_tokens=_HASHED_TOKENS)


def logged(row: Mapping[str, Any]) -> SimulatedRequest | None:
    """Return the request of a line of the service's log; None if it got no answer. Raises ValueError."""
    at, prompt, output = _times_and_lengths(row, _LOGGED, _MOST_SECONDS)
    if (traffic := row.get("class", "online")) not in ("online", "batch"):
        raise ValueError(f"class={shown(traffic)}: must be online or batch")
    cached = int(_number(row, "cached_tokens")) if "cached_tokens" in row else 0
    if cached > prompt:
        raise ValueError(f"cached_tokens={cached}: must be at most prompt_tokens={prompt}, of which they are a part")
    limit = int(_number(row, "max_tokens")) if "max_tokens" in row else 0
    # Only the length of what was found in the cache is known: it counts as the same prefix for all.
    blocks = tuple(range(cached // BLOCK_SIZE))
    return _request(at, prompt, output, blocks=blocks, block_tokens=BLOCK_SIZE, max_tokens=limit, traffic=traffic)


def _times_and_lengths(row: Mapping[str, Any], names: Sequence[str], latest: float) -> tuple[float, int, int]:
    at, prompt, output = names
    return float(_number(row, at, latest)), int(_number(row, prompt)), int(_number(row, output))


def _number(row: Mapping[str, Any], name: str, most: float = MOST_TOKENS) -> float:
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= most:
        raise ValueError(f"{name}={shown(value)}: must be a number from 0 to {most:,.0f}")
    return value


def _request(at: float, prompt: int, output: int, **more: Any) -> SimulatedRequest | None:
    return (
        SimulatedRequest(arrived_at=at, prompt_tokens=prompt, output_tokens=output, **more)
        if prompt and output
        else None
    )
