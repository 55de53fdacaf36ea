"""Signatures of webhooks by the Standard Webhooks specification (https://www.standardwebhooks.com)."""

from __future__ import annotations

import base64
import secrets as random_source
from collections.abc import Sequence
from datetime import UTC, datetime

from standardwebhooks import Webhook

_PREFIX = "whsec_"
_SECRET_BYTES = 32


def new_secret() -> str:
    """Return a random secret of 32 bytes, as `whsec_` and base64."""
    return _PREFIX + base64.b64encode(random_source.token_bytes(_SECRET_BYTES)).decode()


def signed_headers(secrets: Sequence[str], *, message_id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """Return the three headers of a message signed at `timestamp` (Unix seconds) with each of `secrets`.

    There are several secrets during a rotation; a receiver accepts the message if any signature is valid.
    """
    at, text = datetime.fromtimestamp(timestamp, UTC), body.decode()
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(Webhook(secret).sign(message_id, at, text) for secret in secrets),
    }
