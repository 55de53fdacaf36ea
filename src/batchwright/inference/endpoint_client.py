"""Single requests to a remote endpoint, without retries.

The API key is sent in one header and appears nowhere else: if an error contains it, it is masked, and also in an
answer, unless it is as short as placeholders for no key, such as `EMPTY`, which may be words of any answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any, TypeAlias

import aiohttp
import httpx
import msgspec
from yarl import URL

from batchwright.errors import AnswerBroken, EndpointError, EndpointUnreachable, EngineClosed
from batchwright.inference.endpoint_address import endpoint_url, proxy_for
from batchwright.inference.endpoint_keys import EndpointKey
from batchwright.wire.dialects import OPENAI, Dialect
from batchwright.wire.rate_limits import StatedLimit, limits_of_headers, retry_after_of_refusal

_MOST_BYTES = 256 * 2**20
"""Largest size of an answer, or of one event of a stream."""
_MOST_HEADER_BYTES = 64 * 1024
"""Largest size of one header of an answer."""
_CONNECT_SECONDS = 10.0
_KEPT_SECONDS = 4.0
"""Time for which an idle connection is kept: less than the 5 s for which uvicorn keeps its side open."""
_STALE_SECONDS = 1.0
"""Time within which a request fails on a kept connection that the endpoint has closed."""
_BUFFERED_BYTES = 64 * 1024
"""Largest body that is sent at once, whether or not the endpoint reads it."""
_SHOWN = 300
_READ_OF_PAGES = 4096
_PAGE = re.compile(r"<(!doctype html|html|head|body)\b", re.IGNORECASE)
_SHOWN_OF_PAGES = 80
_TAG = re.compile(r"<[^>]*>")
_TITLE = re.compile(r"<title[^>]*>(.+?)</title>", re.IGNORECASE | re.DOTALL)
_WEB_PAGE = "a web page"
_VERSION = re.compile(r"/v\d")
_KEY_REFUSED = frozenset({401, 403})
_SHORTEST_SECRET = 16
"""Fewest characters of a key that is masked in answers."""
_UNSENT = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, aiohttp.ClientHttpProxyError)
"""Errors of a request of which no byte was sent."""
_DONE = b"[DONE]"
_CONTENTS = frozenset({"choices", "content", "data", "output", "usage"})
"""Fields that show that an answer was computed, whatever else it says."""

Heard: TypeAlias = Callable[[Sequence[StatedLimit]], None]
"""Called with the rate limits that the head of an answer (or refusal) states, as soon as it has arrived."""


class EndpointClient:
    """A client of one endpoint, over persistent connections.

    `base_url` ends before `/chat/completions`, as for the official client: `https://host/v1`. `dialect` defines how the
    key is sent, and the form of answers, which are returned in OpenAI's form. `timeout` is the longest time without any
    data, in seconds. Without `resends`, no request is sent twice, not even one that failed on a connection that the
    endpoint was closing. Raises ValueError for a malformed URL or key, and for a proxy from the environment that cannot
    be used. All requests raise `EndpointError` if they fail.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | EndpointKey | None,
        *,
        dialect: Dialect = OPENAI,
        timeout: float,
        connections: int,
        resends: bool = True,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        try:
            self._base = endpoint_url(base_url)
        except ValueError as error:
            raise ValueError(f"base_url {error}") from None
        self._key = key = api_key if isinstance(api_key, EndpointKey) else EndpointKey(api_key)
        if key.value is not None and not (key.value.isascii() and key.value.isprintable()):
            raise ValueError("api_key: contains a line break, or another character that no key has")
        self._proxy = proxy_for(self._base)
        self._dialect = dialect
        self._headers = {"content-type": "application/json", **dialect.headers(key.value)}
        self._tunnel_headers: dict[str, str] | None = None
        if self._proxy is not None and self._proxy.user is not None:
            credentials = {"proxy-authorization": aiohttp.encode_basic_auth(*self._proxy.user)}
            # Encrypted requests go through a tunnel, and the request for the tunnel carries the proxy's credentials.
            if self._base.scheme == "https":
                self._tunnel_headers = credentials
            else:
                self._headers |= credentials
        self.url = str(self._base).rstrip("/")
        self._urls: dict[str, URL] = {}
        self._unix_time = unix_time
        self._timeout = timeout
        self._connections = connections
        self._resends = resends
        self._session: aiohttp.ClientSession | None = None
        self._closed = False
        self._has_answered = False
        """Whether there has been an answer in the form of an API."""

    @property
    def identity(self) -> str:
        """Digest of address and key, for which limits are shared."""
        return hashlib.sha256(f"{self.url}\n{self._key.value}".encode()).hexdigest()

    async def send(self, path: str, body: bytes | None = None, heard: Heard | None = None) -> dict[str, Any]:
        """Get `path`, or post the JSON `body` to it. Returns the JSON object of the answer."""
        async with self._answer("GET" if body is None else "POST", path, body, heard) as response:
            answer = self._object(await self._whole(response))
        self._require_no_error(answer)
        self._has_answered = True
        return self._dialect.answer(answer, int(self._unix_time()))

    async def stream(self, path: str, body: bytes, heard: Heard | None = None) -> AsyncGenerator[dict[str, Any]]:
        """Post `body` to `path` and yield the chunks of the answer's stream, up to its end."""
        chunks_of = self._dialect.chunks(int(self._unix_time()))
        async with self._answer("POST", path, body, heard) as response:
            if response.content_type == "application/json":
                self._require_no_error(self._object(await self._whole(response)))
                raise EndpointError(f"{self.url} answered at once, though a stream was asked for: it may have none")
            async for line in self._lines(response):
                if not line.startswith(b"data:"):
                    continue  # a keep-alive comment, or the name of an event
                data = line.removeprefix(b"data:").strip()
                if data == _DONE:
                    return
                event = self._object(data)
                if event.get("error"):
                    reported = self._error_body(event)
                    status = None if reported is None else self._dialect.error_status(reported)
                    raise EndpointError(
                        f"{self.url} broke its stream off: {_message(reported)}", status=status, body=reported
                    )
                for chunk in chunks_of(event):
                    yield chunk
                if self._dialect.is_last(event):
                    return
        raise EndpointUnreachable(f"{self.url} ended its stream before it was done")

    async def beside(self, path: str) -> str:
        """Get what an engine serves beside its API, such as its metrics at "/metrics"."""
        url = self._beside(path)
        async with self._answer("GET", path, None, None, url) as response:
            return (await self._whole(response)).decode(errors="replace")

    def _beside(self, path: str) -> URL:
        return self._base.with_path(self._base.path.rstrip("/").removesuffix("/v1") + path)

    def _url(self, path: str) -> URL:
        if (url := self._urls.get(path)) is None:
            url = self._beside(path) if self._dialect.is_beside(path) else URL(self.url + path)
            self._urls[path] = url
        return url

    async def close(self) -> None:
        """Close the connections. Later requests raise `EngineClosed`."""
        self._closed = True
        if self._session is not None:
            await self._session.close()

    def _http(self) -> aiohttp.ClientSession:
        """Return the session, which is created on first use and belongs to the event loop running then.

        Raises `EngineClosed` after `close`.
        """
        if self._closed:
            raise EngineClosed("nothing more is sent to the endpoint: the service is closing")
        if self._session is None:
            trace = aiohttp.TraceConfig()
            trace.on_connection_reuseconn.append(_note_kept)
            connect = min(self._timeout, _CONNECT_SECONDS)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    # The caller limits the calls; one more connection is for probes, and one for metrics.
                    limit=self._connections + 2,
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
    async def _answer(
        self, method: str, path: str, body: bytes | None, heard: Heard | None, url: URL | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request and yield a successful response, of which only the head has been read."""
        try:
            async with await self._head(method, url or self._url(path), body) as response:
                if heard is not None and (stated := self._stated(response)):
                    heard(stated)
                if response.status != HTTPStatus.OK:
                    raise self._refusal(response, await self._whole(response))
                yield response
        except (aiohttp.ClientError, TimeoutError) as error:
            what = self._blotted(silence_of(error))
            sent, timed_out = not isinstance(error, _UNSENT), isinstance(error, TimeoutError)
            raise EndpointUnreachable(f"{self.url} {what}", sent=sent, timed_out=timed_out) from None

    async def _head(self, method: str, url: URL, body: bytes | None) -> aiohttp.ClientResponse:
        """Send a request and return the response as soon as its head has arrived.

        A server may close a kept connection at the moment when it is used again. A request that fails for this reason
        within a second is sent once more, since it most likely never arrived; if it did, it is computed twice.
        """
        began, sent = asyncio.get_running_loop().time(), SimpleNamespace(over_kept=False)
        try:
            return await self._sent(method, url, body, sent)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientConnectionResetError, aiohttp.ClientOSError) as error:
            stale = self._resends and sent.over_kept and asyncio.get_running_loop().time() - began <= _STALE_SECONDS
            if not stale or isinstance(error, aiohttp.ClientConnectorError):
                raise
        return await self._sent(method, url, body, sent)

    async def _sent(self, method: str, url: URL, body: bytes | None, sent: SimpleNamespace) -> aiohttp.ClientResponse:
        """Send a request once. `sent.over_kept` is set if it used a connection that had served another request."""
        # The read timeout begins at the end of the body, so sending the body has its own limit.
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
        # The reader's own line method cannot return lines longer than its buffer.
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

    def _object(self, content: bytes) -> dict[str, Any]:
        try:
            value = self._decoded(content)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            return value
        shown = self._excerpt(content)
        is_elsewhere = shown.startswith(_WEB_PAGE) and not self._has_answered
        hint = f"; there is no API at this address{self._address_meant}" if is_elsewhere else ""
        raise AnswerBroken(f"{self.url} answers with something else than a JSON object: {shown}{hint}")

    def _decoded(self, content: bytes) -> Any:
        """Return a JSON value without the key. Raises ValueError and RecursionError."""
        text = content.decode()
        return msgspec.json.decode(self._blotted(text) if len(self._key.value or "") >= _SHORTEST_SECRET else text)

    def _refusal(self, response: aiohttp.ClientResponse, content: bytes) -> EndpointError:
        status = response.status
        try:
            body = self._error_body(self._object(content))
        except EndpointError:
            body = None
        if status in _KEY_REFUSED:
            return self._key_refused(status, body)
        # Some web frameworks repeat the status in the text.
        what = _message(body) if body else self._excerpt(content).removeprefix(f"{status}: ")
        after = self._retry_after(response.headers)
        if after is None and status == HTTPStatus.TOO_MANY_REQUESTS:
            after = retry_after_of_refusal(what)
        error = EndpointError(
            f"{self.url} answered {status}: {what[:_SHOWN]}".rstrip(": "), status=status, body=body, retry_after=after
        )
        if error.is_no_such_path:
            path = response.url.path.removeprefix(self._base.path.rstrip("/"))
            error.args = (f"{error}; there is no {path} at this address{self._address_meant}",)
        elif HTTPStatus.MULTIPLE_CHOICES <= status < HTTPStatus.BAD_REQUEST:
            error.args = (f"{error}; {self._redirection(response)}",)
            error.is_wrong_address = True
        return error

    def _redirection(self, response: aiohttp.ClientResponse) -> str:
        """Return what to do about an answer that redirects the request elsewhere, where the key must not be sent."""
        target = response.headers.get("location", "")
        try:
            there = response.url.join(URL(target)).with_user(None).with_query(None) if target else None
        except ValueError:
            there = None
        if there is None:
            return "it sends requests elsewhere, without saying where"
        path = response.url.path.removeprefix(self._base.path.rstrip("/"))
        meant = str(there).removesuffix(path)
        advice = f"if that is the endpoint, give {meant} as its address" if meant != str(there) else "check the address"
        return f"it sends requests on to {self._blotted(str(there))[:_SHOWN]}, which are not followed: {advice}"

    @property
    def _address_meant(self) -> str:
        """Return what to add to the statement that something else is at an address."""
        for path in sorted({self._dialect.path(endpoint) for endpoint in self._dialect.endpoints}):
            if self.url.endswith(path):
                return f" (an API's ends before {path}: is {self.url.removesuffix(path)} meant?)"
        if _VERSION.search(self.url):
            return ""
        return f" (an API's ends before /chat/completions, mostly with /v1: is {self.url}/v1 meant?)"

    def _key_refused(self, status: int, body: dict[str, object] | None) -> EndpointError:
        # A 401 is about the key, parts of which it may repeat; a 403 may be about a model, or the content of one line.
        body = body if status == HTTPStatus.FORBIDDEN else None
        reason = "" if body is None else f"; it says: {_message(body)[:_SHOWN]}"
        error = EndpointError(f"{self.url} answered {status}: {_message(body)[:_SHOWN]}", status=status, body=body)
        if error.is_no_such_model:
            return error
        return EndpointError(f"{self.url} answered {status}: {self._key.refusal}{reason}", status=status, body=body)

    def _excerpt(self, content: bytes) -> str:
        """Return what to show of an answer that is not a JSON object."""
        text = self._blotted(content[:_READ_OF_PAGES].decode(errors="replace")).strip()
        if not _PAGE.match(text):
            return text[:_SHOWN]
        title = _TITLE.search(text)
        shown = " ".join((title[1] if title else _TAG.sub(" ", text)).split())
        return f"{_WEB_PAGE} ({shown[:_SHOWN_OF_PAGES]!r})" if shown else _WEB_PAGE

    def _stated(self, response: aiohttp.ClientResponse) -> list[StatedLimit]:
        named = {name.lower(): text for name, text in response.headers.items() if "ratelimit-" in name.lower()}
        return limits_of_headers(named, self._unix_time()) if named else []

    def _require_no_error(self, answer: Mapping[str, Any]) -> None:
        """Raise `EndpointError` for an error object that came with status 200 and without anything to be paid for."""
        if not answer.get("error") or _CONTENTS & answer.keys():
            return
        body = self._error_body(answer)
        status = None if body is None else self._dialect.error_status(body)
        if status in _KEY_REFUSED:
            raise self._key_refused(status, body)
        kind = AnswerBroken if status is None else EndpointError  # an error without a status may be transient
        message = _message(body)
        after = retry_after_of_refusal(message) if status == HTTPStatus.TOO_MANY_REQUESTS else None
        raise kind(f"{self.url} answered with an error: {message}", status=status, body=body, retry_after=after)

    def _error_body(self, answer: Mapping[str, Any]) -> dict[str, object] | None:
        body = _error_object(answer)
        if body is None:
            return None
        if isinstance(message := body.get("message"), str):
            body = {**body, "message": self._blotted(message)}
        return self._dialect.error(body)

    def _retry_after(self, headers: Mapping[str, str]) -> float | None:
        """Return the seconds to wait, which headers specify in seconds, in milliseconds or as a date."""
        for name, unit in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
            text = headers.get(name, "")
            if text.isascii() and text.replace(".", "", 1).isdigit():
                seconds = float(text) * unit
                return seconds if math.isfinite(seconds) else None
        try:
            date = parsedate_to_datetime(headers.get("retry-after", ""))
            return max(0.0, (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp() - self._unix_time())
        except (ValueError, OverflowError):
            return None

    def _blotted(self, text: str) -> str:
        return text.replace(self._key.value, "[API key]") if self._key.value else text


async def _note_kept(
    session: aiohttp.ClientSession, context: SimpleNamespace, params: aiohttp.TraceConnectionReuseconnParams
) -> None:
    context.trace_request_ctx.over_kept = True


def silence_of(error: Exception) -> str:
    """Return what an endpoint did instead of answering, to continue a sentence that begins with its address."""
    if isinstance(error, aiohttp.ClientPayloadError):
        return "broke off in the middle of its answer"
    return f"gave no answer: {why_silent(error)}"


def why_silent(error: Exception) -> str:
    """Return why there was no answer, and what to check if no connection was established."""
    if isinstance(error, aiohttp.ClientProxyConnectionError):
        return f"the proxy that the environment names does not answer ({error})"
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return "no connection came about in time (ConnectionTimeoutError); check the address"
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return f"there is no host {error.host}; check the address"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"the certificate of {error.host} is not accepted: {error.certificate_error}"
    if isinstance(error, aiohttp.ClientConnectorSSLError):
        return f"{error.host}:{error.port} speaks no TLS, or another; if it has none, its address begins with http://"
    if isinstance(error, aiohttp.ClientConnectorError):
        why = error.strerror if (error.os_error.errno or 0) > 0 else str(error.os_error)
        if isinstance(error.os_error, ConnectionRefusedError):
            why = "nothing listens there"
        return f"no connection to {error.host}:{error.port}: {why}; check the address, and that the server is up"
    if isinstance(error, aiohttp.ServerTimeoutError):
        return "it sent nothing for too long"
    if isinstance(error, TimeoutError):
        return "it did not take the request in time"
    if isinstance(error, (aiohttp.ServerDisconnectedError, aiohttp.ClientConnectionResetError)):
        return "it closed the connection before it answered"
    if isinstance(error, aiohttp.ClientOSError):
        return f"the connection broke: {error.strerror or error}"
    return f"{type(error).__name__}: {error}".rstrip(": ")


def _error_object(answer: Mapping[str, Any]) -> dict[str, object] | None:
    """Return the error object of an answer, in any of the forms in use; None if there is none."""
    error = answer.get("error", answer)
    if isinstance(error, dict) and ("error" in answer or "message" in error):
        return error
    message = answer.get("detail") if isinstance(error, dict) else error
    return {"message": str(message)} if message else None


def _message(body: Mapping[str, object] | None) -> str:
    return str((body or {}).get("message") or "no reason given")
