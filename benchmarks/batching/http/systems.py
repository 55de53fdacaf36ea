"""The systems compared over HTTP: where each server's environment is, its protocol, and its published settings."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.batching.workload import Job


@dataclass(frozen=True, slots=True)
class Wire:
    """How one request is written and its answer read."""

    path: str
    encode: Callable[[Job], bytes]
    """The body of the request."""
    decode: Callable[[bytes], int]
    """The id in the body of an answer with status 200."""


@dataclass(frozen=True, slots=True)
class HttpSystem:
    """One server and the settings that it is measured with, by its library's names; the first is the default.

    `environment` is a folder of .bench/, made by `benchmarks/setup_batching.sh`; `module` is run in it.
    """

    name: str
    environment: str
    module: str
    wire: str
    settings: tuple[Mapping[str, Any], ...] = ({},)


def _fields(job: Job) -> dict[str, Any]:
    return {"id": job.ident, "length": job.length, "poison": job.poison, "limit": job.limit}


def _plain(job: Job) -> bytes:
    return json.dumps(_fields(job)).encode()


def _listed(job: Job) -> bytes:
    return json.dumps({"items": [_fields(job)]}).encode()


def _kserve(job: Job) -> bytes:
    values = {"id": job.ident, "length": job.length, "poison": int(job.poison)}
    inputs = [{"name": name, "shape": [1, 1], "datatype": "INT64", "data": [value]} for name, value in values.items()]
    return json.dumps({"inputs": inputs}).encode()


WIRES: dict[str, Wire] = {
    "predict": Wire("/predict", _plain, lambda body: int(json.loads(body)["id"])),
    "mosec": Wire("/inference", _plain, lambda body: int(json.loads(body)["id"])),
    "bentoml": Wire("/predict", _listed, lambda body: int(json.loads(body)[0])),
    "triton": Wire("/v2/models/stub/infer", _kserve, lambda body: int(json.loads(body)["outputs"][0]["data"][0])),
}

_SERVERS = "benchmarks.batching.http.servers."

SYSTEMS: tuple[HttpSystem, ...] = (
    HttpSystem("batchwright", "fastapi", _SERVERS + "ours", "predict", ({"deadline": True}, {"deadline": False})),
    HttpSystem(
        "LitServe",
        "litserve",
        _SERVERS + "peer_litserve",
        "predict",
        ({}, {"batch_timeout": 0.005}, {"batch_timeout": 0.02}),
    ),
    HttpSystem("mosec", "mosec", _SERVERS + "peer_mosec", "mosec", ({}, {"max_wait_time": 1}, {"max_wait_time": 20})),
    HttpSystem(
        "BentoML",
        "bentoml",
        _SERVERS + "peer_bentoml",
        "bentoml",
        ({}, {"max_latency_ms": 300}, {"max_latency_ms": 120}),
    ),
    HttpSystem(
        "Triton",
        "pytriton",
        _SERVERS + "peer_triton",
        "triton",
        ({}, {"max_queue_delay_microseconds": 5000}, {"queue_timeout_us": 100_000}),
    ),
)
