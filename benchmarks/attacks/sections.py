"""The attacks, in the order in which they are run and shown."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.attacks import (
    crowding,
    idle_sockets,
    large_bodies,
    page_streams,
    schema,
    slow_headers,
    small_chunks,
    stops,
    unread_streams,
)
from benchmarks.attacks.attack import Attack

ATTACKS: Sequence[Attack] = (
    idle_sockets.ATTACK,
    slow_headers.ATTACK,
    unread_streams.ATTACK,
    page_streams.ATTACK,
    small_chunks.ATTACK,
    large_bodies.ATTACK,
    schema.ATTACK,
    stops.ATTACK,
    *crowding.ATTACKS,
)
