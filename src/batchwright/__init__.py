"""batchwright turns many LLM requests into few, full, well-shaped batches.

What stands in `__all__` is the public API; everything else may change. Names are loaded when first used, so that
importing the package needs neither torch nor any other extra.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from batchwright.errors import (
    BatcherClosed,
    BatchwrightError,
    Cancelled,
    ContextLengthExceeded,
    DeadlineExceeded,
    DownloadError,
    EngineClosed,
    GenerationError,
    InputBroken,
    InputError,
    InvalidRequest,
    MissingExtra,
    ModelCacheError,
    ModelNotFound,
    NonFiniteLogits,
    OutOfMemory,
    Overloaded,
    ResumeRefused,
    RunFailed,
    UnsupportedModel,
)
from batchwright.request import (
    Choice,
    InferenceRequest,
    InferenceResponse,
    Prompt,
    SamplingParams,
    StreamEvent,
    TokenLogprob,
    Usage,
)

if TYPE_CHECKING:
    from batchwright.batcher import (
        AdaptiveBatcher,
        AsyncBatchConfig,
        AsyncBatchProcessor,
        Batcher,
        BatcherStats,
        LengthAwareBatcher,
        ParallelBatchProcessor,
        PriorityBatcher,
        SimpleBatcher,
        TimeBasedBatcher,
        WrongOutputs,
        batched,
    )
    from batchwright.engine.async_engine import AsyncEngine
    from batchwright.engine.engine import Engine
    from batchwright.engine.stats import EngineStats
    from batchwright.jobs.report import RunReport
    from batchwright.jobs.run import RunInterrupted, RunProgress, run
    from batchwright.padding import BucketedPadding, PackedSequences, PaddingConfig, PaddingOptimizer

__version__ = "0.1.0"

__all__ = [
    "AdaptiveBatcher",
    "AsyncBatchConfig",
    "AsyncBatchProcessor",
    "AsyncEngine",
    "Batcher",
    "BatcherClosed",
    "BatcherStats",
    "BatchwrightError",
    "BucketedPadding",
    "Cancelled",
    "Choice",
    "ContextLengthExceeded",
    "DeadlineExceeded",
    "DownloadError",
    "Engine",
    "EngineClosed",
    "EngineStats",
    "GenerationError",
    "InferenceRequest",
    "InferenceResponse",
    "InputBroken",
    "InputError",
    "InvalidRequest",
    "LengthAwareBatcher",
    "MissingExtra",
    "ModelCacheError",
    "ModelNotFound",
    "NonFiniteLogits",
    "OutOfMemory",
    "Overloaded",
    "PackedSequences",
    "PaddingConfig",
    "PaddingOptimizer",
    "ParallelBatchProcessor",
    "PriorityBatcher",
    "Prompt",
    "ResumeRefused",
    "RunFailed",
    "RunInterrupted",
    "RunProgress",
    "RunReport",
    "SamplingParams",
    "SimpleBatcher",
    "StreamEvent",
    "TimeBasedBatcher",
    "TokenLogprob",
    "UnsupportedModel",
    "Usage",
    "WrongOutputs",
    "__version__",
    "batched",
    "run",
]

_LAZY = {
    "AdaptiveBatcher": "batchwright.batcher",
    "AsyncBatchConfig": "batchwright.batcher",
    "AsyncBatchProcessor": "batchwright.batcher",
    "Batcher": "batchwright.batcher",
    "BatcherStats": "batchwright.batcher",
    "LengthAwareBatcher": "batchwright.batcher",
    "ParallelBatchProcessor": "batchwright.batcher",
    "PriorityBatcher": "batchwright.batcher",
    "SimpleBatcher": "batchwright.batcher",
    "TimeBasedBatcher": "batchwright.batcher",
    "WrongOutputs": "batchwright.batcher",
    "batched": "batchwright.batcher",
    "BucketedPadding": "batchwright.padding",
    "PackedSequences": "batchwright.padding",
    "PaddingConfig": "batchwright.padding",
    "PaddingOptimizer": "batchwright.padding",
    "AsyncEngine": "batchwright.engine.async_engine",
    "Engine": "batchwright.engine.engine",
    "EngineStats": "batchwright.engine.stats",
    "RunInterrupted": "batchwright.jobs.run",
    "RunProgress": "batchwright.jobs.run",
    "RunReport": "batchwright.jobs.report",
    "run": "batchwright.jobs.run",
}


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'batchwright' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name in {"torch", "transformers", "safetensors", "tokenizers", "psutil", "jinja2"}:
            raise MissingExtra(f"batchwright.{name} needs {error.name}: pip install 'batchwright[engine]'") from error
        raise
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
