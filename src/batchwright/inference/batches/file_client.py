"""`FileClient`: an `EndpointClient` that can also send and fetch whole files."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import aiohttp
import httpx
import msgspec
from yarl import URL

from batchwright.durable_files import TEMPORARY, sync
from batchwright.errors import EndpointError, EndpointUnreachable
from batchwright.inference.endpoint_address import proxy_for
from batchwright.inference.endpoint_client import EndpointClient, silence_of
from batchwright.inference.endpoint_keys import EndpointKey
from batchwright.wire.dialects import OPENAI, Dialect

_PIECE = 2**18


class FileClient(EndpointClient):
    """A client of an endpoint's files and batches. No request is sent twice, and all methods raise `EndpointError`."""

    def __init__(
        self, base_url: str, key: str | EndpointKey | None, *, dialect: Dialect = OPENAI, timeout: float = 120.0
    ) -> None:
        super().__init__(base_url, key, dialect=dialect, timeout=timeout, connections=4, resends=False)

    async def get(self, *parts: str, **query: str | int | None) -> Any:
        """Get the JSON value at a path of `parts`."""
        async with self._exchange("GET", _path(*parts, **query)) as response:
            return self._value(await self._whole(response))

    async def post(
        self,
        *parts: str,
        body: object = None,
        headers: Mapping[str, str] | None = None,
        query: Mapping[str, str] | None = None,
    ) -> Any:
        """Post a value as JSON, and return the JSON value of the answer."""
        content = b"" if body is None else msgspec.json.encode(body)
        async with self._exchange("POST", _path(*parts, **(query or {})), content, headers) as response:
            return self._value(await self._whole(response))

    async def delete(self, *parts: str) -> None:
        """Delete what is at a path of `parts`."""
        async with self._exchange("DELETE", _path(*parts)) as response:
            await self._whole(response)

    async def post_pieces(self, *parts: str, pieces: AsyncIterator[bytes], size: int) -> Any:
        """Post `size` bytes of JSON that come in pieces."""
        headers = {"content-length": str(size)}
        async with self._exchange("POST", _path(*parts), pieces, headers) as response:
            return self._value(await self._whole(response))

    async def post_form(self, *parts: str, fields: Mapping[str, str], file: Path, name: str) -> Any:
        """Post a form with `fields` and, as `file`, a file with the name `name`."""
        with file.open("rb") as content, aiohttp.MultipartWriter("form-data") as form:
            for key, value in fields.items():
                form.append(value).set_content_disposition("form-data", name=key)
            part = form.append(content, {"content-type": "application/jsonl"})
            part.set_content_disposition("form-data", name="file", filename=name)
            headers = {"content-type": form.headers["content-type"]}
            async with self._exchange("POST", _path(*parts), form, headers) as response:
                return self._value(await self._whole(response))

    async def first_line(self, path: str) -> bytes:
        """Return the first line of the content at `path`, and leave the rest."""
        line = bytearray()
        async with self._exchange("GET", path) as response:
            async for piece in response.content.iter_chunked(_PIECE):
                line += piece
                if b"\n" in piece:
                    break
            response.close()
        return bytes(line).partition(b"\n")[0]

    async def download(self, sources: Sequence[str], path: Path) -> None:
        """Write the contents at some paths to the file `path`, one after the other, either completely or not at all.

        A source may also be a complete URL that carries its own authorization: no key is sent to it.
        """
        temporary = path.with_name(path.name + TEMPORARY)
        with temporary.open("wb") as file:
            for each in sources:
                last = b"\n"
                async with self._signed(each) if "://" in each else self._exchange("GET", each) as response:
                    async for piece in response.content.iter_chunked(_PIECE):
                        file.write(piece)
                        last = piece[-1:]
                if last != b"\n":
                    file.write(b"\n")
        await asyncio.to_thread(_put, temporary, path)

    @asynccontextmanager
    async def _exchange(
        self, method: str, path: str, data: object = None, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        try:
            async with self._http().request(
                method,
                URL(self.url + path, encoded=True),
                data=data,
                headers=headers,
                allow_redirects=False,
                proxy_headers=self._tunnel_headers,
                # With a kept connection that the server has just closed, it would be unclear whether the request
                # arrived.
                trace_request_ctx=_Unused(),
            ) as response:
                if not 200 <= response.status < 300:
                    raise self._refusal(response, await self._whole(response))
                yield response
        except (aiohttp.ClientError, TimeoutError) as error:
            what = self._blotted(silence_of(error))
            raise EndpointUnreachable(f"{self.url} {what}") from None

    @asynccontextmanager
    async def _signed(self, url: str) -> AsyncIterator[aiohttp.ClientResponse]:
        """Get the content at a URL of another host, without the key."""
        there = URL(url, encoded=True)
        try:
            proxy = proxy_for(there)
            user = None if proxy is None or proxy.user is None else aiohttp.encode_basic_auth(*proxy.user)
            async with (
                aiohttp.ClientSession(
                    connector=aiohttp.TCPConnector(
                        ssl=httpx.create_ssl_context() if there.scheme == "https" else True, force_close=True
                    ),
                    timeout=aiohttp.ClientTimeout(sock_connect=self._timeout, sock_read=self._timeout),
                    cookie_jar=aiohttp.DummyCookieJar(),
                ) as session,
                session.get(
                    there,
                    allow_redirects=False,
                    proxy=None if proxy is None else proxy.url,
                    proxy_headers=None if user is None else {"proxy-authorization": user},
                ) as response,
            ):
                if response.status != HTTPStatus.OK:
                    # Its signature may have expired: the status says nothing about the key.
                    raise EndpointError(f"{there.host} answered {response.status} instead of results")
                yield response
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            what = self._blotted(type(error).__name__)
            raise EndpointUnreachable(f"{there.host} gave no answer: {what}") from None

    def _value(self, content: bytes) -> Any:
        try:
            return self._decoded(content)
        except (ValueError, RecursionError):
            raise EndpointError(f"{self.url} answers with something else than JSON: {self._excerpt(content)}") from None


def _put(made: Path, path: Path) -> None:
    """Move a finished file to its place, durably."""
    sync(made)
    made.replace(path)
    sync(path.absolute().parent)


class _Unused:
    """What the trace of a request writes to."""

    over_kept = False


def _path(*parts: str, **query: str | int | None) -> str:
    """Return the path of `parts`, each of which is one segment or several with slashes between them."""
    path = "".join("/" + quote(part.strip("/"), safe="/:") for part in parts)
    given = {name: value for name, value in query.items() if value is not None}
    return f"{path}?{urlencode(given)}" if given else path
