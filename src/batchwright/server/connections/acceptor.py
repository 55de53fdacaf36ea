"""Accepts connections, as many as there are places, and ends those that take too long."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress

from batchwright.clock import Clock
from batchwright.server.connections.connection_places import ConnectionPlaces, NoPlace
from batchwright.server.connections.protocol import Connection, closing_answer
from batchwright.server.http.error_answers import unavailable
from batchwright.service.observability.figures import ConnectionFigures
from batchwright.service.observability.logs import logger

_BACKLOG = 2048
_TURN = 64
"""Connections that are accepted in one go, before the event loop does anything else."""
_RETRY = 1.0
"""Seconds for which no connection is accepted after the machine has run out of descriptors or memory."""
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_UNSENT = 128 * 1024
"""Unsent bytes that the kernel buffers for a client: few, so that an unread answer is soon noticed."""
_LINGER = 1.0
"""Seconds for which a refused connection stays open, so that its client can read why."""
_LINGERING = 64
"""Most refused connections that stay open."""
_TLS_SHUTDOWN = 5.0
"""Seconds that a client has to agree to the end of a TLS connection."""


class Acceptor:
    """A replacement for `asyncio.Server`, of which uvicorn uses `close` and `wait_closed`.

    When descriptors run out, the event loop's own server logs each failed attempt, up to its backlog in a row; and it
    creates a transport for every connection before the connection can be counted.
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
        """`connect` makes the protocol of a connection, which calls the function it is given when it is closed."""
        self.tls = tls
        """Context for connections that are accepted from now on; None: plain HTTP."""
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
        self._logged: Counter[str] = Counter()

    def start(self) -> None:
        """Begin to accept connections."""
        self._listener.setblocking(False)
        self._listener.listen(_BACKLOG)
        self._open_reserve()
        self._loop.add_reader(self._listener, self._accept)

    def close(self) -> None:
        """Accept no more connections, and close refused ones; others stay open."""
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
        """End connections that take too long, and log what ended since the last call. To be called every second."""
        now = self._clock.now()
        for connection in list(self._connections):
            overdue = connection.end_if_overdue(now)
            if overdue is not None:
                self._figures.count(overdue.value)
        while self._lingering and self._lingering[0][0] <= now:
            self._lingering.popleft()[1].close()
        self._figures.open = len(self._places)
        if news := Counter(self._figures.ended) - self._logged:
            self._logged += news
            logger.warning("connections_ended", open=len(self._places), idle=self._places.idle, **news)

    def _accept(self) -> None:
        for _ in range(_TURN):
            try:
                self._take_next()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:
                self._figures.count("accept_failed")
                self._loop.remove_reader(self._listener)
                self._retry = self._loop.call_later(_RETRY, self._loop.add_reader, self._listener, self._accept)
                return

    def _take_next(self) -> None:
        """Accept the next connection. Raises `OSError` when there is none, or it cannot be accepted."""
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
            opening = self._opening.get(evicted)
            if (opening is None or not opening.cancel()) and evicted.transport is not None:
                evicted.transport.abort()
        connection = self._connect(self._forget)
        self._places.add(connection, host)
        self._connections.add(connection)
        task = self._opening[connection] = self._loop.create_task(self._open(connection, accepted))
        task.add_done_callback(lambda task: self._opened(connection, accepted, task))

    async def _open(self, connection: Connection, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        # With keep-alive, a client that vanished is noticed even while its answer is computed.
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT)
        timeouts = {} if self.tls is None else self._tls_timeouts
        await self._loop.connect_accepted_socket(lambda: connection, accepted, ssl=self.tls, **timeouts)

    def _opened(self, connection: Connection, accepted: socket.socket, task: asyncio.Task[None]) -> None:
        del self._opening[connection]
        error = None if task.cancelled() else task.exception()
        if error is None and not task.cancelled():
            return
        accepted.close()
        self._forget(connection)
        # A client that speaks no TLS, or hangs up during the handshake, is not worth a log line.
        if error is not None and not isinstance(error, OSError):
            logger.error("connection_failed", exc_info=error)

    def _forget(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._places.remove(connection)

    def _refuse(self, accepted: socket.socket, why: NoPlace) -> None:
        """Answer without reading the request. With TLS, only close: the handshake is the cost to be avoided."""
        try:
            if self.tls is not None:
                raise ConnectionAbortedError
            accepted.setblocking(False)
            accepted.send(closing_answer(unavailable(str(why), why.code)))
            accepted.shutdown(socket.SHUT_WR)
        except OSError:
            accepted.close()
            return
        # If it were closed at once, with the request unread, it would be reset, and the answer could be lost.
        if len(self._lingering) >= _LINGERING:
            self._lingering.popleft()[1].close()
        self._lingering.append((self._clock.now() + _LINGER, accepted))

    def _refuse_next(self) -> None:
        """Refuse a connection with the descriptor that is reserved for that. Raises what `_take_next` does."""
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
                    with suppress(OSError):  # the client may have hung up
                        accepted.send(
                            closing_answer(unavailable("the service is out of descriptors", "no_descriptors"))
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
