"""Token by token: slots that refill, and streams that are read as they come."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from batchwright import ContinuousBatcher, ContinuousStats, InferenceRequest, SimpleBatcher, StreamingBatchProcessor
from batchwright.clock import ManualClock
from batchwright.testing import play

SLOTS = 6
STEP_SECONDS = 0.02
REQUESTS = 20
STREAMS = 4


@dataclass(slots=True)
class Grid:
    """Which request each slot computed in each step, and what was counted."""

    rows: list[list[int | None]] = field(default_factory=list)
    """A list for each step, in it the number of the request in each slot."""
    stats: ContinuousStats = field(default_factory=ContinuousStats)


@dataclass(slots=True)
class Reading:
    """When each token was read."""

    begun: dict[str, float] = field(default_factory=dict)
    """When the processor took a request from those to come."""
    tokens: list[tuple[float, str]] = field(default_factory=list)
    stats: ContinuousStats = field(default_factory=ContinuousStats)


class Steps:
    """A model of which each step takes the same time. The prompt `[i]` has an output of `lengths[i]` tokens."""

    def __init__(self, lengths: list[int], seconds: float = STEP_SECONDS) -> None:
        self.lengths = lengths
        self.seconds = seconds
        self.steps: list[list[int]] = []

    async def generate_step(self, prompts: list[list[int]], partial_outputs: list[str]) -> list[str]:
        """One token for each prompt; where an output ends is left to `max_tokens`."""
        numbers = [prompt[0] for prompt in prompts]
        self.steps.append(numbers)
        await asyncio.sleep(self.seconds)
        return ["."] * len(prompts)

    async def generate_batch(self, prompts: list[list[int]]) -> list[str]:
        """All outputs, when the longest is there."""
        numbers = [prompt[0] for prompt in prompts]
        for step in range(max(self.lengths[number] for number in numbers)):
            self.steps.append([number for number in numbers if self.lengths[number] > step])
            await asyncio.sleep(self.seconds)
        return ["." * self.lengths[number] for number in numbers]


def continuous() -> Grid:
    """Twenty outputs of unlike lengths in six slots."""
    return _continuous(_lengths(REQUESTS), SLOTS, [0.0] * REQUESTS)


def whole_batches() -> Grid:
    """The same, in batches that are computed as a whole."""
    model = Steps(_lengths(REQUESTS))

    async def main(clock: ManualClock) -> None:
        batcher = SimpleBatcher(model, SLOTS, clock=clock)
        await asyncio.gather(*(batcher.add_request([number]) for number in range(REQUESTS)))
        await batcher.close()

    play(main)
    return Grid(_slots(model.steps))


def continuous_working() -> Grid:
    """20 requests/s of about 30 tokens, in 32 slots."""
    return _continuous(_lengths(200, 30), 32, [number / 20 for number in range(200)])


def continuous_misused() -> Grid:
    """The same in eight slots, though a step with 32 would take no longer."""
    return _continuous(_lengths(200, 30), 8, [number / 20 for number in range(200)])


def streaming(read_seconds: float = 0.0, count: int = 12, slots: int = STREAMS) -> Reading:
    """Twelve outputs, of which the second is long, four at a time; `read_seconds` are spent on each token."""
    lengths = _lengths(count, 12)
    lengths[1] = 60
    model, reading = Steps(lengths), Reading()

    async def main(clock: ManualClock) -> None:
        def requests() -> Iterator[InferenceRequest]:
            for number in range(count):
                reading.begun[str(number)] = clock.now()
                yield InferenceRequest([number], request_id=str(number), max_tokens=lengths[number])

        async with StreamingBatchProcessor(model, slots, clock=clock) as processor:
            async for request_id, _ in processor.process_streaming(requests()):
                reading.tokens.append((clock.now(), request_id))
                if read_seconds:
                    await asyncio.sleep(read_seconds)
            reading.stats = processor.batcher.stats()

    play(main)
    return reading


def streaming_working() -> Reading:
    """200 outputs, eight at a time, read as fast as they come."""
    return streaming(count=200, slots=8)


def streaming_misused() -> Reading:
    """The same, with 20 ms of other work for each token: the time in which the model makes eight."""
    return streaming(read_seconds=0.02, count=200, slots=8)


def _continuous(lengths: list[int], slots: int, arrivals: list[float]) -> Grid:
    model, grid = Steps(lengths), Grid()

    async def main(clock: ManualClock) -> None:
        batcher = ContinuousBatcher(model, slots, clock=clock)

        async def one(number: int) -> None:
            await asyncio.sleep(arrivals[number])
            await batcher.add_request(InferenceRequest([number], max_tokens=lengths[number]))

        await asyncio.gather(*map(one, range(len(lengths))))
        grid.stats = batcher.stats()
        await batcher.close()

    play(main)
    grid.rows = _slots(model.steps)
    return grid


def _slots(steps: list[list[int]]) -> list[list[int | None]]:
    """The steps with each request in the slot that it got: the lowest that was free when it came."""
    places: dict[int, int] = {}
    rows: list[list[int | None]] = []
    for step in steps:
        places = {number: place for number, place in places.items() if number in step}
        for number in step:
            if number not in places:
                places[number] = min(set(range(len(step) + len(places) + 1)) - set(places.values()))
        row: list[int | None] = [None] * (max(places.values()) + 1)
        for number, place in places.items():
            row[place] = number
        rows.append(row)
    return rows


def _lengths(count: int, mean: float = 14.0) -> list[int]:
    draw = random.Random(3)
    return [max(2, round(draw.gammavariate(2.0, mean / 2.0))) for _ in range(count)]
