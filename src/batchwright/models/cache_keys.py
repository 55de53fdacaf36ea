"""Under which name a model lies in the cache: another one when its files differ, or the way in which they are made."""

from __future__ import annotations

import hashlib

from batchwright.models.catalog import BuiltinModel
from batchwright.models.conversion import CONVERSION_REVISION

_GGUF_PREFIX = "gguf-"


def builtin_key(model: BuiltinModel) -> str:
    return f"{model.name}-{_digest(model.content_sha256)}"


def gguf_key(sha256: str) -> str:
    """Of the GGUF file with this checksum."""
    return f"{_GGUF_PREFIX}{_digest(sha256)}"


def is_gguf_key(key: str) -> bool:
    return key.startswith(_GGUF_PREFIX)


def _digest(sha256: str) -> str:
    return hashlib.sha256(f"{CONVERSION_REVISION} {sha256}".encode()).hexdigest()[:16]
