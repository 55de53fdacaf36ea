"""What is known about a request before it is computed, and what it may cost a replica."""

from __future__ import annotations

from dataclasses import dataclass

from batchwright.request import Traffic
from batchwright.routing.prefixes import KEY_TOKENS

_MEMORY = 256
"""Answers over which a mean length is taken."""
_UNKNOWN = 256
"""Tokens assumed for an answer, unless its limit is lower, until one with a similar limit has ended."""


@dataclass(frozen=True, slots=True)
class Work:
    """A request, as a router sees it."""

    prompt_tokens: int
    """Tokens of all prompts, estimated."""
    limit: int = 0
    """Most tokens of each answer; 0 for embeddings."""
    sequences: int = 1
    """Answers that it asks for, each of which takes a place at the same time."""
    prefixes: tuple[int, ...] = ()
    """Keys of the prefixes of its prompt, the shortest first, as `prefix_keys` makes them."""
    traffic: Traffic = "batch"
    priority: int = 5
    """Priority among lines of batches; lower is sooner."""


@dataclass(frozen=True, slots=True)
class TokenCosts:
    """Costs of tokens, in units of a prompt token."""

    decode: float = 1.0
    """Cost of an answer token in a full batch."""

    def of(self, work: Work, answer: float, known: int) -> float:
        """Return the cost of `work` with answers of `answer` tokens, where `known` of its prefixes are cached."""
        uncached = max(1, work.prompt_tokens - known * KEY_TOKENS)
        return uncached + work.sequences * answer * self.decode


class ExpectedAnswers:
    """Mean lengths of recent answers, by the magnitude of their limits."""

    def __init__(self) -> None:
        self._means: dict[int, tuple[float, int]] = {}

    def of(self, limit: int) -> float:
        """Return the tokens that an answer of at most `limit` tokens is expected to have."""
        mean, count = self._means.get(limit.bit_length(), (0.0, 0))
        return min(mean, float(limit)) if count else float(min(limit, _UNKNOWN))

    def observe(self, limit: int, tokens: float) -> None:
        """Learn that an answer of at most `limit` tokens had `tokens`."""
        mean, count = self._means.get(limit.bit_length(), (0.0, 0))
        count = min(count + 1, _MEMORY)
        self._means[limit.bit_length()] = mean + (tokens - mean) / count, count
