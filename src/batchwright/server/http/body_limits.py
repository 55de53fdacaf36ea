"""Limits on the size of a request's body, and on the bytes of all large bodies of requests in progress."""

from __future__ import annotations

from batchwright.errors import Overloaded
from batchwright.server.http.error_answers import HttpError
from batchwright.service.settings import Settings
from batchwright.wire.requests import ALIASES, CHAT_URL, COMPLETION_URL, ENCODER_URLS, RESPONSES_URL

UPLOAD = ("POST", "/v1/files")
"""Request whose body has its own limit, counted while it is written to a blob."""
SMALL = 65_536
"""Largest body in bytes that is parsed on the event loop, in about a millisecond. Such bodies are not counted: the
limit on the number of requests bounds them.
"""
_MANAGEMENT = 131_072
"""Most bytes of any other body. The largest is that of a batch: 16 pairs of metadata, of up to 12 bytes a character."""
_PROMPTS = ("/v1/batch/sync", "/v1/batch/async")
_RETRY_AFTER = 1.0


class BodyLimits:
    """The largest body that each path accepts."""

    def __init__(self, settings: Settings) -> None:
        online = settings.max_online_body_size, "max_online_body_size"
        prompts = settings.max_body_size, "max_body_size"
        self._by_path: dict[str, tuple[int, str]] = dict.fromkeys(
            (CHAT_URL, COMPLETION_URL, RESPONSES_URL, *ENCODER_URLS, *ALIASES), online
        )
        self._by_path |= dict.fromkeys(_PROMPTS, prompts)

    def most(self, method: str, path: str) -> tuple[int, str | None] | None:
        """Return the limit in bytes and the setting that raises it, if any; None: the body is counted elsewhere."""
        if (method, path) == UPLOAD:
            return None
        return self._by_path.get(path, (_MANAGEMENT, None))


class ByteBudget:
    """The number of bytes in the large bodies of all requests that are under way.

    Beyond `limit`, a body is refused and does not wait for others: a waiting request would hold what has arrived of its
    body in memory, perhaps for the minutes that another answer takes.
    """

    def __init__(self, limit: int) -> None:
        self.in_progress = 0
        self._limit = limit

    def take(self, count: int) -> None:
        """Count `count` more bytes. Beyond the limit, count nothing and raise `Overloaded`."""
        if self.in_progress + count > self._limit:
            raise Overloaded(
                f"the large bodies of requests in progress have {self.in_progress:,} bytes, the most is "
                f"{self._limit:,} (max_body_memory): try again later",
                retry_after=_RETRY_AFTER,
            )
        self.in_progress += count

    def give_back(self, count: int) -> None:
        """Stop counting `count` bytes of a request that has ended."""
        self.in_progress -= count


class BodyCount:
    """Counts the bytes of one body against its limit, and those of a large body against the budget of all."""

    def __init__(self, most: tuple[int, str | None] | None, budget: ByteBudget) -> None:
        self._most = most
        self._budget = budget
        self._passed = 0
        self._taken = 0

    def announce(self, length: str) -> None:
        """Check a Content-Length. Raises `HttpError` (413) if it is beyond the limit."""
        if self._most is not None and length.isdecimal() and (len(length) > 18 or int(length) > self._most[0]):
            raise _too_large(*self._most)

    def count(self, size: int) -> None:
        """Count bytes that have arrived. Raises `HttpError` (413), and `Overloaded` beyond the budget."""
        if self._most is None:
            return
        self._passed += size
        if self._passed > self._most[0]:
            raise _too_large(*self._most)
        if self._passed > SMALL:
            self._budget.take(self._passed - self._taken)
            self._taken = self._passed

    def end(self) -> bool:
        """Give back what was taken from the budget, and return whether anything was."""
        taken, self._taken = self._taken, 0
        self._budget.give_back(taken)
        return taken > 0


def _too_large(most: int, setting: str | None) -> HttpError:
    remedy = "" if setting is None else f", or raise {setting} of the service"
    return HttpError(413, f"the body has more than {most:,} bytes: send less{remedy}", code="request_too_large")
