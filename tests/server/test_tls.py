"""HTTPS by flags, with certificates of a private CA, in one process before and after SIGHUP."""

from __future__ import annotations

import signal
import socket
import ssl
import subprocess
import time
from pathlib import Path

import httpx2
import pytest
import trustme
from tests.server.served import Endpoint, Process, serving

from batchwright.errors import InputError
from batchwright.server.process import tls_of
from batchwright.service.settings import Settings


def _write(authority: trustme.CA, folder: Path) -> tuple[Path, Path]:
    """Write a new certificate for this machine and its key, into the same files each time."""
    issued = authority.issue_cert("localhost", "127.0.0.1")
    chain, key = folder / "chain.pem", folder / "key.pem"
    chain.write_bytes(b"".join(each.bytes() for each in issued.cert_chain_pems))
    key.write_bytes(issued.private_key_pem.bytes())
    return chain, key


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def _connected(url: httpx2.URL, authority: trustme.CA) -> ssl.SSLSocket:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context.wrap_socket(socket.create_connection((url.host, url.port or 443)), server_hostname="localhost")


def _health(connection: ssl.SSLSocket) -> bytes:
    connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
    answer = b""
    while not answer.endswith(b"}"):
        answer += connection.recv(65_536)
    return answer


def _logged(log: list[dict[str, str]], event: str, process: Process) -> dict[str, str]:
    while process.poll() is None:
        for each in log:
            if each["event"] == event:
                return each
        time.sleep(0.02)
    raise AssertionError(f"the service ended before it logged {event}")


def test_new_connections_get_the_new_certificate_and_a_bad_one_is_not_taken(
    tmp_path: Path, endpoint: Endpoint, authority: trustme.CA
) -> None:
    chain, key = _write(authority, tmp_path)
    flags = ("--backend", endpoint.url, "--tls-cert", str(chain), "--tls-key", str(key))
    with serving(tmp_path, *flags, fork=True) as (process, address, log):
        url = httpx2.URL(address)
        assert url.scheme == "https"
        old = _connected(url, authority)
        first = old.getpeercert(binary_form=True)
        assert _health(old).startswith(b"HTTP/1.1 200 ")
        _check_strangers(url, authority)
        _write(authority, tmp_path)
        process.send_signal(signal.SIGHUP)
        _logged(log, "certificate_loaded", process)
        with _connected(url, authority) as new:
            second = new.getpeercert(binary_form=True)
            assert second != first
            assert _health(new).startswith(b"HTTP/1.1 200 ")
        key.write_text("no key")
        process.send_signal(signal.SIGHUP)
        assert "key.pem" in _logged(log, "certificate_kept", process)["error"]
        with _connected(url, authority) as new:
            assert new.getpeercert(binary_form=True) == second
        # The old connection was never dropped.
        assert _health(old).startswith(b"HTTP/1.1 200 ")
        old.close()
        with socket.create_connection((url.host, url.port or 0)) as plain:
            plain.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert not plain.recv(65_536).startswith(b"HTTP/1.1 200")
        process.send_signal(signal.SIGTERM)
    assert process.returncode == 0
    assert not [each for each in log if "exception" in each]


def _check_strangers(url: httpx2.URL, authority: trustme.CA) -> None:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    own, other = f"https://{url.host}:{url.port}", f"https://evil.example:{url.port}"
    with httpx2.Client(base_url=url, verify=context) as http:
        assert http.get("/v1/models", headers={"origin": own}).status_code == 200
        assert http.get("/v1/models", headers={"origin": other}).status_code == 403
        assert http.get("/v1/models", headers={"host": "evil.example"}).status_code == 403


def test_what_is_wrong_with_a_certificate_is_one_line_that_names_it(tmp_path: Path, authority: trustme.CA) -> None:
    chain, key = _write(authority, tmp_path)
    other = tmp_path / "other.pem"
    other.write_bytes(authority.issue_cert("localhost").private_key_pem.bytes())
    locked = tmp_path / "locked.pem"
    subprocess.run(
        ["openssl", "pkcs8", "-topk8", "-v2", "aes256", "-passout", "pass:x", "-in", key, "-out", locked], check=True
    )
    rubbish = tmp_path / "rubbish.pem"
    rubbish.write_text("rubbish")
    for cert, secret, told in (
        (chain, other, "the key is not that of tls_cert"),
        (chain, tmp_path / "none.pem", "none.pem': the file cannot be read (No such file or directory)"),
        (tmp_path, key, "the file cannot be read (Is a directory)"),
        (chain, locked, "the key has a password"),
        (rubbish, key, "not a certificate"),
        (chain, rubbish, "not a certificate"),
        (chain, None, "give its key, too"),
        (None, key, "give its certificate, too"),
    ):
        with pytest.raises(InputError) as caught:
            tls_of(Settings(tls_cert=cert, tls_key=secret))
        assert told in str(caught.value)
        assert "\n" not in str(caught.value)
    assert tls_of(Settings()) is None
