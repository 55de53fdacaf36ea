"""Opening replicas that are actors of a Ray cluster."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from batchwright.engine_config import EngineConfig, parse_bytes
from batchwright.errors import InputError, MissingExtra
from batchwright.inference.replicas.cores import ReplicaCount
from batchwright.inference.replicas.messages import ReplicaSpec
from batchwright.inference.replicas.ray_resources import RayResources
from batchwright.inference.replicas.replicated import ReplicatedInference
from batchwright.models import BUILTIN
from batchwright.policies.suspects import MAX_CRASHES

LOCAL = "local"
JOINED = "joined the Ray cluster at"
"""Beginning of the progress line that names the cluster."""
JOIN_SECONDS = 90.0
"""Seconds within which a cluster that answers at its address must accept this driver."""
_ANSWER_SECONDS = 10.0
_ADDRESS = "RAY_ADDRESS"
"""Variable with the address that `auto` stands for, if set."""
_OBJECT_STORE = 100 * 2**20
"""Bytes of the object store of a cluster started here: calls and answers pass through it, nothing stays."""


def ray_count(given: ReplicaCount | None) -> int:
    """Return the number of replicas on a cluster. Raises `InputError` if it is not a number."""
    if given == "auto":
        raise InputError("replicas='auto' with ray: a cluster may grow, so name a number; those without a node wait")
    return given or 1


async def open_ray_replicas(
    address: str,
    count: int,
    resources: RayResources,
    model: str | None,
    embedding_model: str | None,
    config: EngineConfig,
    progress: Callable[[str], None] = lambda text: None,
    *,
    classifiers: Sequence[str] = (),
    stepped: bool = False,
    most_deaths: int = MAX_CRASHES,
) -> ReplicatedInference:
    """Open replicas of the models, each an actor with `resources` of a node of the cluster at `address`.

    `address` is one for `ray.init`: `auto` for this machine's cluster, `host:port`, `ray://host:port`; or `local` to
    start one here. Waits until the first replica is up; the others join it when there are nodes for them. Models are
    found on each node, by name or by path. Raises `InputError`, `MissingExtra`, and the errors of
    `ReplicatedInference.opened_by_first`.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        raise MissingExtra(f"ray={address!r} needs {error.name}; install it: pip install 'batchwright[ray]'") from error
    from batchwright.inference.replicas.ray_replica import RayReplica

    spec = _spec(count, resources, model, embedding_model, config, classifiers=classifiers, stepped=stepped)
    closes = not ray.is_initialized()
    if closes:
        progress("starting a Ray cluster" if address == LOCAL else f"joining the Ray cluster {address}")
        # In a thread: it takes seconds, and in the main thread it would replace Python's SIGTERM handler.
        named = await asyncio.to_thread(_join, ray, address)
        _keep_sigterm()
        if address != LOCAL:
            nodes = sum(node["Alive"] for node in await asyncio.to_thread(ray.nodes))
            progress(f"{JOINED} {named}, which has {nodes} node{'s' * (nodes != 1)}")

    async def close() -> None:
        if closes:
            await asyncio.to_thread(ray.shutdown)
            _let_print(True)

    try:
        if address == LOCAL:
            _require_room(count, resources, await asyncio.to_thread(ray.cluster_resources))
        replicas = [RayReplica(spec, resources) for _ in range(count)]
    except BaseException:
        await close()
        raise
    return await ReplicatedInference.opened_by_first(replicas, progress, most_deaths=most_deaths, closed=close)


def _spec(
    count: int,
    resources: RayResources,
    model: str | None,
    embedding_model: str | None,
    config: EngineConfig,
    *,
    classifiers: Sequence[str],
    stepped: bool,
) -> ReplicaSpec:
    ranks = config.tensor_parallel
    if ranks > 1 and (resources.num_gpus or resources.num_cpus) < ranks:
        raise InputError(
            f"tensor_parallel={ranks} with resources ({resources}): each rank needs a GPU, or a CPU, of its own; ask "
            f'for as many with resources, such as {{"num_gpus": {ranks}}}'
        )
    chosen = dict(config.chosen())
    if config.kv_memory is not None:
        chosen["kv_memory"] = int(parse_bytes(config.kv_memory))
    if not resources.num_gpus:
        if config.device not in ("cpu", "auto"):
            raise InputError(f'device={config.device!r} with ray: ask for it with resources, such as {{"num_gpus": 1}}')
        chosen["device"] = "cpu"
    return ReplicaSpec(
        model=_absolute(model),
        embedding_model=_absolute(embedding_model),
        classifiers=tuple(_absolute_name(name) for name in classifiers),
        config=chosen,
        threads=resources.threads,
        count=count,
        stepped=stepped,
    )


