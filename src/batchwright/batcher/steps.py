"""The token-level loop for a model that computes one step at a time: `generate_step(prompts, partial_outputs)`.

While anything is waiting or being computed, one task takes steps: it fills the free slots, has the model compute one
token for each sequence that has a slot, and delivers the tokens. Between two steps the event loop gets a turn, so that
arrivals and departures take effect before the next one.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from batchwright.batcher.model import ModelCall, checked_outputs, is_being_cancelled
from batchwright.batcher.token_core import Shared, TokenCore
from batchwright.batcher.token_entry import TokenEntry


class StepCore(TokenCore):
    """The loop of steps."""

    def __init__(self, call: ModelCall, as_text: bool, loop: asyncio.AbstractEventLoop, shared: Shared) -> None:
        super().__init__(loop, shared)
        self._call = call
        self._as_text = as_text
        """Whether the model gets the outputs so far as text, not as lists of tokens."""
        self._task: asyncio.Task[None] | None = None
        self._computing: set[TokenEntry] = set()
        """Sequences in the model now that are still wanted."""
        self._dropping = False
        """Whether the model call was cancelled because no caller waited for it any more."""

    def _wake(self) -> None:
        if self._task is None:
            # Not through the loop's task factory: an eager task would begin before `_task` is set.
            self._task = asyncio.Task(self._run(), loop=self.loop)
            # A task that is cancelled before its first step never runs.
            self._task.add_done_callback(self._end)

    def _left(self, sequence: TokenEntry) -> None:
        if sequence in self._computing:
            self._computing.discard(sequence)
            if not self._computing and self._task is not None and (self._closing or not self._call.in_thread):
                self._dropping = True
                self._task.cancel()

    async def _run(self) -> None:
        while not self.is_empty:
            self._place()
            live = cast(list[TokenEntry], list(self._slots.live))
            begin = self._clock.now()
            parts = [live]
            while parts:
                part = [sequence for sequence in parts.pop() if sequence.waits_for_answer]
                if part:
                    parts += await self._step(part)
            self._count_step(len(live), len(live), self._clock.now() - begin)
            await asyncio.sleep(0)
        self._task = None

    def _end(self, task: asyncio.Task[None]) -> None:
        """Answer all requests if the task was ended from outside or by an internal error."""
        if task is self._task:
            self._task = None
            self._ended_early(task)

    async def _step(self, sequences: list[TokenEntry]) -> list[list[TokenEntry]]:
        """Compute one token for each sequence, and return the parts to be computed again, the last one first."""
        try:
            tokens = await self._tokens(sequences)
        except asyncio.CancelledError as error:
            if is_being_cancelled():
                raise
            return self._failed(sequences, error)
        except Exception as error:
            return self._failed(sequences, error)
        now = self._clock.now()
        for sequence, token in zip(sequences, tokens, strict=False):
            self._accept(sequence, token, now)
        return []

    async def _tokens(self, sequences: list[TokenEntry]) -> list[Any]:
        """Return the model's tokens; none if no caller waits for them any more."""
        self._computing = set(sequences)
        try:
            result = await self._call(
                [sequence.prompt for sequence in sequences],
                [sequence.raw if self._as_text else list(sequence.tokens) for sequence in sequences],
                requests=[sequence.request for sequence in sequences],
            )
        except (Exception, asyncio.CancelledError):
            if not self._dropped():
                raise
            return []
        finally:
            self._computing = set()
        return [] if self._dropped() else checked_outputs(result, len(sequences))

    def _dropped(self) -> bool:
        """Return whether the call was cancelled here, and nowhere else."""
        dropped, self._dropping = self._dropping, False
        return dropped and self._task is not None and self._task.uncancel() == 0

    def _failed(self, sequences: list[TokenEntry], error: BaseException) -> list[list[TokenEntry]]:
        """Answer all with the error or, where one may be the cause, return halves to compute again."""
        if len(sequences) == 1 or not self._shared.limits.isolate:
            self._fail(sequences, error)
            return []
        self._stats.splits += 1
        middle = len(sequences) // 2
        return [sequences[middle:], sequences[:middle]]
