"""Running out of memory: how the error is recognized, and how what the failed call held is freed."""

from __future__ import annotations

import traceback

from batchwright.errors import OutOfMemory
from batchwright.request import InferenceResponse

_WORDS = ("out of memory", "can't allocate memory", "not enough memory")
"""Words in the messages of CUDA, ROCm, MPS and XLA; of torch on a CPU."""


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
    return isinstance(output, RuntimeError) and any(words in str(output).lower() for words in _WORDS)


def free_frames(error: BaseException) -> None:
    """Clear the local variables of the calls that raised `error`: they hold the batch for which memory ran out."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__
