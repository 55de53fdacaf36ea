"""Quotas: the most that a tenant or a key may use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from batchwright.errors import InvalidRequest

LARGEST = 2**53


@dataclass(frozen=True, slots=True, kw_only=True)
class Quotas:
    """Limits of one tenant or one key; None: no limit."""

    storage_bytes: int | None = None
    """Bytes of all files, including outputs of batches."""
    enqueued_lines: int | None = None
    """Lines of batches that have no result yet."""
    enqueued_tokens: int | None = None
    """Estimated prompt tokens of those lines."""
    requests_per_minute: int | None = None
    """Online requests per minute."""
    tokens_per_minute: int | None = None
    """Tokens of the prompts and answers of online requests per minute."""
    concurrent_requests: int | None = None
    """Online requests at once."""

    def __post_init__(self) -> None:
        for name in NAMES:
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LARGEST:
                raise InvalidRequest(f"{name}={value!r}: must be a whole number from 1 to 2**53", param=name)

    def over(self, defaults: Quotas) -> Quotas:
        """Return these quotas, with the limits of `defaults` where they have none."""
        return Quotas(**{name: _first(getattr(self, name), getattr(defaults, name)) for name in NAMES})

    def as_values(self) -> dict[str, int]:
        """Return the limits that are set, by name, as `of_values` takes them."""
        return {name: value for name in NAMES if (value := getattr(self, name)) is not None}


NAMES = tuple(field.name for field in fields(Quotas))
UNLIMITED = Quotas()


def of_values(values: Mapping[str, Any]) -> Quotas:
    """Return quotas from their values by name. Raises `InvalidRequest` for an invalid value."""
    return Quotas(**{name: value for name, value in values.items() if name in NAMES})


def _first(value: int | None, default: int | None) -> int | None:
    return default if value is None else value
