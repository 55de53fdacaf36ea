"""The token-level loop for a model that streams whole batches: `generate_stream_batch(prompts)`.

Such a batch is fixed once it has started. So when sequences end, their slots are filled by another batch of waiting
requests, which is started beside the running ones, so a slow sequence delays no other. There are never more live
sequences than slots, except for sequences that have probably ended (`stream_ends.py`), of which there are at most as
many. A batch whose sequences have all ended is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from functools import partial
from typing import Any

from batchwright.batcher.model import ModelCall, WrongOutputs, awaited, checked_outputs, is_being_cancelled
from batchwright.batcher.stream_ends import Meaning, Silence, StreamEnds
from batchwright.batcher.token_core import Shared, TokenCore
from batchwright.batcher.token_entry import TokenEntry

_END = object()


class _Stream:
    """A batch in the model."""

    def __init__(self, sequences: list[TokenEntry]) -> None:
        self.sequences = sequences
        self.silences = [Silence() for _ in sequences]
        self.task: asyncio.Task[None] | None = None
        self.in_thread = False
        """Whether it runs in a thread, where it cannot be cancelled while it computes."""
        self.begun = False
        """Whether tokens have come, so that it cannot be restarted."""

    @property
    def wanted(self) -> int:
        """Number of its sequences that are still waiting for an answer."""
        return sum(sequence.waits_for_answer for sequence in self.sequences)


class StreamCore(TokenCore):
    """The streams of one model, side by side."""

    def __init__(self, call: ModelCall, ends: StreamEnds, loop: asyncio.AbstractEventLoop, shared: Shared) -> None:
        super().__init__(loop, shared)
        self._call = call
        self._ends = ends
        self._held: set[TokenEntry] = set()
        """Sequences without a slot that have probably ended."""
        self._pumping = False
        """Whether `_pump` is about to be called."""

    @property
    def is_empty(self) -> bool:
        return super().is_empty and not self._held

    @property
    def held(self) -> int:
        return len(self._held)

    def _free(self, sequence: TokenEntry) -> None:
        self._held.discard(sequence)
        super()._free(sequence)

    def _take_all(self) -> list[TokenEntry]:
        held = list(self._held)
        self._held.clear()
        return held + super()._take_all()

    def _hold(self, sequence: TokenEntry) -> None:
        """Give the slot of a sequence to the next one, and wait to see whether it has ended."""
        is_bounded = len(self._held) < self._shared.places
        if is_bounded and sequence.waits_for_answer and sequence not in self._held:
            self._held.add(sequence)
            self._slots.remove(sequence)
            sequence.leave_slot()
            self._wake()

    def _wake(self) -> None:
        if not self._pumping:
            self._pumping = True
            self.loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pumping = False
        placed = self._place()
        if placed:
            self._start(list(placed))

    def _left(self, sequence: TokenEntry) -> None:
        stream = sequence.group
        if stream is not None and not stream.wanted and (self._closing or not stream.in_thread):
            stream.task.cancel()

    def _start(self, sequences: list[TokenEntry]) -> None:
        stream = _Stream(sequences)
        for sequence in sequences:
            sequence.group = stream
        stream.task = self.loop.create_task(self._run(stream))
        stream.task.add_done_callback(partial(self._end, stream))

    def _end(self, stream: _Stream, task: asyncio.Task[None]) -> None:
        """Answer what is left, usually nothing, and detach the sequences from their stream."""
        mine = [sequence for sequence in stream.sequences if sequence.group is stream]
        for sequence in mine:
            sequence.group = None
        if any(sequence.waits_for_answer for sequence in mine) or not task.cancelled():
            self._ended_early(task, mine)

    async def _run(self, stream: _Stream) -> None:
        try:
            await self._read(stream)
        except asyncio.CancelledError as error:
            if is_being_cancelled():
                raise
            self._failed(stream, error)
        except Exception as error:
            self._failed(stream, error)
        else:
            self._ends.stream_ended(stream.silences)
            now = self._clock.now()
            for sequence in stream.sequences:
                self._accept(sequence, "", now)

    async def _read(self, stream: _Stream) -> None:
        """Deliver the tokens until the iterator ends, or no caller waits for more."""
        begin, size = self._clock.now(), stream.wanted
        async with contextlib.aclosing(self._lists(stream)) as lists:
            async for tokens in lists:
                stream.begun = True
                now = self._clock.now()
                self._count_step(size, len(self._slots.live), now - begin)
                for sequence, silence, entry in zip(stream.sequences, stream.silences, tokens, strict=True):
                    meaning = self._ends.meaning(entry, silence)
                    if meaning is Meaning.HELD:
                        self._hold(sequence)
                    elif meaning is not Meaning.NOTHING_NEW:
                        self._accept(sequence, "" if meaning is Meaning.END else entry, now)
                # Arrivals, departures and readers get their turn, even if the model never waits.
                await asyncio.sleep(0)
                begin, size = self._clock.now(), stream.wanted
                if not size:
                    break

    async def _lists(self, stream: _Stream) -> AsyncGenerator[list[Any]]:
        """Yield the model's lists, with one entry per sequence. Raises what the model raises, and `WrongOutputs`."""
        count = len(stream.sequences)
        found = await self._call(
            [sequence.prompt for sequence in stream.sequences],
            requests=[sequence.request for sequence in stream.sequences],
        )
        if isinstance(found, Iterator):
            stream.in_thread = True
            while (tokens := await self._call.in_own_thread(partial(next, found, _END))) is not _END:
                yield checked_outputs(tokens, count)
        elif isinstance(found, AsyncIterator):
            try:
                while (tokens := await awaited(anext(found, _END))) is not _END:
                    yield checked_outputs(tokens, count)
            finally:
                if isinstance(found, AsyncGenerator):
                    await awaited(found.aclose())
        else:
            raise WrongOutputs(
                f"generate_stream_batch returned {type(found).__name__}: it must return an async iterator of lists"
            )

    def _failed(self, stream: _Stream, error: BaseException) -> None:
        """Answer all with the error or, if one may be the cause and no token has come, restart them in halves."""
        live = [sequence for sequence in stream.sequences if sequence.waits_for_answer]
        isolate = self._shared.limits.isolate and not stream.begun and not isinstance(error, WrongOutputs)
        if len(live) < 2 or not isolate:
            self._fail(live, error)
            return
        self._stats.splits += 1
        middle = len(live) // 2
        self._start(live[:middle])
        self._start(live[middle:])
