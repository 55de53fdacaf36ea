"""Models that compute token by token, for tests in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, TypeVar

from batchwright import InferenceRequest

T = TypeVar("T")


def tokens_of(prompt: str) -> list[str]:
    """A prompt is `name:count`; its output is `name0 name1 ...`, so many tokens."""
    name, _, count = prompt.partition(":")
    return [f"{name}{i} " for i in range(int(count.split(",")[0]))]


class Steps:
    """`generate_step`, in `base` seconds. Keeps the prompts of its steps."""

    def __init__(self, base: float = 1.0) -> None:
        self.base = base
        self.steps: list[list[str]] = []

    async def generate_step(self, prompts: list[str], partial_outputs: list[str]) -> list[Any]:
        self.steps.append(list(prompts))
        await asyncio.sleep(self.base)
        return [self.token(*each) for each in zip(prompts, partial_outputs, strict=True)]

    def token(self, prompt: str, output: str) -> Any:
        tokens = tokens_of(prompt)
        done = output.count(" ")
        assert output == "".join(tokens[:done])
        return tokens[done] if done < len(tokens) else ""


class Streams:
    """`generate_stream_batch`, one list in `base` seconds. Keeps its batches, and how many are open."""

    def __init__(self, base: float = 1.0) -> None:
        self.base = base
        self.batches: list[list[str]] = []
        self.open = 0

    async def generate_stream_batch(self, prompts: list[str]) -> AsyncGenerator[list[Any]]:
        self.batches.append(list(prompts))
        self.open += 1
        try:
            outputs = [tokens_of(prompt) for prompt in prompts]
            for i in range(max(map(len, outputs))):
                await asyncio.sleep(self.base)
                yield [self.token(prompt, tokens, i) for prompt, tokens in zip(prompts, outputs, strict=True)]
        finally:
            self.open -= 1

    def token(self, prompt: str, tokens: list[str], i: int) -> Any:
        return tokens[i] if i < len(tokens) else None


def request(prompt: str, **fields: Any) -> InferenceRequest:
    return InferenceRequest(prompt, request_id=prompt, **fields)


async def gather(items: AsyncIterator[T], into: list[T]) -> None:
    """Put all that comes into a list, which has it also when an error ends it."""
    async for item in items:
        into.append(item)  # noqa: PERF401
