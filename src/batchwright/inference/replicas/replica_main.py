"""The process of a replica: `python -m batchwright.inference.replicas.replica_main DESCRIPTOR`, a connected socket."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING

from batchwright.errors import EngineClosed, GenerationError
from batchwright.inference.calls import closing, device_failure
from batchwright.inference.inference import work_of
from batchwright.inference.replicas.messages import (
    HEADER_BYTES,
    Answered,
    Ask,
    Beat,
    Broken,
    Cancel,
    Chunk,
    Close,
    Found,
    FromReplica,
    Loading,
    Look,
    Raised,
    Ready,
    Refused,
    ReplicaSpec,
    ToReplica,
    decode_for_replica,
    encoded_error,
    encoded_figures,
    frame,
    length_of,
)
from batchwright.inference.replicas.replica import ReplicaFacts

if TYPE_CHECKING:
    from batchwright.engine.engine import Engine
    from batchwright.inference.routing import RoutedInference

_log = logging.getLogger(__name__)
_BROKEN = 70
"""Exit status of a replica whose engine cannot go on."""
_ENCODER_PLACES = 256
_NO_LIMIT = 2**31 - 1
_KV_SHARE, _KV_MOST = 0.5, 4 * 2**30
"""Share of the free memory that the KV caches of all replicas on CPUs take, and the most that one takes."""


def main() -> None:
    """Load the model that the first message names, and answer calls until told to end, or the other side is gone."""
    # Ctrl-C is for the process that started this one, which ends it when it is time.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[1]))
    spec = decode_for_replica(_receive(connection, length_of(_receive(connection, HEADER_BYTES))))
    assert isinstance(spec, ReplicaSpec)
    _take_place(spec)
    try:
        engine, inference = _load(spec, lambda text: connection.sendall(frame(Loading(text))))
    except Exception as error:
        connection.sendall(frame(Refused(encoded_error(error))))
        return
    with contextlib.suppress(ConnectionError):
        asyncio.run(_Serving(spec, engine, inference).run(connection))


def _receive(connection: socket.socket, size: int) -> bytes:
    content = b""
    while len(content) < size:
        more = connection.recv(size - len(content))
        if not more:
            sys.exit()
        content += more
    return content


def _take_place(spec: ReplicaSpec) -> None:
    """Stay on the processors of this replica. Before torch is imported, which counts them."""
    if spec.cpus is not None:
        os.sched_setaffinity(0, spec.cpus)
    if spec.threads is not None and "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = str(spec.threads)


def _load(spec: ReplicaSpec, progress: object) -> tuple[Engine | None, RoutedInference]:
    from batchwright.engine_config import EngineConfig
    from batchwright.inference.loading import load_models, local_inference, system_fingerprint

    config = EngineConfig(**spec.config)
    if config.kv_memory is None and spec.cpus is not None and spec.count > 1:
        import psutil

        free = psutil.virtual_memory().available
        sharing = spec.count * config.tensor_parallel
        config = config.with_options(kv_memory=int(min(_KV_MOST, free * _KV_SHARE / sharing)))
    engine, encoder = load_models(spec.model, spec.embedding_model, config, progress)  # type: ignore[arg-type]
    if engine is None:
        return None, local_inference(None, encoder)
    from batchwright.engine.async_engine import AsyncEngine
    from batchwright.inference.stepped_engine import SteppedEngine

    running = SteppedEngine(engine) if spec.stepped else AsyncEngine(engine)
    return engine, local_inference(running, encoder, fingerprint=system_fingerprint(engine))


class _Serving:
    """The calls of one replica."""

    def __init__(self, spec: ReplicaSpec, engine: Engine | None, inference: RoutedInference) -> None:
        self._beat_every = spec.beat
        self._engine = engine
        self._inference = inference
        self._calls: dict[int, asyncio.Task[None]] = {}

    async def run(self, connection: socket.socket) -> None:
        reader, self._writer = await asyncio.open_connection(sock=connection)
        self._send(Ready(self._facts()))
        beats = asyncio.create_task(self._beat())
        while True:
            try:
                header = await reader.readexactly(HEADER_BYTES)
                message = decode_for_replica(await reader.readexactly(length_of(header)))
            except (asyncio.IncompleteReadError, ConnectionError):
                os._exit(0)  # nobody wants an answer any more
            if isinstance(message, Close):
                break
            self._obey(message)
        beats.cancel()
        for task in self._calls.values():
            task.cancel()
        await asyncio.gather(*self._calls.values(), return_exceptions=True)
        await self._inference.close()
        self._send_figures()
        await self._writer.drain()
        self._writer.close()

    def _facts(self) -> ReplicaFacts:
        routes = self._inference.routes
        stats = None if self._engine is None else self._engine.stats
        kv_tokens = _NO_LIMIT if stats is None else stats.kv_blocks * stats.block_size
        return ReplicaFacts(
            models=tuple(self._inference.models),
            endpoints=tuple(endpoint for route in routes for endpoint in route.endpoints),
            places=_ENCODER_PLACES if stats is None else stats.max_num_seqs,
            kv_tokens=kv_tokens,
            longest=0 if self._engine is None else min(self._engine.max_model_len, kv_tokens),
        )

    def _obey(self, message: ToReplica) -> None:
        if isinstance(message, Ask):
            self._begin(message.id, self._stream(message) if message.stream else self._answer(message))
        elif isinstance(message, Look):
            self._begin(message.id, self._look(message))
        elif isinstance(message, Cancel) and (task := self._calls.get(message.id)) is not None:
            task.cancel()

    def _begin(self, number: int, work: object) -> None:
        task = self._calls[number] = asyncio.create_task(work)  # type: ignore[arg-type]
        task.add_done_callback(lambda _: self._calls.pop(number, None))

    async def _answer(self, ask: Ask) -> None:
        try:
            self._send(Answered(ask.id, await self._inference.answer(ask.call())))
        except Exception as error:
            self._fail(ask, error)

    async def _stream(self, ask: Ask) -> None:
        try:
            async with closing(self._inference.stream(ask.call())) as bodies:
                async for body in bodies:
                    self._send(Chunk(ask.id, body))
            self._send(Chunk(ask.id, None))
        except Exception as error:
            self._fail(ask, error)

    async def _look(self, look: Look) -> None:
        self._send(Found(look.id, await work_of(self._inference, look.prefix)))

    def _fail(self, ask: Ask, error: Exception) -> None:
        if isinstance(error, EngineClosed):
            self._break(str(error))
        if isinstance(error, GenerationError) and (reason := device_failure(self._engine)) is not None:
            self._break(reason)
        if not hasattr(error, "code"):
            _log.error("%s failed", ask.request_id, exc_info=error)
        self._send(Raised(ask.id, encoded_error(error)))

    def _break(self, reason: str) -> None:
        """End this process: another one can go on."""
        with contextlib.suppress(OSError):
            found = self._writer.get_extra_info("socket")
            os.set_blocking(found.fileno(), True)
            os.write(found.fileno(), frame(Broken(reason)))
        os._exit(_BROKEN)

    async def _beat(self) -> None:
        while True:
            if self._engine is not None and (reason := self._engine.core.body.failure) is not None:
                self._break(reason)
            self._send_figures()
            await asyncio.sleep(self._beat_every)

    def _send_figures(self) -> None:
        self._send(Beat(encoded_figures(None if self._engine is None else self._engine.stats.copy())))

    def _send(self, message: FromReplica) -> None:
        self._writer.write(frame(message))


if __name__ == "__main__":
    main()
