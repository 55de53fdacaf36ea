"""One try at one call to an OpenAI-compatible endpoint elsewhere, which ends with an answer or an `EndpointError`.

The API key goes into one header and nowhere else: should an answer hold it, it is blotted out before anybody sees it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import aiohttp
import httpx
import msgspec
from yarl import URL

from batchwright.errors import EndpointError, EndpointUnreachable, EngineClosed
from batchwright.inference.endpoint_address import endpoint_url, proxy_for

_MOST_BYTES = 256 * 2**20
"""Of one answer, or of one event of a stream."""
_MOST_HEADER_BYTES = 64 * 1024
"""Of one header of an answer."""
_CONNECT_SECONDS = 10.0
_KEPT_SECONDS = 4.0
"""How long an idle connection is kept: less than the 5 s for which uvicorn keeps its side open."""
_STALE_SECONDS = 1.0
"""Within which a kept connection that was closed by the other side proves to be."""
_BUFFERED_BYTES = 64 * 1024
"""A body up to this size leaves at once, whether the other side reads or not."""
_SHOWN = 300
_DONE = b"[DONE]"


@dataclass(slots=True)
class _Sent:
    """How a request went out."""

    over_kept: bool = False
    """Over a connection that had served another request before."""


class EndpointClient:
    """Speaks to one endpoint over kept connections.

    `base_url` ends before `/chat/completions`, as for the official client: `https://host/v1`. `timeout` is in seconds,
    and is how long nothing may come. Raises ValueError for a URL or a key that cannot be one, and for a proxy of the
    environment that cannot be used.
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
        try:
            self._base = endpoint_url(base_url)
        except ValueError as error:
            raise ValueError(f"base_url {error}") from None
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ValueError("api_key: contains a line break, or another character that no key has")
        self._proxy = proxy_for(self._base)
        self._headers = {"content-type": "application/json"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._tunnel_headers: dict[str, str] | None = None
        if self._proxy is not None and self._proxy.user is not None:
            credentials = {"proxy-authorization": aiohttp.encode_basic_auth(*self._proxy.user)}
            # What is encrypted passes the proxy unread, in a tunnel for which it is asked by itself.
            if self._base.scheme == "https":
                self._tunnel_headers = credentials
            else:
                self._headers |= credentials
        self.url = str(self._base).rstrip("/")
        self._urls: dict[str, URL] = {}
        self._api_key = api_key
        self._unix_time = unix_time
        self._timeout = timeout
        self._connections = connections
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

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
        raise EndpointUnreachable(f"{self.url} ended its stream before it was done")

    async def close(self) -> None:
        """Close the connections. What is asked after that raises `EngineClosed`."""
        self._closed = True
        if self._session is not None:
            await self._session.close()

    def _http(self) -> aiohttp.ClientSession:
        """The session, made when it is first needed: it belongs to the event loop that runs then.

        Raises `EngineClosed` once it was closed.
        """
        if self._closed:
            raise EngineClosed("the endpoint is not asked any more: the service is closing")
        if self._session is None:
            trace = aiohttp.TraceConfig()
            trace.on_connection_reuseconn.append(_note_kept)
            connect = min(self._timeout, _CONNECT_SECONDS)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    # Calls are bounded by whoever makes them; one more for a look at whether the endpoint answers.
                    limit=self._connections + 1,
                    keepalive_timeout=_KEPT_SECONDS,
                    ssl=httpx.create_ssl_context() if self._base.scheme == "https" else True,
                ),
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(connect=connect, sock_connect=connect, sock_read=self._timeout),
                cookie_jar=aiohttp.DummyCookieJar(),
                proxy=None if self._proxy is None else self._proxy.url,
                max_line_size=_MOST_HEADER_BYTES,
                max_field_size=_MOST_HEADER_BYTES,
                trace_configs=[trace],
            )
        return self._session

    @asynccontextmanager
    async def _answer(self, method: str, path: str, body: bytes | None) -> AsyncIterator[aiohttp.ClientResponse]:
        """A successful response, of which only the head has been read."""
        try:
            async with await self._head(method, path, body) as response:
                if response.status != HTTPStatus.OK:
                    raise self._refusal(response, await self._whole(response))
                yield response
        except (aiohttp.ClientError, TimeoutError) as error:
            what = self._blotted(f"{type(error).__name__}: {error}".rstrip(": "))
            raise EndpointUnreachable(f"{self.url} gave no answer: {what}") from None

    async def _head(self, method: str, path: str, body: bytes | None) -> aiohttp.ClientResponse:
        """The response, as soon as its head is there.

        A server may close a kept connection at the moment at which it is used again. A request that fails so within a
        second goes out once more, since it most likely never arrived; where it did, it is computed twice.
        """
        url = self._urls.get(path) or self._urls.setdefault(path, URL(self.url + path))
        began, sent = asyncio.get_running_loop().time(), _Sent()
        try:
            return await self._sent(method, url, body, sent)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientConnectionResetError, aiohttp.ClientOSError) as error:
            stale = sent.over_kept and asyncio.get_running_loop().time() - began <= _STALE_SECONDS
            if not stale or isinstance(error, aiohttp.ClientConnectorError):
                raise
        return await self._sent(method, url, body, _Sent())

    async def _sent(self, method: str, url: URL, body: bytes | None, sent: _Sent) -> aiohttp.ClientResponse:
        """The response to one sending."""
        # The time for reading runs from the end of the body: its sending has a limit of its own.
        async with asyncio.timeout(None if body is None or len(body) <= _BUFFERED_BYTES else 2 * self._timeout):
            return await self._http().request(
                method,
                url,
                data=body,
                allow_redirects=False,
                proxy_headers=self._tunnel_headers,
                trace_request_ctx=sent,
            )

    async def _whole(self, response: aiohttp.ClientResponse) -> bytes:
        self._require_size(response.content_length or 0)
        content = bytearray()
        async for piece in response.content.iter_any():
            content += piece
            self._require_size(len(content))
        return bytes(content)

    async def _lines(self, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        # Not the reader's own lines, whose length is bounded by its buffer.
        rest = bytearray()
        async for piece in response.content.iter_any():
            first, *others = piece.split(b"\n")
            rest += first
            self._require_size(len(rest))
            for other in others:
                yield bytes(rest).rstrip(b"\r")
                rest = bytearray(other)
        if rest:
            yield bytes(rest)

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

    def _refusal(self, response: aiohttp.ClientResponse, content: bytes) -> EndpointError:
        status = response.status
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

    def _retry_after(self, headers: Mapping[str, str]) -> float | None:
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


async def _note_kept(
    session: aiohttp.ClientSession, context: SimpleNamespace, told: aiohttp.TraceConnectionReuseconnParams
) -> None:
    context.trace_request_ctx.over_kept = True


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
