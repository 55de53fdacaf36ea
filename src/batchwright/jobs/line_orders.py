"""Orders in which the lines of a job are started, for endpoints elsewhere and for our own engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np

from batchwright.errors import BatchwrightError
from batchwright.jobs.lines import check_body
from batchwright.lines.batch_line import token_count
from batchwright.lines.forecast import LONGEST_COUNTED, answer_limit, default_limit
from batchwright.planning import job_order, prefix_order
from batchwright.planning.arrangement import Caches, LineShape
from batchwright.planning.job_order import JobOrder
from batchwright.planning.prefix_order import PrefixOrder
from batchwright.planning.prefix_tree import block_ids
from batchwright.request import Prompt, SamplingParams
from batchwright.wire.fields import DEFAULT_PRIORITY, expected_tokens, priority_or_default
from batchwright.wire.identity import cacheable_prompt
from batchwright.wire.requests import ENCODER_URLS

_DEADLINES = frozenset({"deadline", "deadline_ms"})
_NO_BLOCKS = np.zeros(0, np.int64)


class OrderedLine(Protocol):
    """A line that can be put in order."""

    @property
    def number(self) -> int: ...
    @property
    def endpoint(self) -> str: ...
    @property
    def body(self) -> Mapping[str, Any]: ...
    @property
    def size(self) -> int:
        """Approximate bytes of the body."""


_Line = TypeVar("_Line", bound=OrderedLine)


class LineOrder(Protocol[_Line]):
    """Holds lines that are read ahead, and hands them out in an order of its own."""

    reads_ahead: bool = False
    """Whether two lines should be added for each one that is taken, so that more and more are known."""

    @property
    def full(self) -> bool:
        """Whether no more lines are accepted until others are taken."""

    def __len__(self) -> int:
        """Number of lines that were added and not taken."""

    def add(self, line: _Line) -> None:
        """Add a line."""

    def take(self, now: float, *, more: bool) -> _Line | None:
        """Take the next line; None if there is none now. `more`: whether lines can still be added."""

    def expected_tokens(self, line: _Line) -> float | None:
        """Tokens expected of the answer to a line that was taken; None if nothing is known about it."""
        return None

    def ended(self, line: _Line, answer: Mapping[str, Any] | None) -> None:
        """Note that a line that was taken has ended, with this answer; None: without one."""


class EndpointOrder(LineOrder[_Line], Generic[_Line]):
    """The order for an endpoint elsewhere, for which only the text of prompts is known: see `PrefixOrder`."""

    window: ClassVar[tuple[int, int]] = (prefix_order.MOST_LINES, prefix_order.MOST_BYTES)
    """Lines that are put in order together, and their bytes."""

    def __init__(self, order: PrefixOrder[_Line] | None = None) -> None:
        """`order`: one with bounds other than the usual ones."""
        most_lines, most_bytes = self.window
        self._order = PrefixOrder[_Line](most_lines=most_lines, most_bytes=most_bytes) if order is None else order

    @property
    def full(self) -> bool:
        return self._order.full

    def __len__(self) -> int:
        return len(self._order)

    def add(self, line: _Line) -> None:
        # A line with a priority or a deadline of its own waits for no other.
        scope, prompt = cacheable_prompt(line.endpoint, line.body) if waits_for_others(line.body) else (b"", b"")
        priority = priority_or_default(line.body)
        self._order.add(line.number, line, size=line.size, scope=scope, prompt=prompt, priority=priority)

    def take(self, now: float, *, more: bool) -> _Line | None:
        return self._order.take(now, more=more)

    def ended(self, line: _Line, answer: Mapping[str, Any] | None) -> None:
        self._order.answered(line.number)


class EngineOrder(LineOrder[_Line], Generic[_Line]):
    """The order for our own engines, whose tokens and blocks are known: see `JobOrder`."""

    reads_ahead = True
    window: ClassVar[tuple[int, int]] = (job_order.MOST_LINES, job_order.MOST_BYTES)
    """Lines that are put in order together, and their bytes."""

    def __init__(
        self,
        places: int,
        caches: Caches,
        encode: Callable[[Prompt], list[int]],
        defaults: SamplingParams | Mapping[str, Any],
    ) -> None:
        """`places`: lines that the engines compute at once; `encode` returns the tokens of a prompt, or raises."""
        most_lines, most_bytes = self.window
        self._order = JobOrder[_Line](places, caches=caches, most_lines=most_lines, most_bytes=most_bytes)
        self._block_size = caches.block_tokens
        self._encode = encode
        self._defaults = defaults
        self._limit: int = default_limit(defaults) or LONGEST_COUNTED

    @property
    def full(self) -> bool:
        return self._order.full

    def __len__(self) -> int:
        return len(self._order)

    def add(self, line: _Line) -> None:
        priority = None if waits_for_others(line.body) else priority_or_default(line.body) - DEFAULT_PRIORITY
        self._order.add(line.number, line, size=line.size, shape=self.shape_of(line), priority=priority)

    def take(self, now: float, *, more: bool) -> _Line | None:
        return self._order.take(more=more)

    def expected_tokens(self, line: _Line) -> float | None:
        limit, given = answer_limit(line.body, self._limit), expected_tokens(line.body)
        return self._order.expected(line.number, limit) if given is None else float(min(given, limit))

    def ended(self, line: _Line, answer: Mapping[str, Any] | None) -> None:
        choices = 1 if answer is None else max(1, len(answer.get("choices") or ()))
        tokens = None if answer is None else token_count(answer, "completion_tokens") // choices
        self._order.ended(line.number, tokens)

    def shape_of(self, line: OrderedLine) -> LineShape:
        """What is known about a line; one that cannot be computed has no prompt, and fails when its turn comes."""
        limit, expected = answer_limit(line.body, self._limit), expected_tokens(line.body)
        if line.endpoint in ENCODER_URLS:
            return LineShape(line.size, 1, _NO_BLOCKS)
        try:
            prompts = [self._encode(each) for each in check_body(line.endpoint, line.body, self._defaults)]
        except (BatchwrightError, ValueError, TypeError, KeyError):
            return LineShape(0, limit, _NO_BLOCKS)
        return LineShape(sum(map(len, prompts)), limit, block_ids(prompts[0], self._block_size), expected)


def waits_for_others(body: Mapping[str, Any]) -> bool:
    """Whether a line with this body, without a priority or deadline of its own, waits for those with its prefix."""
    return priority_or_default(body) == DEFAULT_PRIORITY and not _DEADLINES & body.keys()
