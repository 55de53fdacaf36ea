"""What can stand behind a batcher, and how it is called."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeAlias

from batchwright.errors import GenerationError
from batchwright.request import InferenceRequest


class BatchModel(Protocol):
    """Computes a list of prompts at once: one output for each, in their order.

    An exception object among the outputs fails that prompt alone. `generate_batch` may also be a plain function, which
    is then called in a thread. A model with a `tokenizer` (anything with `encode(text)`) has its tokens counted by it.
    """

    def generate_batch(self, prompts: list[Any]) -> Awaitable[Sequence[Any]] | Sequence[Any]: ...


class RequestModel(Protocol):
    """A `BatchModel` that wants the parameters of its prompts: None for an item that came without a request."""

    def generate_batch(self, prompts: list[Any], requests: list[Any]) -> Awaitable[Sequence[Any]] | Sequence[Any]: ...


Model: TypeAlias = BatchModel | RequestModel | Callable[[list[Any]], Awaitable[Sequence[Any]] | Sequence[Any]]
"""A `BatchModel` or `RequestModel`, or a function, async or not, from a list of items to the list of their outputs."""


class Runner:
    """Calls a model. Raises TypeError for what is no model."""

    def __init__(self, model: Model, *, slots: int) -> None:
        call = getattr(model, "generate_batch", model)
        if not callable(call):
            raise TypeError(
                f"model of type {type(model).__name__}: must have generate_batch(prompts), or be a function of a list"
            )
        self._call: Callable[..., Any] = call
        self.takes_requests = _takes_requests(call)
        self.in_thread = not _is_async(call)
        """Then a call cannot be cancelled, only its result ignored."""
        self._slots = slots
        self._executor: ThreadPoolExecutor | None = None

    @property
    def slots(self) -> int:
        """How many batches it takes at once."""
        return self._slots

    def changes_at(self, now: float) -> float:
        """When `slots` will be another, without anything else happening; infinite: never."""
        return math.inf

    async def run(self, prompts: list[Any], requests: list[InferenceRequest | None]) -> list[Any]:
        """One output for each of `prompts`. Raises what the model raises, and `WrongOutputs`."""
        options: dict[str, Any] = {"requests": requests} if self.takes_requests else {}
        count = len(prompts)
        if self.in_thread:
            loop = asyncio.get_running_loop()
            if self._executor is None:
                # Its own threads: those of the loop may all be waiting for us.
                self._executor = ThreadPoolExecutor(self._slots, thread_name_prefix="batchwright-model")
            result = await loop.run_in_executor(self._executor, self._call_in_thread, prompts, options)
        else:
            result = self._call(prompts, **options)
        if inspect.isawaitable(result):
            result = await result
        return _outputs(result, count)

    def _call_in_thread(self, prompts: list[Any], options: dict[str, Any]) -> Any:
        try:
            return self._call(prompts, **options)
        except StopIteration as error:
            # A future refuses to carry it, and would never be done.
            raise RuntimeError("the model raised StopIteration") from error

    def close(self) -> None:
        """Let the threads end when they are done."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = None


class WrongOutputs(GenerationError):
    """The model returned something else than one output for each prompt."""


def _outputs(result: Any, count: int) -> list[Any]:
    if not isinstance(result, Iterable) or isinstance(result, (str, bytes, bytearray, Mapping, set, frozenset)):
        raise WrongOutputs(
            f"the model returned {type(result).__name__} for a batch of {count}: it must return a list with one output "
            "for each prompt"
        )
    outputs = list(result)
    if len(outputs) != count:
        raise WrongOutputs(
            f"the model returned {len(outputs)} outputs for a batch of {count}: it must return one for each prompt, in "
            "their order"
        )
    return outputs


def _takes_requests(call: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(call).parameters
    except (TypeError, ValueError):
        return False
    # By name only: `**kwargs` may belong to a wrapper of something that does not take it.
    return "requests" in parameters


def _is_async(call: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(getattr(call, "__call__", None))  # noqa: B004
