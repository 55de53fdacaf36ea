"""Triton's dynamic batcher, with the model in Python through pytriton."""

from __future__ import annotations

import importlib
from typing import Any

from benchmarks.batching.http.servers import HOST, Model, Spec

_config: Any = importlib.import_module("pytriton.model_config")  # the environment that checks types has none
_triton: Any = importlib.import_module("pytriton.triton")
_numpy: Any = importlib.import_module("numpy")

NAMES = ("id", "length", "poison")


def batcher(settings: dict[str, Any]) -> Any:
    """`queue_timeout_us`: a request that waits longer is rejected; the rest by the library's own names."""
    rest = dict(settings)
    timeout = rest.pop("queue_timeout_us", None)
    if timeout is not None:
        rest["default_queue_policy"] = _config.QueuePolicy(default_timeout_microseconds=timeout)
    return _config.DynamicBatcher(**rest)


def main() -> None:
    """Serve until the process is told to end."""
    spec = Spec.read()
    model = Model(spec)

    def infer(requests: Any) -> list[dict[str, Any]]:
        rows = [{name: int(request.data[name][0, 0]) for name in NAMES} for request in requests]
        return [{"id": _numpy.array([[ident]], dtype=_numpy.int64)} for ident in model.compute(rows)]

    ports = {"http_port": spec.port, "grpc_port": spec.port + 1, "metrics_port": spec.port + 2}
    config = _triton.TritonConfig(http_address=HOST, grpc_address=HOST, allow_metrics=False, **ports)
    one = {"dtype": _numpy.int64, "shape": (1,)}
    with _triton.Triton(config=config) as triton:
        triton.bind(
            model_name="stub",
            infer_func=infer,
            inputs=[_config.Tensor(name=name, **one) for name in NAMES],
            outputs=[_config.Tensor(name="id", **one)],
            config=_config.ModelConfig(max_batch_size=spec.max_batch_size, batcher=batcher(spec.settings)),
            strict=False,
        )
        triton.serve()


if __name__ == "__main__":
    main()
