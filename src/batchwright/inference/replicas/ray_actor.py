"""`ReplicaActor`: a replica as a Ray actor, in a process that Ray started on some node."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Sequence

import msgspec

from batchwright.inference.replicas.messaged_replica import PATIENCE
from batchwright.inference.replicas.messages import (
    Broken,
    Close,
    FromReplica,
    Loading,
    Refused,
    ReplicaSpec,
    decode_for_replica,
    encoded,
    encoded_error,
)
from batchwright.inference.replicas.serving import BROKEN, Serving, load, take_place

_LAST_WORDS = 5.0
"""Seconds within which the reason why an engine broke must be fetched; then its process ends."""


class ReplicaActor:
    """Loads a model and answers messages. Its messages are fetched: an actor calls no one and stores nothing in Ray."""

    def __init__(self) -> None:
        self._outbox: list[bytes] = []
        self._has_more = asyncio.Event()
        self._fetching = 0
        self._fetched_at = time.monotonic()
        self._serving: Serving | None = None
        self._is_over = False

    async def begin(self, spec: bytes) -> str:
        """Begin to load the model, and return the id of the node."""
        import ray

        self._watching = asyncio.create_task(self._watch())
        message = decode_for_replica(spec)
        assert isinstance(message, ReplicaSpec)
        if message.threads is not None:
            # Assume that the node has as many replicas as it can: they share its memory.
            most = max(1, (os.cpu_count() or 1) // message.threads)
            message = msgspec.structs.replace(message, count=min(message.count, most))
        self._loading = asyncio.create_task(self._load(message))
        return str(ray.get_runtime_context().get_node_id())

    async def take(self, messages: Sequence[bytes]) -> None:
        """Take messages for the replica, in their order."""
        for content in messages:
            message = decode_for_replica(content)
            if isinstance(message, Close):
                self._closing = asyncio.create_task(self._close())
            elif self._serving is not None:
                self._serving.obey(message)

    async def fetch(self) -> list[bytes]:
        """Wait for messages of the replica, and return them; none if there will be no more."""
        self._fetching += 1
        try:
            await self._has_more.wait()
        finally:
            self._fetching -= 1
            self._fetched_at = time.monotonic()
        messages, self._outbox = self._outbox, []
        if not self._is_over:
            self._has_more.clear()
        return messages

    async def _load(self, spec: ReplicaSpec) -> None:
        loop = asyncio.get_running_loop()

        def progress(text: str) -> None:
            loop.call_soon_threadsafe(self._send, Loading(text))

        take_place(spec)
        try:
            engine, inference = await asyncio.to_thread(load, spec, progress)
        except Exception as error:
            self._send(Refused(encoded_error(error)))
            self._end()
            return
        self._serving = Serving(spec, engine, inference, self._send, self._break)

    async def _close(self) -> None:
        if self._serving is not None:
            await self._serving.close()
        self._end()

    def _send(self, message: FromReplica) -> None:
        if not self._is_over:
            self._outbox.append(encoded(message))
            self._has_more.set()

    def _end(self) -> None:
        self._is_over = True
        self._has_more.set()

    def _break(self, reason: str) -> None:
        """End this process: an actor that stayed would hold its node's GPU, and calls, for a dead engine."""
        self._send(Broken(reason))
        self._end()
        # In its own thread: after some errors CUDA blocks every caller.
        end = threading.Timer(_LAST_WORDS, os._exit, [BROKEN])
        end.daemon = True
        end.start()

    async def _watch(self) -> None:
        """End this process if nothing fetches its messages: this node was given up, and is unreachable."""
        while self._fetching or time.monotonic() - self._fetched_at < PATIENCE:  # noqa: ASYNC110 - time is awaited
            await asyncio.sleep(PATIENCE / 10)
        os._exit(BROKEN)
