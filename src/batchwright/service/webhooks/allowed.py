"""Destinations outside of the public Internet that the operator allows for webhooks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_network
from typing import Self

from batchwright.errors import InvalidRequest
from batchwright.service.webhooks.addresses import Address, reached
from batchwright.service.webhooks.hosts import UrlRefused, parse_host


@dataclass(frozen=True, slots=True)
class AllowList:
    """Hosts and networks that the operator trusts: they need not be global, and plain http and any port will do."""

    hosts: frozenset[str] = frozenset()
    """Host names in lower case. Whatever they resolve to is accepted."""
    networks: tuple[IPv4Network | IPv6Network, ...] = ()

    @classmethod
    def parse(cls, entries: Iterable[str]) -> Self:
        """Parse entries such as `hooks.internal`, `10.1.0.0/16` and `::1`. Raises `InvalidRequest` naming a bad one."""
        hosts: set[str] = set()
        networks: list[IPv4Network | IPv6Network] = []
        for entry in map(str.strip, entries):
            try:
                networks.append(ip_network(entry))
            except ValueError as error:
                hosts.add(_host(entry, error))
        return cls(frozenset(hosts), tuple(networks))

    def has(self, address: Address) -> bool:
        """Return whether `address`, or the IPv4 address within it, lies in a network. None with a zone does."""
        if isinstance(address, IPv6Address) and address.scope_id is not None:
            return False
        address = reached(address)
        return any(address.version == network.version and address in network for network in self.networks)


def _host(entry: str, not_a_network: ValueError) -> str:
    try:
        return parse_host(entry)[0]
    except UrlRefused:
        raise InvalidRequest(
            f"webhook_allow: {entry!r} is neither a host name nor an address nor a network ({not_a_network}); "
            "write hooks.internal, 10.1.2.3 or 10.1.0.0/16",
            param="webhook_allow",
        ) from None
