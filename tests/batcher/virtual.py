"""A model and callers for tests in virtual time (`batchwright.testing`). No test waits."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from batchwright.batcher import Batcher
from batchwright.testing import Stuck, VirtualLoop, play

__all__ = ["Model", "Noisy", "Stuck", "VirtualLoop", "at", "outcome", "play"]

T = TypeVar("T")


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


class Noisy:
    """Takes `base` seconds and `each` for every prompt, with normal noise of so much of it. Keeps its batches."""

    def __init__(self, base: float, each: float = 0.0, noise: float = 0.0, seed: int = 0) -> None:
        self.base = base
        self.each = each
        self.noise = noise
        self.batches: list[list[Any]] = []
        self._rng = random.Random(seed)

    async def generate_batch(self, prompts: Sequence[Any]) -> list[Any]:
        self.batches.append(list(prompts))
        usual = self.base + self.each * len(prompts)
        await asyncio.sleep(usual * max(0.2, self._rng.gauss(1.0, self.noise)))
        return list(prompts)


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
