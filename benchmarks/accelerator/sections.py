"""The sections that run in the worker. Each yields its results one by one: what it has measured remains if it fails."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from batchwright import Engine
from batchwright.engine_config import QuantizationName
from batchwright.scheduling.sizes import BLOCK_SIZE
from benchmarks.accelerator.hardware import measure_hardware
from benchmarks.accelerator.peer import measure_peer
from benchmarks.accelerator.results import Busy, Decode, Mixed, Prefix, Result, Section, Unavailable
from benchmarks.accelerator.shapes import ModelCost, Shape
from benchmarks.accelerator.steady import Steady, compute_step, steady, submit
from benchmarks.accelerator.weights import random_weights, write_model
from benchmarks.accelerator.worker import short
from benchmarks.throughput.workers.protocol import Job


class Bench:
    """One device with an engine that stays loaded between sections until another model needs the memory."""

    def __init__(self, shape: Shape, device: torch.device, folder: Path) -> None:
        """`folder`: an empty folder for the model's config."""
        self.shape, self.device = shape, device
        if device.index is not None:
            torch.cuda.set_device(device)  # events are recorded on the current one
        self._folder = folder
        self._engine: Engine | None = None

    def run(self, section: Section, limit: float) -> Iterator[Result]:
        """Jobs are stopped after `limit` seconds; what else takes longer, the caller has to end from outside."""
        yield from _SECTIONS[section](self, time.perf_counter() + limit)
        self._free()

    def hardware(self, ends: float) -> Iterator[Result]:
        yield from measure_hardware(self.shape, self.device)

    def decode(self, ends: float) -> Iterator[Result]:
        """The time of a step of steady decoding, and the part of it in which the device computes."""
        shape = self.shape
        for count in shape.decodes:
            with steady(self._opened(), shape.decode(count).job(0, self.shape.vocab_size), shape.warm_up) as sequences:
                step, context = sequences.timed(shape.steps)
                yield Decode(count, context, step)
                yield self._busy(sequences)

    def prefix(self, ends: float) -> Iterator[Result]:
        """The time of a step of steady decoding, without a common prefix and with one."""
        for with_prefix in (False, True):
            workload = self.shape.shared(with_prefix=with_prefix)
            with steady(self._opened(), workload.job(0, self.shape.vocab_size), self.shape.warm_up) as sequences:
                yield Prefix(workload.shared, sequences.timed(self.shape.steps)[0])

    def mixed(self, ends: float) -> Iterator[Result]:
        """Our time for the job of mixed lengths, after a short round."""
        engine = self._opened()
        if not _compute(engine, self.shape.short_round(), ends):
            raise RuntimeError("the short round that goes before took all the time")
        began = time.perf_counter()
        ended = _compute(engine, self.shape.lengths().job(0, self.shape.vocab_size), ends)
        yield Mixed("batchwright", engine.stats.implementation, time.perf_counter() - began, ended)

    def fp8(self, ends: float) -> Iterator[Result]:
        """The time of a step of steady decoding with weights in 8-bit floating point."""
        if self.device.type != "cuda":
            yield Unavailable("decode in fp8", "needs CUDA")
            return
        self._close()
        shape = self.shape
        for count in shape.decodes:
            engine = self._opened("fp8")
            with steady(engine, shape.decode(count).job(0, shape.vocab_size), shape.warm_up) as sequences:
                step, context = sequences.timed(shape.steps)
                yield Decode(count, context, step, "fp8")
        self._close()

    def generate_batch(self, ends: float) -> Iterator[Result]:
        """The same job with transformers' continuous batching."""
        self._close()
        yield measure_peer(self.shape, self.device, ends)

    def _busy(self, sequences: Steady) -> Result:
        what = f"GPU busy, {sequences.count}"
        if self.device.type != "cuda":
            return Unavailable(what, "needs CUDA")
        try:
            return Busy(sequences.count, sequences.kernel_seconds(self.shape.profiled))
        except Exception as error:  # profiling may not be permitted; what follows does not need it
            return Unavailable(what, short(error))

    def _close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None
            self._free()

    def _opened(self, quantization: QuantizationName | None = None) -> Engine:
        if self._engine is None:
            write_model(self.shape, self._folder)
            with random_weights():
                self._engine = Engine(
                    self._folder,
                    dtype="bfloat16",
                    device=str(self.device),
                    max_model_len=self.shape.max_model_len,
                    kv_memory=kv_memory(self.shape),
                    quantization=quantization,
                    drafting=False,  # what random weights generate repeats itself: it would be guessed too well
                )
        return self._engine

    def _free(self) -> None:
        """Release freed memory that torch holds: it would count as taken when a KV cache or a model is sized."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _compute(engine: Engine, job: Job, ends: float) -> bool:
    """Compute `job`. False, and the rest is cancelled, when `time.perf_counter()` passes `ends` first."""
    requests = submit(engine, job)
    while engine.unfinished:
        if time.perf_counter() > ends:
            for request in requests:
                engine.cancel(request.request_id)
            return False
        compute_step(engine)
    return True


def kv_memory(shape: Shape) -> int:
    """Bytes in which every section's sequences fit at once; the rest of the memory is left for activations."""
    blocks = [
        -(-workload.shared // BLOCK_SIZE)
        + sum(-(-(prompt - workload.shared + output) // BLOCK_SIZE) + 1 for prompt, output in workload.lengths)
        for workload in shape.workloads
    ]
    longest = -(-shape.max_model_len // BLOCK_SIZE)
    return ModelCost.of(shape.config).kv_bytes * BLOCK_SIZE * max(longest, *blocks)


_SECTIONS: Mapping[Section, Callable[[Bench, float], Iterator[Result]]] = {
    "hardware": Bench.hardware,
    "decode": Bench.decode,
    "prefix": Bench.prefix,
    "mixed": Bench.mixed,
    "fp8": Bench.fp8,
    "generate_batch": Bench.generate_batch,
}
