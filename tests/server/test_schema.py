"""Every answer is as the OpenAPI description says, to requests that it allows and that it does not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn
from benchmarks.attacks.described import run
from tests.long_form import examples
from tests.server.batch_files import begin, line
from tests.server.conftest import running


class _Running:
    """The service on a thread with its own event loop, over a real socket; requests need a key."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ready = threading.Event()
        self._server: uvicorn.Server
        self.url = ""
        self.key = ""
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
            await service.ended((await begin(service, line("a", "x"), line("b", "fail"))).id)
            self.key = await service.key("default")
            config = uvicorn.Config(service.app, port=0, log_config=None, lifespan="off", http="h11")
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


def test_answers_are_as_described(service: _Running) -> None:
    counts = run(service.url, service.key, None, phases="fuzzing", examples=examples(3, long=5))
    assert not counts.failures, counts.output
    assert counts.cases > 100
    assert counts.accepted > 30
