"""Parsing of JSON bodies: small ones on the event loop, large ones on a thread, so that other requests do not wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.types import Receive, Scope

from batchwright.server.http.body_limits import SMALL
from batchwright.server.http.context import ScopeCheck
from batchwright.server.http.error_answers import HttpError
from batchwright.service.process_memory import return_free_pages
from batchwright.wire.json_bounds import JsonScan

_T = TypeVar("_T")

_BOM = b"\xef\xbb\xbf"
_IS_THERE = b"\0"


def read_json(content: bytes | bytearray, model: type[BaseModel] | None) -> Any:
    """Return the value of a JSON text, as an instance of `model` if that is given.

    Raises `HttpError` for invalid JSON, and `RequestValidationError`.
    """
    try:
        value = msgspec.json.decode(memoryview(content)[len(_BOM) :] if content.startswith(_BOM) else content)
    except (ValueError, RecursionError) as error:
        raise HttpError(400, f"the body must be JSON: {error}", code="invalid_json") from error
    if model is None:
        return value
    try:
        return model.model_validate(value)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
        raise RequestValidationError([{**each, "loc": ("body", *each["loc"])} for each in found]) from error


class JsonThread:
    """The thread that parses large bodies. As parsing holds the interpreter's lock, a second would not help."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batchwright-json")

    async def run(self, function: Callable[[], _T]) -> _T:
        """Return or raise what `function` does."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    def give_memory_back(self) -> None:
        """Make the allocator return the memory that large bodies have freed, after parsing the bodies that wait."""
        self._thread.submit(return_free_pages)


class JsonRequest(Request):
    """A request whose JSON body is stored only once, and only until it is parsed.

    `model`: what the body is validated against, on the thread that parses it; FastAPI would do so on the event loop.
    """

    def __init__(self, scope: Scope, receive: Receive, model: type[BaseModel] | None) -> None:
        super().__init__(scope, receive)
        self._model = model
        self._content = bytearray()

    async def body(self) -> bytes:
        """Read the body, and return only whether there is one, as FastAPI keeps the result until the answer.

        Raises `InvalidRequest` as soon as the body is too complex; the rest of it is not kept.
        """
        scan = JsonScan()
        async for chunk in self.stream():
            scan.feed(chunk)
            self._content += chunk
        return _IS_THERE if self._content else b""

    async def json(self) -> Any:
        """Return the value of the body. Raises what `read_json` does."""
        content, self._content = self._content, bytearray()
        read = partial(read_json, content, self._model)
        if len(content) <= SMALL:
            return read()
        thread: JsonThread = self.app.state.json_thread
        return await thread.run(read)


class JsonRoute(APIRoute):
    """A route whose body, if it has one, is JSON."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        kind = None if self.body_field is None else self.body_field.field_info.annotation
        model = kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None
        checks = [each.dependency for each in self.dependencies if isinstance(each.dependency, ScopeCheck)]

        async def handle_json(request: Request) -> Response:
            # FastAPI checks dependencies only after it has read the body, which a refused client need not send.
            for check in checks:
                check.require(request)
            return await handle(JsonRequest(request.scope, request.receive, model))

        return handle_json
