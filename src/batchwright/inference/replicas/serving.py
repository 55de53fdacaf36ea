"""The work of a replica, wherever it runs: it loads the model and answers messages."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from batchwright.cgroups import free_memory
from batchwright.errors import EngineClosed, GenerationError
from batchwright.inference.calls import closing, device_failure
from batchwright.inference.inference import work_of
from batchwright.inference.replicas.messages import (
    Answered,
    Ask,
    Beat,
    Cancel,
    Chunk,
    Found,
    FromReplica,
    Look,
    Raised,
    Ready,
    ReplicaSpec,
    ToReplica,
    encoded_error,
    encoded_figures,
)
from batchwright.inference.replicas.replica import ReplicaFacts
from batchwright.peak_memory import peak_memory_bytes

if TYPE_CHECKING:
    from batchwright.engine.engine import Engine
    from batchwright.inference.routing import RoutedInference

BROKEN = 70
"""Exit status of a replica whose engine cannot go on."""
_log = logging.getLogger(__name__)
_ENCODER_PLACES = 256
_NO_LIMIT = 2**31 - 1
_KV_SHARE, _KV_MOST = 0.5, 4 * 2**30
"""Share of the free memory that the KV caches of all replicas on CPUs take, and the most that one takes."""


def take_place(spec: ReplicaSpec) -> None:
    """Pin this process to the replica's processors, before torch is imported, which counts them."""
    if spec.cpus is not None:
        os.sched_setaffinity(0, spec.cpus)
    if spec.threads is not None:
        given = os.environ.get("OMP_NUM_THREADS", "")
        os.environ["OMP_NUM_THREADS"] = str(min(spec.threads, int(given)) if given.isdecimal() else spec.threads)


def load(spec: ReplicaSpec, progress: Callable[[str], None]) -> tuple[Engine | None, RoutedInference]:
    """Load the models of a replica. Takes seconds; raises the errors of `load_models`."""
    from batchwright.engine_config import EngineConfig
    from batchwright.inference.loading import load_classifiers, load_models, local_inference, system_fingerprint

    config = EngineConfig(**spec.config)
    if config.kv_memory is None and spec.threads is not None and spec.count > 1:
        sharing = spec.count * config.tensor_parallel
        config = config.with_options(kv_memory=int(min(_KV_MOST, free_memory() * _KV_SHARE / sharing)))
    if spec.weights is not None:
        from batchwright.engine.native.shared_weights import share_weights
        from batchwright.models import fingerprint as fingerprint_of

        assert spec.model is not None
        share_weights(spec.weights, fingerprint_of(spec.model))
    engine, encoder = load_models(spec.model, spec.embedding_model, config, progress)
    classifiers = load_classifiers(spec.classifiers, config.device, progress)
    if engine is None:
        return None, local_inference(None, encoder, classifiers=classifiers)
    from batchwright.engine.async_engine import AsyncEngine
    from batchwright.inference.stepped_engine import SteppedEngine

    running = SteppedEngine(engine) if spec.stepped else AsyncEngine(engine)
    fingerprint = system_fingerprint(engine)
    return engine, local_inference(running, encoder, fingerprint=fingerprint, classifiers=classifiers)


class Serving:
    """The calls of one replica, made on the event loop on which they are computed.

    `send` sends a message to the process that made the calls. `give_up` is called with the reason when the engine
    cannot go on: it ends this process, so that another one can take over.
    """

    def __init__(
        self,
        spec: ReplicaSpec,
        engine: Engine | None,
        inference: RoutedInference,
        send: Callable[[FromReplica], None],
        give_up: Callable[[str], None],
    ) -> None:
        self._engine = engine
        self._inference = inference
        self._send = send
        self._give_up = give_up
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._send(Ready(self._facts()))
        self._beats = asyncio.create_task(self._beat(spec.beat))

    def obey(self, message: ToReplica) -> None:
        """Begin or cancel a call."""
        if isinstance(message, Ask):
            self._begin(message.id, self._stream(message) if message.stream else self._answer(message))
        elif isinstance(message, Look):
            self._begin(message.id, self._look(message))
        elif isinstance(message, Cancel) and (task := self._calls.get(message.id)) is not None:
            task.cancel()

    async def close(self) -> None:
        """Cancel all calls, close the engine and send its last statistics."""
        self._beats.cancel()
        for task in self._calls.values():
            task.cancel()
        await asyncio.gather(*self._calls.values(), return_exceptions=True)
        await self._inference.close()
        self._send_figures()

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

    def _begin(self, number: int, work: Coroutine[Any, Any, None]) -> None:
        task = self._calls[number] = asyncio.create_task(work)
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
        work = None
        try:
            work = await work_of(self._inference, look.prefix)
        finally:
            self._send(Found(look.id, work))  # who asked waits for this

    def _fail(self, ask: Ask, error: Exception) -> None:
        reason = str(error) if isinstance(error, EngineClosed) else None
        if isinstance(error, GenerationError):
            reason = device_failure(self._engine)
        if reason is not None:
            self._give_up(reason)
            return
        if not hasattr(error, "code"):
            _log.error("%s failed", ask.request_id, exc_info=error)
        self._send(Raised(ask.id, encoded_error(error)))

    async def _beat(self, every: float) -> None:
        while True:
            if self._engine is not None and (reason := self._engine.core.body.failure) is not None:
                self._give_up(reason)
            self._send_figures()
            await asyncio.sleep(every)

    def _send_figures(self) -> None:
        stats = None if self._engine is None else self._engine.stats.copy()
        if stats is not None:
            stats.peak_memory_bytes = peak_memory_bytes()
        self._send(Beat(encoded_figures(stats)))
