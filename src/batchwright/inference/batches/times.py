"""Times by which batches are submitted, looked at and waited for, in seconds."""

from __future__ import annotations

from dataclasses import dataclass, field

from batchwright.backoff import Backoff
from batchwright.errors import InputError
from batchwright.submitting.looking import LookPauses
from batchwright.submitting.moving import Mover


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """Times by which batches are submitted, looked at and waited for, in seconds."""

    patience: float = 5.0
    """Time without a new line after which a batch that is not full is submitted."""
    looks: LookPauses = field(default_factory=LookPauses)
    retries: Backoff = field(default_factory=lambda: Backoff(1.0, 60.0, jitter=(0.75, 1.25)))
    """Pauses after a request that failed."""
    settles_in: float | None = None
    """Time within which a batch is listed once it was created. None: what is known of the provider."""
    longest_silence: float = 86_400.0
    """Time without any answer of the provider after which the run ends."""
    full_for: float = 300.0
    """Pause after a refusal because too much is enqueued, if nothing of this job is."""
    mover: Mover = field(default_factory=Mover)


_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def duration_seconds(name: str, text: str) -> float:
    """Return the seconds of a duration such as `24h`, given as the option `name`. Raises `InputError`."""
    number, unit = text[:-1], text[-1:]
    if unit not in _UNITS or not (number.isascii() and number.isdigit() and 0 < int(number) < 10**6):
        raise InputError(f"{name}={text!r}: must be a duration such as 24h, 90m or 7d")
    return int(number) * _UNITS[unit]
