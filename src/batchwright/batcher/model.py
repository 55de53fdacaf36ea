"""The models that a batcher supports, and how they are called."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import math
import os
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, get_args, get_origin, get_type_hints

from batchwright.batcher.engine_model import EngineModel, is_engine
from batchwright.errors import GenerationError
from batchwright.request import InferenceRequest, InferenceResponse

if TYPE_CHECKING:
    from batchwright.engine.async_engine import AsyncEngine
    from batchwright.engine.engine import Engine


class BatchModel(Protocol):
    """Model that computes a list of prompts at once, with one output for each, in the same order.

    An exception object among the outputs fails that prompt alone. `generate_batch` may also be a plain function, which
    is then called in a thread. If the model has a `tokenizer` (anything with `encode(text)`), it counts the tokens.
    """

    def generate_batch(self, prompts: list[Any]) -> Awaitable[Sequence[Any]] | Sequence[Any]: ...


class RequestModel(Protocol):
    """`BatchModel` that takes the parameters of its prompts, None for an item without a request.

    The deadline of a request is what was left of it when the batch began.
    """

    def generate_batch(self, prompts: list[Any], requests: list[Any]) -> Awaitable[Sequence[Any]] | Sequence[Any]: ...


Model: TypeAlias = (
    "BatchModel | RequestModel | Callable[[list[Any]], Awaitable[Sequence[Any]] | Sequence[Any]] | AsyncEngine | Engine"
)
"""A `BatchModel` or `RequestModel`, or a function, async or not, from a list of items to the list of their outputs.

An engine computes each request with its own sampling parameters, and a bare prompt with the defaults. An `Engine` then
belongs to the batcher, and is closed with it; an `AsyncEngine` is not.
"""


class StepModel(Protocol):
    """Model that computes one more token for each of several prompts, given the tokens that it returned for them so
    far.

    A token is text; an empty one ends its sequence, and an exception object fails only that sequence. A step must have
    no side effects: one that raises is retried in halves. `generate_step` may also be a plain function, which is then
    called in a thread.
    """

    def generate_step(
        self, prompts: list[Any], partial_outputs: list[list[str]], /
    ) -> Awaitable[Sequence[str | BaseException]] | Sequence[str | BaseException]: ...


class TextStepModel(Protocol):
    """`StepModel` that gets the tokens so far as text.

    Its signature says so: the second parameter is annotated as a list of `str`, or named `partial_texts`.
    """

    def generate_step(
        self, prompts: list[Any], partial_texts: list[str], /
    ) -> Awaitable[Sequence[str | BaseException]] | Sequence[str | BaseException]: ...


class RequestStepModel(Protocol):
    """`StepModel` that takes the parameters of its prompts."""

    def generate_step(
        self, prompts: list[Any], partial_outputs: Any, /, *, requests: list[Any]
    ) -> Awaitable[Sequence[str | BaseException]] | Sequence[str | BaseException]: ...


Tokens: TypeAlias = Sequence[str | BaseException | None]
"""Tokens that a stream yields at once, with an entry for each prompt."""


class StreamModel(Protocol):
    """Model that computes several prompts to their ends, and yields their tokens as they are generated.

    Each list has one entry per prompt, in their order: its next token; an empty text if there is nothing new; None if
    it has ended; an exception object, which fails only that prompt. All end with the iterator. A plain generator is run
    in a thread. A model that uses None for "nothing new" and an empty text for the end is recognised by what follows
    them.
    """

    def generate_stream_batch(
        self, prompts: list[Any], /
    ) -> AsyncIterator[Tokens] | Awaitable[AsyncIterator[Tokens]] | Iterator[Tokens]: ...


class RequestStreamModel(Protocol):
    """`StreamModel` that takes the parameters of its prompts."""

    def generate_stream_batch(
        self, prompts: list[Any], /, *, requests: list[Any]
    ) -> AsyncIterator[Tokens] | Awaitable[AsyncIterator[Tokens]] | Iterator[Tokens]: ...


class ModelCall:
    """One function of a model: async, or called in its own thread."""

    def __init__(self, function: Callable[..., Any], *, threads: int) -> None:
        self._function = function
        self.takes_requests = _takes_requests(function)
        """Whether the function has a parameter for the requests."""
        self._threads = threads
        self._executor: ThreadPoolExecutor | None = None
        self._executor_of = 0
        """Id of the process that has the threads, which a fork does not inherit."""
        self.in_thread = not _is_async(function)
        """Whether calls run in a thread, where they cannot be cancelled but only ignored."""

    async def __call__(self, *arguments: Any, requests: list[InferenceRequest | None]) -> Any:
        """Return the function's result, awaited if necessary. Raises what the function raises."""
        options: dict[str, Any] = {"requests": requests} if self.takes_requests else {}
        if self.in_thread:
            result = await self.in_own_thread(partial(self._function, *arguments, **options))
        else:
            result = self._function(*arguments, **options)
        if not inspect.isawaitable(result):
            return result
        return await awaited(result)

    async def in_own_thread(self, work: Callable[[], Any]) -> Any:
        """Return the result of `work`, run in a thread of this call.

        If `work` never returns, its thread keeps the interpreter from exiting, even after the batcher has been closed:
        Python waits for it, since code such as torch's must not run while the interpreter shuts down.
        """
        if self._executor is None or self._executor_of != os.getpid():
            # Own threads: those of the loop may all be waiting for us.
            self._executor = ThreadPoolExecutor(self._threads, thread_name_prefix="batchwright-model")
            self._executor_of = os.getpid()
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(self._executor, context.run, _carried, work)

    def close(self) -> None:
        """Let the threads end once they are done."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = None


class Runner:
    """Calls a model. Raises TypeError for an object that is not a model."""

    def __init__(self, model: Model, *, slots: int) -> None:
        if isinstance(model, type) and hasattr(model, "generate_batch"):
            raise TypeError(f"model: {model.__name__} is a class; give an instance of it, such as {model.__name__}()")
        self._engine = EngineModel(model) if is_engine(model) else None
        model = self._engine or model
        self.tokenizer: Any = getattr(model, "tokenizer", None)
        """Tokenizer of the model, if it has one."""
        call = getattr(model, "generate_batch", model)
        if not callable(call):
            raise TypeError(
                f"model of type {type(model).__name__}: must have generate_batch(prompts), or be an engine or a "
                "function of a list"
            )
        self._call = ModelCall(call, threads=slots)
        self.in_thread = self._call.in_thread
        self.takes_requests = self._call.takes_requests
        self._slots = slots

    @property
    def slots(self) -> int:
        """Number of batches that the model can compute at once."""
        return self._slots

    def changes_at(self, now: float) -> float:
        """When `slots` will next change by itself; infinite: never."""
        return math.inf

    async def run(self, prompts: list[Any], requests: list[InferenceRequest | None]) -> list[Any]:
        """Return one output for each of `prompts`. Raises what the model raises, and `WrongOutputs`.

        The model gets its own copies of the lists, and may modify them.
        """
        return checked_outputs(await self._call(list(prompts), requests=list(requests)), len(prompts))

    async def release(self) -> None:
        """Let the threads end once they are done, and close an engine that belongs to this. Safe to call twice."""
        self._call.close()
        if self._engine is not None:
            await self._engine.release()


DEADLINES_PASSED = "deadlines passed"
"""Cancellation message of a batch that is cancelled because all its requests were late."""


class WrongOutputs(GenerationError):
    """The model returned something other than one output per prompt."""


async def awaited(work: Awaitable[Any]) -> Any:
    """Return the result of `work`. Raises what it raises, or `GenerationError` if that would end the program."""
    try:
        return await work
    except (SystemExit, KeyboardInterrupt) as error:
        # Either would end the event loop for all callers. Ctrl-C arrives in the main thread, and should do so.
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
        raise _not_to_end(error) from error


def checked_outputs(result: Any, count: int) -> list[Any]:
    """Return `result` as a list of `count` outputs. Raises `WrongOutputs`."""
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


def is_failure(output: object) -> bool:
    """Return whether a model returned an error in place of an output."""
    return isinstance(output, BaseException) or (isinstance(output, InferenceResponse) and output.error is not None)


def is_being_cancelled() -> bool:
    """Return whether the running task is being cancelled. If not, a CancelledError is a failure of the model."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _carried(work: Callable[[], Any]) -> Any:
    """Return the result of `work`; turn its errors into ones that a future can safely carry to an event loop."""
    try:
        return work()
    except StopIteration as error:
        # A future refuses to carry this exception, and would never be done.
        raise RuntimeError("the model raised StopIteration") from error
    except (SystemExit, KeyboardInterrupt) as error:
        raise _not_to_end(error) from error


