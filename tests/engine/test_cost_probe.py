"""The probe of what steps cost, on models of few tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchwright import Engine
from batchwright.engine.cost_probe import probe

from .support import TINY, nothing_left, tiny_model

pytestmark = pytest.mark.usefixtures("two_threads")


@pytest.mark.parametrize("context", [2, 6, 7, 64])
def test_a_model_of_a_short_context_is_probed(tmp_path: Path, context: int) -> None:
    tiny_model(tmp_path, "llama", **TINY | {"max_position_embeddings": context})
    with Engine(tmp_path, device="cpu", dtype="float32", kv_memory="2MB") as engine:
        probe(engine, seconds=0.0)
        assert nothing_left(engine)
        assert engine.core.scheduler.record.added >= 5
