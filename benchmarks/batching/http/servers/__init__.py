"""One minimal server for each library, all in front of the same model, one request at a time over HTTP.

A server is started as `python -m benchmarks.batching.http.servers.NAME`, in the environment that has its library, and
given everything in the environment variable `VARIABLE`, which its child processes see too. A module imports its library
when it is itself imported; this one needs only the standard library.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

VARIABLE = "BATCHING_SERVER"
HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Spec:
    """What a server is given."""

    port: int
    alpha: float
    beta: float
    """The model sleeps `alpha + beta * requests * longest` seconds for a batch."""
    max_batch_size: int
    settings: dict[str, Any]
    """Settings of the library, by its own names."""

    @classmethod
    def read(cls) -> Self:
        """What this process was given."""
        return cls(**json.loads(os.environ[VARIABLE]))

    def environment(self) -> dict[str, str]:
        """Return what the server's process must have in its environment."""
        return {VARIABLE: json.dumps(asdict(self))}


class PoisonError(Exception):
    """Error that the model raises for a batch with a poisoned request."""


class Model:
    """Sleeps as long as a real one would compute on an accelerator, one batch at a time."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self._turn = threading.Lock()

    def compute(self, items: Sequence[dict[str, Any]]) -> list[int]:
        """Return the `id` of each. Raises `PoisonError` if one is poisoned, ValueError if there are too many."""
        if len(items) > self.spec.max_batch_size:
            raise ValueError(f"a batch of {len(items)}: the model holds {self.spec.max_batch_size}")
        longest = max(item["length"] for item in items)
        with self._turn:
            time.sleep(self.spec.alpha + self.spec.beta * len(items) * longest)
        if any(item["poison"] for item in items):
            raise PoisonError("a poisoned request")
        return [item["id"] for item in items]
