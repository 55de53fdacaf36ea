"""What the cache of an endpoint's provider can keep of prompts, estimated from their texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec

from batchwright.jobs.token_counts import BYTES_OF_A_TOKEN, bytes_of
from batchwright.planning.prefix_order import LEAST_SHARED
from batchwright.request import Prompt
from batchwright.wire.dialects import Dialect
from batchwright.wire.identity import cache_scope

_DIGEST = 8
"""Bytes by which texts are made to differ."""


class CacheableTokens(NamedTuple):
    """Prompt tokens that a provider's cache keeps."""

    all: int = 0
    hourly: int = 0
    """The part of them that it is asked to keep for an hour."""

    def __add__(self, other: tuple[Any, ...]) -> CacheableTokens:
        return CacheableTokens(self.all + other[0], self.hourly + other[1])


class CacheablePart(NamedTuple):
    """What a provider's cache can keep of a prompt."""

    text: bytes
    """Two prompts can share the common beginning of their texts."""
    tokens: int
    """Approximate tokens of `text`."""
    cacheable: CacheableTokens
    """Zero for a prompt that is too short to be kept."""


def sent_text(body: Mapping[str, Any], prompt: Prompt) -> bytes:
    """Return a prompt of `body` as a provider's model gets it: its tools, then its messages or text."""
    tools = body.get("tools")
    return _text_of(tools if isinstance(tools, list) else (), prompt)


def cacheable_part(
    dialect: Dialect, endpoint: str, body: Mapping[str, Any], prompt: Prompt, text: bytes, tokens: int
) -> CacheablePart:
    """Return what a provider's cache can keep of a prompt, which has about `tokens` tokens and the `text` that is sent.

    A cache separates prompts of different scopes (`cache_scope`), and those whose answers have different forms, since
    the form comes before all messages.
    """
    scope = cache_scope(endpoint, body) + repr(body.get("response_format")).encode(errors="replace")
    prefixes, hourly = dialect.cached_prefixes(body, prompt), 0
    if prefixes is None:
        text = _digest(scope, text[:_DIGEST])[: len(text)] + text[_DIGEST:]
    else:
        texts = [_text_of(each.tools, each.messages) for each in prefixes]
        text, tokens = _with_atomic_prefixes(texts, scope), 0
        for prefix, each in zip(prefixes, texts, strict=True):
            before, tokens = tokens, -(-len(each) // BYTES_OF_A_TOKEN)
            hourly += tokens - before if prefix.is_hourly else 0
    is_kept = tokens * BYTES_OF_A_TOKEN >= LEAST_SHARED
    return CacheablePart(text, tokens, CacheableTokens(tokens, hourly) if is_kept else CacheableTokens())


def _text_of(tools: Sequence[object], prompt: Prompt | Sequence[Mapping[str, Any]]) -> bytes:
    return b"".join(map(msgspec.json.encode, tools)) + bytes_of(prompt)


def _with_atomic_prefixes(prefixes: Sequence[bytes], key: bytes) -> bytes:
    """Return the last of some prefixes of a prompt, with digests in it that depend on `key` too.

    The digest of each prefix is written over the beginning of what it adds to the one before. Two prompts then share
    either all of a prefix, or none of what it adds. `prefixes`: the shortest first.
    """
    text, start = bytearray(prefixes[-1] if prefixes else b""), 0
    for each in prefixes:
        text[start : start + _DIGEST] = _digest(key, each)[: len(text) - start]
        start = len(each)
    return bytes(text)


def _digest(key: bytes, text: bytes) -> bytes:
    return blake2b(key + b"\0" + text, digest_size=_DIGEST).digest()
