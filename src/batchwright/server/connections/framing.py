"""What of HTTP/1.1 is refused although the parser would take it.

Where two servers in a row can read one request as two different ones, a client can smuggle a request past the first.
"""

from __future__ import annotations

import re
from typing import TypeAlias

import h11

_VERSIONS = (b"1.0", b"1.1")
_FOLDED = re.compile(rb"\n[ \t]")
_BARE_LF = re.compile(rb"(?<!\r)\n")
_FREE_CHUNKS = 1024
"""Chunks of a body that may be of any size."""
_LEAST_CHUNK = 64
"""Bytes that the chunks of a body must have on average when there are more of them."""

Received: TypeAlias = "h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]"


class StrictConnection(h11.Connection):
    """The server's side of a connection. Refuses ambiguous requests, and bodies of very many very small chunks."""

    def __init__(self, max_head_bytes: int) -> None:
        super().__init__(h11.SERVER, max_head_bytes)
        self._max_head_bytes = max_head_bytes
        self.refusal: h11.RemoteProtocolError | None = None
        """Why `next_event` has raised."""
        self._chunks = 0
        self._bytes = 0

    def next_event(self) -> Received:
        before = self.trailing_data[0] if self.their_state is h11.IDLE else b""
        try:
            event = super().next_event()
            if isinstance(event, h11.Request):
                self._chunks = self._bytes = 0
                head = before[: len(before) - len(self.trailing_data[0])]
                # The parser counts only what is not complete.
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
    """Raises `h11.RemoteProtocolError`, whose `error_status_hint` is the status of the answer."""
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
