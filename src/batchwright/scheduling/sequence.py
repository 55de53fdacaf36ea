"""One sequence of tokens, from the scheduler's point of view."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

from batchwright.kv import BlockTable
from batchwright.request import Flow, Traffic
from batchwright.scheduling.drafting import Drafter

if TYPE_CHECKING:
    from batchwright.scheduling.fairness import Share

Urgency: TypeAlias = tuple[bool, bool, int, float, int]

_LONGEST_SILENCE = 8
"""Tokens after which a sequence no longer counts as silent, whether they have text or not."""


class Status(Enum):
    """Stage in the life of a sequence."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """Sequence whose computed tokens chase its known tokens: a step computes some of `tokens[num_computed:]`.

    The caller appends a token to `tokens` after a step that computed all of them, together with others that are certain
    to follow it. Otherwise it sets only `forced` and `text_pending`; the scheduler sets the rest.
    """

    tokens: list[int]
    """Tokens of the prompt, then of the output."""
    num_prompt: int
    max_total: int
    """Most tokens that it may have, prompt included."""
    priority: int = 5
    """Priority; lower is sooner."""
    deadline: float = math.inf
    """Absolute time after which it is abandoned."""
    arrived_at: float = 0.0
    traffic: Traffic = "online"
    """Class of traffic: online sequences go before those of a batch, whatever the priorities."""
    flow: Flow | None = None
    """Flow whose share of the engine it uses."""
    drafter: Drafter | None = None
    """Maker of drafts, if the caller can check all of them at once by their logits; else None."""
    scored: range = range(0)
    """Positions of the prompt whose logits are still wanted, besides those of the last known token.

    Set by the caller before `Scheduler.add`; positions that a step has computed are removed from the beginning.
    """
    ordinal: int = 0
    """Order of arrival, set by `Scheduler.add`."""
    status: Status = Status.WAITING
    num_computed: int = 0
    num_cached: int = 0
    """Prompt tokens found in the prefix cache when it was first admitted."""
    preemptions: int = 0
    promoted: bool = False
    """Whether it has waited so long that it goes before every priority of its class of traffic."""
    admitted: bool = False
    """Whether it has ever been admitted."""
    started: bool = False
    """Whether a step has computed any of it since it was last admitted."""
    kept: bool = False
    """Whether it is a batch sequence in a place that is owed to `batch_share`, which no online sequence takes."""
    first_token_at: float | None = None
    """Time of the first plan after its first token."""
    last_turn: int = 0
    """Serial number of the last chunk of it that was computed."""
    text_pending: bool = False
    """Whether a reader of its text has not received any yet. Set by the caller."""
    forced: int = 0
    """Number of tokens that were appended together with the last one that was chosen. Set by the caller."""
    share: Share | None = None
    """Account of its request."""
    queue_entry: int = -1
    """Serial number of its valid entry in the waiting queue."""
    table: BlockTable = field(default_factory=BlockTable)

    @property
    def is_batch(self) -> bool:
        return self.traffic == "batch"

    @property
    def remaining(self) -> int:
        """Number of known tokens that are not computed yet."""
        return len(self.tokens) - self.num_computed

    @property
    def is_decode(self) -> bool:
        """Whether it lacks only the last chosen token, with tokens that were appended together with it."""
        return self.remaining <= 1 + self.forced

    @property
    def awaits_decode(self) -> bool:
        """Whether its next chunk is a decode. It is not if all its known tokens are computed."""
        return 0 < self.remaining <= 1 + self.forced

    @property
    def reusable(self) -> int | None:
        """Number of its first tokens that may come from the prefix cache, which has no logits; None: all."""
        return self.scored.start if self.scored else None

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def is_silent(self) -> bool:
        """Whether none of its output was delivered yet, though it may have tokens whose text is not certain."""
        return not self.num_generated or (self.text_pending and self.num_generated < _LONGEST_SILENCE)

    @property
    def rank(self) -> tuple[bool, bool, int]:
        """Rank; smaller may take the place of larger: online before batch, then promoted ones, then by priority."""
        return self.urgency[:3]

    @property
    def urgency(self) -> Urgency:
        """Sort key, smaller is sooner: by rank; promoted ones by arrival, the others by deadline and arrival."""
        if self.promoted:
            return (self.is_batch, False, 0, 0.0, self.ordinal)
        return (self.is_batch, True, self.priority, self.deadline, self.ordinal)
