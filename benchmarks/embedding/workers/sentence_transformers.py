"""sentence-transformers' `encode`, which sorts by length and pads, in its own environment."""

from __future__ import annotations

import importlib
from typing import Any

from benchmarks.embedding.workers.protocol import Encode, Options, serve
from benchmarks.throughput.workers.protocol import Ready


def load(options: Options) -> tuple[Ready, Encode]:
    import torch

    library: Any = importlib.import_module("sentence_transformers")  # the environment that checks types has none
    torch.set_num_threads(options["threads"])
    dtype = getattr(torch, options["dtype"])
    model = library.SentenceTransformer(options["model"], device="cpu", model_kwargs={"torch_dtype": dtype})
    model.max_seq_length = options["max_length"]
    size = options["setting"]["batch_size"]

    def encode(texts: list[str]) -> Any:
        return model.encode(texts, batch_size=size, normalize_embeddings=True, show_progress_bar=False)

    return {"version": library.__version__, "settings": f"batch_size {size}, {options['dtype']}"}, encode


if __name__ == "__main__":
    serve(load)
