"""Common parts of the implementations of `Inference`: model names, time left, streams, counts, threads, devices."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from batchwright.errors import DeadlineExceeded, EngineClosed, ModelNotFound, shown
from batchwright.inference.inference import Call
from batchwright.models import served_name
from batchwright.request import Traffic

if TYPE_CHECKING:
    from batchwright.engine.engine import Engine

_P = ParamSpec("_P")
_T = TypeVar("_T")


class InFlight(Counter[Traffic]):
    """Numbers of calls or sequences in progress, by class of traffic."""

    @contextmanager
    def hold(self, traffic: Traffic, count: int = 1) -> Iterator[None]:
        """Count `count` more for the duration of the block."""
        self[traffic] += count
        try:
            yield
        finally:
            self[traffic] -= count


class TrafficThreads:
    """One thread for each class of traffic, so that an online request never queues behind the lines of a batch.

    They are for work such as tokenizing, for which neither the event loop nor the model should wait.
    """

    def __init__(self) -> None:
        self._closed = False
        self._threads: dict[Traffic, ThreadPoolExecutor] = {
            "online": ThreadPoolExecutor(1, thread_name_prefix="batchwright-online"),
            "batch": ThreadPoolExecutor(1, thread_name_prefix="batchwright-batch"),
        }

    async def run(self, traffic: Traffic, function: Callable[_P, _T], *args: _P.args, **options: _P.kwargs) -> _T:
        """Call `function` in the thread of `traffic`, after its earlier calls. Raises `EngineClosed` if closed."""
        if self._closed:
            raise EngineClosed("the model was closed before the request came")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads[traffic], lambda: function(*args, **options))

    def close(self) -> None:
        """Let the threads end when they have finished their work."""
        self._closed = True
        for thread in self._threads.values():
            thread.shutdown(wait=False)


def device_failure(engine: Engine | None) -> str | None:
    """Return why the device computes nothing any more; None if it works. After some errors CUDA never recovers."""
    device = None if engine is None else engine.core.body.device
    if device is None or device.type != "cuda":
        return None
    import torch

    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return f"the device failed: {error}"
    return None


LEAVE_OUT_MODEL = ", or leave --model out to ask for the models that lines name"
"""How to request a model that was not chosen, although the endpoint may have it."""


def chosen_model(asked: str | None, names: Sequence[str], *, remedy: str = "") -> str:
    """Return the model name for an answer: `asked`, by default the first of `names`.

    Raises `ModelNotFound`, whose message ends with `remedy`.
    """
    if asked is None:
        return names[0]
    if asked not in names:
        if served_name(asked) in names:
            return served_name(asked)
        raise ModelNotFound(f"model={shown(asked)} is not served here: choose from {', '.join(names)}{remedy}")
    return asked


def time_left(call: Call, deadline: float | None) -> float | None:
    """Return the seconds left for a call, whose body has this `deadline` in seconds; None if neither sets a limit.

    Raises `DeadlineExceeded` if no time is left.
    """
    left = min((seconds for seconds in (call.timeout, deadline) if seconds is not None), default=None)
    if left is not None and left <= 0:
        raise DeadlineExceeded("the time for this request was over before it was begun")
    return left


async def close(iterator: AsyncIterator[Any]) -> None:
    """Close `iterator` now, if it can be closed: one that is only dropped holds its resources until it is collected."""
    aclose = getattr(iterator, "aclose", None)
    if aclose is not None:
        await aclose()


@asynccontextmanager
async def closing(iterator: AsyncIterator[_T]) -> AsyncIterator[AsyncIterator[_T]]:
    """Like `contextlib.aclosing`, for any asynchronous iterator."""
    try:
        yield iterator
    finally:
        await close(iterator)


async def all_of(work: Sequence[Awaitable[_T]]) -> list[_T]:
    """Return the results in order. If one raises, or the caller is cancelled, cancel the others."""
    if len(work) == 1:
        return [await work[0]]
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def merged(streams: Sequence[AsyncGenerator[_T]]) -> AsyncGenerator[tuple[int, _T]]:
    """Yield the items of all streams as they arrive, each with the position of its stream.

    If a stream raises, or the iterator is closed, all streams are closed.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    items: asyncio.Queue[tuple[int, _T] | Exception | None] = asyncio.Queue()

    async def pump(position: int, stream: AsyncGenerator[_T]) -> None:
        try:
            async with aclosing(stream) as each:
                async for item in each:
                    items.put_nowait((position, item))
        except Exception as error:
            items.put_nowait(error)
        else:
            items.put_nowait(None)

    tasks = [asyncio.ensure_future(pump(position, stream)) for position, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            entry = await items.get()
            if isinstance(entry, Exception):
                raise entry
            if entry is None:
                running -= 1
            else:
                yield entry
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
