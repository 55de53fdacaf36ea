"""What computes, as the settings say: models in this process, or an endpoint elsewhere."""

from __future__ import annotations

import asyncio
import hashlib
import json
import resource
from pathlib import Path
from typing import TYPE_CHECKING

from batchwright.errors import BatchwrightError, InputError, MissingExtra
from batchwright.inference.inference import Inference
from batchwright.inference.routing import Route, RoutedInference
from batchwright.models import fingerprint, resolve
from batchwright.service.settings import Settings
from batchwright.version import __version__

if TYPE_CHECKING:
    from batchwright.encoder.encoder import Encoder
    from batchwright.engine.async_engine import AsyncEngine
    from batchwright.inference.endpoint import EndpointInference

_OTHER_DESCRIPTORS = 64
"""Of the database, of files, of listening."""


async def load_inference(settings: Settings) -> Inference:
    """Load the models, or look at the endpoint, which need not answer yet. Takes seconds.

    Raises `InputError` for a setting that does not fit the model or the machine, `MissingExtra`, `EndpointError`, and
    what loading a model raises.
    """
    if settings.backend != "engine":
        endpoint = await _endpoint(settings)
        try:
            return RoutedInference([endpoint], settings.aliases) if settings.aliases else endpoint
        except InputError:
            await endpoint.close()
            raise
    try:
        return await _models(settings)
    except BatchwrightError:
        raise
    except ValueError as error:
        raise InputError(str(error)) from error
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"running a model needs {error.name}; install it: pip install 'batchwright[engine]', or have an endpoint "
            "elsewhere compute: --backend http://host/v1"
        ) from error


def model_times(settings: Settings) -> dict[str, float]:
    """When the files of each model in this process were made, in Unix seconds, by its names.

    Nothing is fetched: call it after `load_inference`. Of models elsewhere nothing is known.
    """
    if settings.backend != "engine":
        return {}
    times = {name: _made_at(resolve(name, pull=False)) for name in (settings.model, settings.embedding_model) if name}
    return times | {alias: times[model] for alias, model in settings.aliases.items() if model in times}


def _made_at(folder: Path) -> float:
    return max(file.stat().st_mtime for file in folder.iterdir() if file.is_file())


async def _endpoint(settings: Settings) -> EndpointInference:
    from batchwright.inference.endpoint import EndpointInference

    _require_descriptors(settings.backend_concurrency)
    key = settings.backend_api_key
    try:
        endpoint = EndpointInference(
            settings.backend,
            None if key is None else key.get_secret_value(),
            max_concurrency=settings.backend_concurrency,
            max_waiting=settings.max_online_sequences,
        )
    except ValueError as error:
        raise InputError(str(error)) from None
    try:
        await endpoint.discover()
    except BaseException:
        await endpoint.close()
        raise
    return endpoint


def _require_descriptors(connections: int) -> None:
    """Raise `InputError` where the process may not have that many connections open."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and connections > most - _OTHER_DESCRIPTORS:
        raise InputError(
            f"backend_concurrency={connections}: each request takes a file descriptor, of which this process may have "
            f"{most} and keeps {_OTHER_DESCRIPTORS} for other uses; lower it, or raise the limit (ulimit -n)"
        )


async def _models(settings: Settings) -> Inference:
    # Before torch is imported, which takes seconds: a wrong name is told at once.
    for name in filter(None, (settings.model, settings.embedding_model)):
        await asyncio.to_thread(resolve, name)

    from batchwright.inference.embedding_inference import EmbeddingInference
    from batchwright.inference.engine_inference import EngineInference

    engine, encoder = await asyncio.to_thread(_loaded, settings)
    digest = await asyncio.to_thread(_system_fingerprint, settings, engine)
    generating = EngineInference(engine, system_fingerprint=digest)
    routes: list[Route] = [generating]
    if encoder is not None:
        routes.append(EmbeddingInference(encoder))
    return RoutedInference(routes, settings.aliases)


def _system_fingerprint(settings: Settings, engine: AsyncEngine) -> str:
    """Of the weights, of what computes with them in which precision, and of this version."""
    parts = (__version__, fingerprint(settings.model), engine.stats.implementation)
    return f"fp_{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:10]}"


def _loaded(settings: Settings) -> tuple[AsyncEngine, Encoder | None]:
    from batchwright.encoder.encoder import Encoder
    from batchwright.engine.async_engine import AsyncEngine

    config = settings.engine
    encoder = Encoder(settings.embedding_model, device=config.device) if settings.embedding_model else None
    return AsyncEngine(settings.model, config), encoder
