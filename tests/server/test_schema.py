"""Whatever the OpenAPI description allows, and what it does not: no 5xx, and every answer as it is described."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
import uvicorn
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from tests.server.conftest import running
from tests.server.test_batches import begin, line

_CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
_EXAMPLES = {GenerationMode.POSITIVE: 12, GenerationMode.NEGATIVE: 4}
"""For each operation, with data that fits its description, and with data that does not."""
_ENDLESS = {"/dashboard/events"}


class _Running:
    """The service on a thread with an event loop of its own, over a real socket."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ready = threading.Event()
        self._server: uvicorn.Server
        self.url = ""
        self.schema: dict[str, Any] = {}
        self.ids: dict[str, list[str]] = {}
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)

    def __enter__(self) -> _Running:
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(30)

    async def _main(self) -> None:
        async with running(self._folder) as service:
            batch = await service.ended((await begin(service, line("a", "x"), line("b", "fail"))).id)
            simple = (await service.http.post("/v1/batch/async", json={"prompts": ["x"]})).json()["batch_id"]
            self.ids = {"file_id": [batch.input_file_id, str(batch.output_file_id)], "batch_id": [batch.id, simple]}
            self.schema = service.app.openapi()
            config = uvicorn.Config(service.app, port=0, log_config=None, lifespan="off")
            self._server = uvicorn.Server(config)
            serving = asyncio.create_task(self._server.serve())
            while not self._server.started:  # noqa: ASYNC110 - a flag of uvicorn's
                await asyncio.sleep(0)
            port = self._server.servers[0].sockets[0].getsockname()[1]
            self.url = f"http://127.0.0.1:{port}"
            self._ready.set()
            await serving


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Running]:
    with _Running(tmp_path_factory.mktemp("schema")) as running_service:
        yield running_service


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_answers_are_as_described(service: _Running, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_dict(service.schema)
    operations = [found.ok() for found in schema.get_all_operations()]  # type: ignore[union-attr]
    tried = [_try(service, each, mode) for each in operations if each.path not in _ENDLESS]
    assert sum(tried) > 10


def _try(service: _Running, operation: Any, mode: GenerationMode) -> bool:
    """Ask many things of one operation. False: there is nothing of this kind to ask."""
    # In a form everything is text, so a number in place of a file is one.
    rejects = mode is GenerationMode.NEGATIVE and (operation.method, operation.path) != ("post", "/v1/files")
    checks = [*_CHECKS, negative_data_rejection] if rejects else _CHECKS

    @settings(
        max_examples=_EXAMPLES[mode],
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        deadline=None,
        derandomize=True,
        database=None,
    )
    @given(case=operation.as_strategy(generation_mode=mode), real=st.integers(0, 3))
    def ask(case: Any, real: int) -> None:
        for name, ids in service.ids.items():
            if mode is GenerationMode.POSITIVE and name in case.path_parameters and real < len(ids):
                case.path_parameters[name] = ids[real]
        case.call_and_validate(base_url=service.url, checks=checks)

    try:
        ask()
    except Unsatisfiable:
        assert mode is GenerationMode.NEGATIVE
        return False
    return True
