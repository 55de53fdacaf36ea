"""The server's side of one connection: which parts of HTTP/1.1 it accepts, and how long a client may take.

Requests that two servers in a row could interpret differently are refused although h11 accepts them: such a request
lets a client smuggle another one past the first server.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, TypeAlias

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from batchwright.clock import Clock
from batchwright.server.connections.connection_places import ConnectionPlaces
from batchwright.server.connections.patience import ConnectionTimeouts, Overdue, Patience, Phase
from batchwright.server.http.error_answers import HttpError, error_response
from batchwright.server.http.middleware import new_request_id

MAX_HEAD_BYTES = 16 * 1024
"""Largest head of a request."""
_ECHOED = 200
"""Most characters that an answer quotes of the parser's message, which may quote the request."""
_VERSIONS = (b"1.0", b"1.1")
_FOLDED = re.compile(rb"\n[ \t]")
_BARE_LF = re.compile(rb"(?<!\r)\n")
_FREE_CHUNKS = 1024
"""Number of chunks of a body that may be of any size."""
_LEAST_CHUNK = 64
"""Bytes that chunks must have on average in a body with more than `_FREE_CHUNKS`."""

Received: TypeAlias = "h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]"


def closing_answer(error: HttpError) -> bytes:
    """Return the bytes of an error answer after which the connection is closed."""
    response = error_response(error)
    response.headers["connection"] = "close"
    response.headers["x-request-id"] = new_request_id()
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}".encode()]
    lines += [name + b": " + value for name, value in response.raw_headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + bytes(response.body)


class StrictConnection(h11.Connection):
    """h11's parser for servers, which also refuses ambiguous requests and bodies of very many very small chunks."""

    def __init__(self, max_head_bytes: int) -> None:
        super().__init__(h11.SERVER, max_head_bytes)
        self._max_head_bytes = max_head_bytes
        self.refusal: h11.RemoteProtocolError | None = None
        """The error that `next_event` raised; None: it has raised none."""
        self._chunks = 0
        self._bytes = 0

    def next_event(self) -> Received:
        before = self.trailing_data[0] if self.their_state is h11.IDLE else b""
        try:
            event = super().next_event()
            if isinstance(event, h11.Request):
                self._chunks = self._bytes = 0
                head = before[: len(before) - len(self.trailing_data[0])]
                # The parser limits only heads that are still incomplete.
                if len(head) > self._max_head_bytes:
                    raise h11.RemoteProtocolError("the head of the request is too long", error_status_hint=431)
                _check_head(head, event)
            elif isinstance(event, h11.Data):
                self._check_chunks(event)
        except h11.RemoteProtocolError as error:
            self.refusal = error
            raise
        return event

    def _check_chunks(self, data: h11.Data) -> None:
        self._chunks += data.chunk_start
        self._bytes += len(data.data)
        if self._chunks > _FREE_CHUNKS and self._bytes < _LEAST_CHUNK * self._chunks:
            raise h11.RemoteProtocolError(
                f"the body comes in more than {_FREE_CHUNKS:,} chunks of less than {_LEAST_CHUNK} bytes on average: "
                "send larger chunks, or a Content-Length"
            )


def _check_head(head: bytes, request: h11.Request) -> None:
    """Raise `h11.RemoteProtocolError` for an ambiguous head; its `error_status_hint` is the status of the answer."""
    names = {name for name, _ in request.headers}
    if request.http_version not in _VERSIONS:
        raise h11.RemoteProtocolError("the version of HTTP must be 1.0 or 1.1", error_status_hint=505)
    if _BARE_LF.search(head):
        raise h11.RemoteProtocolError("lines of the head must end with CR LF")
    if _FOLDED.search(head):
        raise h11.RemoteProtocolError("a header must not be continued on a next line")
    if b"transfer-encoding" in names:
        if b"content-length" in names:
            raise h11.RemoteProtocolError("Content-Length and Transfer-Encoding exclude each other")
        if request.http_version == b"1.0":
            raise h11.RemoteProtocolError("HTTP/1.0 has no Transfer-Encoding")


class Connection(H11Protocol):
    """uvicorn's protocol over `StrictConnection`, with refusals in the service's form and with time limits."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        *,
        timeouts: ConnectionTimeouts,
        places: ConnectionPlaces[Connection],
        clock: Clock,
        on_close: Callable[[Connection], None],
    ) -> None:
        super().__init__(config, server_state, app_state)
        self.conn = self._strict = StrictConnection(MAX_HEAD_BYTES)
        self._places = places
        self._clock = clock
        self._on_close = on_close
        self._patience = Patience(timeouts, clock.now())

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._on_close(self)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        self._settle()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._settle()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._patience.progressed()

    def shutdown(self) -> None:
        """Begin to close as the server stops, unless a refusal has closed the connection already."""
        if self.transport is None or not self.transport.is_closing():
            super().shutdown()

    def end_if_overdue(self, now: float) -> Overdue | None:
        """End the connection if something took too long, and return what. To be called about every second."""
        # There is no transport during the TLS handshake, which has its own timeout.
        if self.transport is None:
            return None
        closing = self.transport.is_closing()
        unsent = self.transport.get_write_buffer_size()
        if not unsent and self._patience.phase is not Phase.REQUEST:
            self._places.free(self)
        more_comes = self._patience.phase is Phase.REQUEST and not closing and not self.flow.write_paused
        overdue = self._patience.overdue(now, unsent=unsent, more_comes=more_comes)
        if overdue is Overdue.HEAD and not closing:
            if self.conn.trailing_data[0]:
                message = "the head of the request took too long: send it again"
                self._refuse(HttpError(408, message, kind="timeout_error", code="header_timeout"))
            else:
                self.transport.close()
        elif overdue is Overdue.WRITE or (overdue is Overdue.REST and not closing):
            self.transport.abort()
        else:
            return None
        return overdue

    def send_400_response(self, msg: str) -> None:
        """Answer a request that the parser refused, in the service's form. Called by uvicorn."""
        refusal = self._strict.refusal
        status = 400 if refusal is None else refusal.error_status_hint
        why = msg if refusal is None else str(refusal)[:_ECHOED]
        self._refuse(HttpError(status, f"the request is not valid HTTP: {why}", code="invalid_http"))

    def _should_upgrade(self) -> bool:
        """Return False: an upgrade that is not supported has to be ignored."""
        return False

    def _refuse(self, error: HttpError) -> None:
        """Answer with `error` unless another answer has begun, and close."""
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            # The application may be waiting for the rest of the body.
            cycle.disconnected = True
            cycle.message_event.set()
            if cycle.response_started:
                self.transport.abort()
                return
        self.transport.write(closing_answer(error))
        self.transport.close()

    def _settle(self) -> None:
        """Update what the connection waits for."""
        if self.cycle is not None and not self.cycle.response_complete:
            phase = Phase.REQUEST
        elif self.conn.their_state is h11.SEND_BODY:
            phase = Phase.REST
        else:
            # uvicorn's timer ends with the first byte of the next request, and is not set after an unread body.
            timed = self.timeout_keep_alive_task is not None
            phase = Phase.IDLE if timed and not self.conn.trailing_data[0] else Phase.HEAD
        if not self._patience.enter(phase, self._clock.now()):
            return
        if phase is Phase.REQUEST:
            self._places.busy(self)
        elif not self.transport.get_write_buffer_size():
            # While the answer is still being read, the place stays taken until `end_if_overdue` finds it sent.
            self._places.free(self)
