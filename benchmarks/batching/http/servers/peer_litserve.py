"""LitServe: `max_batch_size` and `batch_timeout` (seconds)."""

# No `from __future__ import annotations`: LitServe looks at the annotations of `decode_request` as they are.

import importlib
from typing import Any

from benchmarks.batching.http.servers import HOST, Model, Spec

_litserve: Any = importlib.import_module("litserve")  # the environment that checks types has none


class Api(_litserve.LitAPI):  # type: ignore[misc]
    def setup(self, device: str) -> None:
        self.model = Model(Spec.read())

    def decode_request(self, request: dict[str, Any]) -> dict[str, Any]:
        return request

    def batch(self, inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return inputs

    def predict(self, x: list[dict[str, Any]]) -> list[int]:
        return self.model.compute(x)

    def unbatch(self, output: list[int]) -> list[int]:
        return output

    def encode_response(self, output: int) -> dict[str, int]:
        return {"id": output}


if __name__ == "__main__":
    spec = Spec.read()
    api = Api(max_batch_size=spec.max_batch_size, **spec.settings)
    server = _litserve.LitServer(api, accelerator="cpu", devices=1, workers_per_device=1)
    server.run(host=HOST, port=spec.port, generate_client_file=False, log_level="warning", access_log=False)
