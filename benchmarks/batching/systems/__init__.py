"""What is compared: each module puts one library in front of the same device.

A module has `open_system(device, options)`, called in the event loop in which the system is used, and `OPTIONS`, the
published grid of its settings: the first is the library's default (with the device's batch size, which it must know). A
module imports its library when it is itself imported, and only then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

from benchmarks.batching.workload import Job

Options: TypeAlias = Mapping[str, Any]


class System(Protocol):
    """One library, set up in front of a device."""

    async def call(self, job: Job) -> int:
        """Return what a caller gets, the `ident` of the job. Raises whatever the library raises instead."""
        ...

    async def close(self) -> None: ...
