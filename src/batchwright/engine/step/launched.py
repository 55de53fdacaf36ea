"""A step between its plan and its tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from batchwright.engine.bodies.body import StepOutput
from batchwright.engine.grammars import Masks
from batchwright.engine.sampling import SamplingState
from batchwright.engine.step.batch import StepBatch
from batchwright.engine.step.pending_tokens import PendingTokens, copy_tokens
from batchwright.scheduling import Chunk, Sequence, StepPlan

_UNKNOWN = 0
"""Placeholder for a token that is not known yet. No step computes it, so any token would do."""


@dataclass(slots=True)
class LaunchedStep:
    """A step whose computation has begun: on a GPU it may go on for long."""

    plan: StepPlan
    sampled: list[Chunk]
    """Chunks of the plan after which a token is chosen."""
    states: list[SamplingState]
    """State for choosing the token after each sampled chunk, and after each of its drafts."""
    output: StepOutput | None
    """Logits, and the tokens that were found with them; None if all tokens are pending."""
    masks: Masks | None
    """Masks of the states with a grammar, if they were made before the step."""
    pending: PendingTokens | None
    """Tokens that the device chooses by itself; None if the host has to."""
    began: float
    """Time at which it was planned."""
    computing_since: float
    committed: bool = False
    """Whether its plan was committed before its tokens were known, in order to plan the next step."""
    unknown: list[tuple[Sequence, int]] = field(default_factory=list)
    """Sequences whose last token is not known yet and has a placeholder, and their lengths without it."""
    discarded: set[int] = field(default_factory=set)
    """Ordinals of sequences whose step was computed with a wrong token."""

    def reserve_tokens(self) -> None:
        """Append a place for the token after each sampled chunk, if another one may follow it."""
        for chunk in self.sampled:
            sequence = chunk.sequence
            if self.is_valid(chunk) and len(sequence.tokens) + 1 < sequence.max_total:
                # In this order: an interrupt between the two lines leaves nothing behind.
                self.unknown.append((sequence, len(sequence.tokens)))
                sequence.tokens.append(_UNKNOWN)

    def drop_unknown(self, which: Iterable[Sequence] | None = None) -> None:
        """Remove the placeholders of unknown tokens from all or some sequences: they are known now, or chosen again.

        May be called repeatedly until tokens are delivered.
        """
        dropped = {id(sequence) for sequence in which} if which is not None else None
        for sequence, length in self.unknown:
            if dropped is None or id(sequence) in dropped:
                del sequence.tokens[length:]
        self.unknown = [each for each in self.unknown if dropped is not None and id(each[0]) not in dropped]

    def fill_in(self, batch: StepBatch, chunks: list[Chunk]) -> None:
        """Copy the tokens that this step gives its sequences into the next step, of `chunks`."""
        waiting = {id(sequence) for sequence, _ in self.unknown}
        row_of = {chunk.sequence.ordinal: row for row, chunk in enumerate(self.sampled)}
        lasts = (np.cumsum(batch.query_lens) - 1).tolist()
        pairs = [
            (last, row_of[chunk.sequence.ordinal])
            for last, chunk in zip(lasts, chunks, strict=True)
            if id(chunk.sequence) in waiting
        ]
        if pairs and self.pending is not None:
            copy_tokens(batch.token_ids, [last for last, _ in pairs], self.pending.tokens, [row for _, row in pairs])

    def discard(self, sequences: set[int]) -> None:
        """Discard what was computed for the sequences with these ordinals, so that it is computed again."""
        self.discarded |= sequences
        self.plan.chunks = [chunk for chunk in self.plan.chunks if self.is_valid(chunk)]

    def is_valid(self, chunk: Chunk) -> bool:
        """Return whether what was computed for the chunk is valid."""
        return chunk.sequence.ordinal not in self.discarded
