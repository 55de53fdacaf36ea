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

from batchwright.engine.drawing import draw, row_maxima
from batchwright.request import SamplingParams

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
