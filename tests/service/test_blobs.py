"""Bytes on disk: what is kept is whole, and what is not kept leaves nothing."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.service.support import TENANT, House, in_house, line, pieces, run

from batchwright.errors import InputBroken, InvalidRequest, NotFound, StoreUnavailable
from batchwright.service.files.blobs import Blobs, UploadMeter
from batchwright.service.limits import ServiceLimits


async def _all(blobs: Blobs, file_id: str, start: int = 0, stop: int | None = None) -> bytes:
    return b"".join([piece async for piece in blobs.read(file_id, start, stop)])


def test_what_was_uploaded_is_read_whole_and_in_ranges(tmp_path: Path) -> None:
    content = bytes(range(256)) * 20_000  # several pieces of a read and of a write

    async def main(house: House) -> None:
        file = await house.jobs.upload(TENANT, "x", pieces(content[:7], content[7:3_000_000], content[3_000_000:]))
        assert file.bytes == len(content)
        assert await _all(house.blobs, file.id) == content
        assert await _all(house.blobs, file.id, 5, 1_500_000) == content[5:1_500_000]
        assert await _all(house.blobs, file.id, len(content)) == b""
        spans = [(0, 10), (11, 20), (5000, 3), (2_000_000, 1_000_000), (40, 2)]
        assert await house.blobs.read_spans(file.id, spans) == [content[at : at + size] for at, size in spans]
        with pytest.raises(InputBroken):
            await house.blobs.read_spans(file.id, [(len(content) - 1, 2)])

    run(tmp_path, main, ServiceLimits(max_line_bytes=2**30))


@pytest.mark.parametrize(
    ("wrong", "folder_is_away", "error"),
    [(errno.EIO, False, InputBroken), (errno.EIO, True, OSError), (errno.EMFILE, False, OSError)],
)
def test_a_file_is_blamed_only_where_others_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: int, folder_is_away: bool, error: type[Exception]
) -> None:
    def fails(*given: object) -> Any:
        raise OSError(wrong, os.strerror(wrong))

    async def main(house: House) -> None:
        file = await house.jobs.upload(TENANT, "x", pieces(b"abc"))
        with monkeypatch.context() as patch:
            patch.setattr(os, "pread", fails)
            if folder_is_away:
                patch.setattr(os, "scandir", fails)
            with pytest.raises(error) as raised:
                await house.blobs.read_spans(file.id, [(0, 3)])
            assert raised.type is error

    run(tmp_path, main)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"xxxxxxxxxxxxxxx\n" * 7, "more than 100 bytes"),
        (b"a\n" * 11, "more than 10 lines"),
        (b"a\n" * 10 + b"b", "more than 10 lines"),
        (b"a\nb\n" + b"x" * 51 + b"\n", "line 3 has more than 50 bytes"),
    ],
)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_an_upload_that_is_too_large_leaves_nothing(tmp_path: Path, content: bytes, message: str, size: int) -> None:
    async def main(house: House) -> None:
        chunks = [content[at : at + size] for at in range(0, len(content), size)]
        with pytest.raises(InvalidRequest, match=message) as raised:
            await house.jobs.upload(TENANT, "x", pieces(*chunks))
        assert raised.value.code == "file_too_large"
        assert house.files() == []
        assert await house.jobs.files(TENANT) == []

    run(tmp_path, main, ServiceLimits(max_file_bytes=100, max_lines=10, max_line_bytes=50))


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=5), st.integers(1, 8), st.integers(1, 40))
def test_a_gauge_refuses_exactly_what_is_too_large(content: bytes, cuts: list[int], lines: int, longest: int) -> None:
    gauge = UploadMeter(ServiceLimits(max_lines=lines, max_line_bytes=longest))
    content = content.replace(b"\x01", b"\n").replace(b"\x00", b"\n").replace(b"\x02", b"\r").replace(b"\x03", b"\r\n")
    bounds = [0, *sorted(min(cut, len(content)) for cut in cuts), len(content)]
    parts = content.split(b"\n")
    fits = len(parts) - (not parts[-1]) <= lines and max(len(part.removesuffix(b"\r")) for part in parts) <= longest
    try:
        for start, stop in pairwise(bounds):
            gauge.take(content[start:stop])
    except InvalidRequest:
        assert not fits
    else:
        assert fits


async def _stalling() -> AsyncIterator[bytes]:
    yield line("a")
    await asyncio.sleep(1e6)
    yield line("b")


async def _breaking() -> AsyncIterator[bytes]:
    yield line("a")
    raise ConnectionResetError


async def _dripping() -> AsyncIterator[bytes]:
    while True:
        await asyncio.sleep(50.0)
        yield b"x"


@in_house
async def test_an_upload_that_breaks_off_leaves_nothing(house: House) -> None:
    with pytest.raises(ConnectionResetError):
        await house.jobs.upload(TENANT, "x", _breaking())
    assert house.files() == []


@in_house
async def test_an_upload_whose_form_turns_out_wrong_at_its_end_leaves_nothing(house: House) -> None:
    with pytest.raises(InvalidRequest):
        await house.jobs.upload(TENANT, "x", pieces(line("a")), expires_after=lambda: 1.0)
    assert house.files() == []


@in_house
async def test_an_upload_that_is_cancelled_leaves_nothing(house: House) -> None:
    for steps in range(12):
        upload = asyncio.create_task(house.jobs.upload(TENANT, "x", _stalling()))
        for _ in range(steps):
            await asyncio.sleep(0)
        upload.cancel()
        with pytest.raises(asyncio.CancelledError):
            await upload
        assert house.files() == []


@in_house
async def test_a_full_disk_is_told_and_leaves_nothing(house: House) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, hard))
    try:
        with pytest.raises(StoreUnavailable, match="data folder"):
            await house.jobs.upload(TENANT, "x", pieces(*[b"x" * 1000 + b"\n"] * 5000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert house.files() == []


@in_house
async def test_an_upload_that_cannot_be_recorded_leaves_nothing(house: House) -> None:
    async def before(name: str) -> None:
        if name == "add_file":
            raise StoreUnavailable("full")

    house.store.before = before
    with pytest.raises(StoreUnavailable):
        await house.upload(line("a"))
    assert house.files() == []


@pytest.mark.parametrize("file_id", ["", "file-", "../../etc/passwd", "file-" + "0" * 23 + "/", "FILE-" + "0" * 24])
def test_no_path_is_made_of_what_is_no_id(tmp_path: Path, file_id: str) -> None:
    with pytest.raises(NotFound):
        Blobs(tmp_path).path(file_id)
