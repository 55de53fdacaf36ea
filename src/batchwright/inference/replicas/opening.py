"""Opening replicas that are processes of this machine."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from batchwright.engine_config import EngineConfig, parse_bytes
from batchwright.errors import InputError
from batchwright.inference.replicas.cores import Place, ReplicaCount, places_for
from batchwright.inference.replicas.messages import ReplicaSpec
from batchwright.inference.replicas.process_replica import ProcessReplica
from batchwright.inference.replicas.replicated import ReplicatedInference
from batchwright.models import resolve
from batchwright.policies.suspects import MAX_CRASHES


async def open_replicas(
    count: ReplicaCount,
    model: str | None,
    embedding_model: str | None,
    config: EngineConfig,
    progress: Callable[[str], None] = lambda text: None,
    *,
    classifiers: Sequence[str] = (),
    stepped: bool = False,
    most_deaths: int = MAX_CRASHES,
) -> ReplicatedInference:
    """Open replicas of the models, each a process of this machine. Takes seconds.

    `stepped`: for a program that does not stream, see `SteppedEngine`. Raises the errors of `load_models`, and
    `InputError` for more replicas than this machine has places for.
    """
    if model is None and config.tensor_parallel > 1:
        raise InputError(
            f"tensor_parallel={config.tensor_parallel}: only models that generate are shared by several processes, and "
            f"none is needed here beside {embedding_model or classifiers[0]}; leave it out"
        )
    places = places_for(count, config.device, config.tensor_parallel)
    if model is not None:
        resolve(model, progress=progress, weights=config.weights_form(on_cpu=places[0].gpu is None))
    for name in (embedding_model, *classifiers):
        if name is not None:
            resolve(name, progress=progress, weights="values")
    chosen = dict(config.chosen())
    if config.kv_memory is not None:
        chosen["kv_memory"] = int(parse_bytes(config.kv_memory))  # settings have their own kind of integer
    if places[0].gpu is None:
        chosen["device"] = "cpu"
    spec = ReplicaSpec(
        model=model,
        embedding_model=embedding_model,
        classifiers=tuple(classifiers),
        config=chosen,
        count=len(places),
        stepped=stepped,
    )
    memory = _memory_for_weights(places) if model is not None and config.tensor_parallel == 1 else {}

    async def closed() -> None:
        while memory:
            os.close(memory.popitem()[1])

    replicas = [ProcessReplica(replace(spec, weights=memory.get(place.node)), place) for place in places]
    return await ReplicatedInference.opened(replicas, progress, most_deaths=most_deaths, closed=closed)


def _memory_for_weights(places: Sequence[Place]) -> dict[int | None, int]:
    """Descriptors of memory for packed weights, one for each NUMA node on which several replicas compute."""
    several = [node for node, number in Counter(place.node for place in places).items() if number > 1]
    if any(place.gpu is not None for place in places) or not hasattr(os, "memfd_create"):
        return {}
    return {node: os.memfd_create("batchwright-weights", os.MFD_CLOEXEC) for node in several}
