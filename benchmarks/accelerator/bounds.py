"""The least time that a step or a job can take on a device whose bandwidth and products were measured."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.accelerator.results import Products
from benchmarks.accelerator.shapes import ModelCost


def decode_bound(cost: ModelCost, bandwidth: float, sequences: int, context: float) -> float:
    """Seconds of a step that reads all weights and the keys and values of every sequence once, and does nothing else.

    `bandwidth` is bytes/s, `context` the mean tokens of a sequence.
    """
    return (cost.weight_bytes + sequences * context * cost.kv_bytes) / bandwidth


def job_bound(
    cost: ModelCost, bandwidth: float, products: Sequence[Products], lengths: Sequence[tuple[int, int]]
) -> float:
    """Seconds of a job whose requests, (prompt, output) tokens each, all arrive at once and all fit.

    Prompts: their products in the largest steps that were measured, the scores and sums of their attention at the rate
    of these products. Then one decode per step for every sequence that has not ended: the products of that many rows,
    and the keys and values read once. The first token of an output comes with the prompt.
    """
    return _prefill(cost, products[-1], lengths) + _decoding(cost, bandwidth, products, lengths)


def _prefill(cost: ModelCost, largest: Products, lengths: Sequence[tuple[int, int]]) -> float:
    tokens = sum(prompt for prompt, _ in lengths)
    pairs = sum(prompt * (prompt + 1) // 2 for prompt, _ in lengths)
    rate = largest.rows * cost.layer_flops / largest.layers
    return (tokens * cost.layer_flops + pairs * cost.attention_flops) / rate


def _decoding(
    cost: ModelCost, bandwidth: float, products: Sequence[Products], lengths: Sequence[tuple[int, int]]
) -> float:
    prompts, outputs = np.array(lengths, dtype=np.int64).T
    steps = np.arange(1, outputs.max())
    alive = outputs[None, :] > steps[:, None]
    keys = np.where(alive, prompts[None, :] + steps[:, None], 0).sum()
    rows = [each.rows for each in products]
    seconds = np.interp(alive.sum(axis=1), rows, [each.layers + each.head for each in products]).sum()
    return float(seconds + keys * cost.kv_bytes / bandwidth)
