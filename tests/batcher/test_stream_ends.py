"""What `None` and `""` mean in a stream is found out, and no text is lost by either convention."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.batcher import ContinuousBatcher, StreamingBatchProcessor
from batchwright.batcher.stream_ends import Meaning, Silence, StreamEnds
from batchwright.clock import ManualClock

from .tokens import request
from .virtual import play

_QUICK = settings(max_examples=150, deadline=None, derandomize=True, database=None)


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


def test_none_is_the_end_once_nothing_has_followed_it() -> None:
    ends = StreamEnds()
    for _ in range(2):
        silence = Silence()
        assert [ends.meaning(entry, silence) for entry in ("a", None, None)] == [
            Meaning.TOKEN, Meaning.HELD, Meaning.HELD,
        ]  # fmt: skip
        ends.stream_ended([silence])
    assert ends.meaning(None, Silence()) is Meaning.END
    long = Silence()
    other = StreamEnds()
    assert [other.meaning(None, long) for _ in range(9)][-2:] == [Meaning.HELD, Meaning.END]
    both = Silence()
    assert [other.meaning(entry, both) for entry in ("", None)] == [Meaning.NOTHING_NEW, Meaning.END]


def test_a_model_that_goes_on_after_all_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    ends = StreamEnds()
    ends.none_ends = True
    silence = Silence()
    assert ends.meaning(None, silence) is Meaning.END
    with caplog.at_level(logging.ERROR):
        ends.meaning("lost", silence)
    assert ends.none_ends is False
    assert 'give "" where there is nothing new' in caplog.text


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
