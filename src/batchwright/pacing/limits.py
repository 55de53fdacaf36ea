"""What a request uses of the rate limits of an endpoint, and limits that a user states."""

from __future__ import annotations

from dataclasses import dataclass

from batchwright.wire.rate_limits import RateKind

MINUTE = 60.0
DAY = 86400.0


@dataclass(frozen=True, slots=True)
class Use:
    """What one request uses, or is expected to use."""

    input_tokens: float
    output_tokens: float
    most_output: float | None = None
    """Most tokens that its answer may have, as the request says; None: it does not say."""
    input_estimate: float | None = None
    """Estimate from which `input_tokens` was derived; None: `input_tokens` itself."""

    def of(self, kind: RateKind) -> float:
        """Return the amount that counts against a limit of this kind."""
        if kind == "requests":
            return 1.0
        if kind == "input_tokens":
            return self.input_tokens
        return self.output_tokens if kind == "output_tokens" else self.input_tokens + self.output_tokens

    def at_most(self, kind: RateKind) -> float:
        """Return the amount that counts if the longest answer does, as with many providers when a request arrives."""
        if kind != "tokens" or self.most_output is None:
            return self.of(kind)
        return self.input_tokens + self.most_output


@dataclass(frozen=True, slots=True)
class ConfiguredLimit:
    """A limit that the user configures."""

    kind: RateKind
    limit: float
    """Amount that may be used in any window."""
    window: float = MINUTE
    """Length of the window in seconds."""


def configured_limits(rpm: float | None = None, tpm: float | None = None) -> tuple[ConfiguredLimit, ...]:
    """Return the given limits on requests and tokens per minute. Raises ValueError for one that is not above 0."""
    found = []
    kinds: tuple[tuple[str, RateKind, float | None], ...] = (("rpm", "requests", rpm), ("tpm", "tokens", tpm))
    for name, kind, limit in kinds:
        if limit is not None:
            if not limit > 0:
                raise ValueError(f"{name}={limit!r}: must be above 0; leave it out where there is no limit")
            found.append(ConfiguredLimit(kind, float(limit)))
    return tuple(found)
