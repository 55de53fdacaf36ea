"""`ExpectedUse`: how many tokens a request will use, estimated from the requests to this model so far."""

from __future__ import annotations

from batchwright.pacing.limits import Use

_FIRST_GUESS = 256.0
_KEEP = 0.995
"""Share of what was learned that is kept at each answer: a few hundred answers count."""


class ExpectedUse:
    """Decaying means of the length of answers, and of the ratio of prompts' tokens to their estimates."""

    def __init__(self) -> None:
        self._output = self._answers = 0.0
        self._counted = self._estimated = 0.0

    def of(self, estimate: float, limit: int | None) -> Use:
        """Return the expected use of a request with `estimate` prompt tokens, whose answer may have `limit` tokens."""
        mean = self._output / self._answers if self._answers else _FIRST_GUESS
        ratio = self._counted / self._estimated if self._estimated else 1.0
        return Use(estimate * ratio, mean if limit is None else min(mean, float(limit)), limit, estimate)

    def learn(self, expected: Use, input_tokens: int | None, output_tokens: int | None) -> None:
        """Learn what a request used of which `expected` was expected; None: not known."""
        if output_tokens is not None:
            self._output = self._output * _KEEP + output_tokens
            self._answers = self._answers * _KEEP + 1.0
        estimate = expected.input_tokens if expected.input_estimate is None else expected.input_estimate
        if input_tokens and estimate > 0.0:  # no prompt has 0 tokens: an endpoint that says so does not count
            self._counted = self._counted * _KEEP + input_tokens
            self._estimated = self._estimated * _KEEP + estimate
