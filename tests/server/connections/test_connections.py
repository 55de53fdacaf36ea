"""Clients that are slow, send invalid requests, or open too many connections, over real sockets."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from structlog.typing import EventDict
from tests.server.connections.listening import Client, Listening, play

_HEALTH = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"


def _completion(prompt: str, **more: object) -> bytes:
    body = json.dumps({"prompt": prompt, **more}).encode()
    return _HEAD + b"content-length: %d\r\n\r\n" % len(body) + body


def test_a_head_that_drips_in_is_given_up_after_its_timeout(tmp_path: Path) -> None:
    async def main(service: Listening) -> None:
        client = await service.connect()
        for byte in _HEALTH[:14]:
            client.send(bytes([byte]))
            await service.later(1.0)
        assert not client.reader.at_eof()
        await service.until(lambda: service.held() == 14)
        await service.later(1.0)
        assert await client.error() == (408, "header_timeout")
        assert service.services.connections.ended == {"header_timeout": 1}

    play(tmp_path, main, header_timeout=15)


def test_a_client_that_says_nothing_is_closed_without_a_word(tmp_path: Path) -> None:
    async def main(service: Listening) -> None:
        client = await service.connect()
        await service.later(15.0)
        assert await client.ended() == b""

    play(tmp_path, main, header_timeout=15)


def test_a_connection_that_was_refused_in_the_midst_of_answers_does_not_hinder_the_end(tmp_path: Path) -> None:
    async def main(service: Listening) -> None:
        ambiguous = _HEAD + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n"
        with socket.socket() as client:
            # As the client does not read, the last answer is still in the buffers when the next request is refused.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", service.port))
            client.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" * 2 + ambiguous)
            await service.until(service.closing)
            for connection in service.connections:
                connection.shutdown()  # as uvicorn does at the end

    play(tmp_path, main)


def test_an_answer_that_is_still_being_read_keeps_its_place(tmp_path: Path) -> None:
    async def main(service: Listening) -> None:
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect(("127.0.0.1", service.port))
            await service.until(lambda: len(service.connections) == 1)
            [connection] = service.connections
            connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            slow.sendall(_completion("word " * 8_000, max_tokens=8_000))
            await service.until(service.unsent)
            others = [await service.connect() for _ in range(15)]
            await service.connect()
            # One of the idle connections gave way.
            await service.until(lambda: any(other.reader.at_eof() for other in others))
            slow.setblocking(False)
            received = b""
            while b"usage" not in received:
                piece = await asyncio.get_running_loop().sock_recv(slow, 65_536)
                assert piece
                received += piece

    play(tmp_path, main, max_connections=16)


def test_the_head_of_a_next_request_has_its_own_time(tmp_path: Path) -> None:
    async def main(service: Listening) -> None:
        client = await service.connect()
        for _ in range(3):
            client.send(_HEALTH)
            assert (await client.answer())[0] == 200
            # Idle connections are ended by uvicorn's timer.
            await service.later(16.0)
        client.send(_HEALTH[:20])
        await service.until(lambda: service.held() == 20)
        await service.later(14.0)
        assert not client.reader.at_eof()
        await service.later(1.0)
        assert await client.error() == (408, "header_timeout")

    play(tmp_path, main, header_timeout=15)


def test_a_body_that_was_answered_without_being_read_does_not_hold_its_connection(tmp_path: Path) -> None:
    async def main(service: Listening) -> None:
        client = await service.connect()
        client.send(b"POST /health HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 1000\r\n\r\nxxx")
        assert (await client.answer())[0] == 405
        for _ in range(14):
            client.send(b"x")
            await service.later(1.0)
        await service.later(1.0)
        assert await client.ended() == b""
        assert service.services.connections.ended == {"body_timeout": 1}

    play(tmp_path, main, header_timeout=15)


def _unread_stream(_: Listening) -> bytes:
    return _completion("word " * 20_000, max_tokens=20_000, stream=True)


def _unread_answer(_: Listening) -> bytes:
    return _completion("word " * 700_000, max_tokens=1_000_000)


@pytest.mark.parametrize("request_", [_unread_stream, _unread_answer])
def test_a_client_that_does_not_read_loses_its_request_and_its_place(
    tmp_path: Path, request_: object, logged: list[EventDict]
) -> None:
    async def main(service: Listening) -> None:
        client = await service.connect()
        assert callable(request_)
        client.send(request_(service))
        await service.until(service.blocked)
        await service.much_later(lambda: not service.server.server_state.connections)
        await service.until(lambda: not service.server.server_state.tasks)
        assert service.services.online.inside == 0
        assert service.services.connections.ended == {"write_timeout": 1}
        # The place is free, so others are answered.
        other = await service.connect()
        other.send(_HEALTH)
        assert (await other.answer())[0] == 200

    play(tmp_path, main, write_timeout=60)
    assert not [each for each in logged if each.get("exc_info")]


def test_a_download_that_nobody_reads_is_cut(tmp_path: Path) -> None:
    async def main(service: Listening) -> None:
        line = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x" * 900}})
        content = (line + "\n").encode() * 8000
        form = b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\ncontent-disposition: '
        form += b'form-data; name="file"; filename="in.jsonl"\r\n\r\n' + content + b"\r\n--b--\r\n"
        client = await service.connect()
        client.send(
            b"POST /v1/files HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: multipart/form-data; boundary=b\r\n"
            b"content-length: %d\r\n\r\n" % len(form) + form
        )
        status, _, answer = await client.answer()
        assert status == 200
        client.send(b"GET /v1/files/%b/content HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" % json.loads(answer)["id"].encode())
        await service.until(service.blocked)
        await service.much_later(lambda: not service.server.server_state.connections)
        await service.until(lambda: not service.server.server_state.tasks)
        assert service.services.connections.ended == {"write_timeout": 1}

    play(tmp_path, main, write_timeout=60)


def test_a_client_that_reads_slowly_keeps_its_stream(tmp_path: Path) -> None:
    async def main(service: Listening) -> None:
        client = await service.connect()
        # More than the kernel's buffers hold, which grow while the client reads.
        client.send(_completion("word " * 60_000, max_tokens=60_000, stream=True))
        for _ in range(4):
            await service.until(service.blocked)
            await service.later(50.0)
            await client.reader.readexactly(300_000)
        while b"data: [DONE]" not in await client.reader.readuntil(b"\n\n"):
            pass
        assert service.services.connections.ended == {}

    play(tmp_path, main, write_timeout=60)


async def _waiting(service: Listening) -> Client:
    """Return a client whose request is under way until the stub is told to go on."""
    client, before = await service.connect(), service.stub.waiting
    client.send(_completion("wait"))
    await service.until(lambda: service.stub.waiting > before)
    return client


def test_an_idle_connection_gives_way_and_a_busy_one_does_not(tmp_path: Path) -> None:
    async def main(service: Listening) -> None:
        busy = await _waiting(service)
        first, second = await service.connect(), await service.connect()
        third = await service.connect()
        assert await first.ended() == b""
        for client in (second, third):
            client.send(_HEALTH)
            assert (await client.answer())[0] == 200
        service.stub.go.set()
        assert (await busy.answer())[0] == 200
        assert service.services.connections.ended == {"made_room": 1}

    play(tmp_path, main, max_connections=3)


@pytest.mark.parametrize(
    ("limit", "code"),
    [
        ({"max_connections": 2}, "too_many_connections"),
        ({"max_connections_per_address": 2}, "too_many_connections_from_address"),
    ],
)
def test_where_every_connection_has_a_request_a_further_one_is_refused(
    tmp_path: Path, limit: dict[str, int], code: str
) -> None:
    async def main(service: Listening) -> None:
        busy = [await _waiting(service) for _ in range(2)]
        refused = await service.connect()
        refused.send(_HEALTH)
        assert await refused.error() == (503, code)
        service.stub.go.set()
        for client in busy:
            assert (await client.answer())[0] == 200
        admitted = await service.connect()
        admitted.send(_HEALTH)
        assert (await admitted.answer())[0] == 200

    play(tmp_path, main, **limit)


@contextmanager
def _without_descriptors() -> Iterator[None]:
    """Use up every descriptor of this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(each.name) for each in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 4, hard))
    taken = []
    try:
        while True:
            try:
                taken.append(os.open(os.devnull, os.O_RDONLY))
            except OSError:
                break
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_without_descriptors_a_client_is_told_and_later_ones_are_served(
    tmp_path: Path, logged: list[EventDict]
) -> None:
    async def main(service: Listening) -> None:
        # Created before, as it needs a descriptor itself.
        client = await service.connect()
        spare = [socket.socket() for _ in range(3)]
        for each in spare:
            each.setblocking(False)
        loop = asyncio.get_running_loop()
        with _without_descriptors():
            for each in spare:
                await loop.sock_connect(each, ("127.0.0.1", service.port))
                answer = await loop.sock_recv(each, 65_536)
                assert answer.startswith(b"HTTP/1.1 503 ")
                assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "no_descriptors"
            client.send(_HEALTH)
            assert (await client.answer())[0] == 200
        await service.later(1.0)
        after = await service.connect()
        after.send(_HEALTH)
        assert (await after.answer())[0] == 200

    play(tmp_path, main)
    assert [each["no_descriptors"] for each in logged if each["event"] == "connections_ended"] == [3]


