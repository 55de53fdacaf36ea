"""Loading of the models that the settings name, or connecting to an endpoint elsewhere."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING

from batchwright.errors import InputError
from batchwright.inference.endpoint_keys import EndpointKey, find_key
from batchwright.inference.inference import Inference
from batchwright.inference.loading import (
    load_classifiers,
    load_models,
    local_inference,
    open_endpoint,
    system_fingerprint,
)
from batchwright.inference.replicas.cores import ReplicaCount
from batchwright.inference.replicas.opening import open_replicas
from batchwright.inference.replicas.ray_opening import open_ray_replicas, ray_count
from batchwright.inference.replicas.ray_resources import RayResources
from batchwright.inference.routing import RoutedInference
from batchwright.models import resolve, served_name
from batchwright.pacing.limits import configured_limits
from batchwright.service.observability.logs import logger
from batchwright.service.settings import Settings
from batchwright.wire.dialects import Dialect, dialect_for

if TYPE_CHECKING:
    from batchwright.encoder.classifier import Classifier
    from batchwright.encoder.encoder import Encoder
    from batchwright.engine.engine import Engine

_FIRST_CONCURRENCY = 64
"""Concurrent requests to an endpoint at first: online ones should not wait until its limit is found."""


async def load_inference(settings: Settings) -> Inference:
    """Load the models, or open the endpoint, which need not answer yet. Takes seconds.

    Raises what `load_models` and `open_endpoint` raise.
    """
    if settings.resources is not None and settings.ray is None:
        raise InputError(f"resources ({settings.resources}): they are of a Ray cluster; name it with ray")
    if settings.backend == "engine":
        # A rank that dies takes the others with it: as a replica, they are started again.
        replicas = 1 if settings.replicas is None and settings.engine.tensor_parallel > 1 else settings.replicas
        in_process = replicas is None and settings.ray is None
        return await (_load_models(settings) if in_process else _load_replicas(settings, replicas))
    if settings.ray is not None:
        raise InputError(f"ray={settings.ray!r} with backend={settings.backend!r}: leave one of them out")
    if settings.replicas is not None:
        raise InputError(f"replicas={settings.replicas} with backend={settings.backend!r}: leave one of them out")
    if settings.classifier:
        raise InputError(
            f"classifier={settings.classifier[0]!r} with backend={settings.backend!r}: it is a model in this process; "
            "leave one of them out"
        )
    dialect = dialect_for(settings.backend_dialect, settings.backend)
    key = _endpoint_key(settings, dialect)
    if key.warning is not None:
        logger.warning("backend_api_key", warning=key.warning)
    endpoint = await open_endpoint(
        settings.backend,
        key,
        dialect=dialect,
        max_concurrency=settings.backend_concurrency,
        first_concurrency=min(_FIRST_CONCURRENCY, settings.backend_concurrency),
        limits=configured_limits(settings.backend_rpm, settings.backend_tpm),
        max_waiting=settings.max_online_sequences,
    )
    try:
        return RoutedInference([endpoint], settings.aliases) if settings.aliases else endpoint
    except InputError:
        await endpoint.close()
        raise


def _endpoint_key(settings: Settings, dialect: Dialect) -> EndpointKey:
    """Return the API key that the settings, or else the environment, have for the endpoint. Raises `InputError`."""
    variable, file = settings.backend_api_key_env, settings.backend_api_key_file
    if settings.backend_api_key is None:
        return find_key(settings.backend, dialect, os.environ, variable=variable, file=file)
    if variable is not None or file is not None:
        other = "backend_api_key_env" if file is None else "backend_api_key_file"
        raise InputError(f"backend_api_key and {other} are both set: leave one of them out")
    return EndpointKey(settings.backend_api_key.get_secret_value(), "backend_api_key")


def model_times(settings: Settings) -> dict[str, float]:
    """Return the Unix seconds at which the files of each model in this process were made, by its names.

    Call it after `load_inference`, since it downloads nothing. Models elsewhere, and on a cluster, are left out.
    """
    if settings.backend != "engine" or settings.ray is not None:
        return {}
    encoders = (settings.embedding_model, *settings.classifier)
    times = {
        served_name(name): _made_at(resolve(name, pull=False, weights="either"))
        for name in (settings.model, *encoders)
        if name
    }
    meant = {alias: served_name(model) for alias, model in settings.aliases.items()}
    return times | {alias: times[model] for alias, model in meant.items() if model in times}


def _made_at(folder: Path) -> float:
    return max(file.stat().st_mtime for file in folder.iterdir() if file.is_file())


async def _load_replicas(settings: Settings, count: ReplicaCount | None) -> Inference:
    models = settings.model, settings.embedding_model or None
    if settings.ray is not None:
        replicas = await open_ray_replicas(
            settings.ray,
            ray_count(count),
            settings.resources or RayResources(),
            *models,
            settings.engine,
            lambda text: logger.info("ray", step=text),
            classifiers=settings.classifier,
            most_deaths=settings.max_crashes,
        )
    else:
        assert count is not None
        replicas = await open_replicas(
            count,
            *models,
            settings.engine,
            _log_step,
            classifiers=settings.classifier,
            most_deaths=settings.max_crashes,
        )
    try:
        return RoutedInference([replicas], settings.aliases)
    except InputError:
        await replicas.close()
        raise


def _log_step(text: str) -> None:
    """Log a step of loading that may take minutes, such as a download, or kernels that are compiled."""
    logger.info("loading", step=text)


async def _load_models(settings: Settings) -> Inference:
    def load() -> tuple[Engine | None, Encoder | None, tuple[Classifier, ...], str | None]:
        engine, encoder = load_models(settings.model, settings.embedding_model or None, settings.engine, _log_step)
        classifiers = load_classifiers(settings.classifier, settings.engine.device, _log_step)
        return engine, encoder, classifiers, None if engine is None else system_fingerprint(engine)

    engine, encoder, classifiers, fingerprint = await asyncio.to_thread(load)

    from batchwright.engine.async_engine import AsyncEngine

    running = None if engine is None else AsyncEngine(engine)
    return local_inference(running, encoder, settings.aliases, fingerprint=fingerprint, classifiers=classifiers)
