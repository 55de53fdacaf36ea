"""Log-probabilities of prompt tokens: reduction of the logits of many rows, a few rows at a time.

The logits of a whole prompt would take gigabytes. So the number of rows that are scored in a step is bounded
(`most_scored`), and only the log-probability and the rank of the token that follows each row are kept, and the
likeliest tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from batchwright.engine.bodies.body import StepOutput
from batchwright.engine.tokenizer import Tokenizer
from batchwright.request import TokenLogprob

_LOGITS_AT_ONCE = 2**25
"""Logits of scored rows in one step: 64 or 128 MiB."""
_LEAST_ROWS = 16
_REDUCED_AT_ONCE = 2**22
"""Logits that are converted to float32 and reduced at once."""


def most_scored(vocab_size: int, max_batch_tokens: int) -> int:
    """Return how many tokens of a step may be scored, besides those whose next token is chosen."""
    return min(max_batch_tokens, max(_LEAST_ROWS, _LOGITS_AT_ONCE // vocab_size))


@dataclass(frozen=True, slots=True)
class RowScore:
    """What is kept of the logits of one row. Log-probabilities are natural and the model's own."""

    logprob: float
    """Log-probability of the token that follows; NaN if the logits were not finite."""
    rank: int
    """Rank of that token by its logit, 1 for the one that greedy decoding takes."""
    top_ids: list[int]
    top: list[float]


@dataclass(frozen=True, slots=True)
class WantedRow:
    """The known token that follows a row, and how many of the likeliest tokens are wanted."""

    token: int
    count: int


def score_rows(logits: Tensor, rows: Sequence[int], wanted: Sequence[WantedRow]) -> list[RowScore]:
    """Return the scores of these `rows` of `logits` [any, vocab], each for its item of `wanted`; rows may repeat."""
    at_once = max(1, _REDUCED_AT_ONCE // logits.shape[-1])
    return [
        score
        for start in range(0, len(rows), at_once)
        for score in _reduced(_taken(logits, rows[start : start + at_once]).float(), wanted[start : start + at_once])
    ]


def _taken(logits: Tensor, rows: Sequence[int]) -> Tensor:
    """Return these rows, without a copy if they are consecutive."""
    first, end = rows[0], rows[0] + len(rows)
    return logits[first:end] if list(rows) == [*range(first, end)] else logits[rows]


def _reduced(logits: Tensor, wanted: Sequence[WantedRow]) -> Iterator[RowScore]:
    tokens = torch.tensor([each.token for each in wanted], device=logits.device)[:, None]
    ranks = _ranks(logits, tokens)
    logprobs = logits.log_softmax(-1)
    # Beside an infinite logit, all other tokens would appear impossible.
    finite = logits.amax(-1).isfinite()
    chosen = logprobs.gather(-1, tokens)[:, 0].where(finite, torch.nan).tolist()
    top: dict[int, tuple[list[int], list[float]]] = {}
    # Which tokens of equal logits are among the likeliest depends on how many are asked for.
    for count in {each.count for each in wanted} - {0}:
        rows = [row for row, each in enumerate(wanted) if each.count == count]
        values, ids = _taken(logprobs, rows).topk(min(count, logprobs.shape[-1]), dim=-1)
        top.update(zip(rows, zip(ids.tolist(), values.tolist(), strict=True), strict=True))
    for row in range(len(wanted)):
        yield RowScore(chosen[row], ranks[row], *top.get(row, ([], [])))


def _ranks(logits: Tensor, tokens: Tensor) -> list[int]:
    """Return the ranks of `tokens` [rows, 1] in `logits` [rows, vocab] float32; equal logits rank by position."""
    if logits.device.type == "cpu":
        # Each comparison is made once, and its outcomes are counted by whole vectors.
        return [
            1 + int(np.count_nonzero(row[:token] >= row[token]) + np.count_nonzero(row[token + 1 :] > row[token]))
            for row, token in zip(logits.numpy(), tokens[:, 0].tolist(), strict=True)
        ]
    own = logits.gather(-1, tokens)
    places = torch.arange(logits.shape[-1], device=logits.device)
    before = (logits > own) | ((logits == own) & (places < tokens))
    ranks: list[int] = (before.sum(-1) + 1).tolist()
    return ranks


def without_scored(output: StepOutput, scored: Sequence[bool]) -> tuple[list[int], StepOutput]:
    """Return the indexes in `output.logits` of the logit rows that are `scored`, and the output of the other rows."""
    rows: list[int] = []
    others: list[int] = []
    likeliest: dict[int, int | None] = {}
    at = rest = 0
    for place, is_scored in enumerate(scored):
        if place in output.likeliest:
            likeliest[rest] = output.likeliest[place]
        else:
            (rows if is_scored else others).append(at)
            at += 1
        rest += not is_scored
    return rows, StepOutput(output.logits[others], likeliest)


class PromptScores:
    """The scores of one prompt as far as they have been computed."""

    def __init__(
        self, prompt: Sequence[int], count: int, start: int, tokenizer: Tokenizer, endings: Sequence[int] = ()
    ) -> None:
        """`start` is the position of the first token to score; the first one of a prompt has nothing before it.

        `endings` are further tokens to score in place of the last one.
        """
        self.prompt = prompt
        self.count = count
        self.start = max(1, start)
        self.rows = range(self.start - 1, max(self.start - 1, len(prompt) - 1))
        """Positions whose logits are wanted."""
        self.is_finite = True
        """Whether all logits so far were finite."""
        self._endings = endings
        self._scores: dict[int, list[RowScore]] = {}
        self._tokenizer = tokenizer

    def wanted(self, row: int) -> list[WantedRow]:
        """Return what is wanted at this position: the prompt's own token, and after it the other endings."""
        others = self._endings if row == len(self.prompt) - 2 else ()
        return [WantedRow(token, self.count) for token in (self.prompt[row + 1], *others)]

    def record(self, row: int, scores: list[RowScore]) -> None:
        """Store the scores of a position, one for each item wanted at it; called again if a step is computed again."""
        self._scores[row] = scores
        self.is_finite = self.is_finite and not any(math.isnan(score.logprob) for score in scores)

    def named(self) -> tuple[TokenLogprob | None, ...]:
        """Return the log-probability of each token of the prompt, None for those that were not scored."""
        found: list[TokenLogprob | None] = [None] * len(self.prompt)
        for row, scores in self._scores.items():
            found[row + 1] = self._named(self.prompt[row + 1], scores[0])
        return tuple(found)

    def ended(self, ending: int) -> tuple[TokenLogprob, ...]:
        """Return the log-probabilities of the scored tokens with the ending of this number; 0 is the prompt's own.

        All of them must have been computed.
        """
        tokens, (*rows, last) = self.prompt, self.rows
        body = [self._named(tokens[row + 1], self._scores[row][0]) for row in rows]
        final = tokens[last + 1] if ending == 0 else self._endings[ending - 1]
        return *body, self._named(final, self._scores[last][ending])

    def _named(self, token: int, score: RowScore) -> TokenLogprob:
        name = self._tokenizer.token_text
        top = tuple((other, name(other), value) for other, value in zip(score.top_ids, score.top, strict=True))
        return TokenLogprob(token, name(token), score.logprob, top, score.rank)
