"""How much a step may carry for batches without delaying online requests noticeably.

An SLO limits two times: to an online request's first token (`ttft`), and from one of its tokens to the next, on average
over the request (`tpot`). A step delays every online sequence by its duration, so the SLO limits the seconds of a step,
and a learned model of step times turns these into tokens:

    seconds = α + β · prefill tokens + γ · prefill (token, key) pairs + δ · decode rows + ε · keys that these read

- **While online sequences decode**, a step may take `tpot`. A sequence that is behind demands less, so that it catches
  up within its next tokens; one that is ahead does not allow more. By its end each should be ahead by what a bad step
  would cost it, for instance one with the prompts of several others: 99% of the recent steps cost less.
- **While a sequence waits for its first token**, the steps until then may take what is left of its `ttft`.
- **At any time** a sequence may arrive in the middle of a step. It waits for the end of this step, then for its own: a
  step may take half of `ttft`.
- **The margins** are learned: the ratio to their prediction within which 95% of the recent steps stayed, and the same
  for the means over as many steps as a sequence has to catch up. The first is for waits that end with a step, the
  second for `tpot`. On a quiet machine they are a few percent, on a busy one more.
- **There is no extrapolation**: no planned step has more than twice the tokens of the largest one since the model was
  last reset.

Online tokens are never held back for a batch, and a step without online tokens carries at least one batch token,
whatever the SLO: so an SLO that cannot be met does not stop a batch that has the engine to itself.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from batchwright.fitting import FadedFit
from batchwright.scheduling.plan import Chunk, StepPlan
from batchwright.scheduling.sequence import Sequence

_ACCOUNT_STEPS = 16
"""Most full steps that the account of a `BatchShare` covers."""


class BatchShare:
    """Account of batch sequences, which are owed `share` (0 ≤ share < 1) of all tokens computed while there are any.

    Each step adds its share of the step's tokens, and subtracts the batch tokens that it carried. The account is
    bounded: the tokens owed, and those received beyond the share, never exceed the share of 16 full steps, so a quiet
    hour is not held against a batch. Nor is a long wait made up for in one burst: a step pays at most the share of two
    steps of its size.

    Raises ValueError for a share out of range.
    """

    def __init__(self, share: float, step_tokens: int) -> None:
        if not 0.0 <= share < 1.0:
            raise ValueError(f"batch_share={share}: must be at least 0 and less than 1, such as 0.05")
        self.share = share
        self._most = max(1.0, _ACCOUNT_STEPS * share * step_tokens)
        self._owed = 0.0

    def due(self, step_tokens: int) -> int:
        """Return how many tokens of a step of `step_tokens` batch sequences may have, whatever else is waiting."""
        return max(0, int(min(self._owed, max(1.0, 2.0 * self.share * step_tokens)) + 1e-9))

    def places(self, slots: int) -> int:
        """Return how many of `slots` places batch sequences may keep against online ones, until they end."""
        return max(1, int(self.share * slots))

    def settle(self, tokens: int, batch_tokens: int, *, wanted: bool) -> None:
        """Record a step of `tokens` tokens, `batch_tokens` of them for batches; `wanted`: there are batch sequences."""
        if not self.share:
            return
        if not wanted:
            self._owed = 0.0
            return
        owed = self._owed + self.share * tokens - batch_tokens
        self._owed = min(self._most, max(-self._most, owed))


_CONFIDENCE = 0.95
_BAD_STEP = 0.99
_REMEMBERED = 256
"""Number of recent steps from which the margins are computed."""
_MEMORY = 400
"""Number of recent steps that the model considers."""
_CATCH_UP = 8
"""Number of tokens within which a sequence that is behind catches up."""
_LEAST_PART = 4
_FIRST_TOKENS = 16
"""Tokens of the very first step, about which nothing is known."""


@dataclass(slots=True)
class StepShape:
    """Quantities on which the time of a step depends."""

    prefill_tokens: int = 0
    prefill_pairs: int = 0
    """(token, key) pairs of prefill chunks, which determine the cost of their attention."""
    decode_rows: int = 0
    """Number of chunks of a single token."""
    decode_keys: int = 0
    sampled_rows: int = 0
    """Number of chunks after which a token is chosen."""

    @classmethod
    def of(cls, chunks: Iterable[Chunk]) -> StepShape:
        tokens = pairs = rows = keys = sampled = 0
        for chunk in chunks:
            count = chunk.count
            sampled += chunk.samples
            if count == 1:
                rows += 1
                keys += chunk.start + 1
            else:
                tokens += count
                pairs += _pairs(chunk.start, count)
        return cls(tokens, pairs, rows, keys, sampled)

    @property
    def num_tokens(self) -> int:
        return self.prefill_tokens + self.decode_rows

    @property
    def features(self) -> tuple[float, ...]:
        return (1.0, self.prefill_tokens, self.prefill_pairs, self.decode_rows, self.decode_keys)


class _Spread:
    """Value within which the share `level` of the last values lies; at least `least`."""

    def __init__(self, level: float, least: float) -> None:
        self._level = level
        self._least = least
        self._values: deque[float] = deque(maxlen=_REMEMBERED)
        self._fresh = 0
        self.most = least

    def add(self, value: float) -> None:
        self._values.append(value)
        self._fresh += 1
        # While there are few, each may change the result; later one more changes little.
        if self._fresh * 8 >= len(self._values) or self._fresh >= 8:
            self._fresh = 0
            ordered = sorted(self._values)
            self.most = max(self._least, ordered[min(len(ordered) - 1, int(self._level * len(ordered)))])


class StepTimes:
    """Predictor of the seconds of a step from the earlier steps."""

    def __init__(self) -> None:
        self._fit = FadedFit(5, _MEMORY)
        self._of_steps = _Spread(_CONFIDENCE, 1.0)
        self._of_runs = _Spread(_CONFIDENCE, 1.0)
        self._run: deque[float] = deque(maxlen=_CATCH_UP)
        self._seen: tuple[float, ...] = (0.0,) * 5
        """Greatest value of each feature."""
        self.largest = 0
        """Most tokens of a measured step since the fit was last reset."""

    def observe(self, shape: StepShape, seconds: float) -> float | None:
        """Learn that a step of this shape took `seconds`, and return the prediction for it, or None."""
        predicted = self.predict(shape)
        if predicted is not None and predicted > 0.0:
            self._of_steps.add(seconds / predicted)
            self._run.append(seconds / predicted)
            self._of_runs.add(sum(self._run) / len(self._run))
        features = shape.features
        # A fit to decodes says nothing about the first prompt; but the keys grow with every step, which is not new.
        is_new = any(feature > 2.0 * seen for feature, seen in zip(features, self._seen, strict=True))
        self._fit.observe(features, seconds, is_larger=is_new or shape.num_tokens > self.largest)
        if self._fit.observations == 1:
            self._seen, self.largest = features, shape.num_tokens
        else:
            self._seen = tuple(map(max, self._seen, features))
            self.largest = max(self.largest, shape.num_tokens)
        return predicted

    def predict(self, shape: StepShape) -> float | None:
        """Return the predicted seconds; None if nothing is known."""
        return self._fit.predict(shape.features)

    @property
    def margin(self) -> float:
        """Ratio of measured to predicted seconds within which most steps stay; at least 1."""
        return self._of_steps.most

    @property
    def margin_of_runs(self) -> float:
        """The same margin for the mean over as many steps as a sequence has to catch up."""
        return self._of_runs.most

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Seconds for a step, a prefill token, a prefill pair, a decode row and a key; all 0 if nothing is known."""
        return self._fit.coefficients


