"""From logits to tokens: a whole batch at once, yet each row as if it were alone.

Every row's choice depends on its own logits and its own random numbers only, so a seeded request gives the same tokens
in any company.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
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


_TYPES = {"q": np.int64, "f": np.float32}


_UNUSED = random.Random(0)
"""For sequences whose tokens nothing random decides: to seed a generator takes as long as to read a short request."""


class SamplingState:
    """What the choice of one sequence's tokens depends on besides its logits."""

    def __init__(self, params: SamplingParams, index: int, prompt: Sequence[int], ends: frozenset[int]) -> None:
        self.params = params
        self._random = _generator(params, index)
        self.uniform = self._random.random()
        """Decides the next token; a step that fails and is computed again draws it again."""
        self.generated = 0
        self._places: dict[int, int] = {}
        """Of each token that was generated, where it stands in `_generated` and `_counts`: these grow with the output,
        so a step reads them as they are.
        """
        self._generated = array("q")
        self._counts = array("f")
        self._ends = array("q", sorted(ends))
        self._bias_ids = array("q", params.logit_bias)
        self._bias = array("f", params.logit_bias.values())
        self._penalises = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        self._repeats = params.repetition_penalty != 1.0
        self._seen_set = set(prompt) if self._repeats else set()
        self._seen = array("q", sorted(self._seen_set))

    @property
    def untouched(self) -> bool:
        """Whether its next token follows from its logits as they are, and no log-probabilities are wanted."""
        return (
            self.params.logprobs is None
            and not self._penalises
            and not self._repeats
            and not self._bias_ids
            and self.generated >= self.params.min_tokens
        )

    @property
    def takes_likeliest(self) -> bool:
        """Whether its next token is the one with the greatest logit, and nothing else of the logits is wanted."""
        return self.params.greedy and self.untouched

    @property
    def follows_from_logits(self) -> bool:
        """Whether each of its tokens follows from the logits alone, whatever came before."""
        return self.takes_likeliest and self.params.min_tokens == 0

    def record(self, token: int) -> None:
        """`token` was chosen."""
        self.generated += 1
        self.uniform = self._random.random()
        if self._penalises:
            place = self._places.setdefault(token, len(self._places))
            if place == len(self._counts):
                self._generated.append(token)
                self._counts.append(0.0)
            self._counts[place] += 1.0
        if self._repeats and token not in self._seen_set:
            self._seen_set.add(token)
            self._seen.append(token)

    def adjust(self, logits: Tensor) -> None:
        """Apply bias and penalties to its row of logits [vocab] float32, in place."""
        params = self.params
        if self._repeats:
            ids = _tensor(self._seen, logits.device)
            seen = logits[ids]
            penalty = params.repetition_penalty
            logits[ids] = torch.where(seen > 0, seen / penalty, seen * penalty)
        if self._counts:
            ids, counts = _tensor(self._generated, logits.device), _tensor(self._counts, logits.device)
            logits[ids] -= params.frequency_penalty * counts + params.presence_penalty
        if self._bias_ids:
            logits[_tensor(self._bias_ids, logits.device)] += _tensor(self._bias, logits.device)
        if self.generated < params.min_tokens and self._ends:
            logits[_tensor(self._ends, logits.device)] = -torch.inf


def _generator(params: SamplingParams, index: int) -> random.Random:
    if params.seed is not None:
        return random.Random(f"{params.seed}/{index}")
    return _UNUSED if params.greedy else random.Random()


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Natural logs of the model's own probabilities for one chosen token."""

    chosen: float
    top_ids: list[int]
    top: list[float]


@dataclass(frozen=True, slots=True)
class Sampled:
    """The outcome for one row; `token` is None when its logits were not finite."""

    token: int | None
    logprobs: RowLogprobs | None = None


def sample(
    logits: Tensor, states: Sequence[SamplingState], likeliest: Mapping[int, int | None] | None = None
) -> list[Sampled]:
    """Choose the next token of each of `states` by its row of `logits` [rows, vocab]. Does not call `record`.

    `likeliest` are the tokens of states for which they are known, by their places, None where the logits were not
    finite; `logits` then has rows for the other states only.
    """
    if not likeliest:
        return _sample_rows(logits, states)
    others = iter(_sample_rows(logits, [state for place, state in enumerate(states) if place not in likeliest]))
    return [Sampled(likeliest[place]) if place in likeliest else next(others) for place in range(len(states))]


def _sample_rows(logits: Tensor, states: Sequence[SamplingState]) -> list[Sampled]:
    if not states:
        return []
    best, likeliest = row_maxima(logits)
    finite = torch.isfinite(best).tolist()
    chosen = [Sampled(token if ok else None) for token, ok in zip(likeliest.tolist(), finite, strict=True)]
    plain = [row for row, state in enumerate(states) if finite[row] and state.untouched]
    drawn = [row for row in plain if not states[row].params.greedy]
    for row, token in zip(drawn, _draw(logits, drawn, best, [states[row] for row in drawn]), strict=True):
        chosen[row] = Sampled(token)
    special = [row for row, state in enumerate(states) if finite[row] and not state.untouched]
    if special:
        picked = _sample_adjusted(logits[special].float(), [states[row] for row in special])
        for row, outcome in zip(special, picked, strict=True):
            chosen[row] = outcome
    return chosen


def _sample_adjusted(own: Tensor, states: list[SamplingState]) -> list[Sampled]:
    adjusted = own.clone()
    for row, state in enumerate(states):
        state.adjust(adjusted[row])
    best, likeliest = row_maxima(adjusted)
    tokens = likeliest.tolist()
    drawn = [row for row, state in enumerate(states) if not state.params.greedy]
    for row, token in zip(drawn, _draw(adjusted, drawn, best, [states[row] for row in drawn]), strict=True):
        tokens[row] = token
    return [
        Sampled(token, _logprobs(own[row], token, state.params.logprobs))
        for row, (token, state) in enumerate(zip(tokens, states, strict=True))
    ]


def _draw(logits: Tensor, rows: list[int], best: Tensor, states: list[SamplingState]) -> list[int]:
    if not rows:
        return []
    return draw(logits, rows, best, [state.params for state in states], [state.uniform for state in states])


def _logprobs(logits: Tensor, token: int, count: int | None) -> RowLogprobs | None:
    if count is None:
        return None
    own = logits.log_softmax(-1)
    top, ids = own.topk(min(count, own.shape[-1]))
    return RowLogprobs(float(own[token]), ids.tolist(), top.tolist())


def _tensor(values: array[int] | array[float], device: torch.device) -> Tensor:
    return torch.from_numpy(np.frombuffer(values, _TYPES[values.typecode]).copy()).to(device)
