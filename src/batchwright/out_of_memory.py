"""Running out of memory: how the error is recognized, and how what the failed call held is freed."""

from __future__ import annotations

import traceback

from batchwright.errors import OutOfMemory
from batchwright.request import InferenceResponse

_WORDS = (
    "out of memory",  # CUDA, ROCm, MPS, XLA
    "can't allocate memory",  # torch on a CPU
    "not enough memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "resource_exhausted",  # XLA
    "failed to allocate memory",  # ONNX Runtime, whose arena says so
    "available memory of",  # ONNX Runtime, whose arena may not grow
)
"""Words in the messages of libraries."""

_MODULES = ("onnxruntime", "jax", "tensorflow")
"""Packages whose errors are not of the class RuntimeError."""


def ran_out_of_memory(output: object) -> bool:
    """Return whether this exception, or output of a model, says that there was not enough memory. Needs no torch."""
    if isinstance(output, InferenceResponse):
        output = output.error
    if not isinstance(output, Exception):
        return False
    if isinstance(output, (MemoryError, OutOfMemory)):
        return True
    if any(kind.__name__ == "OutOfMemoryError" for kind in type(output).__mro__):
        return True
    if not isinstance(output, RuntimeError) and not type(output).__module__.startswith(_MODULES):
        return False
    text = str(output).lower()
    return any(words in text for words in _WORDS)


def free_frames(error: BaseException) -> None:
    """Clear the local variables of the calls that raised `error`: they hold the batch for which memory ran out."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__
