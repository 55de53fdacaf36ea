"""Checks of a new batch, apart from those of its lines. All raise `InvalidRequest` that names the field."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import cast, get_args

from batchwright.errors import InvalidRequest, shown
from batchwright.service.limits import LONGEST_AGE
from batchwright.store.records import BatchRecord, Endpoint
from batchwright.wire.bounds import MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE
from batchwright.wire.requests import RESPONSES_URL

MIN_EXPIRY, MAX_EXPIRY = 3600, int(LONGEST_AGE)
"""Least and most seconds from the creation of a file to its expiry."""
_IDEMPOTENCY_KEY = 255
_FILENAME = 1024
_ASKED = (
    "endpoint", "input_file_id", "completion_window", "metadata", "output_expires_after", "callback_url", "simple",
    "parent_id",
)  # fmt: skip
"""Fields of a batch that its request determines."""
_DURATION = re.compile(r"([0-9]{1,9})([smhd])")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def endpoint_of(value: object, *, responses: bool) -> Endpoint:
    """Return `value` if it is the endpoint of a batch. `responses`: whether `/v1/responses` can be computed."""
    known = [each for each in get_args(Endpoint) if responses or each != RESPONSES_URL]
    if value == RESPONSES_URL and not responses:
        raise InvalidRequest(
            f"{RESPONSES_URL} has no counterpart in the dialect of the endpoint that computes here: send chats",
            param="endpoint",
            code="unsupported_url",
        )
    if value not in known:
        raise InvalidRequest(f"endpoint={shown(value)}: must be one of {', '.join(known)}", param="endpoint")
    return cast("Endpoint", value)


def duration_seconds(text: str) -> float | None:
    """Return the seconds of a text such as `24h`, a whole number of s, m, h or d; None for anything else."""
    match = _DURATION.fullmatch(text)
    return int(match[1]) * _SECONDS[match[2]] if match else None


def window_seconds(value: object, longest: float) -> float:
    """Return the seconds of a completion window, at most `longest`."""
    seconds = (duration_seconds(value) if isinstance(value, str) else None) or 0.0
    if not 0.0 < seconds <= longest:
        raise InvalidRequest(
            f"completion_window={shown(value)}: must be a duration such as 24h, 30m, 90s or 7d, "
            f"at most {longest / 86_400:g}d",
            param="completion_window",
        )
    return seconds


def metadata_of(value: object) -> dict[str, str]:
    """Return `value` as metadata: up to 16 pairs of texts; None: no metadata."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or len(value) > MAX_METADATA:
        raise InvalidRequest(f"metadata: must be an object of at most {MAX_METADATA} pairs", param="metadata")
    for key, text in value.items():
        if not isinstance(key, str) or not 0 < len(key) <= MAX_METADATA_KEY:
            raise InvalidRequest(
                f"metadata key {shown(key)}: must have 1 to {MAX_METADATA_KEY} characters", param="metadata"
            )
        if not isinstance(text, str) or len(text) > MAX_METADATA_VALUE:
            raise InvalidRequest(
                f"metadata[{key!r}]: must be a text of at most {MAX_METADATA_VALUE} characters", param="metadata"
            )
        if "\0" in key + text:
            raise InvalidRequest(f"metadata[{key!r}]: must not hold the character NUL", param="metadata")
    return dict(value)


def expiry_of(value: float | None, param: str) -> float | None:
    """Return `value` if it can be the seconds from the creation of a file to its expiry; None: the default."""
    if value is not None and not MIN_EXPIRY <= value <= MAX_EXPIRY:
        raise InvalidRequest(f"{param}[seconds]={shown(value)}: must be {MIN_EXPIRY} to {MAX_EXPIRY}", param=param)
    return value


def idempotency_key_of(value: str | None) -> str | None:
    """Return `value` if it can be an idempotency key; None: there is none."""
    if value is not None and (not 0 < len(value) <= _IDEMPOTENCY_KEY or "\0" in value):
        raise InvalidRequest(f"Idempotency-Key: must have 1 to {_IDEMPOTENCY_KEY} characters", param="Idempotency-Key")
    return value


def require_same(made: BatchRecord, asked: BatchRecord) -> None:
    """Check that `made`, a batch made earlier with the same key, was made by the same request as `asked`."""
    if any(getattr(made, name) != getattr(asked, name) for name in _ASKED):
        raise InvalidRequest(
            f"Idempotency-Key: {made.idempotency_key!r} was used for another request, which made {made.id}: "
            "give each request a key of its own",
            param="Idempotency-Key",
            code="idempotency_key_reused",
        )


def filename_of(value: str) -> str:
    """Return `value` if it can be a file name, which is only stored and shown, and never used as a path."""
    if not 0 < len(value) <= _FILENAME or "\0" in value:
        raise InvalidRequest(f"file: its name must have 1 to {_FILENAME} characters", param="file")
    return value
