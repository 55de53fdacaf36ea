"""The engine's core around a model that computes nothing, and how long each of its steps takes."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from batchwright import InferenceRequest
from batchwright.clock import MonotonicClock
from batchwright.engine.attention import KVShape
from batchwright.engine.bodies import ModelBody
from batchwright.engine.core import EngineCore
from batchwright.engine.step import launcher
from batchwright.engine.step.batch import StepBatch
from batchwright.engine.tokenizer import Tokenizer
from batchwright.kv import BlockManager
from batchwright.scheduling import Scheduler, SloController

PIECES = ("scheduling", "batch building", "commit", "learning and counting", "delivery")
_BLOCK_SIZE = 16
_PROMPT = 16
_OUTPUTS = (64, 192)
"""Of the requests, in turn, evenly from the first to the second."""
_LATER = 3
"""Requests that follow each that is there at the beginning, and take its place."""


@dataclass(frozen=True, slots=True)
class Case:
    """So many sequences at a time, of which `batch` are a batch's, under an SLO on online tokens or none."""

    name: str
    sequences: int
    batch: int = 0
    tpot_ms: float | None = None


CASES = (
    Case("64 sequences", 64),
    Case("256 sequences", 256),
    Case("256, half of them a batch's, SLO of 80 ms", 256, batch=128, tpot_ms=80.0),
)


class FixedLogits(ModelBody):
    """Every token is followed by the same one, at once."""

    name = "stub"
    vocab_size = 256
    max_model_len = 4096
    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(self, most: int) -> None:
        super().__init__()
        self._logits = torch.zeros(most, self.vocab_size)
        self._logits[:, 7] = 1.0

    @property
    def description(self) -> str:
        return "no model"

    def kv_shapes(self, num_blocks: int, block_size: int, attention: str) -> list[KVShape]:
        return []

    def forward(self, batch: StepBatch) -> Tensor:
        return self._logits[: batch.logit_rows.shape[0]]


@dataclass(slots=True)
class Steps:
    """Milliseconds of each step in which all places were taken, the model and the choice of tokens left out."""

    total: list[float] = field(default_factory=list)
    pieces: dict[str, list[float]] = field(default_factory=lambda: {piece: [] for piece in PIECES})
    sampling: list[float] = field(default_factory=list)
    """The choice of tokens, from the few logits of the stub."""

    @property
    def median(self) -> float:
        return statistics.median(self.total)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.total)

    @property
    def p99(self) -> float:
        return sorted(self.total)[int(0.99 * len(self.total))]


def measure(case: Case, rounds: int) -> Steps:
    """Run the requests of `case` `rounds` times, after once to warm up."""
    steps = Steps()
    _run(case, Steps())
    for _ in range(rounds):
        _run(case, steps)
    return steps


def _run(case: Case, steps: Steps) -> None:
    core, watch = _core(case), _Watch()
    waiting = _requests(case)
    with watch.over(core):
        _feed(core, waiting, 2 * case.sequences)
        while core.unfinished:
            rows = core.stats.occupancy_sum
            began = time.perf_counter()
            core.step()
            seconds = time.perf_counter() - began
            taken = watch.take()
            if core.stats.occupancy_sum - rows == case.sequences:
                _note(steps, seconds, taken)
            _feed(core, waiting, 2 * case.sequences)


def _core(case: Case) -> EngineCore:
    longest = _PROMPT + _OUTPUTS[1]
    blocks = BlockManager(2 * case.sequences * -(-longest // _BLOCK_SIZE), _BLOCK_SIZE)
    slo = SloController(tpot=None if case.tpot_ms is None else case.tpot_ms / 1e3)
    scheduler = Scheduler(blocks, max_batch_tokens=512, max_num_seqs=case.sequences, batch_share=0.05, slo=slo)
    with tempfile.TemporaryDirectory() as empty:
        tokenizer = Tokenizer(Path(empty), FixedLogits.vocab_size)
    return EngineCore(FixedLogits(case.sequences), tokenizer, scheduler, MonotonicClock(), max_model_len=longest)


def _requests(case: Case) -> Iterator[InferenceRequest]:
    least, most = _OUTPUTS
    for number in range((1 + _LATER) * case.sequences):
        yield InferenceRequest(
            prompt=[number % 251, number // 251, *range(_PROMPT - 2)],
            max_tokens=least + number * 37 % (most - least + 1),
            temperature=0.0,
            ignore_eos=True,
            traffic="batch" if number % case.sequences < case.batch else "online",
        )


def _feed(core: EngineCore, waiting: Iterator[InferenceRequest], most: int) -> None:
    while core.unfinished < most and (request := next(waiting, None)) is not None:
        core.add(request)


def _note(steps: Steps, seconds: float, taken: dict[str, float]) -> None:
    sampling = taken.pop("sampling")
    total = seconds - sampling - taken.pop("model")
    taken["delivery"] = total - sum(taken.values())
    steps.total.append(total * 1e3)
    steps.sampling.append(sampling * 1e3)
    for piece in PIECES:
        steps.pieces[piece].append(taken[piece] * 1e3)


class _Watch:
    """Seconds in the pieces of one step, measured from outside."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    def take(self) -> dict[str, float]:
        """Since the last call, by piece; 0 for what was not called."""
        taken, self._seconds = self._seconds, {}
        return {piece: taken.get(piece, 0.0) for piece in (*PIECES[:-1], "model", "sampling")}

    @contextmanager
    def over(self, core: EngineCore) -> Iterator[None]:
        """Time the pieces of `core` meanwhile."""
        places: list[tuple[Any, str, str]] = [
            (core.scheduler, "schedule", "scheduling"),
            (launcher, "build_batch", "batch building"),
            (core.body, "output", "model"),
            (launcher, "sample", "sampling"),
            (core.scheduler, "commit", "commit"),
            (core, "_count", "learning and counting"),
        ]
        own = [getattr(owner, name) for owner, name, _ in places]
        for (owner, name, piece), function in zip(places, own, strict=True):
            setattr(owner, name, self._timed(piece, function))
        try:
            yield
        finally:
            for (owner, name, _), function in zip(places, own, strict=True):
                setattr(owner, name, function)

    def _timed(self, piece: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self._seconds[piece] = self._seconds.get(piece, 0.0) + time.perf_counter() - began

        return timed
