"""The choice of tokens by logits, for a whole batch at once, with each row treated as if it were alone.

A row's choice depends only on its own logits and random numbers, so a seeded request gets the same tokens in any batch.
Drawing by temperature, top-k, min-p and top-p goes through the compiled kernels or through torch. Both take one uniform
number for each row, and sum weights in groups of 128 from the first token on.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from math import isfinite

import numpy as np
import torch
from torch import Tensor

from batchwright.engine.grammars import Masks, Matcher
from batchwright.engine.native import NativeKernels, load_kernels
from batchwright.engine.step.batch import on_device
from batchwright.engine.tried_kernels import kernels_or
from batchwright.request import SamplingParams

_HEAD = 1024
"""Tokens sorted for top-k and top-p; rows with a wider nucleus are sorted completely."""
_GROUP = 128
"""Tokens whose weights are summed before the draw is located among them."""


def row_maxima(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the greatest logit of each row of `logits` [rows, vocab], NaN if it holds one, and its first index."""
    kernels = _kernels(logits)
    if kernels is not None:
        return kernels.row_maxima(logits)
    if logits.device.type == "cuda" and logits.stride(-1) == 1 and len(logits):
        return _maxima_on(logits.device, logits.dtype)(logits)
    best, where = logits.max(dim=-1)
    return best, where


Maxima = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Computes `row_maxima`."""


@cache
def _maxima_on(device: torch.device, dtype: torch.dtype) -> Maxima:
    """Return the Triton kernels if they are available and pass their trial; else torch's, and log why."""

    def compiled() -> Maxima:
        from batchwright.engine.triton_maxima import row_maxima

        return row_maxima

    def disagreement(maxima: Maxima) -> str | None:
        return None if maxima_are_torchs(maxima, device, dtype) else "they differ from torch's"

    plain: Maxima = lambda x: torch.max(x, dim=-1)  # noqa: E731
    return kernels_or(plain, "Triton's maxima are not used", device, compiled, disagreement)


