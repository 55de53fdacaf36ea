"""Signatures of webhooks, as the Standard Webhooks specification has them (https://www.standardwebhooks.com).

The signature is an HMAC-SHA256 over `id.timestamp.body` with the bytes that the secret encodes. While a secret rotates
a message bears one signature for each secret, and a receiver accepts it when any of them is right.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets as random_source
from collections.abc import Mapping, Sequence

from batchwright.errors import InvalidRequest

PREFIX = "whsec_"
TOLERANCE = 300.0
"""Seconds that a timestamp may differ from the receiver's clock, either way."""
_SHORTEST, _LONGEST, _NEW = 24, 64, 32


class BadSignature(InvalidRequest):
    """A message that was not signed with the secret, or too long ago."""

    code = "bad_signature"


def new_secret() -> str:
    """A random secret of 32 bytes, as `whsec_` and base64."""
    return PREFIX + base64.b64encode(random_source.token_bytes(_NEW)).decode()


def secret_bytes(secret: str) -> bytes:
    """The 24 to 64 bytes that a `whsec_…` secret encodes. Raises `InvalidRequest`, without repeating the secret."""
    if not secret.startswith(PREFIX):
        raise InvalidRequest(
            f"secret: starts with {PREFIX!r} in every signing secret; this one does not", param="secret"
        )
    try:
        key = base64.b64decode(secret.removeprefix(PREFIX), validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest(f"secret: after {PREFIX!r} stands base64; this is not", param="secret") from None
    if not _SHORTEST <= len(key) <= _LONGEST:
        raise InvalidRequest(
            f"secret: encodes {len(key)} bytes; give one of {_SHORTEST} to {_LONGEST} bytes", param="secret"
        )
    return key


def sign(secrets: Sequence[str], *, message_id: str, timestamp: int, body: bytes) -> str:
    """The value of `webhook-signature`: `v1,<base64>` for each secret, separated by blanks.

    `timestamp` in Unix seconds, the same that is sent as `webhook-timestamp`. Raises `InvalidRequest` for a bad secret.
    """
    return " ".join(f"v1,{_digest(secret, message_id, str(timestamp), body)}" for secret in secrets)


def signed_headers(secrets: Sequence[str], *, message_id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """The three headers of a signed message."""
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": sign(secrets, message_id=message_id, timestamp=timestamp, body=body),
    }


def verify(secret: str, headers: Mapping[str, str], body: bytes, *, now: float) -> None:
    """Check a message that was received; `headers` with names in lower case, `now` in Unix seconds.

    Raises `BadSignature` saying what is wrong: a header that is missing, a timestamp further than `TOLERANCE` from
    `now`, or no signature that is right.
    """
    missing = [name for name in ("webhook-id", "webhook-timestamp", "webhook-signature") if not headers.get(name)]
    if missing:
        raise BadSignature(f"headers: {', '.join(missing)} missing; pass the headers on as they came", param=missing[0])
    stamp = headers["webhook-timestamp"]
    # Digits only: what was signed is the text, so "1e9" or "٣" must not pass as a time.
    if not (stamp.isascii() and stamp.isdigit() and len(stamp) < 20) or abs(now - int(stamp)) > TOLERANCE:
        raise BadSignature(
            f"webhook-timestamp: {stamp!r} is not within {TOLERANCE:.0f} s of this machine's clock; check the clock",
            param="webhook-timestamp",
        )
    right = _digest(secret, headers["webhook-id"], stamp, body).encode()
    for signature in headers["webhook-signature"].split():
        version, _, value = signature.partition(",")
        if version == "v1" and hmac.compare_digest(right, value.encode(errors="replace")):
            return
    raise BadSignature("webhook-signature: none is right for this secret; check the secret", param="webhook-signature")


def _digest(secret: str, message_id: str, timestamp: str, body: bytes) -> str:
    signed = b".".join((message_id.encode(errors="replace"), timestamp.encode(), body))
    return base64.b64encode(hmac.new(secret_bytes(secret), signed, hashlib.sha256).digest()).decode()
