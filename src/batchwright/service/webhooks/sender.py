"""Safe sending of a webhook to a URL that is not trusted.

The host is resolved once, all its addresses must be allowed, and the connection goes to one of them, so a name that
resolves differently a moment later changes nothing. The transport is used without a client around it, so redirects,
proxies and `.netrc` are ignored, no cookies are kept, and no URL is logged. TLS checks the certificate for the name.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import cache, partial
from ipaddress import IPv6Address

import httpx

from batchwright.service.webhooks.addresses import (
    Address,
    AddressRefused,
    AllowList,
    Target,
    UrlRefused,
    check_addresses,
    check_url,
    parse_address,
)

_log = logging.getLogger(__name__)

CONCURRENCY = 32
"""Most names resolved at once, and most messages that the courier sends at once."""
_MOST_READ = 16 * 1024
"""Most bytes of an answer that are read and dropped, so that the receiver does not see a reset connection."""
_MOST_ADDRESSES = 4
_EARLY = 3.0
"""Most seconds for resolving a name that is only checked early."""
_REFUSAL_STEP = 1.0
"""Seconds; refusals are delayed to multiples of it, so that their timing does not reveal how a name was resolved."""

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Function that returns the addresses of a host, as text, for a port. Raises `OSError` when there are none."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of sending, with nothing of the receiver's answer but the status."""

    status: int | None
    """HTTP status; None: there was no answer."""
    reason: str
    """Reason in words, for the owner of the webhook."""

    @property
    def taken(self) -> bool:
        """Whether the receiver accepted the message: the status is 2xx."""
        return self.status is not None and 200 <= self.status < 300


@cache
def _usual_tls() -> ssl.SSLContext:
    """Return the context for all senders of this process: it takes long to read the authorities."""
    return httpx.create_ssl_context()


class Sender:
    """Sender of webhooks. It has threads that resolve names, so `close` it.

    `timeout`: most seconds from resolving the name to the status line. `tls`: context that checks certificates; None:
    the usual authorities, or those named by SSL_CERT_FILE.
    """

    def __init__(
        self,
        allowed: AllowList | None = None,
        *,
        resolve: Resolve | None = None,
        timeout: float = 15.0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._allowed = allowed or AllowList()
        self._threads = ThreadPoolExecutor(CONCURRENCY, "webhook-names")
        self._resolve = resolve or self._ask_the_system
        self._timeout = timeout
        self._tls = tls or _usual_tls()

    def close(self) -> None:
        """Close without waiting for names that are being resolved."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def check_url(self, url: str) -> None:
        """Check what can be checked without resolving the host. Raises `UrlRefused`."""
        check_url(url, self._allowed)

    async def check_host(self, url: str) -> None:
        """Do as `check_url`, and check the addresses of the host too if it resolves now. Raises `UrlRefused`.

        This informs the owner early; the check that counts is made at each sending.
        """
        target = check_url(url, self._allowed)
        with suppress(OSError):  # including a timeout
            async with asyncio.timeout(min(_EARLY, self._timeout)):
                await self._addresses(target)

    async def check_host_for_client(self, url: str) -> None:
        """Do as `check_host`, for a client that may not learn which internal names exist. Raises `UrlRefused`.

        A name that does not resolve and one with a forbidden address are refused alike and as quickly; the log has the
        reason.
        """
        began = asyncio.get_running_loop().time()
        target = check_url(url, self._allowed)
        if target.address is not None or target.host in self._allowed.hosts:
            return
        try:
            async with asyncio.timeout(_EARLY):
                await self._addresses(target)
        except (AddressRefused, OSError) as error:
            _log.info("callback_url refused: host %s: %s", target.host, str(error) or "not resolved in time")
            taken = asyncio.get_running_loop().time() - began
            await asyncio.sleep(max(1, math.ceil(taken / _REFUSAL_STEP)) * _REFUSAL_STEP - taken)
            raise UrlRefused(
                f"url: host {target.host[:80]} cannot be called: use a name that resolves, for anybody, to global "
                "addresses only; the operator may allow others (webhook_allow)"
            ) from None

    async def send(self, url: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """POST `body` to `url`. After any failure, a refused URL included, the `Answer` has no status."""
        async with AsyncExitStack() as opened:
            try:
                target = check_url(url, self._allowed)
                async with asyncio.timeout(self._timeout):
                    addresses = await self._addresses(target)
                    response = await self._post_to_one(opened, target, addresses, headers, body)
            except UrlRefused as refusal:
                return Answer(None, str(refusal))
            except TimeoutError:
                return Answer(None, f"no answer from {target.host} within {self._timeout:g} s")
            except OSError as error:
                return Answer(None, f"host {target.host} does not resolve: {error.strerror or error}")
            except httpx.ConnectError as error:
                return Answer(None, f"cannot connect to {target.host}: {error}")
            except httpx.HTTPError as error:
                # Only the name of the error, since its text can quote what the receiver sent.
                return Answer(None, f"connection to {target.host} failed: {type(error).__name__}")
            await _drain(response)
            return Answer(response.status_code, f"HTTP {response.status_code}")

    async def _addresses(self, target: Target) -> list[Address]:
        if target.address is not None:
            return [target.address]
        found = [parse_address(text) for text in await self._resolve(target.host, target.port)]
        addresses = [address for address in found if address is not None]
        if not addresses or len(addresses) < len(found):
            raise OSError("no address that can be read")
        check_addresses(target, addresses, self._allowed)
        return addresses

    async def _post_to_one(
        self, opened: AsyncExitStack, target: Target, addresses: list[Address], headers: Mapping[str, str], body: bytes
    ) -> httpx.Response:
        """Try the addresses in order until one accepts a connection; later failures are not retried."""
        *others, last = list(dict.fromkeys(addresses))[:_MOST_ADDRESSES]
        for address in others:
            try:
                return await self._post(opened, target, address, headers, body)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                continue
        return await self._post(opened, target, last, headers, body)

    async def _post(
        self, opened: AsyncExitStack, target: Target, address: Address, headers: Mapping[str, str], body: bytes
    ) -> httpx.Response:
        literal = f"[{address}]" if isinstance(address, IPv6Address) else str(address)
        extensions: dict[str, object] = {"timeout": {"connect": self._timeout / 2}}
        if target.address is None:
            extensions["sni_hostname"] = target.host
        request = httpx.Request(
            "POST",
            f"{target.scheme}://{literal}:{target.port}{target.path}",
            headers={"host": target.authority, "connection": "close", **headers},
            content=body,
            extensions=extensions,
        )
        # A separate transport for each message, so that a connection never serves two names.
        transport = await opened.enter_async_context(httpx.AsyncHTTPTransport(verify=self._tls, trust_env=False))
        response = await transport.handle_async_request(request)
        opened.push_async_callback(response.aclose)
        return response

    async def _ask_the_system(self, host: str, port: int) -> list[str]:
        # Separate threads, since a name server that does not answer must not block those of the whole process.
        ask = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(self._threads, ask)
        return [str(address[0]) for *_, address in found]


async def _drain(response: httpx.Response) -> None:
    """Read a little of the answer. Failures are ignored, since the status is known."""
    read = 0
    with suppress(httpx.HTTPError, TimeoutError):
        async with asyncio.timeout(1.0):
            async for chunk in response.aiter_raw():
                read += len(chunk)
                if read >= _MOST_READ:
                    return
