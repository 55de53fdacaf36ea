"""The choice of streamed products: the numbers of rows for which they are faster than torch's on the device at hand.

Both compute all layers of the model without attention, recorded in CUDA graphs, as they run in decode steps. Streamed
products are used only where they are faster and agreed with torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from batchwright.engine.bodies.ops import LayerOps
from batchwright.engine.bodies.weights import Projection

if TYPE_CHECKING:
    from batchwright.engine.bodies.triton_products import StreamedProducts

_log = logging.getLogger(__name__)

_REPEATS = 5

Products = Callable[["StreamedProducts | None", Tensor, Tensor, "int | None"], list[Tensor]]
"""Computes a number of layers, or all, from a residual, which is overwritten, and an assumed output of attention."""


@torch.inference_mode()
def choose_streamed(
    products: Products, weights: Sequence[Projection], norm: Tensor, queries: int, ops: LayerOps, tolerance: float
) -> list[StreamedProducts]:
    """Return streamed products by ascending numbers of rows, each faster than torch's; none if one fails.

    `products` computes them with `weights`, from rows as long as `norm`, where attention returns `queries` values per
    row. `ops` computes what is not part of a product. Results may differ by `tolerance`, relative to their norm.
    """
    try:
        from batchwright.engine.bodies.triton_products import StreamedProducts, blocks_for

        found_blocks = blocks_for(weights)
        if isinstance(found_blocks, str):
            _log.info("products are not streamed on %s: %s", norm.device, found_blocks)
            return []
        chosen = []
        for blocks in found_blocks:
            streamed = StreamedProducts(blocks, norm.device, ops)
            residual, attended = (_random(blocks.rows, size, norm) for size in (norm.shape[0], queries))
            plain, ours = (products(which, residual.clone(), attended, 1) for which in (None, streamed))
            if not (found := _difference(plain, ours)) <= tolerance:
                _log.warning("products are not streamed on %s: they differ from torch's by %.2g", norm.device, found)
                return []
            streamed.takes_head = _is_faster(products, streamed, residual, attended, 0)
            if _is_faster(products, streamed, residual, attended, None):
                chosen.append(streamed)
    except Exception as error:  # from an import, a compiler or a driver: whatever it is, torch computes the same
        _log.warning("products are not streamed on %s: %s: %s", norm.device, type(error).__name__, error)
        return []
    return chosen


def _random(rows: int, size: int, like: Tensor) -> Tensor:
    generator = torch.Generator(like.device).manual_seed(rows)
    return like.new_empty((rows, size)).normal_(generator=generator)


def _difference(plain: Sequence[Tensor], ours: Sequence[Tensor]) -> float:
    each = [(a.float() - b.float()).norm() / a.float().norm() for a, b in zip(plain, ours, strict=True)]
    return float(torch.stack(each).max())  # NaN if one is


def _is_faster(
    products: Products, streamed: StreamedProducts, residual: Tensor, attended: Tensor, layers: int | None
) -> bool:
    """Return whether the first `layers` layers (None: all) and the logits are faster streamed."""
    if residual.device.type != "cuda":
        return True  # interpreted: the times mean nothing
    with torch.cuda.device(residual.device):
        plain = _milliseconds(lambda: products(None, residual, attended, layers))
        ours = _milliseconds(lambda: products(streamed, residual, attended, layers))
    what = "the logits" if layers == 0 else "products"
    _log.info("%s of %d rows take %.3f ms with torch, %.3f ms streamed", what, streamed.rows, plain, ours)
    return ours < plain


def _milliseconds(compute: Callable[[], object]) -> float:
    """Return the least time of several replays of `compute`, which has run before."""
    graph = torch.cuda.CUDAGraph()
    with (
        # A recording that fails leaves its own stream in place; this restores the old one.
        torch.cuda.stream(torch.cuda.current_stream()),
        torch.cuda.graph(graph, capture_error_mode="thread_local"),
    ):
        compute()
    graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(_REPEATS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    return min(float(start.elapsed_time(end)) for start, end in pairwise(marks))