@dataclass(slots=True)
class StepRoom:
    """What may still be added to one step: tokens, and predicted seconds.

    `owed` tokens may be added even if they cost more seconds than there are.
    """

    tokens: int
    owed: int = 0
    seconds: float = math.inf
    costs: tuple[float, ...] = field(default=(0.0,) * 5)

    @property
    def is_open(self) -> bool:
        return self.tokens > 0 and (self.seconds > 0.0 or self.owed > 0)

    def fits_rows(self, rows: int, keys: int) -> bool:
        """Return whether this many decodes fit, which read this many keys together."""
        return rows <= self.tokens and self.costs[3] * rows + self.costs[4] * keys <= self.seconds

    def fits_row(self, keys: int) -> bool:
        return self.tokens > 0 and (self.owed > 0 or self._row(keys) <= self.seconds)

    def take_row(self, keys: int) -> None:
        self._take(1, self._row(keys))

    def most_prompt(self, start: int, wanted: int) -> int:
        """Return how many of `wanted` prompt tokens from position `start` fit."""
        most = min(wanted, self.tokens)
        count = min(most, self._affordable(start))
        if count < 2:
            count = min(most, int(self._row(start + 1) <= self.seconds))
        return max(count, min(most, self.owed))

    def take_prompt(self, start: int, count: int) -> None:
        if count == 1:
            return self.take_row(start + 1)
        return self._take(count, self.costs[1] * count + self.costs[2] * _pairs(start, count))

    def _take(self, tokens: int, seconds: float) -> None:
        self.tokens -= tokens
        self.owed = max(0, self.owed - tokens)
        self.seconds -= seconds

    def _row(self, keys: int) -> float:
        return self.costs[3] + self.costs[4] * keys

    def _affordable(self, start: int) -> int:
        """Return the most prompt tokens n with β n + γ (n start + n (n + 1) / 2) ≤ seconds."""
        if self.seconds <= 0.0:
            return 0
        if self.seconds == math.inf:
            return self.tokens
        half = self.costs[2] / 2
        linear = self.costs[1] + self.costs[2] * (start + 0.5)
        root = linear + math.sqrt(linear * linear + 4 * half * self.seconds)
        count = 2 * self.seconds / root if root > 0.0 else math.inf
        return int(min(count, self.tokens))


