"""Takes connections in, as many as there are places, and looks every second at how they fare."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from batchwright.clock import Clock
from batchwright.server.connections.connection_places import ConnectionPlaces, NoPlace
from batchwright.server.connections.protocol import Connection
from batchwright.server.connections.refusals import closing_answer
from batchwright.server.http.error_answers import RETRY_AFTER, HttpError
from batchwright.service.observability.figures import ConnectionFigures
from batchwright.service.observability.logs import logger

_BACKLOG = 2048
_TURN = 64
"""Connections that are taken in one go; then everything else has its turn."""
_RETRY = 1.0
"""Seconds for which nothing is taken when the machine has nothing to take it with."""
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_UNSENT = 128 * 1024
"""Bytes that the kernel takes for a client before it has sent those it has: an unread answer is soon noticed."""
_LINGER = 1.0
"""Seconds for which a refused connection stays, so that its client can read why."""
_LINGERING = 64
"""At most."""
_TLS_SHUTDOWN = 5.0
"""Seconds for a client to agree to the end of a connection."""


class Acceptor:
    """Has what uvicorn asks of an `asyncio.Server`: `close` and `wait_closed`.

    The loop's own server, out of descriptors, logs each of the attempts that it makes in a row (up to its backlog), and
    makes a transport for every connection before anybody can count it.
    """

    def __init__(
        self,
        listener: socket.socket,
        connect: Callable[[Callable[[Connection], None]], Connection],
        *,
        places: ConnectionPlaces[Connection],
        clock: Clock,
        figures: ConnectionFigures,
        handshake_timeout: float,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`connect` makes the protocol of a connection, which is to call what it is given when it is closed."""
        self.tls = tls
        """For connections from now on."""
        self._listener = listener
        self._connect = connect
        self._places = places
        self._clock = clock
        self._figures = figures
        self._tls_timeouts = {"ssl_handshake_timeout": handshake_timeout, "ssl_shutdown_timeout": _TLS_SHUTDOWN}
        self._loop = asyncio.get_running_loop()
        self._retry: asyncio.TimerHandle | None = None
        self._reserve: int | None = None
        self._opening: dict[Connection, asyncio.Task[None]] = {}
        self._connections: set[Connection] = set()
        self._lingering: deque[tuple[float, socket.socket]] = deque()
        self._told: dict[str, int] = {}

    def start(self) -> None:
        """Take connections from now on."""
        self._listener.setblocking(False)
        self._listener.listen(_BACKLOG)
        self._open_reserve()
        self._loop.add_reader(self._listener, self._accept)

    def close(self) -> None:
        """Take no more connections. Those that are open stay; refused ones do not."""
        self._loop.remove_reader(self._listener)
        if self._retry is not None:
            self._retry.cancel()
        for task in list(self._opening.values()):
            task.cancel()
        while self._lingering:
            self._lingering.popleft()[1].close()
        self._close_reserve()

    async def wait_closed(self) -> None:
        """Return at once: `close` leaves nothing to wait for."""

    def sweep(self) -> None:
        """End connections that take too long, and tell what happened since the last time. To be called every second."""
        now = self._clock.now()
        for connection in list(self._connections):
            overdue = connection.end_if_overdue(now)
            if overdue is not None:
                self._figures.count(overdue.value)
        while self._lingering and self._lingering[0][0] <= now:
            self._lingering.popleft()[1].close()
        self._figures.open = len(self._places)
        self._tell()

    def _tell(self) -> None:
        ended = self._figures.ended
        news = {reason: count - self._told.get(reason, 0) for reason, count in ended.items()}
        if any(news.values()):
            self._told = dict(ended)
            told = {reason: count for reason, count in news.items() if count}
            logger.warning("connections_ended", open=len(self._places), idle=self._places.idle, **told)

    def _accept(self) -> None:
        for _ in range(_TURN):
            try:
                self._take_next()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:
                self._figures.count("accept_failed")
                self._wait()
                return

    def _take_next(self) -> None:
        """Raises OSError when there is none, or it cannot be taken."""
        try:
            accepted, address = self._listener.accept()
        except OSError as error:
            if error.errno not in _EXHAUSTED:
                raise
            self._refuse_next()
        else:
            self._take(accepted, str(address[0]))

    def _take(self, accepted: socket.socket, host: str) -> None:
        self._figures.accepted += 1
        try:
            evicted = self._places.make_room(host)
        except NoPlace as error:
            self._figures.count(error.code)
            self._refuse(accepted, error)
            return
        if evicted is not None:
            self._figures.count("made_room")
            self._evict(evicted)
        connection = self._connect(self._forget)
        self._places.add(connection, host)
        self._connections.add(connection)
        task = self._opening[connection] = self._loop.create_task(self._open(connection, accepted))
        task.add_done_callback(lambda task: self._opened(connection, accepted, task))

    async def _open(self, connection: Connection, accepted: socket.socket) -> None:
        _set_options(accepted)
        timeouts = {} if self.tls is None else self._tls_timeouts
        await self._loop.connect_accepted_socket(lambda: connection, accepted, ssl=self.tls, **timeouts)

    def _opened(self, connection: Connection, accepted: socket.socket, task: asyncio.Task[None]) -> None:
        del self._opening[connection]
        error = None if task.cancelled() else task.exception()
        if error is None and not task.cancelled():
            return
        accepted.close()
        self._forget(connection)
        # A client that speaks no TLS, or hangs up in the midst of the handshake, is nothing to speak of.
        if error is not None and not isinstance(error, OSError):
            logger.error("connection_failed", exc_info=error)

    def _evict(self, connection: Connection) -> None:
        opening = self._opening.get(connection)
        if (opening is None or not opening.cancel()) and connection.transport is not None:
            connection.transport.abort()

    def _forget(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._places.remove(connection)

    def _refuse(self, accepted: socket.socket, why: NoPlace) -> None:
        """Tell it so, without reading the request. Under TLS nothing can be told without what is to be saved."""
        try:
            if self.tls is not None:
                raise ConnectionAbortedError
            accepted.setblocking(False)
            accepted.send(closing_answer(_overloaded(str(why), why.code)))
            accepted.shutdown(socket.SHUT_WR)
        except OSError:
            accepted.close()
            return
        # Closed at once, with the request unread, it would be reset, and the answer could be lost.
        if len(self._lingering) >= _LINGERING:
            self._lingering.popleft()[1].close()
        self._lingering.append((self._clock.now() + _LINGER, accepted))

    def _refuse_next(self) -> None:
        """Refuse a connection with the descriptor that is kept for that. Raises as `_take_next`."""
        if not self._open_reserve():
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        self._close_reserve()
        try:
            accepted, _ = self._listener.accept()
            with accepted:
                self._figures.accepted += 1
                self._figures.count("no_descriptors")
                if self.tls is None:
                    accepted.setblocking(False)
                    with suppress(OSError):  # it has hung up meanwhile
                        accepted.send(
                            closing_answer(_overloaded("the service is out of descriptors", "no_descriptors"))
                        )
        finally:
            self._open_reserve()

    def _open_reserve(self) -> bool:
        if self._reserve is None:
            with suppress(OSError):
                self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        return self._reserve is not None

    def _close_reserve(self) -> None:
        if self._reserve is not None:
            os.close(self._reserve)
            self._reserve = None

    def _wait(self) -> None:
        self._loop.remove_reader(self._listener)
        self._retry = self._loop.call_later(_RETRY, self._loop.add_reader, self._listener, self._accept)


def _overloaded(message: str, code: str) -> HttpError:
    return HttpError(503, message, kind="server_error", code=code, headers={"retry-after": str(RETRY_AFTER)})


def _set_options(accepted: socket.socket) -> None:
    accepted.setblocking(False)
    # A client that is gone without a word is noticed even while an answer is computed.
    accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT)
