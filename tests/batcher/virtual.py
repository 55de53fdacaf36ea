"""An event loop whose time is a number: it jumps to the next timer when there is nothing else to do. No test waits."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from batchwright.batcher import Batcher
from batchwright.clock import ManualClock

T = TypeVar("T")


class Stuck(Exception):
    """Nothing is left to do, and the test is not over: somebody waits for ever."""


class _Selector(selectors.SelectSelector):
    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise Stuck
            self._clock.advance(max(0.0, timeout))
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time is that of `clock`, which moves when all are waiting."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        super().__init__(_Selector(self.clock))

    def time(self) -> float:
        return self.clock.now()


def play(main: Callable[[ManualClock], Coroutine[Any, Any, T]]) -> T:
    """Run `main` in virtual time. Raises `Stuck` when it waits for something that will never happen."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(main(loop.clock))
    finally:
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.close()


class Model:
    """Takes `base` seconds and `each` for every cell of the padded batch. Answers with capitals, keeps its batches."""

    def __init__(self, base: float = 1.0, each: float = 0.0) -> None:
        self.base = base
        self.each = each
        self.batches: list[list[Any]] = []
        self.starts: list[float] = []

    async def generate_batch(self, prompts: Sequence[Any]) -> list[Any]:
        self.batches.append(list(prompts))
        self.starts.append(asyncio.get_running_loop().time())
        await asyncio.sleep(self.base + self.each * len(prompts) * max(map(len, prompts)))
        return [self.answer(prompt) for prompt in prompts]

    def answer(self, prompt: Any) -> Any:
        return prompt.upper()


async def at(moment: float, coroutine: Coroutine[Any, Any, T]) -> T:
    """Run `coroutine` when the clock of the loop says `moment`."""
    await asyncio.sleep(moment - asyncio.get_running_loop().time())
    return await coroutine


async def outcome(batcher: Batcher, prompt: Any, **options: Any) -> str:
    """What became of one request, in a word."""
    try:
        response = await batcher.add_request(prompt, **options)
    except Exception as error:
        return f"refused: {type(error).__name__}"
    return response.output if response.error is None else type(response.error).__name__
