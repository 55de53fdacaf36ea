"""The protocol of an attack: what service it is run against, what it does, and what it reports."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.attacks.service import Service


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value."""

    name: str
    value: float | None
    """None: nothing was measured, such as a latency where no answer came."""
    unit: str = ""
    most: float | None = None
    """The bar: the value must not exceed it."""

    @property
    def missed(self) -> bool:
        """Whether there is a bar and the value is above it, or is missing."""
        return self.most is not None and (self.value is None or self.value > self.most)


@dataclass(frozen=True, slots=True)
class Attack:
    """One section of the benchmark. Each has its own module, as `ATTACK`, listed in `sections.py`."""

    name: str
    """Its name for `--only`."""
    title: str
    text: str
    """What is done and what is measured, in a few sentences of Markdown."""
    run: Callable[[Service], Awaitable[Sequence[Figure]]]
    backend: Literal["engine", "scripted"] = "scripted"
    """What computes: the default model, or an endpoint in another process that answers without computing."""
    flags: Sequence[str] = ()
    """Flags of the service. Those that an older service does not know belong in `new_flags`."""
    new_flags: Sequence[str] = ()
    """Flags of the service in this checkout only; left out with `--source`."""
    endpoint_flags: Sequence[str] = ()
    """Flags of the scripted endpoint: see `endpoint.py`."""
    descriptors: int | None = None
    """RLIMIT_NOFILE of the service's process; None: that of this one."""
    seconds: float = 120.0
    """Seconds after which the section has failed, not counting the start of the service."""
