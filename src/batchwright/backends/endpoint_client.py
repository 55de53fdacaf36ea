"""One try at one call to an OpenAI-compatible endpoint elsewhere, which ends with an answer or an `EndpointError`.

The API key goes into one header and nowhere else: should an answer hold it, it is blotted out before anybody sees it.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any

import httpx
import msgspec

from batchwright.errors import EndpointError

_MOST_BYTES = 256 * 2**20
"""Of one answer, or of one event of a stream."""
_CONNECT_SECONDS = 10.0
_SHOWN = 300
_DONE = b"[DONE]"


class Unreachable(EndpointError):
    """There was no answer, or only a part of one."""


class EndpointClient:
    """Speaks to one endpoint over kept connections.

    `base_url` ends before `/chat/completions`, as for the official client: `https://host/v1`. `timeout` is in seconds,
    and is how long nothing may come. Raises ValueError for a URL that cannot be one.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None,
        *,
        timeout: float,
        connections: int,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        url = httpx.URL(base_url)
        if url.scheme not in ("http", "https") or not url.host:
            raise ValueError(f"base_url={str(url.copy_with(userinfo=b''))!r}: must be like https://host/v1")
        if url.userinfo:
            raise ValueError("base_url has a user or a password in it: give the key as api_key")
        self.url = str(url).rstrip("/")
        self._api_key = api_key
        self._unix_time = unix_time
        self._http = httpx.AsyncClient(
            headers={} if api_key is None else {"authorization": f"Bearer {api_key}"},
            timeout=httpx.Timeout(timeout, connect=min(timeout, _CONNECT_SECONDS), pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=connections),
        )

    async def get(self, path: str) -> dict[str, Any]:
        """The JSON object at `path`."""
        async with self._answer("GET", path, None) as response:
            return self._object(await self._whole(response))

    async def post(self, path: str, body: bytes) -> dict[str, Any]:
        """The JSON object that `path` answers to `body`, which is JSON, with."""
        async with self._answer("POST", path, body) as response:
            return self._object(await self._whole(response))

    async def stream(self, path: str, body: bytes) -> AsyncGenerator[dict[str, Any]]:
        """The JSON objects that `path` streams to `body`, until it says that it is done."""
        async with self._answer("POST", path, body) as response:
            async for line in self._lines(response):
                if not line.startswith(b"data:"):
                    continue  # a comment that keeps the connection open, or the name of an event
                data = line.removeprefix(b"data:").strip()
                if data == _DONE:
                    return
                yield self._event(data)
        raise Unreachable(f"{self.url} ended its stream before it was done")

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    @asynccontextmanager
    async def _answer(self, method: str, path: str, body: bytes | None) -> AsyncIterator[httpx.Response]:
        """A successful response, of which only the head has been read."""
        try:
            headers = {} if body is None else {"content-type": "application/json"}
            async with self._http.stream(method, self.url + path, content=body, headers=headers) as response:
                if response.status_code != httpx.codes.OK:
                    raise self._refusal(response, await self._whole(response))
                yield response
        except httpx.HTTPError as error:
            what = self._blotted(f"{type(error).__name__}: {error}".rstrip(": "))
            raise Unreachable(f"{self.url} gave no answer: {what}") from None

    async def _whole(self, response: httpx.Response) -> bytes:
        content = bytearray()
        async for piece in response.aiter_bytes():
            content += piece
            self._require_size(len(content))
        return bytes(content)

    async def _lines(self, response: httpx.Response) -> AsyncIterator[bytes]:
        # Not httpx's own lines: those also end at characters that may stand within a text, such as U+2028.
        rest = b""
        async for piece in response.aiter_bytes():
            *lines, rest = (rest + piece).split(b"\n")
            self._require_size(len(rest))
            for line in lines:
                yield line.rstrip(b"\r")
        if rest:
            yield rest

    def _require_size(self, size: int) -> None:
        if size > _MOST_BYTES:
            raise EndpointError(f"{self.url} answers with more than {_MOST_BYTES:,} bytes")

    def _event(self, data: bytes) -> dict[str, Any]:
        event = self._object(data)
        if event.get("error"):
            told = _error_object(event)
            raise EndpointError(f"{self.url} broke its stream off: {_message(told)}", body=told)
        return event

    def _object(self, content: bytes) -> dict[str, Any]:
        try:
            value = msgspec.json.decode(self._blotted(content.decode()))
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            return value
        shown = self._blotted(content[:_SHOWN].decode(errors="replace"))
        raise EndpointError(f"{self.url} answers with something else than a JSON object: {shown!r}")

    def _refusal(self, response: httpx.Response, content: bytes) -> EndpointError:
        status = response.status_code
        if status in (401, 403):
            # What it says of the key is for whoever runs this service, not for callers.
            return EndpointError(f"{self.url} answered {status}: it does not accept the API key", status=status)
        try:
            told = _error_object(self._object(content))
        except EndpointError:
            told = None
        what = _message(told) if told else self._blotted(content[:_SHOWN].decode(errors="replace")).strip()
        after = self._retry_after(response.headers)
        return EndpointError(
            f"{self.url} answered {status}: {what[:_SHOWN]}".rstrip(": "), status=status, body=told, retry_after=after
        )

    def _retry_after(self, headers: httpx.Headers) -> float | None:
        """In seconds; given as such, in milliseconds or as a date."""
        for name, unit in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
            text = headers.get(name, "")
            if text.isascii() and text.replace(".", "", 1).isdigit():
                return float(text) * unit
        try:
            date = parsedate_to_datetime(headers.get("retry-after", ""))
            return max(0.0, (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp() - self._unix_time())
        except (ValueError, OverflowError):
            return None

    def _blotted(self, text: str) -> str:
        return text.replace(self._api_key, "[API key]") if self._api_key else text


def _error_object(answer: Mapping[str, Any]) -> dict[str, object] | None:
    """Of an answer that tells of an error, in any of the forms that are in use."""
    error = answer.get("error", answer)
    if isinstance(error, dict):
        return error if "error" in answer or "message" in error else _only_message(answer.get("detail"))
    return _only_message(error)


def _only_message(message: object) -> dict[str, object] | None:
    return {"message": str(message)} if message else None


def _message(told: Mapping[str, object] | None) -> str:
    return str((told or {}).get("message") or "no reason given")
