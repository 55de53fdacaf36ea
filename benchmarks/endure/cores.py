"""Cores of the parts of a run. A thread begins on the cores of the one that starts it."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Cores:
    """Sets of core numbers, which overlap where there are too few cores."""

    engine: frozenset[int]
    http: frozenset[int]
    """Cores of the thread in which the service's event loop runs."""
    generator: frozenset[int]

    @classmethod
    def shared_out(cls, available: set[int]) -> Cores:
        """One for HTTP, one for the load generator, the rest for the engine; the first two are one core of two."""
        ordered = sorted(available)
        if len(ordered) == 1:
            return cls(*[frozenset(ordered)] * 3)
        spare = ordered[-1:] if len(ordered) == 2 else ordered[-2:]
        return cls(frozenset(ordered) - frozenset(spare), frozenset(spare[:1]), frozenset(spare[-1:]))

    def in_words(self) -> str:
        """What runs where, as a sentence."""

        def named(cores: frozenset[int]) -> str:
            return f"core{'s' if len(cores) > 1 else ''} {', '.join(map(str, sorted(cores)))}"

        return (
            f"The service was started on {named(self.engine)} with `OMP_NUM_THREADS={len(self.engine)}`, so its"
            f" engine computes there; then the thread of its event loop was moved to {named(self.http)}, and the load"
            f" generator and the probe of /health run on {named(self.generator)} (`sched_setaffinity`)"
        )

    def take_generator(self) -> None:
        """Move this process to the load generator's cores."""
        os.sched_setaffinity(0, self.generator)

    def move_event_loop(self, pid: int) -> None:
        """Move the main thread of a process, which has the process's number; its other threads stay where they are."""
        os.sched_setaffinity(pid, self.http)
