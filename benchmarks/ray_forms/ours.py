"""`batchwright.ray.Generate` in Ray Data."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import ray.data

from batchwright.ray import Generate
from benchmarks.ray_forms.job import Job, note_start, serve


class Timed(Generate):
    """Notes when the first batch comes."""

    def __init__(self, *, stamp: str, **options: Any) -> None:
        super().__init__(**options)
        self._stamp = stamp

    async def __call__(self, batch: Any) -> AsyncIterator[Any]:
        note_start(self._stamp)
        async for made in super().__call__(batch):
            yield made


def answer(job: Job, dataset: ray.data.Dataset) -> ray.data.Dataset:
    """Return the dataset with answers."""
    return dataset.map_batches(
        Timed,
        fn_constructor_kwargs={
            "stamp": job["stamp"],
            "model": job["model"],
            "defaults": {"temperature": 0.0, "max_tokens": job["tokens"], "ignore_eos": True},
            "errors": "raise",
        },
        batch_size=job["batch_size"],
        compute=ray.data.ActorPoolStrategy(size=1, max_concurrent_calls_per_actor=job["batches"]),
        num_cpus=job["cores"],
    )


if __name__ == "__main__":
    serve(answer, "answer")
