"""Token by token, every request is answered exactly once, with its tokens complete and in order, whatever happens."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.long_form import examples

from batchwright import InferenceRequest, InferenceResponse
from batchwright.batcher import ContinuousBatcher, StreamingBatchProcessor
from batchwright.clock import ManualClock
from batchwright.errors import BatchwrightError, DeadlineExceeded

from .tokens import Steps, Streams, tokens_of
from .virtual import play

_MOMENTS = st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.5, 3.0])


@dataclass(frozen=True)
class Caller:
    """One request: when it comes, how long its output is, how it fares."""

    arrives: float
    tokens: int
    fate: str
    """"fine", "poison" (the call raises), "error" (the model returns one for it)."""
    fails_at: int
    """Which of its tokens is the one that fails."""
    leaves_after: float | None
    deadline: float | None
    max_tokens: int

    def prompt(self, number: int) -> str:
        return f"{number}-{self.fate}-{self.fails_at}:{self.tokens}"

    def output(self, number: int) -> str:
        return "".join(tokens_of(self.prompt(number))[: self.max_tokens])


CALLERS = st.builds(
    Caller,
    arrives=_MOMENTS,
    tokens=st.integers(0, 8),
    fate=st.sampled_from(["fine"] * 6 + ["poison", "error"]),
    fails_at=st.integers(0, 4),
    leaves_after=st.one_of(st.none(), st.none(), _MOMENTS),
    deadline=st.one_of(st.none(), st.none(), st.sampled_from([0.5, 1.0, 4.0])),
    max_tokens=st.sampled_from([1, 3, 100]),
)


class _Watch:
    """Durations of calls, and how many sequences were computed at once at most."""

    def __init__(self, seconds: list[float], short_every: int) -> None:
        self.seconds = seconds
        self.short_every = short_every
        self.calls = 0
        self.busy = 0

    async def wait(self) -> bool:
        """Whether this call gives too little."""
        self.calls += 1
        self.busy += 1
        try:
            await asyncio.sleep(self.seconds[self.calls % len(self.seconds)])
        finally:
            self.busy -= 1
        return bool(self.short_every) and self.calls % self.short_every == 0


def _fails(prompt: str, fate: str, at: int) -> bool:
    _, own, fails_at = prompt.partition(":")[0].split("-")
    return own == fate and int(fails_at) == at


class MoodySteps(Steps):
    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self.watch = watch

    async def generate_step(self, prompts: list[str], partial_outputs: list[str]) -> list[Any]:
        self.steps.append(list(prompts))
        short = await self.watch.wait()
        if any(
            _fails(prompt, "poison", text.count(" ")) for prompt, text in zip(prompts, partial_outputs, strict=True)
        ):
            raise RuntimeError("poison")
        return [self.token(*each) for each in zip(prompts, partial_outputs, strict=True)][short:]

    def token(self, prompt: str, output: str) -> Any:
        return ValueError() if _fails(prompt, "error", output.count(" ")) else super().token(prompt, output)


class MoodyStreams(Streams):
    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self.watch = watch

    async def generate_stream_batch(self, prompts: list[str]) -> AsyncGenerator[list[Any]]:
        self.batches.append(list(prompts))
        self.open += 1
        try:
            for i in range(9):
                short = await self.watch.wait()
                if any(_fails(prompt, "poison", i) for prompt in prompts):
                    raise RuntimeError("poison")
                yield [self.token(prompt, tokens_of(prompt), i) for prompt in prompts][short:]
        finally:
            self.open -= 1

    def token(self, prompt: str, tokens: list[str], i: int) -> Any:
        return ValueError() if _fails(prompt, "error", i) else super().token(prompt, tokens, i)


async def _call(
    batcher: ContinuousBatcher, number: int, caller: Caller, told: Counter[str], *, streams: bool
) -> tuple[str, str]:
    """What became of a caller, and the text that it got."""
    prompt = caller.prompt(number)
    request = InferenceRequest(
        prompt,
        request_id=prompt,
        deadline=caller.deadline,
        max_tokens=caller.max_tokens,
        callback=lambda response: told.update([response.request_id]),
    )
    await asyncio.sleep(caller.arrives)
    text = ""
    try:
        async with asyncio.timeout(caller.leaves_after) as limit:
            if streams:
                async for piece in batcher.stream(request):
                    text += piece
                return "succeeded", text
            response = await batcher.add_request(request)
            text = response.output
            if response.error is not None:
                raise response.error
    except TimeoutError as error:
        if limit.expired() and not isinstance(error, DeadlineExceeded):
            return "left", text
        return "expired", text
    except BatchwrightError:
        return ("failed" if told[prompt] else "refused"), text
    return "succeeded", text


@settings(max_examples=examples(80, long=250))
@given(
    callers=st.lists(CALLERS, min_size=1, max_size=12),
    kind=st.sampled_from([MoodySteps, MoodyStreams]),
    size=st.integers(1, 4),
    max_waiting=st.sampled_from([2, 1000]),
    isolate=st.booleans(),
    seconds=st.lists(st.sampled_from([0.0, 0.25, 1.0, 20.0]), min_size=1, max_size=4),
    short_every=st.sampled_from([0, 0, 5]),
    close_at=st.sampled_from([0.0, 0.5, 2.0, 100.0]),
    drain=st.booleans(),
    streams=st.booleans(),
)
def test_every_request_is_answered_exactly_once(
    callers: list[Caller],
    kind: type[MoodySteps] | type[MoodyStreams],
    size: int,
    max_waiting: int,
    isolate: bool,
    seconds: list[float],
    short_every: int,
    close_at: float,
    drain: bool,
    streams: bool,
) -> None:
    told: Counter[str] = Counter()
    watch = _Watch(seconds, short_every)
    model = kind(watch)

    async def main(clock: ManualClock) -> list[tuple[str, str]]:
        batcher = ContinuousBatcher(model, size, max_waiting=max_waiting, isolate_failures=isolate, clock=clock)
        calls = [
            asyncio.create_task(_call(batcher, number, caller, told, streams=streams))
            for number, caller in enumerate(callers)
        ]
        await asyncio.sleep(close_at)
        await batcher.close(drain=drain)
        fates = await asyncio.gather(*calls)
        stats = batcher.stats()
        assert (stats.waiting, stats.running) == (0, 0)
        assert stats.requests == stats.succeeded + stats.failed + stats.expired + stats.cancelled
        assert stats.items <= size * stats.batches
        for _ in range(5):
            await asyncio.sleep(0)
        assert watch.busy == 0
        return fates

    fates = play(main)
    assert max(told.values(), default=0) <= 1
    for number, (caller, (fate, text)) in enumerate(zip(callers, fates, strict=True)):
        output = caller.output(number)
        assert output.startswith(text)
        assert fate == "left" or told[caller.prompt(number)] == (fate != "refused")
        if fate == "succeeded":
            assert text == output
    if isinstance(model, MoodySteps):
        assert max(map(len, model.steps), default=0) <= size
    else:
        assert model.open == 0


@settings(max_examples=examples(50, long=150))
@given(
    callers=st.lists(CALLERS, max_size=12),
    kind=st.sampled_from([MoodySteps, MoodyStreams]),
    size=st.integers(1, 4),
    seconds=st.lists(st.sampled_from([0.0, 0.25, 1.0, 20.0]), min_size=1, max_size=4),
    short_every=st.sampled_from([0, 0, 5]),
    source=st.sampled_from(["list", "async", "slow"]),
    reads_in=st.sampled_from([0.0, 0.5]),
    stops_after=st.one_of(st.none(), st.integers(0, 10)),
)
def test_every_token_of_every_request_is_yielded_once_and_in_order(
    callers: list[Caller],
    kind: type[MoodySteps] | type[MoodyStreams],
    size: int,
    seconds: list[float],
    short_every: int,
    source: str,
    reads_in: float,
    stops_after: int | None,
) -> None:
    answers: dict[str, InferenceResponse] = {}
    watch = _Watch(seconds, short_every)
    model = kind(watch)

    def tell(response: InferenceResponse) -> None:
        assert response.request_id not in answers
        answers[response.request_id] = response

    def requests() -> list[InferenceRequest]:
        return [
            InferenceRequest(
                caller.prompt(number),
                request_id=caller.prompt(number),
                deadline=caller.deadline,
                max_tokens=caller.max_tokens,
                callback=tell,
            )
            for number, caller in enumerate(callers)
        ]

    async def arriving() -> AsyncIterator[InferenceRequest]:
        for request, caller in zip(requests(), callers, strict=True):
            await asyncio.sleep(caller.arrives if source == "slow" else 0.0)
            yield request

    async def main(clock: ManualClock) -> tuple[Counter[str], dict[str, str], dict[str, BatchwrightError], bool]:
        texts: dict[str, str] = {}
        failures: dict[str, BatchwrightError] = {}
        seen, stopped = Counter[str](), False
        async with StreamingBatchProcessor(model, size, clock=clock) as processor:
            stream = processor.process_streaming(requests() if source == "list" else arriving(), failures)
            async for request_id, token in stream:
                seen[request_id] += 1
                texts[request_id] = texts.get(request_id, "") + token
                if stops_after is not None and seen.total() > stops_after:
                    stopped = True
                    break
                await asyncio.sleep(reads_in)
            await stream.aclose()
            await asyncio.sleep(0)
            stats = processor.stats()
            assert (stats.waiting, stats.running) == (0, 0)
        for _ in range(5):
            await asyncio.sleep(0)
        assert watch.busy == 0
        return seen, texts, failures, stopped

    seen, texts, failures, stopped = play(main)
    for number, caller in enumerate(callers):
        prompt = caller.prompt(number)
        text = texts.get(prompt, "")
        assert caller.output(number).startswith(text)
        answer = answers.get(prompt)
        if stopped:
            continue
        assert answer is not None
        assert (answer.output, answer.tokens_generated) == (text, seen[prompt])
        assert failures.get(prompt) is answer.error
        if answer.error is None:
            assert text == caller.output(number)


@settings(max_examples=examples(40, long=100))
@given(lengths=st.lists(st.integers(0, 12), min_size=1, max_size=30), size=st.integers(1, 6), streaming=st.booleans())
def test_no_slot_is_empty_in_any_step_while_somebody_waits(lengths: list[int], size: int, streaming: bool) -> None:
    model = Steps()
    prompts = [f"{number}:{length}" for number, length in enumerate(lengths)]

    async def main(clock: ManualClock) -> None:
        if streaming:
            async with StreamingBatchProcessor(model, size, clock=clock) as processor:
                async for _ in processor.process_streaming(prompts):
                    pass
        else:
            async with ContinuousBatcher(model, size, clock=clock) as batcher:
                await asyncio.gather(*map(batcher.add_request, prompts))

    play(main)
    begun: set[str] = set()
    for step in model.steps:
        begun.update(step)
        assert len(step) == size or len(begun) == len(prompts)
    assert sum(map(len, model.steps)) == sum(lengths) + len(lengths)
