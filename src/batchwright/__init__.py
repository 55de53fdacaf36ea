"""batchwright turns many LLM requests into few, full, well-shaped batches.

What stands in `__all__` is the public API; everything else may change. Names are loaded when first used, so that
importing the package needs neither torch nor any other extra.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from batchwright.errors import (
    BatchwrightError,
    Cancelled,
    ContextLengthExceeded,
    DeadlineExceeded,
    DownloadError,
    EngineClosed,
    GenerationError,
    InputError,
    InvalidRequest,
    MissingExtra,
    ModelCacheError,
    ModelNotFound,
    NonFiniteLogits,
    OutOfMemory,
    ResumeRefused,
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
    from batchwright.engine.async_engine import AsyncEngine
    from batchwright.engine.engine import Engine
    from batchwright.engine.stats import EngineStats
    from batchwright.jobs.report import RunReport
    from batchwright.jobs.run import RunInterrupted, RunProgress, run

__version__ = "0.1.0"

__all__ = [
    "AsyncEngine",
    "BatchwrightError",
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
    "InputError",
    "InvalidRequest",
    "MissingExtra",
    "ModelCacheError",
    "ModelNotFound",
    "NonFiniteLogits",
    "OutOfMemory",
    "Prompt",
    "ResumeRefused",
    "RunInterrupted",
    "RunProgress",
    "RunReport",
    "SamplingParams",
    "StreamEvent",
    "TokenLogprob",
    "UnsupportedModel",
    "Usage",
    "__version__",
    "run",
]

_LAZY = {
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