def test_when_nothing_can_be_accepted_it_waits_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(service: Listening) -> None:
        acceptor, tries = service.server.acceptor, 0

        def in_vain() -> None:
            nonlocal tries
            tries += 1
            raise OSError(errno.EMFILE, "Too many open files")

        loop = asyncio.get_running_loop()
        monkeypatch.setattr(acceptor, "_refuse_next", in_vain)
        client = socket.socket()
        client.setblocking(False)
        with _without_descriptors():
            await loop.sock_connect(client, ("127.0.0.1", service.port))
            await service.until(lambda: tries > 0)
            for _ in range(100):
                await asyncio.sleep(0)
            assert tries == 1
        await loop.sock_sendall(client, _HEALTH)
        assert (await loop.sock_recv(client, 65_536)).startswith(b"HTTP/1.1 200 ")
        client.close()

    play(tmp_path, main)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (_HEAD + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\nGET /ready HTTP/1.1\r\n\r\n", 400),
        (_HEAD + b"transfer-encoding: gzip\r\n\r\n", 501),
        (_HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n", 400),
        (_HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 1100, 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (_HEAD + b"x: " + b"a" * 20_000 + b"\r\n\r\n", 431),
    ],
)
def test_what_cannot_be_read_is_answered_in_the_form_of_the_service_and_closed(
    tmp_path: Path, sent: bytes, status: int, logged: list[EventDict]
) -> None:
    async def main(service: Listening) -> None:
        client = await service.connect()
        client.send(sent)
        assert await client.error() == (status, "invalid_http")
        await service.until(lambda: not service.server.server_state.tasks)

    play(tmp_path, main)
    assert not [each for each in logged if each.get("exc_info")]


def test_pipelined_requests_are_answered_in_order(tmp_path: Path) -> None:
    async def main(service: Listening) -> None:
        client = await service.connect()
        client.send(_HEALTH * 3 + _completion("hello world") + _HEALTH[:10])
        for _ in range(3):
            assert (await client.answer())[0] == 200
        assert json.loads((await client.answer())[2])["choices"][0]["text"] == "HELLO WORLD"
        await service.later(15.0)
        assert await client.error() == (408, "header_timeout")

    play(tmp_path, main, header_timeout=15)


def test_a_wish_to_upgrade_is_ignored(tmp_path: Path) -> None:
    async def main(service: Listening) -> None:
        client = await service.connect()
        client.send(_HEALTH[:-2] + b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n\r\n")
        assert (await client.answer())[0] == 200

    play(tmp_path, main)


def test_past_its_grace_the_service_answers_what_is_still_inside(tmp_path: Path, logged: list[EventDict]) -> None:
    async def main(service: Listening) -> None:
        whole = await _waiting(service)
        stream = await service.connect()
        stream.send(_completion("pause more", stream=True))
        await service.until(lambda: service.stub.waiting == 2)
        half = await service.connect()
        half.send(_HEAD + b"content-length: 9\r\n\r\n{")
        await service.until(lambda: len(service.server.server_state.tasks) == 3)
        service.server.handle_exit(signal.SIGTERM, None)
        await service.until(lambda: service.services.draining)
        assert not await service.server.on_tick(1)
        service.clock.advance(30.0)
        assert await service.server.on_tick(1)
        stopped = asyncio.create_task(service.server.shutdown([]))
        for client in (whole, half):
            assert await client.error() == (503, "shutting_down")
        events = (await stream.ended()).split(b"data: ")
        assert b"PAUSE" in events[-2]
        assert b'"code":"shutting_down"' in events[-1]
        await service.until(lambda: not service.server.server_state.tasks)
        assert service.stub.cancelled >= 1
        await stopped

    play(tmp_path, main, drain_grace=30.0)
    assert not [each for each in logged if each.get("exc_info")]
    assert {each["status"] for each in logged if each["event"] == "request"} == {200, 503}
