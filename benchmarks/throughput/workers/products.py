"""The matrix products of a decode step and nothing else: what no engine on this processor and precision can pass.

A job's number of prompts is the number of rows, up to `max_num_seqs`; the outcome's `seconds` are those of one step,
and it has no tokens. The shapes are those of the Llama family with q, k, v in one product and gate and up in one.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.throughput.workers.protocol import Job, Options, Outcome, Ready, serve

_COLD_BYTES = 512 * 2**20
"""Weights are gone through in turn; with this many of them none is still in a cache when its turn comes again."""
_LEAST_STEPS = 5
_LEAST_SECONDS = 1.0


def load(options: Options) -> tuple[Ready, Callable[[Job], Outcome]]:
    import torch

    from batchwright.engine.bodies.linear import Linear, make_linear

    config = json.loads((Path(options["model"]) / "config.json").read_text(encoding="utf-8"))
    shapes = step_shapes(config)
    per_step = sum(2 * fan_in * fan_out for fan_in, fan_out in shapes)

    def one_step() -> list[tuple[int, Linear]]:
        return [(fan_in, make_linear(torch.randn(fan_out, fan_in).bfloat16())) for fan_in, fan_out in shapes]

    models = [one_step() for _ in range(-(-_COLD_BYTES // per_step))]

    @torch.inference_mode()
    def answer(job: Job) -> Outcome:
        rows = min(len(job["prompts"]), options["max_num_seqs"])
        inputs = {fan_in: torch.randn(rows, fan_in).bfloat16() for fan_in, _ in shapes}
        seconds: list[float] = []
        ends = time.perf_counter() + _LEAST_SECONDS
        for model in itertools.cycle(models):
            began = time.perf_counter()
            for fan_in, product in model:
                product(inputs[fan_in])
            now = time.perf_counter()
            seconds.append(now - began)
            if now > ends and len(seconds) > _LEAST_STEPS:
                break
        return {"seconds": statistics.median(seconds[1:]), "tokens": [], "profile": {}}

    return {"version": torch.__version__, "settings": "prepacked weights, bfloat16"}, answer


def step_shapes(config: dict[str, Any]) -> list[tuple[int, int]]:
    """(in, out) of every product of a step, in their order."""
    hidden, middle, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads") or heads
    layer = [
        (hidden, (heads + 2 * kv_heads) * head_dim),
        (heads * head_dim, hidden),
        (hidden, 2 * middle),
        (middle, hidden),
    ]
    return layer * int(config["num_hidden_layers"]) + [(hidden, config["vocab_size"])]


if __name__ == "__main__":
    serve(load)
