"""What a job needs of whatever turns its requests into responses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from batchwright.engine_config import EngineConfig
from batchwright.errors import BatchwrightError, InputError, MissingExtra
from batchwright.request import InferenceRequest, InferenceResponse

if TYPE_CHECKING:
    from batchwright.engine.engine_stats import EngineStats


class Executor(Protocol):
    """Computes many requests at once, a step at a time. It is driven by one thread."""

    @property
    def model_name(self) -> str:
        """What stands as `model` in the bodies of the responses."""
        ...

    def submit(self, request: InferenceRequest) -> None:
        """Take a request. Raises `InvalidRequest` for one that can never be served."""
        ...

    def step(self) -> list[InferenceResponse]:
        """Compute one step. Returns the responses of the requests that ended in it; failed ones have `error` set."""
        ...

    def cancel(self, request_id: str) -> InferenceResponse | None:
        """End a request at once; `step` will not return it. Its response so far, or None when there is no such."""
        ...

    @property
    def unfinished(self) -> int:
        """Requests taken and not yet ended."""
        ...

    @property
    def wants(self) -> int:
        """How many more requests it would like to hold now, so that its batches are full."""
        ...

    @property
    def stats(self) -> EngineStats:
        """What it did since it was started."""
        ...

    def close(self) -> None:
        """Give its memory back."""
        ...


def load_engine(model: str, config: EngineConfig) -> Executor:
    """The engine with `model` loaded. This is where torch is imported.

    Raises `InputError` for an option that does not fit the model or the machine, `MissingExtra`, and what loading the
    model raises.
    """
    try:
        from batchwright.engine.engine import Engine
    except ModuleNotFoundError as error:
        raise MissingExtra.of_engine("running a model", error) from error
    try:
        return Engine(model, config)
    except BatchwrightError:
        raise
    except ValueError as error:
        raise InputError(str(error)) from error
