"""Loading of the models that the settings name, or connecting to an endpoint elsewhere."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from batchwright.errors import InputError
from batchwright.inference.inference import Inference
from batchwright.inference.loading import load_models, local_inference, open_endpoint, system_fingerprint
from batchwright.inference.routing import RoutedInference
from batchwright.models import resolve
from batchwright.pacing.limits import told_limits
from batchwright.service.settings import Settings

if TYPE_CHECKING:
    from batchwright.encoder.encoder import Encoder
    from batchwright.engine.engine import Engine

_FIRST_CONCURRENCY = 64
"""Requests under way at an endpoint to begin with: online ones should not wait for what is found later."""


async def load_inference(settings: Settings) -> Inference:
    """Load the models, or open the endpoint, which need not answer yet. Takes seconds.

    Raises what `load_models` and `open_endpoint` raise.
    """
    if settings.backend == "engine":
        return await _load_models(settings)
    key = settings.backend_api_key
    endpoint = await open_endpoint(
        settings.backend,
        None if key is None else key.get_secret_value(),
        max_concurrency=settings.backend_concurrency,
        first_concurrency=min(_FIRST_CONCURRENCY, settings.backend_concurrency),
        told=told_limits(settings.backend_rpm, settings.backend_tpm),
        max_waiting=settings.max_online_sequences,
    )
    try:
        return RoutedInference([endpoint], settings.aliases) if settings.aliases else endpoint
    except InputError:
        await endpoint.close()
        raise


def model_times(settings: Settings) -> dict[str, float]:
    """Return the Unix seconds at which the files of each model in this process were made, by its names.

    Call it after `load_inference`, since it downloads nothing. Models elsewhere are left out.
    """
    if settings.backend != "engine":
        return {}
    times = {name: _made_at(resolve(name, pull=False)) for name in (settings.model, settings.embedding_model) if name}
    return times | {alias: times[model] for alias, model in settings.aliases.items() if model in times}


def _made_at(folder: Path) -> float:
    return max(file.stat().st_mtime for file in folder.iterdir() if file.is_file())


async def _load_models(settings: Settings) -> Inference:
    def load() -> tuple[Engine | None, Encoder | None, str | None]:
        engine, encoder = load_models(settings.model, settings.embedding_model or None, settings.engine)
        return engine, encoder, None if engine is None else system_fingerprint(engine)

    engine, encoder, fingerprint = await asyncio.to_thread(load)

    from batchwright.engine.async_engine import AsyncEngine

    running = None if engine is None else AsyncEngine(engine)
    return local_inference(running, encoder, settings.aliases, fingerprint=fingerprint)
