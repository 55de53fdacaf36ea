"""Limits on the number of connections, in total and per address, and which connection gives way to a new one.

A connection without a request under way costs its client nothing, so it has no right to its place: when all places are
taken, one such connection is closed for a newcomer. A newcomer is refused only when every place has a request.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from batchwright.limiting.turns import Turns

_C = TypeVar("_C", bound=Hashable)

_RESERVED = 128
"""Descriptors for the database, the model, webhooks, logs and the listener."""
_SHARE = 0.75
"""Share of the other descriptors for connections: a request may need a second one, for a file that it transfers."""
_FEWEST, _MOST = 16, 8192
_PART_OF_ONE_ADDRESS = 4


class NoPlace(Exception):
    """A connection was refused, as every place has a request under way. `code` says which limit is reached."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


def default_places(descriptors: int, *, upstream: int) -> int:
    """Return how many connections to accept with `descriptors`, of which `upstream` may go to an endpoint."""
    return min(max(int((descriptors - _RESERVED - upstream) * _SHARE), _FEWEST), _MOST)


@dataclass(slots=True)
class _Address(Generic[_C]):
    open: int = 0
    idle: dict[_C, None] = field(default_factory=dict)
    """Connections without a request under way, the longest idle first."""


class ConnectionPlaces(Generic[_C]):
    """Open connections by address. A new one is idle until `busy` is called."""

    def __init__(self, most: int, most_of_one_address: int | None = None) -> None:
        """`most_of_one_address`: None for a quarter of `most`, but no limit for loopback, where a proxy may run."""
        self.most = most
        self._most_of_one = most_of_one_address
        self._address_of: dict[_C, str] = {}
        self._by_address: dict[str, _Address[_C]] = {}
        self._idle: Turns[str] = Turns(lambda name: (-self._by_address[name].open,))
        """Addresses with idle connections, the one with most connections first."""

    def __len__(self) -> int:
        return len(self._address_of)

    @property
    def idle(self) -> int:
        """Number of connections without a request under way."""
        return sum(len(each.idle) for each in self._by_address.values())

    def make_room(self, host: str) -> _C | None:
        """Remove and return the connection to be closed for one from `host`; None: there is room.

        At the limit of an address, its own longest idle connection gives way; at the limit of all, the longest idle one
        of the address with most connections. Raises `NoPlace` when none is idle.
        """
        here = self._by_address.get(origin_of(host))
        most = self._limit_of(host)
        if here is not None and most is not None and here.open >= most:
            if not here.idle:
                raise NoPlace(
                    f"{most} connections from this address have requests under way, which is the most: try again later",
                    "too_many_connections_from_address",
                )
            return self._give_up(here)
        if len(self) < self.most:
            return None
        if not len(self._idle):
            raise NoPlace(
                f"{self.most} connections have requests under way, which is the most: try again later",
                "too_many_connections",
            )
        return self._give_up(self._by_address[self._idle.first()])

    def add(self, connection: _C, host: str) -> None:
        """Give a place to a connection from `host`, after `make_room`."""
        name = origin_of(host)
        address = self._by_address.setdefault(name, _Address())
        address.open += 1
        address.idle[connection] = None
        self._address_of[connection] = name
        self._idle.offer(name)

    def busy(self, connection: _C) -> None:
        """Note that a request is under way, so that the connection keeps its place. Does nothing when it has none."""
        name = self._address_of.get(connection)
        if name is not None:
            address = self._by_address[name]
            address.idle.pop(connection, None)
            if not address.idle:
                self._idle.remove(name)

    def free(self, connection: _C) -> None:
        """Note that no request is under way any more. Does nothing when the connection has no place."""
        name = self._address_of.get(connection)
        if name is not None:
            self._by_address[name].idle.setdefault(connection)
            self._idle.offer(name)

    def remove(self, connection: _C) -> None:
        """Take away the place of a closed connection. Does nothing when it has none."""
        name = self._address_of.pop(connection, None)
        if name is None:
            return
        address = self._by_address[name]
        address.open -= 1
        address.idle.pop(connection, None)
        if not address.idle:
            self._idle.remove(name)
        if not address.open:
            del self._by_address[name]

    def _give_up(self, address: _Address[_C]) -> _C:
        connection = next(iter(address.idle))
        self.remove(connection)
        return connection

    def _limit_of(self, host: str) -> int | None:
        if self._most_of_one is not None:
            return self._most_of_one
        address = _parsed(host)
        loopback = address is not None and address.is_loopback
        return None if loopback else max(1, self.most // _PART_OF_ONE_ADDRESS)


def origin_of(host: str) -> str:
    """Return the IPv4 address, or the /64 network of an IPv6 address, which one client may have as a whole."""
    address = _parsed(host)
    if isinstance(address, ipaddress.IPv6Address):
        return str(ipaddress.IPv6Network((address, 64), strict=False))
    return host if address is None else str(address)


def _parsed(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
