"""Which addresses of the network a webhook may go to. Pure: nothing is resolved or opened here.

Whoever registers a URL makes this machine send a request to it. So only addresses of the public Internet are taken,
lest a tenant reach what only this machine can: its own services, its neighbours, the metadata service of its cloud. An
address that carries an IPv4 address for a gateway to unpack counts as that IPv4 address. Tables: the IANA
special-purpose address registries, kept here since the standard library's knowledge of them depends on its release.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

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
"""Networks of IPv4-mapped and NAT64 addresses. 6to4 and Teredo, which carry one too, are always refused."""


def reached(address: Address) -> Address:
    """Return where traffic to `address` ends: the IPv4 address within a mapped or NAT64 one, else itself."""
    if isinstance(address, IPv6Address) and any(address in network for network in _CARRY_IPV4):
        return IPv4Address(int(address) & 0xFFFF_FFFF)
    return address


def why_not_global(address: Address) -> str | None:
    """Return the kind of an address that is not global, such as "loopback"; None for a global one."""
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
    """Return an address as a resolver gives it; None for an invalid one."""
    try:
        return ip_address(text)
    except ValueError:
        return None
