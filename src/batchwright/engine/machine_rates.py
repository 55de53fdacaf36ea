"""Measurement of the best rates of this machine with the kernels of a model, and the file that stores them.

The rates are those of the model's own layers in steps that suit them: products of many rows, attention of many rows to
the same keys and of single rows to keys that stay in the cache, and a step of one row, which reads all weights. The
bandwidth of memory is that of a plain sum. The best of all repetitions counts. If few come near it, other programs use
the processors: the rate has not settled, and is measured again before long. All rates together have a time limit, since
on a busy machine a step may take many times as long: a rate with few repetitions counts as not settled. Until the next
measurement the stored rates only get better: `WorkMeter` finds what a run reaches beyond them. A measurement that has
settled replaces what was stored: a shared processor (a virtual machine) is faster on one day than on another.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import msgspec
import numpy as np
import torch

from batchwright.clock import Clock, MonotonicClock
from batchwright.durable_files import write_shared
from batchwright.engine.bodies.body import LEAST_POSITIONS, KernelSeconds, ModelBody
from batchwright.engine.native.build import processor
from batchwright.engine.step.batch import batch_of
from batchwright.models import cache_dir
from batchwright.models.cache import Progress
from batchwright.planning.bound import MachineRates, ModelCosts, NoBound, Work
from batchwright.version import __version__

_log = logging.getLogger(__name__)

_SECONDS = 0.4
"""Seconds for which each rate is measured, and for at least three steps."""
_LEAST_STEPS = 3
_MOST_SECONDS = 1.0
"""Seconds after which a rate that has not settled is taken as it is."""
_LIMIT = 10.0
"""Seconds for all rates together; a step that is being computed then is finished."""
_RATES = 5
_SETTLED_FOR = 86_400.0
"""Seconds for which rates are used before they are measured again."""
_UNSETTLED_FOR = 600.0
"""Seconds for which rates that have not settled are used."""
_NEAR = 1.03
"""Repetitions that take up to this many times as long as the best one agree with it."""
_MOST_OPERATIONS = 1.2e11
"""Approximate maximum of operations of a step, which a slow machine with a large model computes in a second."""
_ROWS = (512, 256, 128, 64)
_KEYS = 112
"""Keys of each row alone, in whole blocks: too few to be read for several rows together."""
_READ_BYTES = 2**27


def machine_rates(
    body: ModelBody,
    block_size: int,
    num_blocks: int,
    progress: Progress = lambda text: None,
    clock: Clock | None = None,
    *,
    again: bool = False,
) -> MachineRates:
    """Return the rates of this machine with `body`, whose KV cache must hold nothing that is still needed.

    They are measured once a day, in about two seconds, and stored in the cache folder; `again` measures them now. If
    measuring takes longer than ten seconds, the stored rates are used, if any. `progress` is called with a line of text
    when they are measured. Raises `NoBound` if the times of the body cannot be separated, its KV cache is too small for
    a measurement, or the machine was too busy for it and nothing is stored.
    """
    model, seconds = body.costs, body.watch()
    if model is None or seconds is None:
        raise NoBound("the times of the model's products and attention cannot be told apart here")
    path = _path(model, body)
    kept = _read(path)
    if kept is not None and not again and _age(path) < (_SETTLED_FOR if kept.settled else _UNSETTLED_FOR):
        return kept
    progress("measuring the rates of this machine")
    try:
        rates = _Probe(body, model, seconds, block_size, num_blocks, clock or MonotonicClock()).rates()
    except _TooSlow:
        if kept is None:
            raise NoBound(
                f"the rates of this machine could not be measured within {_LIMIT:.0f} s: it was busy with something "
                "else, or is slow for this model"
            ) from None
        rates = replace(kept, settled=False)
    return keep_rates(rates, body, measured=True)


def kept_rates(body: ModelBody) -> MachineRates | None:
    """Return the stored rates of this machine with `body`, if any."""
    return None if body.costs is None else _read(_path(body.costs, body))


def keep_rates(rates: MachineRates, body: ModelBody, *, measured: bool = False) -> MachineRates:
    """Store `rates`, merged with those already stored, and return the result.

    `measured`: whether they come from a measurement: if they have settled, they replace what is stored; if not, the
    stored rates count as not settled. Rates of a run do not postpone the next measurement.
    """
    model = body.costs
    if model is None:
        return rates
    path = _path(model, body)
    kept = _read(path)
    best = rates if kept is None or (measured and rates.settled) else kept.with_best(rates)
    best = replace(best, settled=rates.settled) if measured else best
    if best == kept and not measured:
        return best
    try:
        measured_at = path.stat().st_mtime if kept is not None and not measured else None
        write_shared(path, msgspec.json.encode(asdict(best)))
        if measured_at is not None:
            os.utime(path, (measured_at, measured_at))
    except OSError as error:
        _log.info("the rates of this machine are not kept: %s", error)
    return best


def _age(path: Path) -> float:
    """Return the seconds since the rates in a file were measured."""
    try:
        age = time.time() - path.stat().st_mtime
    except OSError:
        return 0.0  # it was there a moment ago
    return age if age >= 0.0 else math.inf  # a clock was set back


def _read(path: Path) -> MachineRates | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=MachineRates)
    except (OSError, msgspec.DecodeError):
        return None


def _path(model: ModelCosts, body: ModelBody) -> Path:
    """Return the file for this version, processor, thread count and model: rates depend on the shapes of products."""
    digest = hashlib.sha256()
    for text in (__version__, processor(), str(torch.get_num_threads()), body.description, repr(model)):
        digest.update(text.encode() + b"\0")
    return cache_dir() / "rates" / f"{digest.hexdigest()[:16]}.json"


class _TooSlow(Exception):
    """The time limit was over before each rate was measured."""


class _Probe:
    """Steps of one body for measurements only."""

    def __init__(
        self,
        body: ModelBody,
        model: ModelCosts,
        seconds: KernelSeconds,
        block_size: int,
        num_blocks: int,
        clock: Clock,
    ) -> None:
        self._body, self._model, self._seconds = body, model, seconds
        self._block_size, self._num_blocks = block_size, num_blocks
        self._clock = clock
        self._began = clock.now()
        self._measured = 0
        """Number of rates measured so far."""
        self._settled = True

    def rates(self) -> MachineRates:
        """Measure all rates. Raises `NoBound` if the KV cache is too small, and `_TooSlow`."""
        model = self._model
        most = int(_MOST_OPERATIONS / model.layer_operations)
        sizes = [rows for rows in _ROWS if rows <= max(most, _ROWS[-1]) and self._fits(rows)]
        if not sizes or not self._fits_alone(_ROWS[-1]):
            raise NoBound("the KV cache is too small to measure the rates of this machine")
        rows = sizes[0]
        took = self._best(lambda: self._prompt(rows, 0), _by_products)
        products = Work(rows=rows).product_operations(model) / took
        took = self._best(lambda: self._prompt(rows, rows), _by_attention)
        shared = model.pairs(rows, 2 * rows) * model.pair_operations / took
        alone = next(each for each in _ROWS if each in sizes and self._fits_alone(each))
        took = self._best(lambda: self._alone(alone), _by_attention)
        lone = alone * self._keys * sum(layers for _, layers in model.windows) * model.pair_operations / took
        return MachineRates(
            products=products,
            attention=shared,
            unshared_cost=max(1.0, shared / lone),
            least_step=self._best(lambda: self._prompt(1, 0), _by_products),
            bandwidth=self._bandwidth(),
            settled=self._settled,
        )

    @property
    def _keys(self) -> int:
        return _KEYS // self._block_size * self._block_size

    def _fits(self, rows: int) -> bool:
        return 2 * rows <= min(self._num_blocks * self._block_size, self._body.max_model_len, LEAST_POSITIONS)

    def _fits_alone(self, rows: int) -> bool:
        return rows + self._keys // self._block_size * 8 <= self._num_blocks

    def _best(self, step: Callable[[], object], kind: Callable[[KernelSeconds], float]) -> float:
        """Return the fewest seconds of one kind that a step took."""

        def timed() -> float:
            before = kind(self._seconds)
            step()
            return kind(self._seconds) - before

        self._require_time()
        step()
        return self._fewest(timed)

    def _require_time(self) -> None:
        if self._clock.now() - self._began >= _LIMIT:
            raise _TooSlow

    def _fewest(self, timed: Callable[[], float]) -> float:
        """Return the least of the seconds that `timed` returns, and record whether others came near it.

        The measurement of a rate ends when its share of the limit and the shares of the rates before it are over, so
        that it leaves time for the others. Raises `_TooSlow` if the whole limit is over before the first repetition.
        """
        self._require_time()
        self._measured += 1
        end = self._began + _LIMIT * self._measured / _RATES
        began, took = self._clock.now(), list[float]()
        while (spent := (now := self._clock.now()) - began) < _MOST_SECONDS or len(took) < _LEAST_STEPS:
            agreeing = sum(each <= _NEAR * min(took) for each in took)
            if (spent >= _SECONDS and agreeing >= _LEAST_STEPS) or (took and now >= end):
                break
            took.append(timed())
        self._settled = self._settled and sum(each <= _NEAR * min(took) for each in took) >= _LEAST_STEPS
        return min(took)

    def _bandwidth(self) -> float:
        """Return the bytes per second of a sum over memory that is in no cache."""
        values = torch.ones(_READ_BYTES // 4)

        def timed() -> float:
            began = time.perf_counter()
            values.sum()
            return time.perf_counter() - began

        return _READ_BYTES / self._fewest(timed)

    def _prompt(self, rows: int, start: int) -> None:
        blocks = -(-(start + rows) // self._block_size)
        self._step([rows], [start], np.arange(blocks, dtype=np.int32)[None], [])

    def _alone(self, rows: int) -> None:
        """Compute rows that each read the same keys as others, but in another order, and write their own."""
        shared = self._keys // self._block_size
        pool = shared * 8
        tables = (np.arange(rows)[:, None] + np.arange(shared)[None]) % pool
        own = pool + np.arange(rows)[:, None]
        self._step(
            [1] * rows, [self._keys] * rows, np.concatenate((tables, own), axis=1).astype(np.int32), list(range(rows))
        )

    def _step(
        self, counts: Sequence[int], starts: Sequence[int], tables: np.ndarray, logit_rows: Sequence[int]
    ) -> None:
        tokens = np.arange(sum(counts), dtype=np.int64) % self._body.vocab_size
        batch = batch_of(
            tokens,
            np.array(counts, np.int32),
            np.array(starts, np.int32),
            tables,
            np.array(logit_rows, np.int64),
            self._block_size,
            self._body.device,
        )
        with torch.inference_mode():
            self._body.output(batch, [False] * len(logit_rows))


def _by_products(seconds: KernelSeconds) -> float:
    return seconds.products


def _by_attention(seconds: KernelSeconds) -> float:
    return seconds.attention
