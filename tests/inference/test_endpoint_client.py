"""What goes over the wire to an endpoint: compression, certificates, proxies, bounds."""

from __future__ import annotations

import asyncio
import base64
import gzip
import shutil
import ssl
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from yarl import URL

from batchwright.errors import EndpointError, EndpointUnreachable
from batchwright.inference import endpoint_client
from batchwright.inference.endpoint_address import proxy_for
from batchwright.inference.endpoint_client import EndpointClient

from .running import in_real_time
from .scripted import CHAT, Reply, Script, ScriptedServer

PATH = "/chat/completions"
_PROXY_VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _PROXY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


async def post(url: str, body: bytes = b"{}", *, quiet: float = 20.0) -> dict[str, object]:
    client = EndpointClient(url, None, timeout=quiet, connections=1)
    try:
        async with asyncio.timeout(30):
            return await client.send(PATH, body)
    finally:
        await client.close()


def scripted(*script: Script, tls: ssl.SSLContext | None = None, quiet: float = 20.0) -> dict[str, object]:
    async def main() -> dict[str, object]:
        async with ScriptedServer(*script, tls=tls) as server:
            return await post(server.url, quiet=quiet)

    return asyncio.run(main())


def compressed(content: bytes) -> Reply:
    return Reply(content=gzip.compress(content), headers={"content-encoding": "gzip"})


def test_a_compressed_answer_is_read() -> None:
    assert scripted(compressed(Reply().content)) == CHAT


def test_an_answer_is_bounded_however_small_it_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_client, "_MOST_BYTES", 2**20)
    for reply in (
        compressed(b" " * 50_000_000),
        Reply(content=b" " * (2**20 + 1)),
        Reply(headers={"content-length": "99999999999"}),
    ):
        with pytest.raises(EndpointError, match="more than 1,048,576 bytes"):
            scripted(reply)


def test_an_answer_that_stops_half_way_is_given_up() -> None:
    half = Reply(content=b'{"id"', headers={"content-length": "100", "x-then": "hang"})
    with pytest.raises(EndpointUnreachable, match=r"gave no answer: it sent nothing for too long"):
        scripted(half, quiet=0.1)


@in_real_time
async def test_a_body_that_nobody_reads_is_given_up() -> None:
    left = asyncio.Event()

    async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await left.wait()
        writer.close()

    # As little as possible is taken in before somebody reads.
    server = await asyncio.start_server(deaf, "127.0.0.1", 0, limit=1)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(EndpointUnreachable, match=r"gave no answer: it did not take the request in time"):
        await post(f"http://127.0.0.1:{port}/v1", b" " * 50_000_000, quiet=0.1)
    left.set()
    server.close()


