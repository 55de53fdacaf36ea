"""batchwright's `Encoder.encode` over all texts."""

from __future__ import annotations

import batchwright
from batchwright import Encoder
from batchwright.encoder.layouts import Layout
from benchmarks.embedding.workers.protocol import Encode, Options, serve
from benchmarks.throughput.workers.protocol import Ready


def load(options: Options) -> tuple[Ready, Encode]:
    encoder = make_encoder(options)
    return {"version": batchwright.__version__, "settings": encoder.description}, encoder.encode


def make_encoder(options: Options, layout: Layout = "packed") -> Encoder:
    """The encoder, on as many threads as all systems."""
    import torch

    torch.set_num_threads(options["threads"])
    model, length = options["model"], options["max_length"]
    return Encoder(model, dtype=options["dtype"], layout=layout, max_length=length, truncate=True)


if __name__ == "__main__":
    serve(load)
