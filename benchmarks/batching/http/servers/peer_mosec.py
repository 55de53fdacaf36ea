"""mosec: `max_batch_size` and `max_wait_time` (milliseconds)."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from benchmarks.batching.http.servers import HOST, Model, Spec

_mosec: Any = importlib.import_module("mosec")  # the environment that checks types has none


class Worker(_mosec.Worker):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.model = Model(Spec.read())

    def forward(self, data: list[dict[str, Any]]) -> list[dict[str, int]]:
        return [{"id": ident} for ident in self.model.compute(data)]


if __name__ == "__main__":
    spec = Spec.read()
    sys.argv[1:] = ["--address", HOST, "--port", str(spec.port), "--log-level", "error"]
    server = _mosec.Server()
    server.append_worker(Worker, num=1, max_batch_size=spec.max_batch_size, **spec.settings)
    server.run()
