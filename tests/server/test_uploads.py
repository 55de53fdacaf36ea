"""Uploads that are too large, too slow or cut off are refused with the right error, and leave nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import openai
import pytest
from tests.server.batch_files import content, line
from tests.server.conftest import Play, Service, with_service

_TYPE = {"content-type": "multipart/form-data; boundary=cut"}
_PURPOSE = b'--cut\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
_FILE = b'--cut\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
_END = b"\r\n--cut--\r\n"


async def nothing_is_left(service: Service) -> None:
    assert (await service.http.get("/v1/files")).json()["data"] == []
    assert list(service.services.settings.data.rglob("file-*")) == []


async def _send(service: Service, *pieces: bytes, **options: Any) -> httpx2.Response:
    async def arriving() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    return await service.http.post("/v1/files", content=arriving(), headers=_TYPE, **options)


@pytest.mark.parametrize(
    ("settings", "sent", "told"),
    [
        ({"max_file_size": 100}, b"x" * 101, "more than 100 bytes"),
        ({"max_lines": 3}, b"x\n" * 4, "more than 3 lines"),
        ({"max_line_size": 10}, b"x\n" + b"y" * 11, "line 2 has more than 10 bytes"),
    ],
)
def test_what_is_too_large_is_refused_with_413(play: Play, settings: dict[str, int], sent: bytes, told: str) -> None:
    async def main(service: Service) -> None:
        with pytest.raises(openai.APIStatusError) as caught:
            await service.client.files.create(file=("in.jsonl", sent), purpose="batch")
        assert (caught.value.status_code, caught.value.code, caught.value.param) == (413, "file_too_large", "file")
        assert told in caught.value.message
        await nothing_is_left(service)

    play(main, **settings)


@pytest.mark.parametrize("content", [b"", b"\n \r\n\n"])
@with_service()
async def test_an_empty_file_is_refused(service: Service, content: bytes) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await service.client.files.create(file=("in.jsonl", content), purpose="batch")
    assert (caught.value.code, caught.value.param) == ("empty_file", "file")
    await nothing_is_left(service)


@with_service(max_file_size=1_000_000)
async def test_an_endless_upload_is_refused_when_it_passes_the_cap(service: Service) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        yield _PURPOSE + _FILE
        while True:
            sent += 2**16
            yield b"x" * (2**16 - 1) + b"\n"

    answer = await service.http.post("/v1/files", content=endless(), headers=_TYPE)
    assert answer.status_code == 413
    assert sent < 2_000_000
    await nothing_is_left(service)


@with_service(upload_timeout=0.05)
async def test_an_upload_that_stalls_is_given_up(service: Service) -> None:
    async def stalling() -> AsyncIterator[bytes]:
        yield _PURPOSE + _FILE + b"x\n"
        await asyncio.Event().wait()

    answer = await service.http.post("/v1/files", content=stalling(), headers=_TYPE)
    assert (answer.status_code, answer.json()["error"]["code"]) == (408, "upload_too_slow")
    await nothing_is_left(service)


@pytest.mark.parametrize(
    ("pieces", "param"),
    [
        ((_PURPOSE, _FILE, b"x\n"), None),
        ((_PURPOSE, _FILE, b"x\n", _END[:-4]), None),
        ((_FILE, b"x\n", _END), "purpose"),
        ((_PURPOSE, _END), "file"),
        ((_PURPOSE.replace(b"batch", b"vision"), _FILE, b"x\n", _END), "purpose"),
        ((_PURPOSE.replace(b"purpose", b"expires_after[anchor]"), _PURPOSE, _FILE, b"x", _END), "expires_after"),
        ((b"no form",), None),
    ],
)
@with_service()
async def test_a_form_that_is_cut_off_or_wrong_is_refused(
    service: Service, pieces: tuple[bytes, ...], param: str | None
) -> None:
    answer = await _send(service, *pieces)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    await nothing_is_left(service)


@with_service()
async def test_a_client_that_goes_away_leaves_nothing(service: Service) -> None:
    messages: list[dict[str, object]] = [
        {"type": "http.disconnect"},
        {"type": "http.request", "body": _PURPOSE + _FILE + b"x" * 100_000, "more_body": True},
    ]

    async def receive() -> dict[str, object]:
        return messages.pop()

    sent: list[object] = []

    async def send(message: object) -> None:
        sent.append(message)

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": "/v1/files", "raw_path": b"/v1/files", "query_string": b"", "root_path": "",
        "headers": [(b"host", b"localhost"), (b"content-type", _TYPE["content-type"].encode())],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8000),
    }  # fmt: skip
    await service.app(scope, receive, send)
    assert sent == []
    await nothing_is_left(service)


@with_service()
async def test_the_fields_may_stand_after_the_file(service: Service) -> None:
    fields = [
        _PURPOSE.replace(b"purpose", b"expires_after[" + name + b"]").replace(b"batch", value)
        for name, value in ((b"anchor", b"created_at"), (b"seconds", b"7200"))
    ]
    answer = await _send(
        service, _FILE, content(line("a", "x")) + b"\r\n", _PURPOSE, *fields, _END.removeprefix(b"\r\n")
    )
    file = answer.json()
    assert answer.status_code == 200
    assert file["expires_at"] == file["created_at"] + 7200
    assert [path.read_bytes() for path in service.services.settings.data.rglob("file-*")] == [content(line("a", "x"))]


@pytest.mark.parametrize(
    ("path", "headers", "begun"),
    [
        ("/v1/files", _TYPE, _PURPOSE),
        ("/v1/files", _TYPE, b""),
        ("/v1/batches", {"content-type": "application/json"}, b"{"),
    ],
)
@with_service(upload_timeout=0.05)
async def test_a_body_that_stalls_before_there_is_a_file_is_given_up_too(
    service: Service, path: str, headers: dict[str, str], begun: bytes
) -> None:
    async def stalling() -> AsyncIterator[bytes]:
        yield begun
        await asyncio.Event().wait()

    answer = await service.http.post(path, content=stalling(), headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (408, "upload_too_slow")
    await nothing_is_left(service)


@with_service()
async def test_a_name_is_kept_as_it_is_and_makes_no_path(service: Service) -> None:
    answer = await _send(service, _PURPOSE, _FILE.replace(b"in.jsonl", b"../../etc/passwd"), b"x", _END)
    file = answer.json()
    assert file["filename"] == "../../etc/passwd"
    assert [path.name for path in service.services.settings.data.rglob("file-*")] == [file["id"]]


def test_any_other_body_has_a_cap_too(play: Play) -> None:
    async def main(service: Service) -> None:
        body = {"prompt": "x" * 2000}
        answers = [
            await service.http.post("/v1/completions", json=body),
            await service.http.post("/v1/completions", content=_pieces(), headers={"content-type": "application/json"}),
        ]
        for answer in answers:
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")

    async def _pieces() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b"x" * 100

    play(main, max_online_body_size=1000)
