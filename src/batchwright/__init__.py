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
    BudgetExhausted,
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
    RowsFailed,
    RunFailed,
    UnsupportedModel,
)
from batchwright.request import (
    Choice,
    Flow,
    InferenceRequest,
    InferenceResponse,
    Prompt,
    SamplingParams,
    Score,
    StreamEvent,
    TokenLogprob,
    Usage,
)
from batchwright.version import __version__

if TYPE_CHECKING:
    from batchwright.batcher import (
        AdaptiveBatcher,
        AsyncBatchConfig,
        AsyncBatchProcessor,
        Batcher,
        BatcherStats,
        ContinuousBatcher,
        ContinuousStats,
        LengthAwareBatcher,
        MemoryEfficientBatcher,
        ParallelBatchProcessor,
        PrioritizedRequest,
        PriorityBatcher,
        SimpleBatcher,
        StreamingBatchProcessor,
        TimeBasedBatcher,
        WrongOutputs,
        batched,
    )
    from batchwright.batcher.prometheus import export_metrics
    from batchwright.encoder.classifier import Classifier, Ranked
    from batchwright.encoder.encoder import Encoder
    from batchwright.encoder.lanes import EncoderStats
    from batchwright.engine.async_engine import AsyncEngine
    from batchwright.engine.engine import Engine
    from batchwright.engine.engine_stats import EngineStats
    from batchwright.engine.static_generator import StaticGenerator
    from batchwright.engine_config import EngineConfig
    from batchwright.jobs.job_run import RunInterrupted, RunProgress
    from batchwright.jobs.mapping import map  # noqa: A004 - the name that users expect
    from batchwright.jobs.report import RunReport
    from batchwright.jobs.run import run
    from batchwright.padding import BucketedPadding, PackedSequences, PaddingConfig, PaddingOptimizer
    from batchwright.server.routes.parameters import SimpleBatch as BatchRequest
    from batchwright.server.routes.parameters import SimpleBatchAsync as AsyncBatchRequest
    from batchwright.server.routes.simple_batches import SimpleState as BatchStatus
    from batchwright.server.routes.simple_batches import SyncAnswer as BatchResponse

__all__ = [
    "AdaptiveBatcher",
    "AsyncBatchConfig",
    "AsyncBatchProcessor",
    "AsyncBatchRequest",
    "AsyncEngine",
    "BatchRequest",
    "BatchResponse",
    "BatchStatus",
    "Batcher",
    "BatcherClosed",
    "BatcherStats",
    "BatchwrightError",
    "BucketedPadding",
    "BudgetExhausted",
    "Cancelled",
    "Choice",
    "Classifier",
    "ContextLengthExceeded",
    "ContinuousBatcher",
    "ContinuousStats",
    "DeadlineExceeded",
    "DownloadError",
    "Encoder",
    "EncoderStats",
    "Engine",
    "EngineClosed",
    "EngineConfig",
    "EngineStats",
    "Flow",
    "GenerationError",
    "InferenceRequest",
    "InferenceResponse",
    "InputBroken",
    "InputError",
    "InvalidRequest",
    "LengthAwareBatcher",
    "MemoryEfficientBatcher",
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
    "PrioritizedRequest",
    "PriorityBatcher",
    "Prompt",
    "Ranked",
    "ResumeRefused",
    "RowsFailed",
    "RunFailed",
    "RunInterrupted",
    "RunProgress",
    "RunReport",
    "SamplingParams",
    "Score",
    "SimpleBatcher",
    "StaticGenerator",
    "StreamEvent",
    "StreamingBatchProcessor",
    "TimeBasedBatcher",
    "TokenLogprob",
    "UnsupportedModel",
    "Usage",
    "WrongOutputs",
    "__version__",
    "batched",
    "export_metrics",
    "map",
    "run",
]

_LAZY = {
    name: f"batchwright.{module}"
    for module, names in {
        "batcher": (
            "AdaptiveBatcher AsyncBatchConfig AsyncBatchProcessor Batcher BatcherStats ContinuousBatcher "
            "ContinuousStats LengthAwareBatcher MemoryEfficientBatcher ParallelBatchProcessor PrioritizedRequest "
            "PriorityBatcher SimpleBatcher StreamingBatchProcessor TimeBasedBatcher WrongOutputs batched"
        ),
        "batcher.prometheus": "export_metrics",
        "padding": "BucketedPadding PackedSequences PaddingConfig PaddingOptimizer",
        "encoder.classifier": "Classifier Ranked",
        "encoder.encoder": "Encoder",
        "encoder.lanes": "EncoderStats",
        "engine.static_generator": "StaticGenerator",
        "engine.async_engine": "AsyncEngine",
        "engine.engine": "Engine",
        "engine_config": "EngineConfig",
        "engine.engine_stats": "EngineStats",
        "jobs.job_run": "RunInterrupted RunProgress",
        "jobs.mapping": "map",
        "jobs.run": "run",
        "jobs.report": "RunReport",
        "server.routes.parameters": "AsyncBatchRequest BatchRequest",
        "server.routes.simple_batches": "BatchResponse BatchStatus",
    }.items()
    for name in names.split()
}
"""Module of each name that is loaded when it is first used."""

_THERE = {
    "AsyncBatchRequest": "SimpleBatchAsync",
    "BatchRequest": "SimpleBatch",
    "BatchResponse": "SyncAnswer",
    "BatchStatus": "SimpleState",
}
"""Names in their modules of objects that are called differently there."""


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'batchwright' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(module), _THERE.get(name, name))
    except ModuleNotFoundError as error:
        if error.name in {"torch", "transformers", "safetensors", "tokenizers", "psutil", "jinja2"}:
            raise MissingExtra.of_engine(f"batchwright.{name}", error) from error
        if error.name in {"fastapi", "pydantic", "pydantic_settings", "starlette"}:
            raise MissingExtra(
                f"batchwright.{name} needs {error.name}; install it: pip install 'batchwright[server]'"
            ) from error
        raise
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
