"""Forms of uploads that are cut into pieces anywhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.errors import InvalidRequest
from batchwright.server.http.multipart import Form

_TYPE = "multipart/form-data; boundary=cut"


def _part(name: str, content: bytes, filename: str | None = None) -> bytes:
    more = "" if filename is None else f'; filename="{filename}"'
    return f'--cut\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + content + b"\r\n"


def _body(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--cut--\r\n"


def _read(pieces: list[bytes], content_type: str = _TYPE) -> tuple[str, bytes, dict[str, str]]:
    async def arriving() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    async def main() -> tuple[str, bytes, dict[str, str]]:
        form = Form(content_type, arriving())
        name = await form.begin()
        content = b"".join([chunk async for chunk in form.chunks()])
        return name, content, form.fields

    return asyncio.run(main())


@given(content=st.binary(max_size=200), cuts=st.lists(st.integers(0, 500), max_size=8), file_first=st.booleans())
def test_wherever_it_is_cut_the_file_and_the_fields_are_whole(
    content: bytes, cuts: list[int], file_first: bool
) -> None:
    content = content.replace(b"--cut", b"")
    parts = [_part("purpose", b"batch"), _part("file", content, "ä.jsonl")]
    body = _body(*(reversed(parts) if file_first else parts))
    places = [0, *sorted(min(cut, len(body)) for cut in cuts), len(body)]
    pieces = [body[start:stop] for start, stop in pairwise(places)]
    assert _read(pieces) == ("ä.jsonl", content, {"purpose": "batch"})


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (_body(_part("purpose", b"batch")), "file: the form has no such part"),
        (_body(_part("file", b"a", "a"))[:-20], "cut off"),
        (_part("file", b"a", "a"), "cut off"),
        (b"", "cut off"),
        (b"not a form at all", "form"),
        (_body(_part("file", b"a", "a"), _part("file", b"b", "b")), "more than one part named file"),
        (_body(_part("purpose", b"x" * 5000), _part("file", b"a", "a")), "purpose: the field has more than 4096 bytes"),
        (_body(*[_part(f"f{n}", b"x") for n in range(40)], _part("file", b"a", "a")), "more than 32 fields"),
        (b"--cut\r\nContent-Disposition: form-data\r\n\r\nx\r\n--cut--\r\n", "has no name"),
        (b"--cut\r\n" + b"X" * 20_000 + b": y\r\n\r\n", "header"),
    ],
)
def test_what_is_no_such_form_is_refused(body: bytes, told: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        _read([body])
    assert told in str(caught.value).lower() or told in str(caught.value)


@pytest.mark.parametrize(
    "content_type", ["", "application/json", "multipart/form-data", "multipart/form-data; boundary=" + "x" * 300]
)
def test_another_content_type_is_refused(content_type: str) -> None:
    with pytest.raises(InvalidRequest):
        _read([_body(_part("file", b"a", "a"))], content_type)
