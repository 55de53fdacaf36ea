"""Input and output of the embedding workers, over the pipes of `benchmarks.throughput.workers.protocol`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypedDict, cast

from benchmarks.throughput.workers import protocol
from benchmarks.throughput.workers.protocol import Ready


class Options(TypedDict):
    """How to load the model. `setting` is one of those that are tried, as listed in the system's own module."""

    model: str
    dtype: str
    threads: int
    max_length: int
    setting: dict[str, Any]


class Job(TypedDict):
    texts: list[str]
    vectors: str
    """File to write the vectors to, as .npy; empty: nowhere."""


class Outcome(TypedDict):
    seconds: float


Encode = Callable[[list[str]], Any]
"""Texts to an array [texts, dim] float32."""


def serve(load: Callable[[Options], tuple[Ready, Encode]]) -> None:
    """Load the model, then encode what arrives. Writing the vectors is not timed."""

    def load_timed(options: Options) -> tuple[Ready, Callable[[Job], Outcome]]:
        ready, encode = load(options)

        def answer(job: Job) -> Outcome:
            began = time.perf_counter()
            vectors = encode(job["texts"])
            seconds = time.perf_counter() - began
            if job["vectors"]:
                import numpy as np

                np.save(job["vectors"], np.asarray(vectors, dtype=np.float32))
            return {"seconds": seconds}

        return ready, answer

    protocol.serve(cast(Any, load_timed))
