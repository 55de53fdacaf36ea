"""Tokens that a device chooses while the host prepares the step after them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from batchwright.engine.sampling import (
    UNDECIDED,
    SamplingState,
    draw_with_torch,
    draw_without_waiting,
    needs_order,
    row_maxima,
)
from batchwright.engine.step.batch import on_device

_NO_TOKEN = -1
"""Placeholder for a token whose logits were not finite."""


class PendingTokens:
    """Tokens of the R logit rows of a step, which may not be known to the host yet."""

    def __init__(self, tokens: Tensor, drawn: dict[int, tuple[SamplingState, float]], logits: Tensor | None) -> None:
        """`tokens` are those on the device. `drawn` has the states and random numbers of drawn rows, `logits` [drawn,
        vocab] their logits in case too few tokens were examined.
        """
        self.tokens = tokens
        """Tokens on the device: [R] int64, negative for rows without one."""
        self._drawn, self._logits = drawn, logits
        self._host = tokens
        self._copied: torch.cuda.Event | None = None
        if tokens.is_cuda:
            self._host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self._host.copy_(tokens, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(tokens.device))

    def wait(self) -> tuple[list[int | None], set[int]]:
        """Wait for the tokens; None stands for logits that are not finite.

        Also return the rows that have a different token on the device, where too few tokens were examined to draw it.
        """
        if self._copied is not None:
            self._copied.synchronize()
        tokens: list[int | None] = self._host.tolist()
        undecided = [row for row in self._drawn if tokens[row] == UNDECIDED]
        if undecided and self._logits is not None:
            places = {row: place for place, row in enumerate(self._drawn)}
            params = [self._drawn[row][0].params for row in undecided]
            uniforms = [self._drawn[row][1] for row in undecided]
            rows = self._logits[[places[row] for row in undecided]]
            for row, token in zip(undecided, draw_with_torch(rows, params, uniforms), strict=True):
                tokens[row] = token
        return [None if token == _NO_TOKEN else token for token in tokens], set(undecided)


def choose_without_waiting(
    logits: Tensor, states: Sequence[SamplingState], following: Sequence[bool]
) -> PendingTokens | None:
    """Choose the next token of each of `states` by its row of `logits` [R, vocab]; None if the host must take part.

    States that are `following` get the token after the next one, since the next one is not known yet.
    """
    if any(state.matcher is not None or not state.untouched for state in states):
        return None
    best, tokens = row_maxima(logits)
    drawn = {
        row: (state, state.uniforms(1 + after)[-1])
        for row, (state, after) in enumerate(zip(states, following, strict=True))
        if not state.params.greedy
    }
    kept, is_ordered = None, any(needs_order(state.params) for state, _ in drawn.values())
    if drawn:
        where = on_device(np.fromiter(drawn, np.int64), logits.device)
        # Rows that are not finite cannot be drawn from, and their tokens are not used.
        kept = torch.where(torch.isfinite(best[where])[:, None], logits[where].float(), 0.0)
        params, uniforms = [state.params for state, _ in drawn.values()], [uniform for _, uniform in drawn.values()]
        tokens = tokens.index_copy(0, where, draw_without_waiting(kept, params, uniforms))
    return PendingTokens(torch.where(torch.isfinite(best), tokens, _NO_TOKEN), drawn, kept if is_ordered else None)


def copy_tokens(token_ids: Tensor, rows: Sequence[int], tokens: Tensor, sources: Sequence[int]) -> None:
    """Set `token_ids` [T] at `rows` to `tokens` [R] at `sources`; any token stands for a missing one."""
    where, which = (on_device(np.array(each, np.int64), token_ids.device) for each in (rows, sources))
    token_ids.index_copy_(0, where, tokens[which].clamp_(min=0))
