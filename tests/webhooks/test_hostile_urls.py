"""URLs by which somebody tries to reach this machine or its neighbours: all refused, and no connection is made.

Each goes through the real sender. A trap listens on both loopback addresses at the port that the URLs name, and every
attempt of the event loop to connect anywhere is counted.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from benchmarks.batching.http.run import free_port
from tests.webhooks.outbox import in_event_loop
from tests.webhooks.receiver import Receiver, answer, listening

from batchwright.service.webhooks.addresses import AllowList
from batchwright.service.webhooks.sender import Answer, Sender

TLS = ssl.create_default_context()
GLOBAL = "93.184.216.34"

# PORT stands for the trap's.
URLS = {
    # Loopback and the unspecified address, plainly
    "ipv4 loopback": "https://127.0.0.1:PORT/",
    "elsewhere in 127/8": "https://127.8.9.10:PORT/",
    "ipv6 loopback": "https://[::1]:PORT/",
    "ipv6 loopback, long": "https://[0:0:0:0:0:0:0:1]:PORT/",
    "unspecified": "https://0.0.0.0:PORT/",
    "unspecified, v6": "https://[::]:PORT/",
    "localhost": "https://localhost:PORT/",
    "localhost, capitals": "https://LOCALHOST:PORT/",
    "below localhost": "https://hooks.localhost:PORT/",
    # IPv4 within IPv6
    "mapped loopback": "https://[::ffff:127.0.0.1]:PORT/",
    "mapped loopback, hex": "https://[::ffff:7f00:1]:PORT/",
    "mapped metadata": "https://[::ffff:169.254.169.254]:PORT/",
    "compatible loopback": "https://[::127.0.0.1]:PORT/",
    "translated loopback": "https://[::ffff:0:127.0.0.1]:PORT/",
    "nat64 loopback": "https://[64:ff9b::7f00:1]:PORT/",
    "nat64 private": "https://[64:ff9b::10.0.0.1]:PORT/",
    "local nat64": "https://[64:ff9b:1::7f00:1]:PORT/",
    "6to4 loopback": "https://[2002:7f00:1::]:PORT/",
    "teredo loopback": "https://[2001:0:7f00:1::]:PORT/",
    # Other spellings of IPv4
    "decimal": "https://2130706433:PORT/",
    "octal": "https://0177.0.0.1:PORT/",
    "octal in one": "https://017700000001:PORT/",
    "hex": "https://0x7f000001:PORT/",
    "hex in parts": "https://0x7f.0.0.0x1:PORT/",
    "hex without digits": "https://127.0.0.0x:PORT/",
    "short": "https://127.1:PORT/",
    "shorter": "https://0:PORT/",
    "too large, wraps": "https://4294967297:PORT/",
    "leading zeros": "https://127.000.000.001:PORT/",
    "five parts": "https://127.0.0.1.1:PORT/",
    "trailing dot": "https://127.0.0.1.:PORT/",
    "trailing dot, name": "https://localhost.:PORT/",
    "percent-encoded": "https://%31%32%37%2e0.0.1:PORT/",
    "fullwidth digits": "https://\uff11\uff12\uff17.0.0.1:PORT/",
    "fullwidth dots": "https://127\uff0e0\uff0e0\uff0e1:PORT/",
    "ideographic dots": "https://127\u30020\u30020\u30021:PORT/",
    "circled digits": "https://\u2460\u2461\u2466.0.0.1:PORT/",
    "circled letters": "https://\u24db\u24de\u24d2\u24d0\u24db\u24d7\u24de\u24e2\u24e3:PORT/",
    "soft hyphen": "https://local\u00adhost:PORT/",
    "arabic digits": "https://\u0661\u0662\u0667.0.0.1:PORT/",
    # What only this machine or its neighbours can reach
    "private 10": "https://10.0.0.1:PORT/",
    "private 172": "https://172.16.0.1:PORT/",
    "private 192": "https://192.168.1.1:PORT/",
    "metadata": "https://169.254.169.254/latest/meta-data/",
    "metadata, plain http": "http://169.254.169.254/latest/meta-data/",
    "metadata, v6": "https://[fd00:ec2::254]/latest/meta-data/",
    "metadata in shared space": "https://100.100.100.200/latest/meta-data/",
    "metadata, protocol space": "https://192.0.0.192/opc/v1/",
    "host agent": "https://168.63.129.16/machine/",
    "link-local v6": "https://[fe80::1]:PORT/",
    "zone": "https://[fe80::1%25lo]:PORT/",
    "zone, bare": "https://[::1%lo]:PORT/",
    "zone on a global address": "https://[2606:4700::1111%25lo]:PORT/",
    "unique local": "https://[fc00::1]:PORT/",
    "site-local": "https://[fec0::1]:PORT/",
    "multicast": "https://224.0.0.1:PORT/",
    "multicast v6": "https://[ff02::1]:PORT/",
    "broadcast": "https://255.255.255.255:PORT/",
    "benchmarking": "https://198.18.0.1:PORT/",
    "documentation": "https://203.0.113.5:PORT/",
    # URLs that different readers read differently
    "credentials": "https://hooks.example@127.0.0.1:PORT/",
    "credentials, other way": "https://127.0.0.1:PORT@hooks.example/",
    "credentials, both": "https://user:secret@hooks.example:PORT/",
    "backslash": "https://127.0.0.1:PORT\\@hooks.example/",
    "backslash for slash": "https:\\\\127.0.0.1:PORT\\",
    "fragment as host": "https://127.0.0.1:PORT#@hooks.example/",
    "query as host": "https://127.0.0.1:PORT?@hooks.example/",
    "tab within": "https://127.0.0.1\t:PORT/",
    "newline within": "https://127.0.0.1:PORT/\r\nX-Injected: yes",
    "blank before": " https://127.0.0.1:PORT/",
    "NUL": "https://127.0.0.1\x00.hooks.example:PORT/",
    "three slashes": "https:///127.0.0.1:PORT/",
    "no slashes": "https:127.0.0.1:PORT/",
    "no scheme": "//127.0.0.1:PORT/",
    "no host": "https://:PORT/",
    "nothing": "",
    "two ports": "https://127.0.0.1:PORT:443/",
    "port with sign": "https://127.0.0.1:+PORT/",
    "port zero": "https://hooks.example:0/",
    "port too large": "https://hooks.example:65536/",
    "brackets around ipv4": "https://[127.0.0.1]:PORT/",
    "ipv6 without brackets": "https://::1:PORT/",
    "unclosed bracket": "https://[::1:PORT/",
    "very long": f"https://127.0.0.1:PORT/{'a' * 3000}",
    "label too long": f"https://{'a' * 64}.example:PORT/",
    # Other schemes and services
    "plain http": "http://127.0.0.1:PORT/",
    "plain http, global": f"http://{GLOBAL}/",
    "plain http, name": "http://hooks.example/",
    "mail": f"https://{GLOBAL}:25/",
    "file": "file:///etc/passwd",
    "gopher": "gopher://127.0.0.1:PORT/_GET",
    "ftp": "ftp://127.0.0.1:PORT/",
    "unix": "http+unix://%2Frun%2Fdocker.sock/containers",
    "javascript": "javascript:alert(1)",
}
NAMES: dict[str, Sequence[str]] = {
    "loopback": ["127.0.0.1"],
    "loopback v6": ["::1"],
    "mapped": ["::ffff:127.0.0.1"],
    "nat64": ["64:ff9b::7f00:1"],
    "6to4": ["2002:7f00:1::"],
    "metadata": ["169.254.169.254"],
    "private": ["10.1.2.3"],
    "shared": ["100.64.0.1"],
    "link-local with zone": ["fe80::1%lo"],
    "unspecified": ["0.0.0.0"],
    "mixed, bad last": [GLOBAL, "127.0.0.1"],
    "mixed, bad first": ["127.0.0.1", GLOBAL],
    "mixed, bad far behind": [f"93.184.216.{number}" for number in range(40)] + ["127.0.0.1"],
    "mixed families": [GLOBAL, "::1"],
    "nothing": [],
    "nonsense": ["not an address"],
    "short form": ["127.1"],
}


@dataclass
class Names:
    """A name server for tests: each question gets the next answer, the last one again and again."""

    answers: Sequence[Sequence[str]]
    asked: list[str] = field(default_factory=list)

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        return self.answers[min(len(self.asked), len(self.answers)) - 1]


@pytest.fixture
def connects(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where the event loop was asked to connect to. What is not on loopback is not reached: it raises OSError."""
    asked: list[str] = []
    real = asyncio.base_events.BaseEventLoop.create_connection

    async def noted(loop: Any, factory: Any, host: Any = None, port: Any = None, **more: Any) -> Any:
        asked.append(str(host))
        if not str(host).startswith("127."):
            raise OSError("not from a test")
        return await real(loop, factory, host, port, **more)

    monkeypatch.setattr(asyncio.base_events.BaseEventLoop, "create_connection", noted)
    return asked


