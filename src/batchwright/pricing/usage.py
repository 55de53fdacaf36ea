"""Cost of an answer, according to its `usage`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchwright.pricing.rates import ModelPrices, Picodollars, Rates

_MOST_TOKENS = 2**53


@dataclass(frozen=True, slots=True)
class TokensUsed:
    """Tokens that an answer is charged for."""

    prompt: int
    """All tokens of the prompt, including those in the cache."""
    output: int
    cached: int = 0
    """Prompt tokens that were read from the provider's cache."""
    written: int = 0
    """Prompt tokens that were put into it."""
    written_1h: int = 0
    """Prompt tokens that were put into it for an hour."""

    def cost(self, rates: Rates) -> Picodollars:
        """Return what they cost."""
        at = self.prompt
        plain = rates.input.at(at)
        cached = plain if rates.cached is None else rates.cached.at(at)
        written = plain if rates.cache_write is None else rates.cache_write.at(at)
        written_1h = written if rates.cache_write_1h is None else rates.cache_write_1h.at(at)
        return (
            rates.request
            + (self.prompt - self.cached - self.written - self.written_1h) * plain
            + self.cached * cached
            + self.written * written
            + self.written_1h * written_1h
            + self.output * rates.output.at(at)
        )

    def saved_by_cache(self, rates: Rates) -> Picodollars:
        """Return how much more they would have cost without the cache; below 0 if writing to it cost more."""
        return TokensUsed(self.prompt, self.output).cost(rates) - self.cost(rates)


def read_usage(answer: Mapping[str, Any]) -> TokensUsed | None:
    """Read the `usage` of an answer: of chats, completions, embeddings, ranks, responses or messages.

    None if the answer has none, or an inconsistent one.
    """
    usage = answer.get("usage")
    if not isinstance(usage, Mapping):
        return None
    if "prompt_tokens" in usage:
        return _openai(usage, "prompt_tokens", "completion_tokens", "prompt_tokens_details")
    if "total_tokens" in usage and "input_tokens" not in usage and "output_tokens" not in usage:
        # The only figure that some state for ranking or classifying, where nothing is generated.
        return _openai(usage, "total_tokens", "completion_tokens", "prompt_tokens_details")
    if "cache_read_input_tokens" in usage or "cache_creation_input_tokens" in usage:
        return _messages(usage)
    return _openai(usage, "input_tokens", "output_tokens", "input_tokens_details")


def rates_of(prices: ModelPrices, answer: Mapping[str, Any], asked: object, *, batch: bool) -> Rates | None:
    """Return the prices of an answer to a request for the `service_tier` `asked`; None if they are not known."""
    if batch:
        return prices.batch
    given = answer.get("service_tier")
    tier = given if isinstance(given, str) else asked
    if is_usual_tier(tier):
        return prices.live
    return prices.tiers.get(tier) if isinstance(tier, str) else None


def is_usual_tier(tier: object) -> bool:
    """Whether a `service_tier` has the usual prices."""
    return tier in (None, "auto", "default", "standard", "standard_only", "on_demand")


def _openai(usage: Mapping[str, Any], prompt_name: str, output_name: str, details_name: str) -> TokensUsed | None:
    prompt, output = _count(usage, prompt_name, None), _count(usage, output_name, 0)
    details = usage.get(details_name)
    details = details if isinstance(details, Mapping) else {}
    # DeepSeek's name, in addition to the usual ones.
    cached = _count(details, "cached_tokens", _count(usage, "prompt_cache_hit_tokens", 0))
    written = _count(details, "cache_write_tokens", 0)
    written_1h = min(_written_1h(usage), written or 0)
    if prompt is None or output is None or cached is None or written is None or cached + written > prompt:
        return None
    if _audio(details) or _audio(usage.get(output_name.replace("tokens", "tokens_details"))):
        return None  # audio has its own prices
    return TokensUsed(prompt, output, cached, written - written_1h, written_1h)


def _messages(usage: Mapping[str, Any]) -> TokensUsed | None:
    """Read the usage of Anthropic's messages, whose `input_tokens` exclude cached ones."""
    plain, output = _count(usage, "input_tokens", None), _count(usage, "output_tokens", 0)
    cached, written = _count(usage, "cache_read_input_tokens", 0), _count(usage, "cache_creation_input_tokens", 0)
    if plain is None or output is None or cached is None or written is None:
        return None
    written_1h = min(_written_1h(usage), written)
    return TokensUsed(plain + cached + written, output, cached, written - written_1h, written_1h)


def _written_1h(usage: Mapping[str, Any]) -> int:
    written = usage.get("cache_creation")
    return (_count(written, "ephemeral_1h_input_tokens", 0) or 0) if isinstance(written, Mapping) else 0


def _audio(details: object) -> bool:
    return isinstance(details, Mapping) and bool(details.get("audio_tokens"))


def _count(values: Mapping[str, Any], name: str, default: int | None) -> int | None:
    """Return a number of tokens, `default` if there is none, and None for a value that is not a number of tokens."""
    count = values.get(name)
    if count is None:
        return default
    return count if type(count) is int and 0 <= count < _MOST_TOKENS else None
