"""Steady decoding: every step computes one token of each sequence, for as long as it is observed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

from torch.profiler import ProfilerActivity, profile

from batchwright import Engine, InferenceRequest, SamplingParams
from benchmarks.accelerator.timing import synchronize
from benchmarks.throughput.workers.protocol import Job


@dataclass(slots=True)
class Steady:
    """`count` sequences with prompts of one length, all past their first token."""

    engine: Engine
    count: int
    prompt: int
    generated_before: int
    """Tokens that the engine had generated before these sequences."""

    def advance(self, steps: int) -> None:
        """Compute until there are `steps` more tokens for each sequence."""
        wanted = self.engine.stats.generated_tokens + steps * self.count
        while self.engine.stats.generated_tokens < wanted:
            compute_step(self.engine)

    def timed(self, steps: int) -> tuple[float, float]:
        """Seconds from a token to the next, and the mean tokens of a sequence, over `steps` of them."""
        device, stats = self.engine.core.body.device, self.engine.stats
        before = stats.generated_tokens
        synchronize(device)
        began = time.perf_counter()
        self.advance(steps)
        synchronize(device)
        seconds = time.perf_counter() - began
        middle = (before + stats.generated_tokens) / 2 - self.generated_before
        return seconds * self.count / (stats.generated_tokens - before), self.prompt + middle / self.count

    def kernel_seconds(self, steps: int) -> float:
        """Seconds per step in which a kernel or a copy ran on the device, by torch's profiler.

        A profiled program launches kernels later, so compare this with steps that were timed without the profiler.
        Raises RuntimeError if the profiler saw nothing.
        """
        device, stats = self.engine.core.body.device, self.engine.stats
        with profile(activities=[ProfilerActivity.CUDA]):  # the first profile of a process begins late
            self.advance(1)
            synchronize(device)
        before = stats.generated_tokens
        with profile(activities=[ProfilerActivity.CUDA]) as watched:
            self.advance(steps)
            synchronize(device)
        spans = [
            (event.time_range.start, event.time_range.end)
            for event in watched.events()
            if event.device_type.name == "CUDA" and not event.is_user_annotation
        ]
        if not spans:
            raise RuntimeError("torch's profiler saw no kernel on the device")
        return covered(spans) / 1e6 * self.count / (stats.generated_tokens - before)


@contextlib.contextmanager
def steady(engine: Engine, job: Job, warm_up: int) -> Iterator[Steady]:
    """Bring the prompts of `job` to steady decoding and `warm_up` steps further; at the end they are cancelled."""
    generated, first_tokens = engine.stats.generated_tokens, engine.stats.ttft_ms.count
    requests = submit(engine, job)
    sequences = Steady(engine, len(requests), len(job["prompts"][0]), generated)
    try:
        while engine.stats.ttft_ms.count < first_tokens + len(requests):
            compute_step(engine)
        sequences.advance(warm_up)
        yield sequences
        if engine.unfinished < len(requests):
            raise RuntimeError("a sequence ended while all were to decode: give them more tokens")
    finally:
        for request in requests:
            engine.cancel(request.request_id)


def submit(engine: Engine, job: Job) -> list[InferenceRequest]:
    """Queue the prompts of `job`: greedy, the end of text ignored."""
    requests = [
        InferenceRequest.of(prompt, SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=output))
        for prompt, output in zip(job["prompts"], job["outputs"], strict=True)
    ]
    for request in requests:
        engine.submit(request)
    return requests


def compute_step(engine: Engine) -> None:
    """One step. Raises the error of a request that failed in it."""
    for response in engine.step():
        if response.error is not None:
            raise response.error


def covered(spans: list[tuple[float, float]]) -> float:
    """Total length that the (start, end) of `spans` cover."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
