"""batchwright: a `Batcher` behind one FastAPI route under uvicorn."""

from __future__ import annotations

import importlib
from typing import Any

from batchwright.batcher import Batcher
from batchwright.errors import DeadlineExceeded, Overloaded
from batchwright.policies import auto
from benchmarks.batching.http.servers import HOST, Model, Spec

_fastapi: Any = importlib.import_module("fastapi")  # not a dependency of what checks types
_uvicorn: Any = importlib.import_module("uvicorn")


def make_app(spec: Spec) -> Any:
    """Return the app. `deadline`: whether the batcher is given the time within which each answer is wanted."""
    batcher = Batcher(Model(spec).compute, auto(spec.max_batch_size), length=lambda request: request["length"])
    app = _fastapi.FastAPI()

    async def predict(request: dict[str, Any]) -> dict[str, int]:
        deadline = request["limit"] if spec.settings["deadline"] else None
        try:
            return {"id": await batcher.compute(request, deadline=deadline)}
        except (DeadlineExceeded, Overloaded) as error:
            raise _fastapi.HTTPException(503, str(error)) from error

    app.post("/predict")(predict)
    return app


if __name__ == "__main__":
    spec = Spec.read()
    _uvicorn.run(make_app(spec), host=HOST, port=spec.port, log_level="warning", access_log=False)
