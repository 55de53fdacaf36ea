"""The plan of one step, and drafts added to it if there are spare rows."""

from __future__ import annotations

from dataclasses import dataclass, field

from batchwright.kv import BlockManager
from batchwright.scheduling.sequence import Sequence


@dataclass(slots=True)
class Chunk:
    """`count` tokens of `sequence`, from position `start`, to be computed in one step."""

    sequence: Sequence
    start: int
    count: int
    fresh: bool
    """Whether it is the first chunk since its sequence was admitted, usually by this plan."""

    samples: bool
    """Whether it includes the last known token, whose logits choose the next one."""

    is_decode: bool = False
    """Whether it consists of the last chosen token, with tokens that were appended together with it."""
    scored: range = range(0)
    """Positions in it whose logits are wanted for the known token that follows."""

    ends: bool = False
    """Whether it includes the last token that its sequence will ever have, so that no token is chosen."""

    drafts: list[int] = field(default_factory=list)
    """Guesses at the tokens after it, computed with it; the logits of each choose the token after it."""


@dataclass(slots=True)
class StepPlan:
    """Content of the next step. `expired` sequences have ended because their deadline passed."""

    chunks: list[Chunk] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    expired: list[Sequence] = field(default_factory=list)
    alone: bool = False
    """Whether it computes one sequence alone, to see whether that makes a step fail."""

    @property
    def is_pure_decode(self) -> bool:
        """Whether it only computes the next token of sequences that ran before, and none has lost its place."""
        return not (self.alone or self.preempted or self.expired) and all(
            chunk.is_decode
            and chunk.count == 1
            and chunk.samples
            and not chunk.fresh
            and not chunk.scored
            and not chunk.drafts
            and chunk.start >= chunk.sequence.num_prompt
            for chunk in self.chunks
        )

    @property
    def num_tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)

    @property
    def num_rows(self) -> int:
        """Number of tokens and drafts."""
        return self.num_tokens + sum(len(chunk.drafts) for chunk in self.chunks)

    @property
    def num_scored(self) -> int:
        """Number of tokens whose logits are wanted for the known token that follows."""
        return sum(len(chunk.scored) for chunk in self.chunks)

    @property
    def num_batch_tokens(self) -> int:
        """Number of tokens of batch sequences."""
        return sum(chunk.count for chunk in self.chunks if chunk.sequence.is_batch)


def repeated(plan: StepPlan) -> StepPlan:
    """Return the plan of one more token for each sequence of `plan`, a pure decode."""
    return StepPlan(
        [Chunk(each.sequence, each.start + 1, 1, fresh=False, samples=True, is_decode=True) for each in plan.chunks]
    )


def add_drafts(plan: StepPlan, blocks: BlockManager, rows: int) -> None:
    """Add drafts to decodes as long as they cost nothing: no row beyond `rows`, no block of another sequence."""
    decodes = [chunk for chunk in plan.chunks if chunk.is_decode and chunk.samples and chunk.sequence.drafter]
    room = rows - plan.num_tokens
    for place, chunk in enumerate(decodes):
        sequence = chunk.sequence
        # The step chooses one token in any case.
        most = min(room // (len(decodes) - place), sequence.max_total - len(sequence.tokens) - 1)
        if most < 1 or sequence.drafter is None:
            continue
        drafts = sequence.drafter.draft(sequence.tokens, most)
        if blocks.grow(sequence.table, len(sequence.tokens) + len(drafts)):
            chunk.drafts = drafts
            room -= len(drafts)
