"""Multipart forms with one file, read as they arrive: the file is not stored, and other fields are few and small."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from typing import TypeAlias

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from batchwright.errors import InvalidRequest

_FILE = "file"
_MAX_FIELDS = 32
_MAX_FIELD_BYTES = 4096

_Event: TypeAlias = tuple[str, bytes]


class Form:
    """A multipart/form-data body whose part `file` is streamed.

    First call `begin` for the file's name, then read `chunks` to the end; after that, `fields` holds the other fields,
    wherever in the body they were. All raise `InvalidRequest` for a body that is not such a form, or ends too early.
    """

    def __init__(self, content_type: str, body: AsyncIterator[bytes]) -> None:
        self.fields: dict[str, str] = {}
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not boundary:
            raise _refused("Content-Type must be multipart/form-data with a boundary")
        self._body = body
        self._events: deque[_Event] = deque()
        self._header: tuple[bytearray, bytearray] = (bytearray(), bytearray())
        self._ended = False
        try:
            self._parser = MultipartParser(boundary, {
                "on_part_begin": lambda: self._events.append(("part", b"")),
                "on_header_field": lambda data, start, end: self._header[0].extend(data[start:end]),
                "on_header_value": lambda data, start, end: self._header[1].extend(data[start:end]),
                "on_header_end": self._on_header,
                "on_headers_finished": lambda: self._events.append(("body", b"")),
                "on_part_data": lambda data, start, end: self._events.append(("data", data[start:end])),
                "on_part_end": lambda: self._events.append(("end", b"")),
                "on_end": lambda: self._events.append(("finished", b"")),
            })  # fmt: skip
        except FormParserError as error:
            raise _refused(str(error)) from error

    async def begin(self) -> str:
        """Read up to the bytes of the file, and return its name as the client gave it, "" for none."""
        filename = await self._next_file()
        if filename is None:
            raise InvalidRequest("file: the form has no such part", param=_FILE, code="missing_required_parameter")
        return filename

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the bytes of the file, then read the rest of the form."""
        while (event := await self._next())[0] == "data":
            yield event[1]
        if await self._next_file() is not None:
            raise _refused("the form has more than one part named file")

    async def _next_file(self) -> str | None:
        """Read fields up to the part `file`, and return the file's name; None at the end of the form."""
        while (event := await self._next())[0] != "finished":
            if event[0] != "part":
                raise _refused("the body is not a well-formed form")
            name, filename = await self._disposition()
            if name == _FILE:
                return filename or ""
            await self._field(name)
        return None

    async def _disposition(self) -> tuple[str, str | None]:
        name, filename = None, None
        while (event := await self._next())[0] == "header":
            _, options = parse_options_header(event[1].decode("latin-1"))
            name = _text(options[b"name"]) if b"name" in options else name
            filename = _text(options[b"filename"]) if b"filename" in options else filename
        if name is None:
            raise _refused("a part of the form has no name")
        return name, filename

    async def _field(self, name: str) -> None:
        value = bytearray()
        while (event := await self._next())[0] == "data":
            value += event[1]
            if len(value) > _MAX_FIELD_BYTES:
                raise InvalidRequest(f"{name}: the field has more than {_MAX_FIELD_BYTES} bytes", param=name[:64])
        if len(self.fields) >= _MAX_FIELDS:
            raise _refused(f"the form has more than {_MAX_FIELDS} fields")
        self.fields[name] = _text(bytes(value))

    async def _next(self) -> _Event:
        while not self._events:
            if self._ended:
                raise _refused("the body ended in the middle of the form: the upload was cut off")
            piece = await anext(self._body, None)
            if piece is None:
                self._ended = True
                continue
            try:
                self._parser.write(piece)
            except FormParserError as error:
                raise _refused(str(error)) from error
        return self._events.popleft()

    def _on_header(self) -> None:
        field, value = (bytes(each) for each in self._header)
        self._header = (bytearray(), bytearray())
        if field.lower() == b"content-disposition":
            self._events.append(("header", value))


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def _refused(why: str) -> InvalidRequest:
    return InvalidRequest(f"{why}: send the file as a multipart form", code="invalid_form")