def _absolute(model: str | None) -> str | None:
    """Return a name unchanged, and a path as an absolute one."""
    return None if model is None else _absolute_name(model)


def _absolute_name(model: str) -> str:
    path = Path(model).expanduser()
    return str(path.absolute()) if model not in BUILTIN and path.exists() else model


def _join(ray: Any, address: str) -> str:
    """Start or join the cluster at `address`, and return which one it is. Raises `InputError`."""
    options: dict[str, Any] = {}
    if address == LOCAL:
        # A cluster started here reports nothing to the outside.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options = {"include_dashboard": False, "object_store_memory": _OBJECT_STORE}
    named = address
    _let_print(False)
    try:
        if address != LOCAL:
            named = _resolved(address)
            _require_answer(named)
        within = None if address == LOCAL else JOIN_SECONDS
        _in_time(lambda: ray.init(address=named, logging_level=logging.ERROR, log_to_driver=False, **options), within)
        return named
    except (OSError, RuntimeError, ValueError, AssertionError) as error:  # among them ConnectionError, TimeoutError
        _let_print(True)
        of_machine = f", which is that of this machine by {_source_of_auto()}," if address == "auto" else ""
        about = f"the cluster at {named}{of_machine} cannot be joined: " if named != address else ""
        theirs = ", or belongs to another user" if isinstance(error, PermissionError) else ""
        raise InputError(
            f"ray={address!r}: {about}{error}. It may have ended{theirs}: start a cluster (ray stop, then "
            f"ray start --head) and name its address, or use {LOCAL!r}"
        ) from error


def _resolved(address: str) -> str:
    """Return the address that `auto` stands for; any other unchanged. Raises ConnectionError if there is none."""
    from ray._private.services import canonicalize_bootstrap_address_or_die

    if address != "auto":
        return address
    given = os.environ.get(_ADDRESS, "")
    return given if "://" in given else str(canonicalize_bootstrap_address_or_die(address))


def _source_of_auto() -> str:
    return _ADDRESS if os.environ.get(_ADDRESS) else "what `ray start` noted in /tmp/ray, or a process of Ray"


def _require_answer(address: str) -> None:
    """Raise OSError if nothing answers at the address of a cluster: Ray itself would wait for a minute or more."""
    host, _, port = address.rpartition("://")[2].partition("/")[0].rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_SECONDS).close()


def _in_time(work: Callable[[], object], seconds: float | None) -> None:
    """Do `work` in a thread that is abandoned after `seconds`. Raises what it raises, and TimeoutError."""
    failed: list[BaseException] = []

    def carry_out() -> None:
        try:
            work()
        except BaseException as error:  # raised in the waiting thread
            failed.append(error)

    # A daemon thread: the process may exit although Ray is still waiting in it.
    thread = threading.Thread(target=carry_out, name="batchwright-ray", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"it took no driver within {seconds:.0f} s")
    if failed:
        raise failed[0]


def _let_print(is_allowed: bool) -> None:
    """Set whether Ray prints what nodes report to standard output, where results may go. It has no option for that."""
    from ray._private import worker

    worker._worker_logs_enabled = is_allowed  # noqa: SLF001


def _keep_sigterm() -> None:
    """Restore Python's own SIGTERM handler in place of Ray's, which aborts the process."""
    handler = signal.getsignal(signal.SIGTERM)
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def _require_room(count: int, resources: RayResources, there: dict[str, float]) -> None:
    for name, amount in resources.bundle.items():
        if count * amount > there.get(name, 0):
            raise InputError(
                f"replicas={count}, each with {amount:g} {name}: this machine has {there.get(name, 0):g}; ask for less "
                "with resources, or name a cluster with ray"
            )
