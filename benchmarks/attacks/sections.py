"""The attacks, in the order in which they are run and shown."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.attacks import idle_sockets
from benchmarks.attacks.attack import Attack

ATTACKS: Sequence[Attack] = (idle_sockets.ATTACK,)
