"""What `None` and `""` mean in a stream is found out, and no text is lost by either convention."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.long_form import examples

from batchwright.batcher import ContinuousBatcher, StreamingBatchProcessor
from batchwright.batcher.stream_ends import Meaning, Silence, StreamEnds
from batchwright.clock import ManualClock

from .tokens import request
from .virtual import play

_QUICK = settings(max_examples=examples(60, long=150))


class Scripted:
    """Yields for each prompt, which is a script, its entries: a letter is a token, "." is nothing new, "!" the end."""

    def __init__(self, *, none_ends: bool) -> None:
        self.entries = {".": "" if none_ends else None, "!": None if none_ends else ""}

    async def generate_stream_batch(self, prompts: list[str]) -> AsyncGenerator[list[Any]]:
        for i in range(max(map(len, prompts))):
            await asyncio.sleep(1.0)
            yield [self.entries.get(prompt[i : i + 1] or "!", prompt[i : i + 1]) for prompt in prompts]


def _scripts() -> st.SearchStrategy[str]:
    # Up to seven lists without a token in the midst of others.
    gaps = st.text(".", max_size=7)
    return st.lists(st.tuples(gaps, st.sampled_from("abc")), max_size=6).map(lambda parts: "".join(map("".join, parts)))


@_QUICK
@given(st.lists(_scripts(), min_size=1, max_size=12), st.booleans(), st.integers(1, 4))
def test_no_text_is_lost_by_either_convention(scripts: list[str], none_ends: bool, slots: int) -> None:
    async def main(clock: ManualClock) -> None:
        async with ContinuousBatcher(Scripted(none_ends=none_ends), slots, clock=clock) as batcher:
            responses = await asyncio.gather(*(batcher.add_request(script + "!") for script in scripts))
            assert [(each.output, each.error) for each in responses] == [
                (script.replace(".", ""), None) for script in scripts
            ]
            assert (batcher.stats().running, batcher.held) == (0, 0)

    play(main)


def test_text_after_a_gap_shows_the_convention() -> None:
    for first, none_ends in ((["", "a"], True), ([None, "a"], False)):
        ends, silence = StreamEnds(), Silence()
        for entry in first:
            ends.meaning(entry, silence)
        assert ends.none_ends is none_ends
        assert ends.meaning(None if none_ends else "", silence) is Meaning.END


def _after(ends: StreamEnds, *entries: str | None) -> Meaning:
    """What the last of these entries of a sequence means."""
    silence = Silence()
    return [ends.meaning(entry, silence) for entry in entries][-1]


def test_none_is_the_end_once_nothing_has_followed_it_in_two_streams() -> None:
    ends = StreamEnds()
    for _ in range(2):
        assert ends.none_ends is None
        silences = [Silence() for _ in range(5)]
        for silence in silences:
            assert [ends.meaning(entry, silence) for entry in ("a", *[None] * 20)] == [
                Meaning.TOKEN, *[Meaning.HELD] * 20,
            ]  # fmt: skip
        ends.stream_ended(silences)
    assert ends.none_ends is True
    assert _after(ends, "a", None) is Meaning.END
    # It may be a prompt that is still being read.
    assert _after(ends, None, None) is Meaning.NOTHING_NEW
    assert _after(StreamEnds(), "a", "", None) is Meaning.END


def test_a_model_that_goes_on_after_all_is_told_of_and_has_the_other_convention(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ends = StreamEnds()
    ends.none_ends = True
    silence = Silence()
    with caplog.at_level(logging.ERROR):
        assert [ends.meaning(entry, silence) for entry in ("a", None, "lost")][1] is Meaning.END
    assert ends.none_ends is False
    assert 'give "" where there is nothing new' in caplog.text
    assert _after(ends, None, None) is Meaning.NOTHING_NEW


class Listed:
    """Yields the lists of the batch that is next."""

    def __init__(self, *batches: list[list[str | None]]) -> None:
        self.batches = list(batches)

    async def generate_stream_batch(self, prompts: list[str]) -> AsyncGenerator[list[Any]]:
        for entries in self.batches.pop(0) if len(self.batches) > 1 else self.batches[0]:
            await asyncio.sleep(0.1)
            yield entries[: len(prompts)]


@pytest.mark.parametrize(
    "batches",
    [
        # A prompt that is read for a while, before and after None was believed to be the end.
        [[[None]] * 30 + [["x"], ["y"]]],
        [[["a"], [None], [None]], [["b"], [None], [None]], [[None], [None], ["x"], ["y"]]],
    ],
)
def test_a_prompt_that_is_still_being_read_is_not_ended_by_none(batches: list[list[list[str | None]]]) -> None:
    async def main(clock: ManualClock) -> list[str]:
        async with ContinuousBatcher(Listed(*batches), 1, clock=clock) as batcher:
            return [(await batcher.add_request("p")).output for _ in range(len(batches) + 2)]

    assert play(main)[-3:] == ["xy"] * 3


def test_one_prompt_after_the_other_in_one_stream_loses_none() -> None:
    turns = [["x" if turn == number else None for number in range(4)] for turn in range(4) for _ in range(12)]

    async def main(clock: ManualClock) -> list[str]:
        async with ContinuousBatcher(Listed(turns), 4, clock=clock) as batcher:
            outputs = []
            for _ in range(4):
                outputs += await asyncio.gather(*(batcher.add_request("p") for _ in range(4)))
            return [each.output for each in outputs]

    assert play(main) == ["x" * 12] * 16


def test_a_stream_that_fails_fails_those_that_have_probably_ended_too() -> None:
    class Fails:
        async def generate_stream_batch(self, prompts: list[str]) -> AsyncGenerator[list[Any]]:
            yield ["a"] * len(prompts)
            yield [None] * len(prompts)
            raise RuntimeError("CUDA error")

    async def main(clock: ManualClock) -> None:
        async with ContinuousBatcher(Fails(), 4, clock=clock) as batcher:
            responses = await asyncio.gather(*(batcher.add_request("p") for _ in range(4)))
            assert [each.output for each in responses] == ["a"] * 4
            assert all("CUDA error" in str(each.error) for each in responses)
            assert batcher.stats().failed == 4

    play(main)


def test_no_more_are_held_than_there_are_slots() -> None:
    held: list[int] = []

    class Beats:
        batcher: ContinuousBatcher

        async def generate_stream_batch(self, prompts: list[str]) -> AsyncGenerator[list[Any]]:
            yield ["a"] * len(prompts)
            for _ in range(20):
                held.append(self.batcher.held)
                await asyncio.sleep(0.1)
                yield [None] * len(prompts)

    async def main(clock: ManualClock) -> None:
        model = Beats()
        async with ContinuousBatcher(model, 3, clock=clock) as model.batcher:
            await asyncio.gather(*(model.batcher.add_request("p") for _ in range(30)))

    play(main)
    assert 0 < max(held) <= 3


@pytest.mark.parametrize("none_ends", [True, False])
def test_the_slot_of_a_sequence_that_has_probably_ended_is_given_on(none_ends: bool) -> None:
    class Model(Scripted):
        batches: list[list[str]]

        async def generate_stream_batch(self, prompts: list[str]) -> AsyncGenerator[list[Any]]:
            self.batches.append(prompts)
            async for entries in super().generate_stream_batch(prompts):
                yield entries

    async def main(clock: ManualClock) -> None:
        model = Model(none_ends=none_ends)
        model.batches = []
        async with StreamingBatchProcessor(model, 2, clock=clock) as processor:
            scripts = ["a" * 50, "b!", "c!", "d.d!"]
            seen = [
                (request_id, token, clock.now())
                async for request_id, token in processor.process_streaming(map(request, scripts))
            ]
        texts = {script: "".join(token for name, token, _ in seen if name == script) for script in scripts}
        assert texts == {script: script.replace(".", "").replace("!", "") for script in scripts}
        if none_ends:
            assert max(at for name, _, at in seen if name != scripts[0]) < 15

    play(main)


@pytest.mark.parametrize("drain", [True, False])
def test_closing_answers_what_is_held(drain: bool) -> None:
    async def main(clock: ManualClock) -> None:
        batcher = ContinuousBatcher(Scripted(none_ends=True), 2, clock=clock)
        calls = [asyncio.create_task(batcher.add_request(script)) for script in ("a!", "bbbbb")]
        await asyncio.sleep(2.5)
        assert batcher.held == 1
        await batcher.close(drain)
        held, running = await asyncio.gather(*calls)
        assert held.output == "a"
        assert (running.error is None) == drain
        assert (batcher.held, batcher.stats().running) == (0, 0)

    play(main)


def test_a_plain_generator_may_use_both_entries() -> None:
    class Plain:
        def generate_stream_batch(self, prompts: list[str]) -> Iterator[list[str | None]]:
            yield ["a" for _ in prompts]
            yield ["" for _ in prompts]
            yield ["b" for _ in prompts]
            yield [None for _ in prompts]

    with ContinuousBatcher(Plain()) as batcher:
        assert batcher.submit("x").result().output == "ab"
