"""Drawing tokens by temperature, top-k, min-p and top-p: through the compiled kernels, or through torch.

Both take one uniform number for each row, and sum weights in groups of 128 from the first token on, so a row's token
depends on nothing but the row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from batchwright.engine.native import NativeKernels, load_kernels
from batchwright.request import SamplingParams

_HEAD = 1024
"""Tokens sorted for top-k and top-p; rows whose nucleus is wider are sorted whole."""
_GROUP = 128
"""Tokens whose weights are summed before the draw is located among them."""


def row_maxima(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The greatest logit of each row of [rows, vocab], NaN if the row holds one, and its first index."""
    kernels = _kernels(logits)
    if kernels is not None:
        return kernels.row_maxima(logits)
    best, where = logits.max(dim=-1)
    return best, where


def draw(
    logits: Tensor, rows: list[int], best: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> list[int]:
    """A token for each of `rows` of `logits` [any, vocab], drawn by its params and its uniform number in [0, 1).

    `best` holds the greatest logit of every row of `logits`, all finite in `rows`.
    """
    kernels = _kernels(logits)
    if kernels is not None:
        return kernels.draw_rows(logits, rows, best, params, uniforms)
    return draw_with_torch(logits[rows].float(), params, uniforms)


def draw_with_torch(logits: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> list[int]:
    """The same through torch, on any device: `logits` [rows, vocab] float32, a row for each of `params`."""
    tokens = [0] * len(params)
    ordered = [row for row, each in enumerate(params) if _needs_order(each)]
    direct = [row for row, each in enumerate(params) if not _needs_order(each)]
    for rows, method in ((ordered, _draw_sorted), (direct, _draw_direct)):
        if rows:
            some = [params[row] for row in rows]
            scaled = _scaled(logits[rows], some)
            numbers = torch.tensor([uniforms[row] for row in rows], dtype=torch.float64, device=logits.device)
            for row, token in zip(rows, method(scaled, some, numbers), strict=True):
                tokens[row] = token
    return tokens


def _kernels(logits: Tensor) -> NativeKernels | None:
    if logits.device.type != "cpu" or logits.stride(-1) != 1:
        return None
    kernels = load_kernels(logits.dtype)
    return kernels if isinstance(kernels, NativeKernels) else None


def _scaled(logits: Tensor, params: list[SamplingParams]) -> Tensor:
    """Logits over temperature, the likeliest at 0, so that no temperature makes them infinite."""
    temperatures = _column(params, "temperature", logits).clamp(min=torch.finfo(logits.dtype).tiny)
    return (logits - logits.amax(-1, keepdim=True)) / temperatures


def _needs_order(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0


def _draw_direct(scaled: Tensor, params: list[SamplingParams], uniforms: Tensor) -> list[int]:
    """Draw without sorting: sums of groups of weights are searched first, then the group that the draw falls in."""
    weights = torch.exp(scaled)
    if any(p.min_p > 0 for p in params):
        weights = weights.masked_fill(weights < _column(params, "min_p", weights), 0.0)
    groups = _groups(weights)
    ends = groups.sum(-1).double().cumsum(-1)
    targets = uniforms[:, None] * ends[:, -1:]
    group = _locate(ends, targets)
    before = torch.where(group > 0, ends.gather(-1, (group - 1).clamp(min=0)), 0.0)
    inner = groups.gather(1, group[:, :, None].expand(-1, 1, _GROUP))[:, 0].double().cumsum(-1)
    within = _locate(inner, targets - before)
    tokens: list[int] = (group * _GROUP + within)[:, 0].tolist()
    return tokens


def _groups(weights: Tensor) -> Tensor:
    """[rows, groups, `_GROUP`], filled up with zeros."""
    rows, vocab = weights.shape
    return torch.nn.functional.pad(weights, (0, -vocab % _GROUP)).view(rows, -1, _GROUP)


def _draw_sorted(scaled: Tensor, params: list[SamplingParams], uniforms: Tensor) -> list[int]:
    """Draw among the top-k, top-p and min-p tokens of each row."""
    # Summed by groups: a sum over a whole row is rounded differently when it is the only row.
    total = _groups(torch.exp(scaled)).sum(-1).double().cumsum(-1)[:, -1:]
    tokens, wide = _draw_among(scaled, total, params, uniforms, min(_HEAD, scaled.shape[-1]))
    if wide:
        again = [params[row] for row in wide]
        whole, _ = _draw_among(scaled[wide], total[wide], again, uniforms[wide], scaled.shape[-1])
        for row, token in zip(wide, whole, strict=True):
            tokens[row] = token
    return tokens


def _draw_among(
    scaled: Tensor, total: Tensor, params: list[SamplingParams], uniforms: Tensor, width: int
) -> tuple[list[int], list[int]]:
    """Tokens drawn from the `width` likeliest, and the rows for which that was not enough."""
    values, ids = scaled.topk(width, dim=-1)
    probabilities = torch.exp(values).double() / total
    limits = torch.tensor([p.top_k or scaled.shape[-1] for p in params], device=scaled.device)[:, None]
    rank = torch.arange(width, device=scaled.device)[None, :]
    least = _column(params, "min_p", probabilities) * probabilities[:, :1]
    probabilities = probabilities.masked_fill((rank >= limits) | (probabilities < least), 0.0)
    cumulative = probabilities.cumsum(-1)
    # Among those that top-k and min-p leave, top-p takes its share of what they have together: known to be 1 when
    # neither is in force, and otherwise only when none of them lies beyond `width`.
    more = (limits > width) & (probabilities[:, -1:] > 0) & (width < scaled.shape[-1])
    limited = (limits < scaled.shape[-1]) | (least > 0)
    nucleus = _column(params, "top_p", probabilities) * torch.where(more, 1.0, cumulative[:, -1:])
    wide = more & (limited | (cumulative[:, -1:] < nucleus))
    keep = cumulative - probabilities < nucleus
    weights = (probabilities * keep).cumsum(-1)
    drawn = _locate(weights, uniforms[:, None] * weights[:, -1:])
    tokens: list[int] = ids.gather(-1, drawn)[:, 0].tolist()
    return tokens, wide[:, 0].nonzero()[:, 0].tolist()


def _locate(ends: Tensor, targets: Tensor) -> Tensor:
    """[rows, 1]: first index of each row of the non-decreasing `ends` that is above its target, and of some weight."""
    found = torch.searchsorted(ends, targets, right=True)
    # Rounding can put a target at the very end: the last index that adds weight is where the end is first reached.
    last = torch.searchsorted(ends, ends[:, -1:].contiguous(), right=False)
    return torch.minimum(found, last)


def _column(params: list[SamplingParams], name: str, like: Tensor) -> Tensor:
    return torch.tensor([getattr(p, name) for p in params], dtype=like.dtype, device=like.device)[:, None]
