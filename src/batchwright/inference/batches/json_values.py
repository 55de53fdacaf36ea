"""Values in the JSON of providers, any of which may be missing."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from batchwright.errors import EndpointError


def data(answer: object) -> list[dict[str, Any]]:
    """Return the objects of a list, in either of the forms in use."""
    found = answer.get("data") if isinstance(answer, dict) else answer
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def result_object(line: bytes) -> dict[str, Any] | None:
    """Return the object with a custom id in a line of results; None if there is none."""
    try:
        value = msgspec.json.decode(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and isinstance(value.get("custom_id"), str) else None


def id_of(answer: object, what: str) -> str:
    found = answer.get("id") if isinstance(answer, dict) else None
    if not isinstance(found, str) or not found:
        raise EndpointError(f"the provider answers without the id of {what}")
    return found


def part(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = values.get(name)
    return part if isinstance(part, dict) else {}


def text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def count(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 0


def time_of(value: object) -> float | None:
    """Return a Unix time, given as a number or in ISO 8601, in UTC unless specified otherwise."""
    if isinstance(value, int | float):
        return float(value)
    try:
        time = datetime.fromisoformat(value) if isinstance(value, str) else None
        return None if time is None else (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None
