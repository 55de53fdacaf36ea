"""What the implementations of `Inference` have in common: names of models, time that is left, calls under way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import TypeVar

from batchwright.errors import DeadlineExceeded, ModelNotFound, shown
from batchwright.inference.inference import Call
from batchwright.request import Traffic

_T = TypeVar("_T")


class InFlight:
    """Counts what is under way, by class of traffic."""

    def __init__(self) -> None:
        self.online = 0
        self.batch = 0

    @property
    def total(self) -> int:
        return self.online + self.batch

    @contextmanager
    def hold(self, traffic: Traffic, count: int = 1) -> Iterator[None]:
        """Count `count` more for as long as the block lasts."""
        self._add(traffic, count)
        try:
            yield
        finally:
            self._add(traffic, -count)

    def _add(self, traffic: Traffic, count: int) -> None:
        if traffic == "online":
            self.online += count
        else:
            self.batch += count


def chosen_model(asked: str | None, names: Sequence[str]) -> str:
    """The name that an answer carries: the one asked for, or the first of `names`. Raises `ModelNotFound`."""
    if asked is None:
        return names[0]
    if asked not in names:
        raise ModelNotFound(f"model={shown(asked)} is not served here: choose from {', '.join(names)}")
    return asked


def time_left(call: Call, deadline: float | None) -> float | None:
    """Seconds after which the answer is of no use, by the call and by its body; None: it always is.

    Raises `DeadlineExceeded` when there are none.
    """
    given = [seconds for seconds in (call.timeout, deadline) if seconds is not None]
    if not given:
        return None
    if min(given) <= 0:
        raise DeadlineExceeded("the time for this request was over before it was begun")
    return min(given)


async def all_of(work: Sequence[Awaitable[_T]]) -> list[_T]:
    """The results in order. When one raises, or the caller is cancelled, the others are cancelled."""
    if len(work) == 1:
        return [await work[0]]
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def merged(streams: Sequence[AsyncGenerator[_T]]) -> AsyncGenerator[tuple[int, _T]]:
    """The items of all streams as they come, each with the position of its stream.

    When one raises, or the iterator is left, all are closed.
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
