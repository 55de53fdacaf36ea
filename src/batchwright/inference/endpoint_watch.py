"""`EndpointWatch`: notices when a remote endpoint stops answering, and when it answers again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextvars import Context

from batchwright.backoff import Backoff
from batchwright.errors import EndpointDown, EndpointError

_log = logging.getLogger(__name__)

SILENCE = "the endpoint does not answer"
"""Message for callers. The address and the error are only for the log."""
_LEAST_WAIT = 1.0


class Availability:
    """Decides whether an endpoint counts as down, and when to probe it again. Pure: time is an argument.

    An endpoint counts as answering until a probe fails. While it is down, each pause before the next probe is twice as
    long as the one before, up to `longest_pause`. All times are in seconds.
    """

    def __init__(self, *, first_pause: float = 1.0, longest_pause: float = 5.0) -> None:
        self.down = False
        self._backoff = Backoff(first_pause, longest_pause)
        self._silences = 0
        """Number of consecutive failed probes."""
        self._probe_at = float("-inf")

    def answered(self, now: float) -> None:
        """Record that a probe or a call was answered."""
        self.down = False
        self._silences = 0
        self._probe_at = now + self._backoff.first

    def silent(self, now: float) -> None:
        """Record that a probe was not answered."""
        self.down = True
        self._silences += 1
        self._probe_at = now + self._backoff.pause(self._silences)

    def until_probe(self, now: float) -> float:
        """Return the seconds until the endpoint may be probed again."""
        return max(0.0, self._probe_at - now)


class EndpointWatch:
    """Probes an endpoint after a call to it failed, and then repeatedly until it answers.

    `probe` makes a cheap request, and raises `EndpointError` if it is not answered. There is one probe at a time, and
    none while calls succeed.
    """

    def __init__(self, probe: Callable[[], Awaitable[None]]) -> None:
        self._probe = probe
        self._availability = Availability()
        self._looking: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def down(self) -> bool:
        """Whether the endpoint is known not to answer."""
        return self._availability.down

    def require_answering(self) -> None:
        """Raise `EndpointDown` while the endpoint is known not to answer."""
        if self._availability.down:
            wait = self._availability.until_probe(asyncio.get_running_loop().time())
            raise EndpointDown(f"{SILENCE}: try again later", retry_after=max(_LEAST_WAIT, wait))

    async def look(self) -> None:
        """Probe once. If the endpoint does not answer, record that it is down and raise `EndpointError`."""
        now = asyncio.get_running_loop().time
        try:
            await self._probe()
        except EndpointError:
            self._availability.silent(now())
            raise
        if self._availability.down:
            _log.info("the endpoint answers again")
        self._availability.answered(now())

    def answered(self) -> None:
        """Record that a call was answered."""
        if self._availability.down:
            _log.info("the endpoint answers again")
            self._availability.answered(asyncio.get_running_loop().time())

    def suspect(self, error: EndpointError | None = None) -> None:
        """Probe in the background until the endpoint answers. Returns immediately. `error`, of a probe, is logged."""
        if error is not None:
            self._log_silence(error)
        if not self._closed and (self._looking is None or self._looking.done()):
            # In its own context, since its log lines belong to no request.
            self._looking = asyncio.create_task(self._look_until_answered(), context=Context())

    async def close(self) -> None:
        """Stop probing."""
        self._closed = True
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    async def _look_until_answered(self) -> None:
        while True:
            await asyncio.sleep(self._availability.until_probe(asyncio.get_running_loop().time()))
            try:
                return await self.look()
            except EndpointError as error:
                self._log_silence(error)
            except Exception:  # whatever it is, probing must go on
                _log.exception("a look at the endpoint failed")
                self._availability.silent(asyncio.get_running_loop().time())

    def _log_silence(self, error: EndpointError) -> None:
        wait = self._availability.until_probe(asyncio.get_running_loop().time())
        _log.warning("%s; tried again in %.0f s: %s", SILENCE, wait, error)
