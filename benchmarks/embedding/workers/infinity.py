"""infinity-emb's engine in this process, all texts in one call, which it sorts into batches; its own environment."""

from __future__ import annotations

import asyncio
import importlib
from importlib.metadata import version
from typing import Any

from benchmarks.embedding.workers.protocol import Encode, Options, serve
from benchmarks.throughput.workers.protocol import Ready


def load(options: Options) -> tuple[Ready, Encode]:
    import torch

    library: Any = importlib.import_module("infinity_emb")  # the environment that checks types has none
    torch.set_num_threads(options["threads"])
    setting = options["setting"]
    arguments = {"bettertransformer": False, "compile": False} | setting
    engine = library.AsyncEmbeddingEngine.from_args(
        library.EngineArgs(
            model_name_or_path=options["model"], engine="torch", device="cpu", dtype=options["dtype"], **arguments
        )
    )
    loop = asyncio.new_event_loop()  # its threads continue between the calls, as in a server
    loop.run_until_complete(engine.astart())

    def encode(texts: list[str]) -> Any:
        vectors, _ = loop.run_until_complete(engine.embed(texts))
        return vectors

    words = [name if value is True else f"{name} {value}" for name, value in setting.items()]
    settings = ", ".join([*words, options["dtype"]])
    return {"version": version("infinity-emb"), "settings": settings}, encode


if __name__ == "__main__":
    serve(load)
