"""The certificate of the service: read at the start, and again at SIGHUP."""

from __future__ import annotations

import ssl
from pathlib import Path

from batchwright.errors import InputError
from batchwright.service.settings import Settings


def tls_of(settings: Settings) -> ssl.SSLContext | None:
    """What the settings say; None: plain HTTP. Raises `InputError` in one line for what cannot be used."""
    certificate, key = settings.tls_cert, settings.tls_key
    if certificate is None and key is None:
        return None
    if certificate is None:
        raise InputError(f"tls_key={str(key)!r}: give its certificate, too, as tls_cert (--tls-cert)")
    if key is None:
        raise InputError(f"tls_cert={str(certificate)!r}: give its key, too, as tls_key (--tls-key)")
    return server_context(certificate, key)


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """What connections are made with. Raises `InputError` in one line for a pair that cannot be used."""
    _readable("tls_cert", certificate)
    _readable("tls_key", key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except _Encrypted:
        raise InputError(f"tls_key={str(key)!r}: the key has a password; give one without") from None
    except ssl.SSLError as error:
        raise InputError(_why(certificate, key, error)) from error
    return context


class _Encrypted(Exception):
    pass


def _no_password() -> str:
    # Left out, OpenSSL would ask for it on the terminal.
    raise _Encrypted


def _readable(setting: str, path: Path) -> None:
    try:
        path.read_bytes()
    except OSError as error:
        raise InputError(f"{setting}={str(path)!r}: the file cannot be read ({error.strerror})") from error


def _why(certificate: Path, key: Path, error: ssl.SSLError) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return f"tls_key={str(key)!r}: the key is not that of tls_cert={str(certificate)!r}"
    return (
        f"tls_cert={str(certificate)!r}, tls_key={str(key)!r}: not a certificate (with its chain) and its key, both in "
        f"PEM ({error.reason or error})"
    )
