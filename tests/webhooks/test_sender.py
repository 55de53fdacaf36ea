"""Sending: what goes over the wire, certificates, limits."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.webhooks.outbox import in_event_loop
from tests.webhooks.receiver import OK, answer, listening

from batchwright.clock import ManualClock
from batchwright.service.webhooks.addresses import AllowList, UrlRefused
from batchwright.service.webhooks.sender import Answer, Sender
from batchwright.testing import play

TLS = ssl.create_default_context()
LOOPBACK = AllowList.parse(["127.0.0.0/8"])


async def loopback(host: str, port: int) -> Sequence[str]:
    return ["127.0.0.1"]


async def send(url: str, *, within: float = 15.0, tls: ssl.SSLContext = TLS) -> Answer:
    sender = Sender(LOOPBACK, resolve=loopback, timeout=within, tls=tls)
    try:
        return await sender.send(url, {"webhook-id": "evt_1"}, b'{"a":1}')
    finally:
        sender.close()


@in_event_loop
async def test_what_the_receiver_gets() -> None:
    async with listening() as receiver:
        sent = await send(f"http://hooks.example:{receiver.port}/take?token=a%20b")
        assert sent == Answer(200, "HTTP 200")
        request = receiver.received[0]
        assert request.line == "POST /take?token=a%20b HTTP/1.1"
        assert request.body == b'{"a":1}'
        assert request.headers["host"] == f"hooks.example:{receiver.port}"
        assert request.headers["webhook-id"] == "evt_1"
        assert request.headers["content-length"] == "7"
        assert request.headers["connection"] == "close"


@pytest.mark.parametrize(
    ("status", "taken"), [(200, True), (204, True), (299, True), (199 + 101, False), (404, False), (500, False)]
)
def test_only_2xx_is_success(status: int, taken: bool) -> None:
    async def main() -> Answer:
        async with listening(lambda number: answer(status)) as receiver:
            return await send(f"http://hooks.example:{receiver.port}/")

    assert asyncio.run(main()) == Answer(status, f"HTTP {status}")
    assert Answer(status, "").taken is taken


def test_an_answer_that_never_comes_is_given_up() -> None:
    async def main() -> Answer:
        async with listening(lambda number: None) as receiver:
            return await send(f"http://hooks.example:{receiver.port}/", within=0.05)

    assert asyncio.run(main()) == Answer(None, "no answer from hooks.example within 0.05 s")


def test_a_name_that_is_never_resolved_is_given_up() -> None:
    async def never(host: str, port: int) -> Sequence[str]:
        await asyncio.Event().wait()
        raise AssertionError

    async def main() -> Answer:
        sender = Sender(tls=TLS, resolve=never, timeout=0.01)
        await sender.check_host("https://hooks.example/")
        return await sender.send("https://hooks.example/", {}, b"{}")

    assert asyncio.run(main()).reason == "no answer from hooks.example within 0.01 s"


def test_the_status_counts_though_the_answer_is_endless_or_breaks_off() -> None:
    huge = b"HTTP/1.1 200 OK\r\ncontent-length: 100000000000\r\n\r\n" + b"x" * 200_000
    broken = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nno chunk"

    async def main(said: bytes) -> Answer:
        async with listening(lambda number: said) as receiver:
            return await send(f"http://hooks.example:{receiver.port}/")

    assert asyncio.run(main(huge)).taken
    assert asyncio.run(main(broken)).taken


def test_headers_without_end_are_not_read_for_ever() -> None:
    async def main() -> Answer:
        async with listening(lambda number: b"HTTP/1.1 200 OK\r\nx: " + b"y" * 1_000_000) as receiver:
            return await send(f"http://hooks.example:{receiver.port}/")

    assert asyncio.run(main()).status is None


def test_nothing_that_the_receiver_said_is_repeated() -> None:
    async def main() -> Answer:
        async with listening(lambda number: b"SSH-2.0-secret banner\r\n\r\n") as receiver:
            return await send(f"http://hooks.example:{receiver.port}/")

    said = asyncio.run(main())
    assert said == Answer(None, "connection to hooks.example failed: RemoteProtocolError")


def test_nobody_there() -> None:
    async def main() -> Answer:
        async with listening() as receiver:
            port = receiver.port
        return await send(f"http://hooks.example:{port}/")

    assert "cannot connect to hooks.example" in asyncio.run(main()).reason


def test_the_next_address_is_tried_when_one_takes_no_connection() -> None:
    async def two(host: str, port: int) -> Sequence[str]:
        return ["127.0.0.3", "127.0.0.1"]

    async def main() -> None:
        async with listening() as receiver:
            sender = Sender(LOOPBACK, resolve=two, tls=TLS)
            assert (await sender.send(f"http://hooks.example:{receiver.port}/", {}, b"{}")).taken
            sender.close()

    asyncio.run(main())


def test_the_system_resolves_where_nothing_else_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        sender = Sender(AllowList.parse(["localhost"]))
        async with listening() as receiver:
            assert (await sender.send(f"http://localhost:{receiver.port}/", {}, b"{}")).taken
        monkeypatch.setattr(socket, "getaddrinfo", unknown)
        said = await sender.send("https://hooks.example/", {}, b"{}")
        assert said.reason == "host hooks.example does not resolve: Name or service not known"
        sender.close()

    def unknown(*question: object, **more: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    asyncio.run(main())


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificate and key for hooks.example, in one file."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the certificate, is not installed")
    file = tmp_path_factory.mktemp("tls") / "hooks.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=hooks.example"
    extension = ["-addext", "subjectAltName=DNS:hooks.example"]
    subprocess.run(
        [*command.split(), *extension, "-keyout", file, "-out", f"{file}.crt"], check=True, capture_output=True
    )
    file.write_bytes(file.read_bytes() + Path(f"{file}.crt").read_bytes())
    return file


def test_tls_is_spoken_with_the_name_and_not_with_the_address(certificate: Path) -> None:
    names: list[str | None] = []

    async def main() -> tuple[Answer, Answer]:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        context.sni_callback = lambda connection, name, _: names.append(name)
        trusting = ssl.create_default_context(cafile=str(certificate))
        async with listening(lambda number: OK, tls=context) as receiver:
            right = await send(f"https://hooks.example:{receiver.port}/", tls=trusting)
            wrong = await send(f"https://other.example:{receiver.port}/", tls=trusting)
            assert len(receiver.received) == 1
            assert receiver.received[0].headers["host"] == f"hooks.example:{receiver.port}"
        return right, wrong

    right, wrong = asyncio.run(main())
    assert right.taken
    assert wrong.status is None
    assert "certificate" in wrong.reason
    assert names == ["hooks.example", "other.example"]


def test_a_certificate_of_nobody_we_know_is_refused(certificate: Path) -> None:
    async def main() -> Answer:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        async with listening(tls=context) as receiver:
            return await send(f"https://hooks.example:{receiver.port}/")

    assert "certificate" in asyncio.run(main()).reason


INSIDE = {
    "private": (["10.1.2.3"], 0.0),
    "loopback": (["127.0.0.1"], 0.0),
    "mixed": (["93.184.216.34", "10.1.2.3"], 0.3),
    "not found": (OSError("Name or service not known"), 0.2),
    "nothing": ([], 0.9),
}


@pytest.mark.parametrize(("found", "seconds"), INSIDE.values(), ids=INSIDE)
def test_a_client_does_not_learn_which_names_there_are_inside(found: list[str] | OSError, seconds: float) -> None:
    async def resolve(host: str, port: int) -> Sequence[str]:
        await asyncio.sleep(seconds)
        if isinstance(found, OSError):
            raise found
        return found

    async def main(clock: ManualClock) -> tuple[str, float]:
        sender = Sender(tls=TLS, resolve=resolve)
        with pytest.raises(UrlRefused) as caught:
            await sender.check_host_for_client("https://db.internal/")
        sender.close()
        return str(caught.value), clock.now()

    assert play(main) == (
        "url: host db.internal cannot be called: use a name that resolves, for anybody, to global addresses only; the "
        "operator may allow others (webhook_allow)",
        1.0,
    )


def test_a_client_waits_for_a_name_no_longer_than_three_seconds() -> None:
    async def never(host: str, port: int) -> Sequence[str]:
        await asyncio.Event().wait()
        raise AssertionError

    async def main(clock: ManualClock) -> float:
        sender = Sender(AllowList.parse(["hooks.internal"]), tls=TLS, resolve=never)
        await sender.check_host_for_client("https://hooks.internal/")
        await sender.check_host_for_client("https://93.184.216.34/")
        with pytest.raises(UrlRefused, match="cannot be called"):
            await sender.check_host_for_client("https://db.internal/")
        sender.close()
        return clock.now()

    assert play(main) == 3.0


def test_a_client_is_told_at_once_of_a_name_that_may_be_called() -> None:
    async def main(clock: ManualClock) -> float:
        sender = Sender(AllowList.parse(["127.0.0.0/8"]), tls=TLS, resolve=loopback)
        await sender.check_host_for_client("https://hooks.example/")
        sender.close()
        return clock.now()

    assert play(main) == 0.0
