"""BentoML: `@bentoml.api(batchable=True)` with `max_batch_size` and `max_latency_ms`."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from benchmarks.batching.http.servers import HOST, VARIABLE, Model, Spec

_bentoml: Any = importlib.import_module("bentoml")  # the environment that checks types has none


def make_service(spec: Spec) -> Any:
    class Service:
        def __init__(self) -> None:
            self.model = Model(spec)

        def predict(self, items: list[dict[str, Any]]) -> list[int]:
            return self.model.compute(items)

    Service.predict.__annotations__ = {"items": list[dict[str, Any]], "return": list[int]}
    batched = _bentoml.api(batchable=True, max_batch_size=spec.max_batch_size, **spec.settings)
    Service.predict = batched(Service.predict)  # type: ignore[method-assign]
    return _bentoml.service(workers=1, logging={"access": {"enabled": False}})(Service)


if VARIABLE in os.environ:
    service = make_service(Spec.read())

if __name__ == "__main__":
    arguments = ["serve", "benchmarks.batching.http.servers.peer_bentoml:service"]
    spec = Spec.read()
    os.execv(sys.executable, [sys.executable, "-m", "bentoml", *arguments, "--host", HOST, "--port", str(spec.port)])