@in_real_time
async def test_a_plain_url_is_asked_for_through_the_proxy_with_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ScriptedServer() as proxy:
        host = proxy.url.removeprefix("http://").removesuffix("/v1")
        monkeypatch.setenv("HTTP_PROXY", f"http://me:hunter2@{host}")
        assert await post("http://endpoint.invalid/v1") == CHAT
        (request,) = proxy.requests
        assert request.path == "http://endpoint.invalid/v1/chat/completions"
        assert request.headers["host"] == "endpoint.invalid"
        sent = "basic " + base64.b64encode(b"me:hunter2").decode().lower()
        assert request.headers["proxy-authorization"] == sent
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        async with ScriptedServer() as server:
            await post(server.url)
            assert len(server.requests) == 1
    with pytest.raises(EndpointUnreachable) as caught:
        await post("http://endpoint.invalid/v1")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("variables", "url", "proxy"),
    [
        ({}, "http://host/v1", None),
        ({"HTTP_PROXY": "http://p:1"}, "http://host/v1", "http://p:1"),
        ({"HTTP_PROXY": "http://p:1"}, "https://host/v1", None),
        ({"HTTPS_PROXY": "p:1"}, "https://host/v1", "http://p:1"),
        ({"ALL_PROXY": "http://p:1"}, "https://host/v1", "http://p:1"),
        ({"ALL_PROXY": "http://p:1", "NO_PROXY": "host"}, "https://host/v1", None),
        ({"ALL_PROXY": "http://p:1", "NO_PROXY": "host:8000"}, "http://host:8000/v1", None),
        ({"ALL_PROXY": "http://p:1", "NO_PROXY": "host:8000"}, "http://host:8001/v1", "http://p:1"),
        ({"ALL_PROXY": "http://p:1", "NO_PROXY": "::1"}, "http://[::1]:8000/v1", None),
    ],
)
def test_which_proxy_is_used(
    variables: dict[str, str], url: str, proxy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = proxy_for(URL(url))
    assert (found and str(found.url)) == proxy


@pytest.mark.parametrize("value", ["socks5://me:hunter2@p:1", "http://me:hunter2@", "http://me:hunter2@[::1"])
def test_a_proxy_that_cannot_be_used_is_refused_without_its_password(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", value)
    with pytest.raises(ValueError, match="HTTPS_PROXY: must be like") as caught:
        EndpointClient("https://host/v1", None, timeout=1.0, connections=1)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("key", ["sk-1\n", "sk-1\r\nx-injected: yes", "sk-\u00fc"])
def test_a_key_that_cannot_be_sent_is_refused_without_repeating_it(key: str) -> None:
    with pytest.raises(ValueError, match="api_key") as caught:
        EndpointClient("https://host/v1", key, timeout=1.0, connections=1)
    assert "sk-" not in str(caught.value)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificate and key for 127.0.0.1, in one file."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the certificate, is not installed")
    file = tmp_path_factory.mktemp("tls") / "endpoint.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=endpoint"
    extension = ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(
        [*command.split(), *extension, "-keyout", file, "-out", f"{file}.crt"], check=True, capture_output=True
    )
    file.write_bytes(file.read_bytes() + Path(f"{file}.crt").read_bytes())
    return file


def test_only_a_certificate_of_somebody_we_know_is_taken(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with pytest.raises(EndpointUnreachable, match="certificate"):
        scripted(tls=context)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert scripted(tls=context) == CHAT


class Tunnel:
    """A proxy that opens tunnels to one port of loopback, whatever it is asked for."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.heads: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.heads.append((await reader.readuntil(b"\r\n\r\n")).decode().lower())
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        await asyncio.gather(_copy(reader, there_writer), _copy(there_reader, writer))


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while piece := await source.read(65_536):
            sink.write(piece)
            await sink.drain()
    sink.close()


@in_real_time
async def test_an_encrypted_request_passes_the_proxy_in_a_tunnel(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)

    async with ScriptedServer(tls=context) as server:
        port = URL(server.url).port
        assert port is not None
        tunnel = Tunnel(port)
        proxy = await asyncio.start_server(tunnel.serve, "127.0.0.1", 0)
        address = proxy.sockets[0].getsockname()[1]
        monkeypatch.setenv("HTTPS_PROXY", f"http://me:hunter2@127.0.0.1:{address}")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert await post(server.url) == CHAT
        (head,) = tunnel.heads
        assert head.startswith(f"connect 127.0.0.1:{port} ")
        assert base64.b64encode(b"me:hunter2").decode().lower() in head
        assert "proxy-authorization" not in server.requests[0].headers
        proxy.close()


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("http://127.0.0.1:1/v1", "no connection to 127.0.0.1:1: nothing listens there; check the address"),
        ("http://nohost.invalid/v1", "there is no host nohost.invalid; check the address"),
    ],
)
@in_real_time
async def test_why_there_is_no_connection(url: str, told: str) -> None:
    with pytest.raises(EndpointUnreachable) as caught:
        await post(url)
    assert str(caught.value).startswith(f"{url} gave no answer: {told}")
    assert not caught.value.sent


@in_real_time
async def test_a_server_without_tls_is_told() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 What?\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        with pytest.raises(EndpointUnreachable, match=r"speaks no TLS, or another; .* begins with http://"):
            await post(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1")


PAGE = b"<!DOCTYPE html>\n<html><head><title>Not\n here</title></head></html>"


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        (Reply(404, PAGE), "answered 404: a web page ('Not here'); there is no /chat/completions at this address"),
        (Reply(404, b'{"detail": "Not Found"}'), "answered 404: Not Found; there is no /chat/completions"),
        (Reply(404, b"404: Not Found"), "answered 404: Not Found; there is no /chat/completions"),
        (Reply(405, b""), "answered 405; there is no /chat/completions"),
        (Reply(200, PAGE), "a JSON object: a web page ('Not here'); there is no API at this address"),
        (Reply(404, b'{"error": {"message": "no such model"}}'), "answered 404: no such model"),
    ],
)
@in_real_time
async def test_what_is_at_a_wrong_address_is_told(reply: Reply, told: str) -> None:
    async with ScriptedServer(reply, reply) as server:
        with pytest.raises(EndpointError) as caught:
            await post(server.url)
        assert told in str(caught.value)
        assert "meant" not in str(caught.value)
        url = server.url.removesuffix("/v1")
        with pytest.raises(EndpointError) as caught:
            await post(url)
        assert ("no such model" in told) != str(caught.value).endswith(f": is {url}/v1 meant?)")


@in_real_time
async def test_an_address_that_ends_too_late_is_told() -> None:
    async with ScriptedServer(Reply(404, b"")) as server:
        with pytest.raises(EndpointError, match=rf"ends before /chat/completions: is {server.url} meant\?\)$"):
            await post(f"{server.url}/chat/completions")


@pytest.mark.parametrize(
    ("location", "advice"),
    [
        ("https://there.invalid/v2/chat/completions", "if that is the endpoint, give https://there.invalid/v2 as its"),
        (
            "https://me:secret@there.invalid/login?key=secret",
            "https://there.invalid/login, which are not followed: check",
        ),
        ("", "it sends requests elsewhere, without saying where"),
        ("http://[", "it sends requests elsewhere, without saying where"),
    ],
)
@in_real_time
async def test_where_a_redirection_leads_is_told(location: str, advice: str) -> None:
    async with ScriptedServer(Reply(307, b"307: Temporary Redirect", {"location": location})) as server:
        with pytest.raises(EndpointError) as caught:
            await post(server.url)
        assert advice in str(caught.value)
        assert "answered 307: Temporary Redirect; it sends" in str(caught.value)
        assert "secret" not in str(caught.value)
        assert caught.value.is_wrong_address


@in_real_time
async def test_an_answer_that_breaks_off_is_told_in_words() -> None:
    half = Reply(200, b"{", {"content-length": "99"}, cut=True)
    async with ScriptedServer(half, None) as server:
        with pytest.raises(EndpointUnreachable, match=r"/v1 broke off in the middle of its answer$"):
            await post(server.url)
        with pytest.raises(EndpointUnreachable, match=r"gave no answer: it closed the connection before it answered$"):
            await post(server.url)


@in_real_time
async def test_a_web_page_from_an_api_is_no_wrong_address() -> None:
    async with ScriptedServer(Reply(), Reply(200, PAGE)) as server:
        client = EndpointClient(server.url, None, timeout=5.0, connections=1)
        await client.send("/chat/completions", b"{}")
        with pytest.raises(EndpointError, match=r"a web page \('Not here'\)$"):
            await client.send("/chat/completions", b"{}")
        await client.close()
