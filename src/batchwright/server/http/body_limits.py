"""How large the body of a request may be, and how many bytes of large ones may be in work at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from batchwright.errors import Overloaded
from batchwright.server.http.error_answers import HttpError
from batchwright.service.settings import Settings
from batchwright.wire.requests import CHAT_URL, COMPLETION_URL, EMBEDDINGS_URL

UPLOAD = ("POST", "/v1/files")
"""Has a cap of its own, counted as it passes into its blob."""
SMALL = 65_536
"""Bytes of a body that is parsed on the event loop, which takes a millisecond, and is not counted: the limit on
requests bounds them.
"""
_MANAGEMENT = 131_072
"""Bytes of any other body. The largest is that of a batch: 16 pairs of metadata, at up to 12 bytes a character."""
_PROMPTS = ("/v1/batch/sync", "/v1/batch/async")
_RETRY_AFTER = 1.0


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """The most bytes of a body, by where it goes."""

    by_path: Mapping[str, tuple[int, str]]
    """With the name of the setting that raises it."""

    @classmethod
    def of(cls, settings: Settings) -> BodyLimits:
        online = settings.max_online_body_size, "max_online_body_size"
        prompts = settings.max_body_size, "max_body_size"
        return cls(dict.fromkeys((CHAT_URL, COMPLETION_URL, EMBEDDINGS_URL), online) | dict.fromkeys(_PROMPTS, prompts))

    def most(self, method: str, path: str) -> tuple[int, str | None] | None:
        """The limit and the setting that raises it, if one does; None: it is counted elsewhere."""
        if (method, path) == UPLOAD:
            return None
        return self.by_path.get(path, (_MANAGEMENT, None))


class ByteBudget:
    """Counts the bytes of large bodies of all requests that are under way.

    Beyond `limit` a body is refused instead of waiting for others: each of those that wait would hold what has arrived
    of it, and what they wait for may be an answer that takes minutes.
    """

    def __init__(self, limit: int) -> None:
        self.in_work = 0
        self._limit = limit

    def take(self, count: int) -> None:
        """Count `count` bytes more. Raises `Overloaded`, and counts nothing, beyond the limit."""
        if self.in_work + count > self._limit:
            raise Overloaded(
                f"large request bodies of {self.in_work:,} bytes are in work, the most is {self._limit:,} "
                "(max_body_memory): try again later",
                retry_after=_RETRY_AFTER,
            )
        self.in_work += count

    def give_back(self, count: int) -> None:
        """Of a request that has ended, what it took."""
        self.in_work -= count


class BodyCount:
    """Counts the bytes of one body against the limit on it, and of a large one against the budget of all."""

    def __init__(self, most: tuple[int, str | None] | None, budget: ByteBudget) -> None:
        self._most = most
        self._budget = budget
        self._passed = 0
        self._taken = 0

    def announce(self, length: str) -> None:
        """Look at a Content-Length. Raises `HttpError` (413) when it is too much already."""
        if self._most is not None and length.isdecimal() and (len(length) > 18 or int(length) > self._most[0]):
            raise _too_large(*self._most)

    def count(self, size: int) -> None:
        """Count what has arrived. Raises `HttpError` (413), and `Overloaded` beyond the budget."""
        if self._most is None:
            return
        self._passed += size
        if self._passed > self._most[0]:
            raise _too_large(*self._most)
        if self._passed > SMALL:
            self._budget.take(self._passed - self._taken)
            self._taken = self._passed

    def end(self) -> bool:
        """Give back what was taken; whether anything was."""
        taken, self._taken = self._taken, 0
        self._budget.give_back(taken)
        return taken > 0


def _too_large(most: int, setting: str | None) -> HttpError:
    remedy = "" if setting is None else f", or raise {setting} of the service"
    return HttpError(413, f"the body has more than {most:,} bytes: send less{remedy}", code="request_too_large")