def maxima_are_torchs(maxima: Maxima, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether `maxima` gives what torch gives for rows with ties, infinities and NaN."""
    x = torch.empty(7, 9001, device=device).normal_(generator=torch.Generator(device).manual_seed(0)).to(dtype)
    x[1, [5000, 8999]] = 50.0
    x[2] = -torch.inf
    x[3, 4096:4098] = torch.inf
    x[4, [10, 9000]] = torch.nan
    x[5, 3], x[5, 8000] = torch.inf, torch.nan
    x[6, 9000] = 60.0
    best, where = maxima(x)
    # torch guarantees no order among equal values.
    first = torch.tensor([int(x[0].argmax()), 5000, 0, 4096, 10, 8000, 9000], device=device)
    return torch.equal(where, first) and torch.equal(best.nan_to_num(-1.0), x.amax(-1).nan_to_num(-1.0))


def mask_rows(logits: Tensor, rows: list[int], masks: Masks) -> None:
    """Set the logits [any, vocab] of `rows`, in place, to -inf for all tokens whose bits in `masks` are 0."""
    bits = torch.from_numpy(np.ascontiguousarray(masks))
    kernels = _kernels(logits)
    if kernels is not None:
        kernels.mask_rows(logits, rows, bits)
        return
    at = torch.arange(32, dtype=torch.int32, device=logits.device)
    forbidden = (bits.to(logits.device)[:, :, None] >> at & 1 == 0).flatten(1)[:, : logits.shape[1]]
    which = torch.tensor(rows, device=logits.device)
    logits[which] = logits[which].masked_fill(forbidden, -torch.inf)


def choose(
    logits: Tensor, rows: list[int], params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> tuple[list[float], list[int]]:
    """Return the greatest value of each row of `logits` [any, vocab], NaN if it holds one, and the token of each row.

    The token of each of `rows` whose greatest logit is finite is drawn by its params and its uniform number in [0, 1);
    every other row gets its likeliest token.
    """
    kernels = _kernels(logits)
    if kernels is not None and rows:
        return kernels.choose_rows(logits, rows, params, uniforms)
    best, likeliest = row_maxima(logits)
    greatest, tokens = best.tolist(), likeliest.tolist()
    drawn = [place for place, row in enumerate(rows) if isfinite(greatest[row])]
    if drawn:
        found = draw_with_torch(
            logits[[rows[place] for place in drawn]].float(),
            [params[place] for place in drawn],
            [uniforms[place] for place in drawn],
        )
        for place, token in zip(drawn, found, strict=True):
            tokens[rows[place]] = token
    return greatest, tokens


def draw_with_torch(logits: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> list[int]:
    """Draw through torch, on any device: `logits` [rows, vocab] float32 has a row for each of `params`."""
    tokens = [0] * len(params)
    for rows, is_ordered in _by_method(params):
        some = [params[row] for row in rows]
        scaled, numbers = _scaled(logits[rows], some), _numbers([uniforms[row] for row in rows], logits.device)
        found = _draw_sorted(scaled, some, numbers) if is_ordered else _draw_direct(scaled, some, numbers).tolist()
        for row, token in zip(rows, found, strict=True):
            tokens[row] = token
    return tokens


UNDECIDED = -2
"""Stand-in for a token where the likeliest ones were too few to draw from."""


def draw_without_waiting(logits: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> Tensor:
    """Draw as `draw_with_torch` does, without waiting for the device -> [rows] int64, possibly `UNDECIDED`."""
    tokens = torch.empty(len(params), dtype=torch.int64, device=logits.device)
    for rows, is_ordered in _by_method(params):
        some, where = [params[row] for row in rows], on_device(np.array(rows, np.int64), logits.device)
        scaled, numbers = _scaled(logits[where], some), _numbers([uniforms[row] for row in rows], logits.device)
        if not is_ordered:
            tokens[where] = _draw_direct(scaled, some, numbers)
            continue
        found, is_wide = _draw_among(scaled, _totals(scaled), some, numbers, min(_HEAD, scaled.shape[-1]))
        tokens[where] = found.masked_fill(is_wide, UNDECIDED)
    return tokens


def _by_method(params: Sequence[SamplingParams]) -> list[tuple[list[int], bool]]:
    """Return the rows of `params` that need their tokens in order, and those that do not; no group is empty."""
    ordered = [row for row, each in enumerate(params) if needs_order(each)]
    direct = [row for row, each in enumerate(params) if not needs_order(each)]
    return [(rows, is_ordered) for rows, is_ordered in ((ordered, True), (direct, False)) if rows]


def _numbers(uniforms: Sequence[float], device: torch.device) -> Tensor:
    return on_device(np.array(uniforms, np.float64), device)


def _kernels(logits: Tensor) -> NativeKernels | None:
    readable = logits.device.type == "cpu" and logits.stride(-1) == 1
    return kernels if readable and isinstance(kernels := load_kernels(logits.dtype), NativeKernels) else None


def _scaled(logits: Tensor, params: list[SamplingParams]) -> Tensor:
    """Return logits [rows, vocab] over temperature, shifted to a maximum of 0, so that they never become infinite."""
    temperatures = _column(params, "temperature", logits).clamp(min=torch.finfo(logits.dtype).tiny)
    return (logits - logits.amax(-1, keepdim=True)) / temperatures


def needs_order(params: SamplingParams) -> bool:
    """Return whether a draw needs the tokens in the order of their probabilities."""
    return params.top_k > 0 or params.top_p < 1.0


def _draw_direct(scaled: Tensor, params: list[SamplingParams], uniforms: Tensor) -> Tensor:
    """Draw without sorting: search the sums of groups of weights, then the group that the draw falls in -> [rows]."""
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
    return (group * _GROUP + within)[:, 0]


def _groups(weights: Tensor) -> Tensor:
    """Return `weights` [rows, vocab] padded with zeros to whole groups -> [rows, groups, `_GROUP`]."""
    rows, vocab = weights.shape
    return torch.nn.functional.pad(weights, (0, -vocab % _GROUP)).view(rows, -1, _GROUP)


def _draw_sorted(scaled: Tensor, params: list[SamplingParams], uniforms: Tensor) -> list[int]:
    """Draw among the top-k, top-p and min-p tokens of each row."""
    total = _totals(scaled)
    drawn, is_wide = _draw_among(scaled, total, params, uniforms, min(_HEAD, scaled.shape[-1]))
    tokens: list[int] = drawn.tolist()
    wide: list[int] = is_wide.nonzero()[:, 0].tolist()
    if wide:
        again = [params[row] for row in wide]
        whole, _ = _draw_among(scaled[wide], total[wide], again, uniforms[wide], scaled.shape[-1])
        for row, token in zip(wide, whole.tolist(), strict=True):
            tokens[row] = token
    return tokens


def _totals(scaled: Tensor) -> Tensor:
    """Return the sum of the weights of each row -> [rows, 1] float64."""
    # Summed by groups: a sum over a whole row is rounded differently if it is the only row.
    return _groups(torch.exp(scaled)).sum(-1).double().cumsum(-1)[:, -1:]


def _draw_among(
    scaled: Tensor, total: Tensor, params: list[SamplingParams], uniforms: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """Return tokens drawn from the `width` likeliest [rows] int64, and for which rows `width` was too small [rows]."""
    values, ids = scaled.topk(width, dim=-1)
    probabilities = torch.exp(values).double() / total
    limits = on_device(np.array([p.top_k or scaled.shape[-1] for p in params], np.int64), scaled.device)[:, None]
    rank = torch.arange(width, device=scaled.device)[None, :]
    least = _column(params, "min_p", probabilities) * probabilities[:, :1]
    probabilities = probabilities.masked_fill((rank >= limits) | (probabilities < least), 0.0)
    cumulative = probabilities.cumsum(-1)
    # Top-p takes its share of the total probability of the tokens that top-k and min-p leave: the total is 1 if neither
    # applies, and otherwise known only if none of those tokens is beyond `width`.
    more = (limits > width) & (probabilities[:, -1:] > 0) & (width < scaled.shape[-1])
    limited = (limits < scaled.shape[-1]) | (least > 0)
    nucleus = _column(params, "top_p", probabilities) * torch.where(more, 1.0, cumulative[:, -1:])
    wide = more & (limited | (cumulative[:, -1:] < nucleus))
    keep = cumulative - probabilities < nucleus
    weights = (probabilities * keep).cumsum(-1)
    drawn = _locate(weights, uniforms[:, None] * weights[:, -1:])
    return ids.gather(-1, drawn)[:, 0], wide[:, 0]


def _locate(ends: Tensor, targets: Tensor) -> Tensor:
    """Return the first index of positive weight where each row of ascending `ends` exceeds its target -> [rows, 1]."""
    found = torch.searchsorted(ends, targets, right=True)
    # Rounding can put a target at the very end: the last index that adds weight is the first that reaches the end.
    last = torch.searchsorted(ends, ends[:, -1:].contiguous(), right=False)
    return torch.minimum(found, last)


def _column(params: list[SamplingParams], name: str, like: Tensor) -> Tensor:
    return on_device(np.array([getattr(p, name) for p in params], np.float64), like.device)[:, None].to(like.dtype)


_TYPES = {"q": np.int64, "f": np.float32}

_UNUSED = random.Random(0)
"""Generator shared by greedy sequences: seeding one for each would take as long as reading a short request."""


class SamplingState:
    """State on which the choice of one sequence's tokens depends, besides its logits."""

    def __init__(
        self,
        params: SamplingParams,
        index: int,
        prompt: Sequence[int],
        ends: frozenset[int],
        matcher: Matcher | None = None,
    ) -> None:
        self.params = params
        self.matcher = matcher
        """Position of the sequence in its grammar, None if its text has no required form."""
        if params.seed is not None:
            self._random = random.Random(f"{params.seed}/{index}")
        else:
            self._random = _UNUSED if params.greedy else random.Random()
        self._coming: deque[float] = deque()
        """Random numbers for the next tokens; a step that is computed again after a failure uses the same ones."""
        self.generated = 0
        self._places: dict[int, int] = {}
        """Indexes of tokens in `_generated` and `_counts`: arrays that grow, so that no step builds them."""
        self._generated = array("q")
        self._counts = array("f")
        self._ends = array("q", sorted(ends))
        never_wanted = matcher.ends - ends if matcher is not None and params.ignore_eos else frozenset()
        self._unwanted_ends = sorted(never_wanted)
        self._unwanted_so_far = sorted(ends | never_wanted)
        self._bias_ids = array("q", params.logit_bias)
        self._bias = array("f", params.logit_bias.values())
        self._penalises = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        self._repeats = params.repetition_penalty != 1.0
        self._seen_set = set(prompt) if self._repeats else set()
        self._seen = array("q", sorted(self._seen_set))

    @property
    def untouched(self) -> bool:
        """Whether the next token depends on unadjusted logits, and no log-probabilities are wanted."""
        return (
            self.params.logprobs is None
            and not self._penalises
            and not self._repeats
            and not self._bias_ids
            and self.generated >= self.params.min_tokens
        )

    @property
    def takes_likeliest(self) -> bool:
        """Whether the next token is the one with the greatest logit, and the logits are needed for nothing else."""
        return self.params.greedy and self.untouched

    @property
    def follows_from_logits(self) -> bool:
        """Whether every token depends only on its logits and its grammar, and otherwise not on earlier tokens."""
        return self.params.greedy and self.untouched and self.params.min_tokens == 0

    def uniforms(self, count: int) -> list[float]:
        """Return the random numbers of the next `count` tokens."""
        while len(self._coming) < count:
            self._coming.append(self._random.random())
        return list(islice(self._coming, count))

    def record(self, token: int) -> None:
        """Record that `token` was chosen."""
        self.generated += 1
        if not self.params.greedy:
            self.uniforms(1)  # one number per token, whether it was drawn or certain
            self._coming.popleft()
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
        """Apply bias and penalties to the sequence's `logits` [vocab] float32, in place."""
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
        if self.generated < params.min_tokens and self._ends and self.matcher is None:
            logits[_tensor(self._ends, logits.device)] = -torch.inf

    def hold_ends(self, mask: Masks) -> None:
        """Remove the end tokens from the sequence's `mask` [words], in place, if they are not wanted yet.

        They stay if nothing else is allowed: a form that is complete ends.
        """
        unwanted = self._unwanted_ends if self.generated >= self.params.min_tokens else self._unwanted_so_far
        if not unwanted:
            return
        held = mask.view(np.uint32).copy()
        for token in unwanted:
            held[token // 32] &= ~np.uint32(1 << token % 32)
        if held.any():
            mask[:] = held.view(np.int32)


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Natural logarithms of the model's own probabilities for one chosen token."""

    chosen: float
    top_ids: list[int]
    top: list[float]


@dataclass(frozen=True, slots=True)
class Sampled:
    """Outcome for one row; `token` is None if its logits were not finite."""

    token: int | None
    logprobs: RowLogprobs | None = None


def sample(
    logits: Tensor,
    states: Sequence[SamplingState],
    likeliest: Mapping[int, int | None] | None = None,
    masks: Masks | None = None,
) -> list[Sampled]:
    """Choose the next token of each of `states` by its row of `logits` [rows, vocab]. Does not call `record`.

    `likeliest` maps the indexes of states whose tokens are already known to these tokens, None if the logits were not
    finite; `logits` then has rows only for the other states. `masks` has a row for each state with a grammar, in their
    order; logits may be overwritten where they forbid a token.
    """
    places = [place for place in range(len(states)) if not likeliest or place not in likeliest]
    others = states if not likeliest else [states[place] for place in places]
    chosen = _sample_rows(logits, others, _rows_of_masks(states, places, masks))
    if not likeliest:
        return chosen
    rest = iter(chosen)
    return [Sampled(likeliest[place]) if place in likeliest else next(rest) for place in range(len(states))]


def hold_ends(states: Sequence[SamplingState], masks: Masks) -> None:
    """Remove end tokens that are not wanted yet from `masks`, in place: one for each state with a grammar, in order."""
    for state, mask in zip((each for each in states if each.matcher is not None), masks, strict=True):
        state.hold_ends(mask)


def _rows_of_masks(states: Sequence[SamplingState], places: Sequence[int], masks: Masks | None) -> dict[int, Masks]:
    """Return the masks [words] of the states at the indexes `places`, by their rows: the first of these is row 0."""
    if masks is None:
        return {}
    constrained = (place for place, state in enumerate(states) if state.matcher is not None)
    of_place = dict(zip(constrained, masks, strict=True))
    return {row: of_place[place] for row, place in enumerate(places) if place in of_place}


def _sample_rows(logits: Tensor, states: Sequence[SamplingState], masks: Mapping[int, Masks]) -> list[Sampled]:
    if not states:
        return []
    # The others' logits are adjusted first: for them a copy is masked.
    masked = [row for row in masks if states[row].untouched]
    if masked:
        mask_rows(logits, masked, np.stack([masks[row] for row in masked]))
    greatest, tokens = _choose(logits, states, [row for row, state in enumerate(states) if state.untouched])
    finite = [isfinite(logit) for logit in greatest]
    chosen = [Sampled(token if ok else None) for token, ok in zip(tokens, finite, strict=True)]
    special = [row for row, ok in enumerate(finite) if ok and not states[row].untouched]
    if special:
        among = {place: masks[row] for place, row in enumerate(special) if row in masks}
        picked = _sample_adjusted(logits[special].float(), [states[row] for row in special], among)
        for row, outcome in zip(special, picked, strict=True):
            chosen[row] = outcome
    return chosen


def _sample_adjusted(own: Tensor, states: list[SamplingState], masks: Mapping[int, Masks]) -> list[Sampled]:
    adjusted = own.clone()
    for row, state in enumerate(states):
        state.adjust(adjusted[row])
    if masks:
        mask_rows(adjusted, [*masks], np.stack([*masks.values()]))
    _, tokens = _choose(adjusted, states, range(len(states)))
    return [
        Sampled(token, _logprobs(own[row], token, state.params.logprobs))
        for row, (token, state) in enumerate(zip(tokens, states, strict=True))
    ]


def _choose(logits: Tensor, states: Sequence[SamplingState], rows: Iterable[int]) -> tuple[list[float], list[int]]:
    """Return what `choose` returns, with a draw for each of `rows` that is not greedy."""
    drawn = [row for row in rows if not states[row].params.greedy]
    return choose(logits, drawn, [states[row].params for row in drawn], [states[row].uniforms(1)[0] for row in drawn])


def _logprobs(logits: Tensor, token: int, count: int | None) -> RowLogprobs | None:
    if count is None:
        return None
    own = logits.log_softmax(-1)
    top, ids = own.topk(min(count, own.shape[-1]))
    return RowLogprobs(float(own[token]), ids.tolist(), top.tolist())


def _tensor(values: array[int] | array[float], device: torch.device) -> Tensor:
    return torch.from_numpy(np.frombuffer(values, _TYPES[values.typecode]).copy()).to(device)
