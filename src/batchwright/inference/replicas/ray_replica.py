"""`RayReplica`: a replica that is an actor of a Ray cluster."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import (
    ActorPlacementGroupRemoved,
    ActorUnavailableError,
    NodeDiedError,
    ObjectLostError,
    RayError,
    RpcError,
)
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from batchwright.errors import InputError
from batchwright.inference.replicas.messaged_replica import PATIENCE, Connection, MessagedReplica
from batchwright.inference.replicas.messages import FromReplica, ReplicaSpec, ToReplica, decode_from_replica, encoded
from batchwright.inference.replicas.ray_actor import ReplicaActor
from batchwright.inference.replicas.ray_resources import RayResources
from batchwright.inference.replicas.replica import ReplicaDied
from batchwright.version import __version__

_MOST_CALLS = 100
"""Most concurrent calls of one actor: messages share calls, so that three are enough."""
_NO_ANSWER = (RayError, ConnectionError)
"""Errors of calls of an actor that is dead, or unreachable, which is treated the same."""
_NOT_IMPORTED = "failed to import on the worker"
"""What Ray says about an actor whose class cannot be imported."""
_NEVER_RAN = "The actor never ran"
_UNREACHABLE = (ActorUnavailableError, NodeDiedError, ObjectLostError, RpcError, ConnectionError)


class RayReplica(MessagedReplica):
    """An actor on whatever node has room for `resources`, which `start` waits for.

    Each has its own placement group, of one bundle. One group of all bundles would be placed only when there is room
    for all of them; without a group, the place of an actor that died would go to any other waiting actor. When the node
    of a bundle is lost, Ray places that bundle on another one, and other bundles are not affected.

    Ray itself restarts no actor and repeats no call: only the sender of calls knows what has become of them.
    """

    def __init__(self, spec: ReplicaSpec, resources: RayResources, *, patience: float = PATIENCE) -> None:
        super().__init__(patience=patience)
        self._spec = spec
        self._resources = resources
        self._group: PlacementGroup | None = None

    async def _connect(self, progress: Callable[[str], None]) -> Connection:
        progress(f"waiting for a node with {self._resources}")
        try:
            if self._group is None:
                self._group = await asyncio.to_thread(placement_group, [self._resources.bundle])
            actor = self._actor()
        except _NO_ANSWER as error:
            raise _death(error) from None
        connection = _RayConnection(actor)
        try:
            await connection.begin(self._spec)
        except ConnectionError:
            death = await connection.end()
            if connection.lost_group:
                self._group = None
            raise death from None
        except BaseException:
            connection.kill()
            raise
        progress("starting")
        return connection

    async def close(self) -> None:
        await super().close()
        if self._group is not None:
            with suppress(*_NO_ANSWER):
                await asyncio.to_thread(remove_placement_group, self._group)
            self._group = None

    def _actor(self) -> Any:
        assert self._group is not None
        resources = self._resources
        options = {
            "num_cpus": resources.num_cpus,
            "num_gpus": resources.num_gpus,
            "memory": resources.memory or None,
            "accelerator_type": resources.accelerator_type,
            "resources": {**resources.resources} or None,
            "max_restarts": 0,
            "max_task_retries": 0,
            "max_concurrency": _MOST_CALLS,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=0),
        }
        given = {name: value for name, value in options.items() if value is not None}
        return ray.remote(ReplicaActor).options(**given).remote()


class _RayConnection(Connection):
    """The calls of one actor, which carry messages both ways."""

    def __init__(self, actor: Any) -> None:
        self.lost_group = False
        """Whether the placement group of the actor was removed."""
        self._actor = actor
        self._node: str | None = None
        self._inbox: deque[bytes] = deque()
        self._outbox: list[bytes] = []
        self._sending: asyncio.Task[None] | None = None
        self._lost: asyncio.Future[ReplicaDied] = asyncio.get_running_loop().create_future()

    async def begin(self, spec: ReplicaSpec) -> None:
        """Wait until the actor is on a node, and have it load. Raises `ConnectionError`, and `InputError`."""
        self._node = await self._called(self._actor.begin.remote(encoded(spec)))

    def send(self, message: ToReplica) -> None:
        self._outbox.append(encoded(message))
        if self._sending is None:
            self._sending = asyncio.create_task(self._send_all())

    async def receive(self) -> FromReplica:
        while not self._inbox:
            self._inbox.extend(await self._called(self._actor.fetch.remote()))
            if not self._inbox:
                self._lose(ReplicaDied("it ended"))
                raise ConnectionError("the actor has ended")
        message: FromReplica = decode_from_replica(self._inbox.popleft())
        return message

    def kill(self) -> None:
        self._lose(ReplicaDied("it was killed"))

    async def end(self) -> ReplicaDied:
        if self._sending is not None:
            self._sending.cancel()
        self._lose(ReplicaDied("it was ended"))
        death = self._lost.result()
        return ReplicaDied(str(death), by_node=death.by_node or await self._has_lost_node())

    async def _send_all(self) -> None:
        # One call at a time, since concurrent calls of an actor may overtake each other.
        try:
            while self._outbox:
                messages, self._outbox = self._outbox, []
                await self._called(self._actor.take.remote(messages))
        except ConnectionError:
            pass  # `receive` raises it
        finally:
            self._sending = None

    async def _called(self, call: Any) -> Any:
        """Return what a call of the actor returns. Raises `ConnectionError` once the actor is dead or given up."""
        task = asyncio.ensure_future(_result(call))
        try:
            await asyncio.wait([task, self._lost], return_when=asyncio.FIRST_COMPLETED)
            if not self._lost.done():
                return task.result()
        except _NO_ANSWER as error:
            if _NOT_IMPORTED in str(error):
                raise InputError(
                    "batchwright cannot be imported on a node of the cluster: install it there, in the version that is "
                    f"here: pip install 'batchwright[ray]=={__version__}'"
                ) from None
            self.lost_group = isinstance(error, ActorPlacementGroupRemoved)
            self._lose(_death(error))
        finally:
            task.cancel()
        raise ConnectionError(str(self._lost.result()))

    def _lose(self, death: ReplicaDied) -> None:
        """Stop reading this actor, and have it killed, in case only its network has failed."""
        if self._lost.done():
            return
        self._lost.set_result(death)
        with suppress(*_NO_ANSWER):
            ray.kill(self._actor, no_restart=True)

    async def _has_lost_node(self) -> bool:
        """Return whether the node of the actor is gone."""
        try:
            return self._node is not None and self._node not in await asyncio.to_thread(_nodes)
        except _NO_ANSWER:
            return False


async def _result(call: Any) -> Any:
    return await call


def _nodes() -> set[str]:
    nodes: Sequence[Mapping[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return {node["NodeID"] for node in nodes if node["Alive"]}


def _death(error: Exception) -> ReplicaDied:
    """Return the death of an actor for which Ray reports `error`."""
    if isinstance(error, _UNREACHABLE):
        # Ray learns from the node that a process has died: here the node itself is silent.
        return ReplicaDied(f"its node cannot be reached ({type(error).__name__})", by_node=True)
    # The last line of an actor's death says why. An actor that never ran was placed on a node that was lost.
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reasons = [line for line in lines if line.startswith("The actor is dead because")] or lines
    reason = next(reversed(reasons), type(error).__name__).split(" Some common causes")[0]
    return ReplicaDied(reason, by_node=_NEVER_RAN in str(error))
