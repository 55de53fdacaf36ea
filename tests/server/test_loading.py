"""From the settings to the engine: what is handed on, and what keeps the service from starting."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.engine.support import TINY, tiny_model

from batchwright.backends.engine_inference import EngineInference
from batchwright.backends.routing import RoutedInference
from batchwright.errors import UnsupportedModel
from batchwright.server.loading import load_inference
from batchwright.server.settings import Settings


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Of a tiny random model, and no other."""
    tiny_model(tmp_path / "model", "llama", **TINY)
    given = {"model": str(tmp_path / "model"), "embedding_model": "", "data": tmp_path, "kv_memory": "1MB"}
    return Settings.model_validate(given | {"dtype": "float32", "device": "cpu"})


def test_the_precision_reaches_the_engine(settings: Settings) -> None:
    async def implementation() -> str:
        inference = await load_inference(settings.model_copy(update={"quantization": "int8"}))
        try:
            assert isinstance(inference, RoutedInference)
            (generating,) = inference.routes
            assert isinstance(generating, EngineInference)
            return generating.engine.stats.implementation
        finally:
            await inference.close()

    assert asyncio.run(implementation()).endswith("float32 on cpu, torch products, int8 weights and activations")


def test_a_promise_that_cannot_be_kept_is_refused_at_the_start(settings: Settings) -> None:
    impossible = settings.model_copy(update={"deterministic": True, "dtype": "float16"})
    with pytest.raises(UnsupportedModel, match=r"deterministic=True is not possible: sdpa attention"):
        asyncio.run(load_inference(impossible))
