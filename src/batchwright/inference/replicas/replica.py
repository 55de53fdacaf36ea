"""`Replica`: one copy of a model that computes elsewhere, and that may die at any moment."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from batchwright.inference.inference import Call, WorkUnderWay

if TYPE_CHECKING:
    from batchwright.engine.engine_stats import EngineStats


class ReplicaDied(Exception):
    """The replica died, or was not up, before it had answered.

    `by_node`: its whole machine was lost, which no call can have caused.
    """

    def __init__(self, reason: str, *, by_node: bool = False) -> None:
        super().__init__(reason)
        self.by_node = by_node


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """What a replica reports about itself when it is up."""

    models: Sequence[str]
    endpoints: Sequence[str]
    places: int
    """Sequences that it computes at once."""
    kv_tokens: int
    """Tokens in its KV cache."""
    longest: int
    """Most tokens of an answer whose request sets no limit."""


class Replica(Protocol):
    """A transport to one copy of a model. All methods are called on one event loop."""

    @property
    def stats(self) -> EngineStats | None:
        """Statistics of its engine since its last start, as last reported; None if there are none."""

    @property
    def is_up(self) -> bool:
        """Whether calls reach it."""

    async def start(self, progress: Callable[[str], None]) -> ReplicaFacts:
        """Load the model, also again after a death. `progress` is called with a line of text at each step.

        Raises the error of loading, and `ReplicaDied`.
        """

    async def ended(self) -> ReplicaDied:
        """Wait until it is dead, and return why."""

    async def answer(self, call: Call) -> dict[str, Any]:
        """Return the body of the response. Raises what `Inference.answer` raises, and `ReplicaDied`."""

    def stream(self, call: Call) -> AsyncIterator[dict[str, Any]]:
        """Yield the bodies of the chunks. Raises like `answer`."""

    async def work_of(self, prefix: str) -> WorkUnderWay | None:
        """Return the work of a job, see `KnowsWork`. Raises `ReplicaDied`."""

    async def close(self) -> None:
        """End it; by then it has reported its last statistics."""
