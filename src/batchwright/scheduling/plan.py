"""The plan of one step."""

from __future__ import annotations

from dataclasses import dataclass, field

from batchwright.scheduling.sequence import Sequence


@dataclass(slots=True)
class Chunk:
    """`count` tokens of `sequence`, from position `start`, to be computed in one step."""

    sequence: Sequence
    start: int
    count: int
    fresh: bool
    """Whether it is the first chunk since its sequence was admitted, as a rule by this plan."""

    samples: bool
    """Whether it reaches the last known token, whose logits choose the next one."""

    drafts: list[int] = field(default_factory=list)
    """Guesses at the tokens after it, computed with it; each one's logits choose what follows it."""


@dataclass(slots=True)
class StepPlan:
    """Content of the next step. `expired` sequences have ended because their deadline passed."""

    chunks: list[Chunk] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    expired: list[Sequence] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)

    @property
    def num_rows(self) -> int:
        """Number of tokens and drafts."""
        return self.num_tokens + sum(len(chunk.drafts) for chunk in self.chunks)

    @property
    def num_batch_tokens(self) -> int:
        """Number of those that are of batch sequences."""
        return sum(chunk.count for chunk in self.chunks if chunk.sequence.is_batch)
