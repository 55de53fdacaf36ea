"""`EndpointWatch`: notices that an endpoint elsewhere does not answer, and when it answers again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextvars import Context

from batchwright.errors import EndpointDown, EndpointError
from batchwright.inference.endpoint_availability import Availability

_log = logging.getLogger(__name__)

SILENCE = "the endpoint does not answer"
"""What callers are told. Its address, and what went wrong, are for the log."""
_LEAST_WAIT = 1.0


class EndpointWatch:
    """Probes an endpoint after a call to it failed, and then again and again until it answers.

    `probe` asks something that costs the endpoint little, and raises `EndpointError` when it is not answered. There is
    one probe at a time, and none while calls succeed.
    """

    def __init__(self, probe: Callable[[], Awaitable[None]], availability: Availability | None = None) -> None:
        self._probe = probe
        self._availability = availability or Availability()
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
        """Probe once. Raises `EndpointError` when the endpoint does not answer, which is then known."""
        now = asyncio.get_running_loop().time
        try:
            await self._probe()
        except EndpointError as error:
            self._availability.silent(now())
            _log.warning("%s; asked again in %.0f s: %s", SILENCE, self._availability.until_probe(now()), error)
            raise
        if self._availability.down:
            _log.info("the endpoint answers again")
        self._availability.answered(now())

    def answered(self) -> None:
        """Note that a call was answered."""
        if self._availability.down:
            _log.info("the endpoint answers again")
            self._availability.answered(asyncio.get_running_loop().time())

    def suspect(self) -> None:
        """Probe in the background until the endpoint answers. Returns at once."""
        if not self._closed and (self._looking is None or self._looking.done()):
            # In a context of its own: its lines in the log belong to no request.
            self._looking = asyncio.create_task(self._look_until_answered(), context=Context())

    async def close(self) -> None:
        """Probe no more."""
        self._closed = True
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    async def _look_until_answered(self) -> None:
        while True:
            await asyncio.sleep(self._availability.until_probe(asyncio.get_running_loop().time()))
            try:
                await self.look()
            except EndpointError:
                continue
            except Exception:  # whatever it is, it must not be the last look
                _log.exception("a look at the endpoint failed")
                self._availability.silent(asyncio.get_running_loop().time())
                continue
            return
