"""URLs that webhooks may have, and network addresses that they may go to. Pure: nothing is resolved or opened here.

A registered URL makes this machine send requests to it. So only addresses of the public Internet are accepted, lest a
tenant reach what only this machine can: its own services, its neighbours, the metadata service of its cloud. An address
that contains an IPv4 address for a gateway to extract counts as that IPv4 address. The tables are those of the IANA
special-purpose address registries, since the standard library's depend on its release.

A URL is parsed only here, and connections are made from its parts, so no second parser can read it differently.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Self

import idna

from batchwright.errors import InvalidRequest, shown

Address = IPv4Address | IPv6Address

_IPV4 = {
    IPv4Network(block): name
    for block, name in {
        "0.0.0.0/8": "unspecified",
        "10.0.0.0/8": "private",
        "100.64.0.0/10": "shared behind carrier-grade NAT",
        "127.0.0.0/8": "loopback",
        "168.63.129.16/32": "the host agent of a cloud",
        "169.254.0.0/16": "link-local",
        "172.16.0.0/12": "private",
        "192.0.0.0/24": "reserved for protocols",
        "192.0.2.0/24": "documentation",
        "192.88.99.0/24": "6to4 relays",
        "192.168.0.0/16": "private",
        "198.18.0.0/15": "benchmarking",
        "198.51.100.0/24": "documentation",
        "203.0.113.0/24": "documentation",
        "224.0.0.0/4": "multicast",
        "240.0.0.0/4": "reserved",
    }.items()
}
_IPV6 = {
    IPv6Network(block): name
    for block, name in {
        "::/128": "unspecified",
        "::1/128": "loopback",
        "::/96": "IPv4-compatible",
        "64:ff9b:1::/48": "local NAT64",
        "2001::/32": "Teredo",
        "2001::/23": "reserved for protocols",
        "2001:db8::/32": "documentation",
        "2002::/16": "6to4",
        "3fff::/20": "documentation",
        "fc00::/7": "unique local",
        "fe80::/10": "link-local",
        "fec0::/10": "site-local",
        "ff00::/8": "multicast",
    }.items()
}
_GLOBAL_UNICAST = IPv6Network("2000::/3")
_CARRY_IPV4 = (IPv6Network("::ffff:0:0/96"), IPv6Network("64:ff9b::/96"))
"""Networks of IPv4-mapped and NAT64 addresses. 6to4 and Teredo addresses, which contain one too, are refused."""


def reached(address: Address) -> Address:
    """Return the destination of traffic to `address`: the IPv4 address in a mapped or NAT64 one, else `address`."""
    if isinstance(address, IPv6Address) and any(address in network for network in _CARRY_IPV4):
        return IPv4Address(int(address) & 0xFFFF_FFFF)
    return address


def why_not_global(address: Address) -> str | None:
    """Return the kind of an address that is not global, such as "loopback"; None for a global address."""
    address = reached(address)
    if isinstance(address, IPv4Address):
        return next((name for network, name in _IPV4.items() if address in network), None)
    if address.scope_id is not None:
        return "with a zone"
    special = next((name for network, name in _IPV6.items() if address in network), None)
    return special or (None if address in _GLOBAL_UNICAST else "reserved")


def is_global(address: Address) -> bool:
    """Return whether `address` can be reached on the Internet."""
    return why_not_global(address) is None


def parse_address(text: str) -> Address | None:
    """Parse an address as a resolver returns it; None: it is invalid."""
    try:
        return ip_address(text)
    except ValueError:
        return None


_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")


class UrlRefused(InvalidRequest):
    """A webhook URL that is invalid, or has a destination where no webhook may go."""

    code = "url_refused"

    def __init__(self, message: str) -> None:
        super().__init__(message, param="url")


class AddressRefused(UrlRefused):
    """A webhook URL whose host is, or resolves to, an address where no webhook may go."""


def parse_host(text: str) -> tuple[str, Address | None]:
    """Return a host as ASCII in lower case, and its address if it is an IPv4 address.

    Raises `UrlRefused`, also for an IPv6 address and for any other spelling of an IPv4 address.
    """
    try:
        name = (text if text.isascii() else idna.encode(text, uts46=True, std3_rules=True).decode()).lower()
    except (idna.IDNAError, UnicodeError):
        raise UrlRefused(f"url: host {shown(text)} is no international host name") from None
    labels = name.split(".")
    # Resolvers read names that end in a number as IPv4 addresses, in many spellings: 2130706433, 0x7f.1, 0177.0.1.
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


@dataclass(frozen=True, slots=True)
class AllowList:
    """Hosts and networks that the operator trusts: they need not be global, and may use plain http and any port."""

    hosts: frozenset[str] = frozenset()
    """Host names in lower case, which may resolve to any address."""
    networks: tuple[IPv4Network | IPv6Network, ...] = ()

    @classmethod
    def parse(cls, entries: Iterable[str]) -> Self:
        """Parse entries such as `hooks.internal`, `10.1.0.0/16` and `::1`. Raises `InvalidRequest` for a bad one."""
        hosts: set[str] = set()
        networks: list[IPv4Network | IPv6Network] = []
        for entry in map(str.strip, entries):
            try:
                networks.append(ip_network(entry))
            except ValueError as error:
                try:
                    hosts.add(parse_host(entry)[0])
                except UrlRefused:
                    raise InvalidRequest(
                        f"webhook_allow: {entry!r} is neither a host name nor an address nor a network ({error}); "
                        "write hooks.internal, 10.1.2.3 or 10.1.0.0/16",
                        param="webhook_allow",
                    ) from None
        return cls(frozenset(hosts), tuple(networks))

    def has(self, address: Address) -> bool:
        """Return whether `address`, or the IPv4 address in it, is in a network; False for one with a zone."""
        if isinstance(address, IPv6Address) and address.scope_id is not None:
            return False
        address = reached(address)
        return any(address.version == network.version and address in network for network in self.networks)


LONGEST = 2048
"""Most characters of a URL."""
_PORTS = {"https": 443, "http": 80}
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/?#]*)([^#]*)(#.*)?", re.DOTALL)
_AUTHORITY = re.compile(r"(?:\[([^\[\]]*)\]|([^:\[\]]*))(?::([0-9]{1,5}))?")


@dataclass(frozen=True, slots=True)
class Target:
    """Parts of a webhook's URL."""

    scheme: str
    host: str
    """Host as ASCII in lower case; an IPv6 address has no brackets."""
    port: int
    path: str
    """Path, which begins with a slash, and query."""
    address: Address | None
    """The host as an address; None: it is a name."""

    @property
    def authority(self) -> str:
        """Value of the `Host` header."""
        host = f"[{self.host}]" if isinstance(self.address, IPv6Address) else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def ordinary(self) -> bool:
        """Whether it may be called without an entry in the allow-list: https, at no other service's well-known port."""
        return self.scheme == "https" and (self.port == _PORTS["https"] or self.port >= 1024)


def check_url(url: str, allowed: AllowList) -> Target:
    """Parse a URL and check what can be checked without resolving its host. Raises `UrlRefused`."""
    target = _parse(url)
    if target.host in allowed.hosts:
        return target
    if target.address is not None:
        check_addresses(target, [target.address], allowed)
    elif not allowed.networks:  # otherwise it depends on the addresses of the name
        if f".{target.host}".endswith(".localhost"):
            raise AddressRefused(f"url: host {target.host} is this machine itself; {_remedy(target.host)}")
        if not target.ordinary:
            raise UrlRefused(_not_ordinary(target))
    return target


def check_addresses(target: Target, addresses: Sequence[Address], allowed: AllowList) -> None:
    """Check all addresses of a host, since an attacker may hide a forbidden one among others.

    Raises `UrlRefused`, or `AddressRefused` because of an address.
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
    scheme, authority, path, fragment = parts.groups()
    scheme = scheme.lower()
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
