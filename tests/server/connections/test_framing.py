"""Ambiguous requests are refused, however their bytes are cut."""

from __future__ import annotations

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.server.connections.protocol import StrictConnection

_POST = b"POST /v1/files HTTP/1.1\r\nHost: x\r\n"
_CHUNKED = _POST + b"Transfer-Encoding: chunked\r\n\r\n"


def _read(*pieces: bytes) -> tuple[list[str], bytes, int | None]:
    """Return the names of the events, the body, and the status of the refusal."""
    connection, names, body = StrictConnection(16_384), [], b""
    try:
        for piece in pieces:
            connection.receive_data(piece)
            while (event := connection.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
                names.append(type(event).__name__)
                body += bytes(event.data) if isinstance(event, h11.Data) else b""
    except h11.RemoteProtocolError:
        pass
    refusal = connection.refusal
    return names, body, None if refusal is None else refusal.error_status_hint


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (_POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (_POST + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n", 400),
        (_POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", 400),
        (_POST + b"Content-Length: 3, 4\r\n\r\nabcd", 400),
        (_POST + b"Content-Length: +3\r\n\r\nabc", 400),
        (_POST + b"Content-Length: 0x3\r\n\r\nabc", 400),
        (_POST + b"Content-Length: 1_0\r\n\r\nabc", 400),
        (_POST + b"Content-Length: -1\r\n\r\nabc", 400),
        (_POST + b"Content-Length:\r\n\r\nabc", 400),
        (_POST + b"Content-Length : 3\r\n\r\nabc", 400),
        (_POST + b" Content-Length: 3\r\n\r\nabc", 400),
        (_POST + b"Transfer-Encoding: identity\r\n\r\n", 501),
        (_POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n", 501),
        (_POST + b"Transfer-Encoding: chunked, identity\r\n\r\n", 501),
        (_POST + b"Transfer-Encoding: xchunked\r\n\r\n", 501),
        (_POST + b"Transfer-Encoding: chunked;q=1\r\n\r\n", 501),
        (_POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n", 501),
        (_POST + b"Transfer-Encoding: \x0bchunked\r\n\r\n", 400),
        (_POST + b"Transfer-Encoding : chunked\r\n\r\n", 400),
        (_POST + b"Transfer-Encoding:\r\n chunked\r\n\r\n", 400),
        (_POST + b"X: a\r\n\tContent-Length: 3\r\n\r\n", 400),
        (_POST + b"X: a\nContent-Length: 3\r\n\r\nabc", 400),
        (_POST + b"X: a\rContent-Length: 3\r\n\r\nabc", 400),
        (_POST + b"X: a\x00b\r\n\r\n", 400),
        (_POST + b"X: a\r\n\n", 400),
        (b"GET / HTTP/1.1\n\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (_POST + b"Host: y\r\n\r\n", 400),
        (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\nHost: x\r\n\r\n", 505),
        (b"GET  / HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET / HTTP/1.1 x\r\nHost: x\r\n\r\n", 400),
        (_POST + b"X: " + b"a" * 20_000, 431),
        (_CHUNKED + b"0x1\r\na\r\n0\r\n\r\n", 400),
        (_CHUNKED + b"+1\r\na\r\n0\r\n\r\n", 400),
        (_CHUNKED + b"1 ;\na\r\n0\r\n\r\n", 400),
        (_CHUNKED + b"1\na\r\n0\r\n\r\n", 400),
        (_CHUNKED + b"1\r\nab\r\n0\r\n\r\n", 400),
        (_CHUNKED + b"1\r\naXX0\r\n\r\n", 400),
        (_CHUNKED + b"-1\r\n", 400),
    ],
)
def test_a_request_that_two_servers_could_read_differently_is_refused(request_: bytes, status: int) -> None:
    # A request with broken framing may lack its end, so an end is sent.
    assert _read(request_, b"\r\n\r\n")[2] == status


@given(st.data())
def test_wherever_a_request_is_cut_it_is_read_alike(data: st.DataObject) -> None:
    body = data.draw(st.binary(max_size=200))
    chunked = data.draw(st.booleans())
    if chunked:
        pieces = [body[start : start + 50] for start in range(0, len(body), 50)]
        framed = b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in pieces) + b"0\r\n\r\n"
        whole = _CHUNKED + framed
    else:
        whole = _POST + b"Content-Length: %d\r\n\r\n" % len(body) + body
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    parts = [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    names, read, status = _read(*[part for part in parts if part])
    assert (names[0], names[-1], read, status) == ("Request", "EndOfMessage", body, None)


@pytest.mark.parametrize(("chunk", "count", "refused_after"), [(1, 5000, 1025), (63, 5000, 1025), (64, 5000, None)])
def test_chunks_that_are_very_many_and_very_small_are_refused(
    chunk: int, count: int, refused_after: int | None
) -> None:
    names, body, status = _read(_CHUNKED, b"".join([b"%x\r\n%b\r\n" % (chunk, b"x" * chunk)] * count))
    if refused_after is None:
        assert (len(body), status) == (chunk * count, None)
    else:
        assert (names.count("Data"), status) == (refused_after - 1, 400)


def test_every_body_has_its_own_count_of_chunks() -> None:
    connection = StrictConnection(16_384)
    for _ in range(3):
        connection.receive_data(_CHUNKED + b"1\r\nx\r\n" * 1000 + b"0\r\n\r\n")
        events = 0
        while connection.next_event() not in (h11.NEED_DATA, h11.PAUSED):
            events += 1
        assert events == 1002
        connection.send(h11.Response(status_code=200, headers=[(b"content-length", b"0")]))
        connection.send(h11.EndOfMessage())
        connection.start_next_cycle()
