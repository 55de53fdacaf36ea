"""The host of a URL: a name, or an IPv4 address in the one spelling that all programs read alike."""

from __future__ import annotations

import re
from ipaddress import AddressValueError, IPv4Address

import idna

from batchwright.errors import InvalidRequest, shown
from batchwright.service.webhooks.addresses import Address

_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")


class UrlRefused(InvalidRequest):
    """A webhook URL that is invalid, or that leads where no webhook may go."""

    code = "url_refused"

    def __init__(self, message: str) -> None:
        super().__init__(message, param="url")


class AddressRefused(UrlRefused):
    """A webhook URL whose host is, or resolves to, an address where no webhook may go."""


def parse_host(text: str) -> tuple[str, Address | None]:
    """Return a host as ASCII in lower case, and as an address where it is one (IPv6 is not read here).

    Raises `UrlRefused`. That includes every other spelling of an IPv4 address.
    """
    name = text.lower() if text.isascii() else _to_ascii(text)
    labels = name.split(".")
    # Resolvers read a name that ends in a number as an IPv4 address, in many spellings: 2130706433, 0x7f.1, 0177.0.1.
    if _NUMBER.fullmatch(labels[-1]):
        try:
            return name, IPv4Address(text)
        except AddressValueError:
            raise UrlRefused(
                f"url: host {shown(text)} ends in a number but is no IPv4 address; write four decimal numbers with dots"
            ) from None
    if len(name) > 253 or not all(map(_LABEL.fullmatch, labels)):
        raise UrlRefused(
            f"url: host {shown(text)} is no host name; write letters, digits and hyphens with single dots between them"
        )
    return name, None


def _to_ascii(text: str) -> str:
    try:
        return idna.encode(text, uts46=True, std3_rules=True).decode().lower()
    except (idna.IDNAError, UnicodeError):
        raise UrlRefused(f"url: host {shown(text)} is no international host name") from None