class SloController:
    """Controller that keeps the SLO `ttft` and `tpot` (seconds; None: no limit). Raises ValueError unless positive."""

    def __init__(self, *, ttft: float | None = None, tpot: float | None = None) -> None:
        for name, value in (("ttft", ttft), ("tpot", tpot)):
            if value is not None and not 0.0 < value < math.inf:
                raise ValueError(f"{name}={value}: must be more than 0, or None for no bound")
        self.ttft = ttft
        self.tpot = tpot
        self.times = StepTimes()
        self._beyond = _Spread(_BAD_STEP, 0.0)
        """Seconds by which recent steps with online sequences exceeded `tpot`."""

    @property
    def bounds_steps(self) -> bool:
        """Whether it limits the time of a step."""
        return self.ttft is not None or self.tpot is not None

    def observe(self, plan: StepPlan, shape: StepShape, seconds: float) -> float | None:
        """Learn that the step, of this shape, took `seconds`, and return the prediction for it, or None."""
        if self.tpot is not None and plan.num_batch_tokens < plan.num_tokens:
            self._beyond.add(seconds - self.tpot)
        return self.times.observe(shape, seconds)

    def limit(self, now: float, online: Iterable[Sequence], waiting: Sequence | None, budget: int) -> float:
        """Return the predicted seconds that the step may have, for running `online` sequences and the first waiting."""
        if not self.bounds_steps:
            return math.inf
        wait, next_ = math.inf if self.ttft is None else self.ttft / 2, math.inf
        for sequence in (*online, *(() if waiting is None else (waiting,))):
            if sequence.num_generated:
                if self.tpot is not None:
                    next_ = min(next_, self._until_next(sequence, now, self.tpot))
            elif self.ttft is not None:
                steps = max(1, math.ceil(sequence.remaining / budget))
                wait = min(wait, (sequence.arrived_at + self.ttft - now) / steps)
        return min(wait / self.times.margin, next_ / self.times.margin_of_runs)

    def room(self, limit: float, online: Iterable[Chunk], tokens: int, owed: int) -> StepRoom:
        """Return the room for batches in a step with the `online` chunks that may have `limit` predicted seconds."""
        if not self.bounds_steps:
            return StepRoom(tokens, owed)
        shape = StepShape.of(online)
        most = max(_FIRST_TOKENS, 2 * self.times.largest) - shape.num_tokens
        if not shape.num_tokens:
            owed = max(owed, 1)
        taken = self.times.predict(shape) or 0.0
        seconds = limit - taken
        return StepRoom(min(tokens, max(most, owed)), owed, seconds, self.times.coefficients)

    def room_beside(self, newcomers: Iterable[Chunk], tokens: int) -> StepRoom:
        """Return the room for `tokens` of others beside `newcomers`: half as long as the newcomers' step alone.

        One token is always allowed, or the others would stand still beside newcomers in every step.
        """
        seconds = self.times.predict(StepShape.of(newcomers))
        return StepRoom(tokens) if not seconds else StepRoom(tokens, 1, seconds / 2, self.times.coefficients)

    def even_room(self, tokens: int) -> StepRoom:
        """Return room for prompts that takes as long as `tokens` of them without context: the more context, the fewer.

        But no fewer than a quarter, since each step reads the weights.
        """
        costs = self.times.coefficients
        seconds = costs[1] * tokens + costs[2] * _pairs(0, tokens)
        least = max(1, tokens // _LEAST_PART)
        return StepRoom(tokens, least, seconds, costs) if seconds > 0.0 else StepRoom(tokens)

    def _until_next(self, sequence: Sequence, now: float, tpot: float) -> float:
        """Return the seconds that the next token of a sequence may take."""
        if sequence.first_token_at is None:
            return tpot
        behind = now - sequence.first_token_at - (sequence.num_generated - 1) * tpot
        left = max(1, sequence.max_total - len(sequence.tokens))
        at_once = behind / min(_CATCH_UP, left)
        by_its_end = (behind + self._beyond.most) / max(_CATCH_UP, left)
        return tpot - max(0.0, at_once, by_its_end)


def _pairs(start: int, count: int) -> int:
    return count * start + count * (count + 1) // 2
