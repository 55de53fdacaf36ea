"""The failed lines of a job, counted by the code of their error and the field at fault, with an example of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

RETRYABLE = "retryable"
"""Name in the error of a result: whether the same line may well succeed later."""
_MOST_NUMBERS = 100


@dataclass(slots=True)
class Failure:
    """The lines that failed with one code, for one field."""

    code: str
    count: int
    line: int
    """Number of the example, the first that was seen."""
    custom_id: str
    """Id of the example."""
    message: str
    """Message of the example."""
    retryable: int = 0
    """Number of these lines that may well succeed later."""
    lines: list[int] = field(default_factory=list)
    """Line numbers of the first of them that were seen, at most 100."""
    param: str | None = None
    """The field at fault; None: the error names none."""


class Failures:
    """Failed lines by code and field."""

    def __init__(self) -> None:
        self._by_kind: dict[tuple[str, str | None], Failure] = {}

    def __iter__(self) -> Iterator[Failure]:
        """The most frequent first."""
        return iter(sorted(self._by_kind.values(), key=lambda failure: -failure.count))

    @property
    def first(self) -> Failure | None:
        """The example that was seen first; None if no line failed."""
        return next(iter(self._by_kind.values()), None)

    def add(self, line: int, custom_id: str, error: Mapping[str, Any]) -> None:
        """Count a failed line."""
        code, param = str(error.get("code")), error.get("param")
        param = param if isinstance(param, str) else None
        made = Failure(code, 0, line, custom_id, str(error.get("message")), param=param)
        failure = self._by_kind.setdefault((code, param), made)
        failure.count += 1
        if len(failure.lines) < _MOST_NUMBERS:
            failure.lines.append(line)
        failure.retryable += bool(error.get(RETRYABLE))

    def __add__(self, later: Failures) -> Failures:
        """The failed lines of both; each example is taken from the first that has one."""
        total = Failures()
        for each in (self, later):
            for kind, failure in each._by_kind.items():
                made = Failure(failure.code, 0, failure.line, failure.custom_id, failure.message, param=failure.param)
                found = total._by_kind.setdefault(kind, made)
                found.count += failure.count
                found.lines += failure.lines[: _MOST_NUMBERS - len(found.lines)]
                found.retryable += failure.retryable
        return total
