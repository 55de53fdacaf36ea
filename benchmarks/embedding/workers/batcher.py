"""The same encoder behind a `Batcher`, to which all texts are submitted at once."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

import batchwright
from batchwright import Batcher
from benchmarks.embedding.workers.encode import make_encoder
from benchmarks.embedding.workers.protocol import Encode, Options, serve
from benchmarks.throughput.workers.protocol import Ready


def load(options: Options) -> tuple[Ready, Encode]:
    encoder = make_encoder(options)

    async def submit(texts: list[str]) -> Any:
        async with Batcher(encoder, max_waiting=len(texts)) as batcher:
            return np.stack(await asyncio.gather(*(batcher.compute(text) for text in texts)))

    settings = f"{encoder.description}, behind a Batcher with its default policy"
    return {"version": batchwright.__version__, "settings": settings}, lambda texts: asyncio.run(submit(texts))


if __name__ == "__main__":
    serve(load)
