"""Ids of new objects of the service."""

from __future__ import annotations

import secrets


def new_id(prefix: str) -> str:
    """Return `prefix` and 24 random hex digits, such as `batch_0f…`."""
    return prefix + secrets.token_hex(12)
