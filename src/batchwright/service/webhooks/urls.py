"""The form of a webhook's URL, and whether its destination may be called. Pure: nothing is resolved here.

The URL is taken apart here and nowhere else: what is connected to later is made of these parts, so there is no second
reading of it that could differ.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv6Address

from batchwright.errors import shown
from batchwright.service.webhooks.addresses import (
    Address,
    AddressRefused,
    AllowList,
    UrlRefused,
    parse_host,
    why_not_global,
)

LONGEST = 2048
"""Most characters of a URL."""
_PORTS = {"https": 443, "http": 80}
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/?#]*)([^#]*)(#.*)?", re.DOTALL)
_AUTHORITY = re.compile(r"(?:\[([^\[\]]*)\]|([^:\[\]]*))(?::([0-9]{1,5}))?")


@dataclass(frozen=True, slots=True)
class Target:
    """A webhook's URL, taken apart."""

    scheme: str
    host: str
    """ASCII in lower case; an IPv6 address without brackets."""
    port: int
    path: str
    """Path with the query, from its slash on."""
    address: Address | None
    """Address of the host, where it is one and no name."""

    @property
    def authority(self) -> str:
        """Value of the `Host` header."""
        host = f"[{self.host}]" if isinstance(self.address, IPv6Address) else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def ordinary(self) -> bool:
        """Whether it is https, at a port that no other well-known service has: allowed without the allow-list."""
        return self.scheme == "https" and (self.port == _PORTS["https"] or self.port >= 1024)


def check_url(url: str, allowed: AllowList) -> Target:
    """Take a URL apart, and refuse what can be refused without resolving its host. Raises `UrlRefused`."""
    target = _parse(url)
    if target.host in allowed.hosts:
        return target
    if target.address is not None:
        check_addresses(target, [target.address], allowed)
    elif not allowed.networks:  # otherwise it depends on what the name resolves to
        if f".{target.host}".endswith(".localhost"):
            raise AddressRefused(f"url: host {target.host} is this machine itself; {_remedy(target.host)}")
        if not target.ordinary:
            raise UrlRefused(_not_ordinary(target))
    return target


def check_addresses(target: Target, addresses: Sequence[Address], allowed: AllowList) -> None:
    """Refuse a host any of whose addresses may not be called: one bad among several is how a name is turned against us.

    Raises `UrlRefused`, for an address `AddressRefused`.
    """
    if target.host in allowed.hosts:
        return
    for address in addresses:
        if allowed.has(address):
            continue
        kind = why_not_global(address)
        if kind is not None:
            where = f"host {target.host}" if target.address else f"host {target.host} resolves to {address}, which"
            raise AddressRefused(f"url: {where} is not a global address ({kind}); {_remedy(target.host)}")
        if not target.ordinary:
            raise UrlRefused(_not_ordinary(target))


def _not_ordinary(target: Target) -> str:
    if target.scheme != "https":
        return f"url: scheme {target.scheme!r} is not encrypted; use https, or {_remedy(target.host)}"
    return f"url: port {target.port} belongs to other services; use 443 or one from 1024 on, or {_remedy(target.host)}"


def _remedy(host: str) -> str:
    return f"have the operator name {host} in webhook_allow if it is meant"


def _parse(url: str) -> Target:
    if len(url) > LONGEST:
        raise UrlRefused(f"url: has {len(url)} characters; at most {LONGEST} are taken")
    if bad := next((char for char in url if char <= " " or char in "\\\x7f"), None):
        raise UrlRefused(f"url: contains {bad!r}; percent-encode it")
    parts = _URL.fullmatch(url)
    if parts is None:
        raise UrlRefused(f"url: {shown(url)} is no absolute URL; write https://host/path")
    scheme, authority, path, fragment = parts[1].lower(), parts[2], parts[3], parts[4]
    if scheme not in _PORTS:
        raise UrlRefused(f"url: scheme {scheme[:20]!r} is none that webhooks are sent by; use https")
    if "@" in authority:
        raise UrlRefused("url: contains credentials; leave them out, the signature says who sends")
    if fragment is not None:
        raise UrlRefused("url: contains a fragment, which is never sent; leave out what follows '#'")
    if not path.isascii():
        raise UrlRefused("url: the path contains characters outside ASCII; percent-encode them")
    host_and_port = _AUTHORITY.fullmatch(authority)
    if host_and_port is None:
        raise UrlRefused(f"url: {shown(authority)} is no host with an optional port; write host or host:port")
    bracketed, name, digits = host_and_port.groups()
    port = _PORTS[scheme] if digits is None else int(digits)
    if not 1 <= port <= 65_535:
        raise UrlRefused(f"url: port {port} does not exist; use one of 1 to 65535")
    host, address = _ipv6(bracketed) if bracketed is not None else parse_host(name)
    return Target(scheme, host, port, path if path.startswith("/") else f"/{path}", address)


def _ipv6(text: str) -> tuple[str, Address]:
    try:
        address = IPv6Address(text)
    except AddressValueError:
        raise UrlRefused(f"url: '[{text[:60]}]' is no IPv6 address") from None
    if address.scope_id is not None:
        raise UrlRefused(f"url: '[{text[:60]}]' names a zone of this machine; write a global address without '%'")
    return str(address), address