@pytest.fixture(autouse=True)
def _no_name_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second look at a name, by whatever library, would go here."""
    real = socket.getaddrinfo

    def only_addresses(host: Any, *rest: Any, **more: Any) -> Any:
        if isinstance(host, str) and not host.startswith("127.") and ":" not in host:
            raise AssertionError(f"{host} was resolved behind the sender's back")
        return real(host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", only_addresses)


@asynccontextmanager
async def trap(port: int = 0) -> AsyncIterator[Receiver]:
    """Listens on loopback, IPv6 too where this machine has it."""
    async with AsyncExitStack() as stack:
        receiver = await stack.enter_async_context(listening(port=port))
        try:
            other = await asyncio.start_server(receiver.serve, "::1", receiver.port)
            stack.callback(other.close)
        except OSError:
            pass  # no IPv6 here
        yield receiver


async def send(url: str, allowed: AllowList, names: Names) -> tuple[Answer, int]:
    """The answer, and how many connections the trap saw."""
    async with trap() as receiver:
        sender = Sender(allowed, resolve=names, tls=TLS)
        result = await sender.send(url.replace("PORT", str(receiver.port)), {"webhook-id": "evt_1"}, b"{}")
        sender.close()
        return result, receiver.connections


def assert_refused(url: str, allowed: AllowList, names: Names, connects: list[str]) -> None:
    result, connections = asyncio.run(send(url, allowed, names))
    assert result.status is None
    assert not result.taken
    assert "url: " in result.reason or "does not resolve" in result.reason
    assert connections == 0
    assert connects == []


def test_there_are_many() -> None:
    assert len(URLS) + len(NAMES) >= 45


# With an allow-list, plain http and names in spite of it are not refused by their form alone.
@pytest.mark.parametrize("allow", [[], ["192.0.2.0/24", "hooks.internal"]], ids=["nothing allowed", "others allowed"])
@pytest.mark.parametrize("url", URLS.values(), ids=URLS)
def test_a_hostile_url_is_refused(url: str, allow: list[str], connects: list[str]) -> None:
    assert_refused(url, AllowList.parse(allow), Names([["127.0.0.1"]]), connects)


@pytest.mark.parametrize("scheme", ["https", "http"])
@pytest.mark.parametrize("addresses", NAMES.values(), ids=NAMES)
def test_a_name_that_leads_inside_is_refused(addresses: Sequence[str], scheme: str, connects: list[str]) -> None:
    assert_refused(f"{scheme}://hooks.example:PORT/", AllowList.parse(["192.0.2.0/24"]), Names([addresses]), connects)


def test_the_trap_works(connects: list[str]) -> None:
    names = Names([["127.0.0.1"]])
    result, connections = asyncio.run(send("http://hooks.example:PORT/", AllowList.parse(["127.0.0.0/8"]), names))
    assert result.taken
    assert connections == 1
    assert connects == ["127.0.0.1"]
    assert asyncio.run(send("http://hooks.example:PORT/", AllowList.parse(["hooks.example"]), names))[0].taken


def test_a_name_is_resolved_once_and_that_address_is_connected_to(connects: list[str]) -> None:
    """The next answer would be loopback: nobody asks for it."""
    names = Names([[GLOBAL], ["127.0.0.1"]])
    result, connections = asyncio.run(send("https://rebind.example:PORT/", AllowList(), names))
    assert "cannot connect" in result.reason
    assert connections == 0
    assert connects == [GLOBAL]
    assert names.asked == ["rebind.example"]


def test_a_name_that_turns_between_two_addresses_reaches_the_one_that_was_checked(connects: list[str]) -> None:
    async def main() -> None:
        port = free_port()
        async with trap(port) as inside, listening(host="127.0.0.2", port=port) as allowed:
            names = Names([["127.0.0.2"], ["127.0.0.1"]])
            sender = Sender(AllowList.parse(["127.0.0.2"]), resolve=names, tls=TLS)
            url = f"http://rebind.example:{port}/"
            assert (await sender.send(url, {}, b"{}")).taken
            assert "127.0.0.1, which is not a global address (loopback)" in (await sender.send(url, {}, b"{}")).reason
            sender.close()
            assert (allowed.connections, inside.connections) == (1, 0)

    asyncio.run(main())
    assert connects == ["127.0.0.2"]


def test_a_name_that_turns_after_its_webhook_was_made_is_refused_at_sending(connects: list[str]) -> None:
    async def main() -> Answer:
        sender = Sender(resolve=Names([[GLOBAL], ["127.0.0.1"]]), tls=TLS)
        await sender.check_host("https://rebind.example/")
        result = await sender.send("https://rebind.example/", {}, b"{}")
        sender.close()
        return result

    assert "loopback" in asyncio.run(main()).reason
    assert connects == []


@pytest.mark.parametrize("status", [300, 301, 302, 303, 307, 308])
@in_event_loop
async def test_a_redirect_is_not_followed(status: int) -> None:
    async with trap() as inside:
        location = f"location: http://127.0.0.1:{inside.port}/"
        async with listening(lambda number: answer(status, location), host="127.0.0.2") as outside:
            sender = Sender(AllowList.parse(["127.0.0.2"]), tls=TLS)
            result = await sender.send(f"http://127.0.0.2:{outside.port}/", {}, b"{}")
            sender.close()
        assert (result.status, result.taken) == (status, False)
        assert inside.connections == 0


@pytest.mark.parametrize(
    "variable", ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"]
)
@in_event_loop
async def test_no_proxy_of_the_environment_is_used(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with trap() as proxy, listening(host="127.0.0.2") as outside:
        monkeypatch.setenv(variable, f"http://127.0.0.1:{proxy.port}")
        sender = Sender(AllowList.parse(["127.0.0.2"]), tls=TLS)
        for scheme in ("http", "https"):
            await sender.send(f"{scheme}://127.0.0.2:{outside.port}/", {}, b"{}")
        sender.close()
        assert (outside.connections, proxy.connections) == (2, 0)
