"""An engine as the model of a batcher that computes whole batches.

The engine has its own slots and order: the requests of a batch are computed token by token, and the batch ends with its
last request. `ContinuousBatcher` passes requests to an engine as they come, and is the better choice for one engine;
this model is for code that is written for a batcher, and for several engines behind one queue.
"""

from __future__ import annotations

import asyncio
import inspect
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from batchwright.errors import MissingExtra
from batchwright.request import InferenceRequest, InferenceResponse

if TYPE_CHECKING:
    from batchwright.engine.async_engine import AsyncEngine


class EngineModel:
    """`RequestModel` over an engine. An `Engine`, unlike an `AsyncEngine`, then belongs to it."""

    def __init__(self, engine: Any) -> None:
        self._engine = async_engine_of(engine)
        self._owns_engine = self._engine is not engine
        self.tokenizer = self._engine.tokenizer

    async def generate_batch(self, prompts: list[Any], requests: list[InferenceRequest | None]) -> list[Any]:
        """Return the response to each request with its own parameters, and the text for a bare prompt.

        For a request that the engine refuses or fails, the error takes the place of the output.
        """
        calls = [self._respond(*each) for each in zip(prompts, requests, strict=True)]
        return await asyncio.gather(*calls, return_exceptions=True)

    async def release(self) -> None:
        """Close the engine if it belongs to this object. May be called repeatedly."""
        if self._owns_engine:
            await self._engine.close()

    async def _respond(self, prompt: Any, request: InferenceRequest | None) -> InferenceResponse | str:
        if request is None:
            response = await self._engine.generate(InferenceRequest(prompt))
            if response.error is not None:
                raise response.error
            return response.output
        # Callers' ids may be duplicates, and the batcher calls the callback.
        return await self._engine.generate(replace(request, request_id=uuid.uuid4().hex, callback=None))


def is_engine(model: object) -> bool:
    """Return whether `model` is an engine, by its methods: checking for the class would import torch."""
    has_own = any(hasattr(model, name) for name in ("generate_step", "generate_stream_batch", "generate_batch"))
    return not has_own and not isinstance(model, type) and hasattr(model, "generate") and hasattr(model, "stream")


def async_engine_of(engine: Any) -> AsyncEngine:
    """Return the engine as an `AsyncEngine`, which takes over an `Engine`."""
    if inspect.iscoroutinefunction(engine.generate):
        given: AsyncEngine = engine
        return given
    return engine_class()(engine)


def engine_class() -> type[AsyncEngine]:
    """Import the engine's class when it is needed, since it loads torch. Raises `MissingExtra`."""
    try:
        from batchwright.engine.async_engine import AsyncEngine
    except ModuleNotFoundError as error:
        raise MissingExtra.of_engine("a batcher over a model that is named", error) from error
    return AsyncEngine
