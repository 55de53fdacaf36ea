"""What can stand behind a batcher, and how it is called."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
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


class StepModel(Protocol):
    """Computes one more token for each of several prompts, from the text that it gave for them before.

    A token is text; an empty one ends its sequence, and an exception object fails it alone. A step must change nothing:
    one that raises is tried again in halves. `generate_step` may also be a plain function, which is then called in a
    thread.
    """

    def generate_step(
        self, prompts: list[Any], partial_outputs: list[str], /
    ) -> Awaitable[Sequence[str | BaseException]] | Sequence[str | BaseException]: ...


class RequestStepModel(Protocol):
    """A `StepModel` that wants the parameters of its prompts."""

    def generate_step(
        self, prompts: list[Any], partial_outputs: list[str], /, *, requests: list[Any]
    ) -> Awaitable[Sequence[str | BaseException]] | Sequence[str | BaseException]: ...


Tokens: TypeAlias = Sequence[str | BaseException | None]
"""What a stream gives at once: an entry for each prompt."""


class StreamModel(Protocol):
    """Computes several prompts to their ends, and gives their tokens as they come.

    Each list has one entry for each prompt, in their order: its next token; None when it has none this time, or has
    ended; an empty text when it has ended; an exception object, which fails it alone. All end with the iterator. A
    plain generator is run in a thread.
    """

    def generate_stream_batch(
        self, prompts: list[Any], /
    ) -> AsyncIterator[Tokens] | Awaitable[AsyncIterator[Tokens]] | Iterator[Tokens]: ...


class RequestStreamModel(Protocol):
    """A `StreamModel` that wants the parameters of its prompts."""

    def generate_stream_batch(
        self, prompts: list[Any], /, *, requests: list[Any]
    ) -> AsyncIterator[Tokens] | Awaitable[AsyncIterator[Tokens]] | Iterator[Tokens]: ...


class Call:
    """One function of a model: async, or called in a thread of its own."""

    def __init__(self, function: Callable[..., Any], *, threads: int) -> None:
        self._function = function
        self._takes_requests = _takes_requests(function)
        self._threads = threads
        self._executor: ThreadPoolExecutor | None = None
        self.in_thread = not _is_async(function)
        """Then a call cannot be cancelled, only its result ignored."""

    async def __call__(self, *arguments: Any, requests: list[InferenceRequest | None]) -> Any:
        """What the function gives, awaited where it is to be. Raises what it raises."""
        options: dict[str, Any] = {"requests": requests} if self._takes_requests else {}
        if self.in_thread:
            result = await self.in_own_thread(partial(self._function, *arguments, **options))
        else:
            result = self._function(*arguments, **options)
        return await result if inspect.isawaitable(result) else result

    async def in_own_thread(self, work: Callable[[], Any]) -> Any:
        """What `work` gives in a thread of ours."""
        if self._executor is None:
            # Its own threads: those of the loop may all be waiting for us.
            self._executor = ThreadPoolExecutor(self._threads, thread_name_prefix="batchwright-model")
        return await asyncio.get_running_loop().run_in_executor(self._executor, _without_stop, work)

    def close(self) -> None:
        """Let the threads end when they are done."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = None


class Runner:
    """Calls a model. Raises TypeError for what is no model."""

    def __init__(self, model: Model, *, slots: int) -> None:
        call = getattr(model, "generate_batch", model)
        if not callable(call):
            raise TypeError(
                f"model of type {type(model).__name__}: must have generate_batch(prompts), or be a function of a list"
            )
        self._call = Call(call, threads=slots)
        self.in_thread = self._call.in_thread
        self._slots = slots

    @property
    def slots(self) -> int:
        """How many batches it takes at once."""
        return self._slots

    def changes_at(self, now: float) -> float:
        """When `slots` will be another, without anything else happening; infinite: never."""
        return math.inf

    async def run(self, prompts: list[Any], requests: list[InferenceRequest | None]) -> list[Any]:
        """One output for each of `prompts`. Raises what the model raises, and `WrongOutputs`."""
        return checked_outputs(await self._call(prompts, requests=requests), len(prompts))

    def close(self) -> None:
        """Let the threads end when they are done."""
        self._call.close()


class WrongOutputs(GenerationError):
    """The model returned something else than one output for each prompt."""


def checked_outputs(result: Any, count: int) -> list[Any]:
    """`result` as a list of `count` outputs. Raises `WrongOutputs`."""
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


def is_being_cancelled() -> bool:
    """Whether somebody cancels the running task. If not, a CancelledError is a failure of the model like any other."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _without_stop(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except StopIteration as error:
        # A future refuses to carry it, and would never be done.
        raise RuntimeError("the model raised StopIteration") from error


def _takes_requests(call: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(call).parameters
    except (TypeError, ValueError):
        return False
    # By name only: `**kwargs` may belong to a wrapper of something that does not take it. The first takes the prompts,
    # whatever it is called.
    return "requests" in list(parameters)[1:]


def _is_async(call: Callable[..., Any]) -> bool:
    own = getattr(call, "__call__", None)  # noqa: B004
    return any(inspect.iscoroutinefunction(each) or inspect.isasyncgenfunction(each) for each in (call, own))
