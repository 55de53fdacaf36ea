"""One connection: uvicorn's protocol, with bounds on what a client may send, and on how long it may take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from batchwright.clock import Clock
from batchwright.server.connections.connection_places import ConnectionPlaces
from batchwright.server.connections.framing import StrictConnection
from batchwright.server.connections.patience import ConnectionTimeouts, Overdue, Patience, Phase
from batchwright.server.connections.refusals import closing_answer
from batchwright.server.http.error_answers import HttpError

MAX_HEAD_BYTES = 16 * 1024
"""Of a request's head."""
_ECHOED = 200
"""Characters of the parser's message, which may quote the request."""


class Connection(H11Protocol):
    """Refuses ambiguous requests in the form of the service, and ends when told that its time is over."""

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
        """Begin to end, as the server stops. What was refused is ending already, in no state to be told so."""
        if self.transport is None or not self.transport.is_closing():
            super().shutdown()

    def end_if_overdue(self, now: float) -> Overdue | None:
        """End the connection when it has taken too long; for what. To be called every second or so."""
        # Before that a TLS handshake is under way, which has a timeout of its own.
        if self.transport is None:
            return None
        closing = self.transport.is_closing()
        unsent = self.transport.get_write_buffer_size()
        if not unsent and self._patience.phase is not Phase.REQUEST:
            self._places.free(self)
        more_comes = self._patience.phase is Phase.REQUEST and not closing and not self.flow.write_paused
        overdue = self._patience.overdue(now, unsent=unsent, more_comes=more_comes)
        if overdue is Overdue.HEAD and not closing:
            self._end_head()
        elif overdue is Overdue.WRITE or (overdue is Overdue.REST and not closing):
            self.transport.abort()
        else:
            return None
        return overdue

    def send_400_response(self, msg: str) -> None:
        """Answer what cannot be read, in the form of the service. uvicorn calls it for every error of its parser."""
        refusal = self._strict.refusal
        status = 400 if refusal is None else refusal.error_status_hint
        why = msg if refusal is None else str(refusal)[:_ECHOED]
        self._refuse(HttpError(status, f"the request is not valid HTTP: {why}", code="invalid_http"))

    def _should_upgrade(self) -> bool:
        """Never: an upgrade that is not understood is to be ignored."""
        return False

    def _end_head(self) -> None:
        if not self.conn.trailing_data[0]:
            self.transport.close()
            return
        self._refuse(
            HttpError(
                408, "the head of the request took too long: send it again", kind="timeout_error", code="header_timeout"
            )
        )

    def _refuse(self, error: HttpError) -> None:
        """Answer with `error` where nothing else was begun, and close."""
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
        """Find out what is waited for now."""
        phase = self._phase()
        if not self._patience.enter(phase, self._clock.now()):
            return
        if phase is Phase.REQUEST:
            self._places.busy(self)
        elif not self.transport.get_write_buffer_size():
            # Else the answer is still being read: the place is free once it has gone out (`end_if_overdue`).
            self._places.free(self)

    def _phase(self) -> Phase:
        if self.cycle is not None and not self.cycle.response_complete:
            return Phase.REQUEST
        if self.conn.their_state is h11.SEND_BODY:
            return Phase.REST
        # uvicorn's timer ends with the first byte of a next request, and is not set again after an unread body.
        timed = self.timeout_keep_alive_task is not None
        return Phase.IDLE if timed and not self.conn.trailing_data[0] else Phase.HEAD