def _not_to_end(error: BaseException) -> GenerationError:
    """Return the error for the callers of a model that tried to end the program."""
    return GenerationError(
        f"the model raised {type(error).__name__}, which fails its batch and does not end the program"
    )


def _takes_requests(call: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(call).parameters
    except (TypeError, ValueError):
        return False
    # By name only: `**kwargs` may belong to a wrapper of something that does not take it. The first parameter takes the
    # prompts, whatever its name.
    return "requests" in list(parameters)[1:]


def wants_text(step: Callable[..., Any]) -> bool:
    """Return whether a `generate_step` takes the outputs so far as texts, judging by its second parameter."""
    try:
        parameters = list(inspect.signature(step).parameters.values())
    except (TypeError, ValueError):
        return False
    if len(parameters) < 2:
        return False
    second = parameters[1]
    try:
        is_function = inspect.isroutine(step)
        annotation = get_type_hints(step if is_function else type(step).__call__).get(second.name)
    except Exception:
        # A name in foreign annotations may be undefined here.
        annotation = second.annotation
    if isinstance(annotation, str):
        return re.fullmatch(r"(\w+\.)*([Ll]ist|Sequence|Iterable|Collection)\[str\]", annotation) is not None
    return second.name == "partial_texts" or (get_origin(annotation) is not None and get_args(annotation) == (str,))


def _is_async(call: Callable[..., Any]) -> bool:
    own = getattr(call, "__call__", None)  # noqa: B004
    return any(inspect.iscoroutinefunction(each) or inspect.isasyncgenfunction(each) for each in (call, own))
