"""Places of connections, which one gets or gives up a place, against a model with a plain list."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from batchwright.server.connections.connection_places import ConnectionPlaces, NoPlace, default_places, origin_of

_HOSTS = ("10.0.0.1", "10.0.0.2", "2001:db8::1", "2001:db8::2", "127.0.0.1")
_MOST, _MOST_OF_ONE = 8, 3


class PlacesMachine(RuleBasedStateMachine):
    """A machine whose connections are numbers; the model knows their addresses, and how long each is idle."""

    def __init__(self) -> None:
        super().__init__()
        self.places: ConnectionPlaces[int] = ConnectionPlaces(_MOST, _MOST_OF_ONE)
        self.address: dict[int, str] = {}
        self.idle: list[int] = []
        self.number = 0

    @rule(host=st.sampled_from(_HOSTS))
    def connect(self, host: str) -> None:
        address = origin_of(host)
        here = [each for each in self.address if self.address[each] == address]
        full = len(here) >= _MOST_OF_ONE
        candidates = [each for each in self.idle if each in here] if full else self.idle
        if not candidates and (full or len(self.address) >= _MOST):
            with pytest.raises(NoPlace) as refused:
                self.places.make_room(host)
            assert refused.value.code == ("too_many_connections_from_address" if full else "too_many_connections")
            return
        evicted = self.places.make_room(host)
        if evicted is not None:
            assert full or len(self.address) >= _MOST
            theirs = self.address[evicted]
            assert evicted == next(each for each in candidates if self.address[each] == theirs)
            assert self._open(theirs) == max(self._open(self.address[each]) for each in candidates)
            self._drop(evicted)
        self.number += 1
        self.places.add(self.number, host)
        self.address[self.number] = address
        self.idle.append(self.number)

    @precondition(lambda self: self.address)
    @rule(data=st.data())
    def begin_request(self, data: st.DataObject) -> None:
        connection = data.draw(st.sampled_from(sorted(self.address)))
        self.places.busy(connection)
        if connection in self.idle:
            self.idle.remove(connection)

    @precondition(lambda self: self.address)
    @rule(data=st.data())
    def end_request(self, data: st.DataObject) -> None:
        connection = data.draw(st.sampled_from(sorted(self.address)))
        self.places.free(connection)
        if connection not in self.idle:
            self.idle.append(connection)

    @rule(connection=st.integers(0, 30))
    def close(self, connection: int) -> None:
        self.places.remove(connection)
        if connection in self.address:
            self._drop(connection)

    @invariant()
    def counts_agree(self) -> None:
        assert len(self.places) == len(self.address) <= _MOST
        assert self.places.idle == len(self.idle)
        assert all(self._open(each) <= _MOST_OF_ONE for each in self.address.values())

    def _open(self, address: str) -> int:
        return list(self.address.values()).count(address)

    def _drop(self, connection: int) -> None:
        del self.address[connection]
        if connection in self.idle:
            self.idle.remove(connection)


TestPlaces = PlacesMachine.TestCase
TestPlaces.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8::1:2:3:4", "2001:db8::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_an_address_is_that_of_one_client(host: str, origin: str) -> None:
    assert origin_of(host) == origin


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "::ffff:127.0.0.1"])
def test_this_machine_may_take_every_place_unless_a_number_says_otherwise(host: str) -> None:
    told: ConnectionPlaces[int] = ConnectionPlaces(8, 2)
    untold: ConnectionPlaces[int] = ConnectionPlaces(8)
    for number in range(8):
        assert untold.make_room(host) is None
        untold.add(number, host)
    for number in range(2):
        assert told.make_room(host) is None
        told.add(number, host)
    assert told.make_room(host) == 0


def test_another_address_may_take_a_quarter() -> None:
    places: ConnectionPlaces[int] = ConnectionPlaces(8)
    for number in range(2):
        assert places.make_room("10.0.0.1") is None
        places.add(number, "10.0.0.1")
    assert places.make_room("10.0.0.1") == 0
    assert places.make_room("10.0.0.2") is None


@pytest.mark.parametrize(
    ("descriptors", "upstream", "places"),
    [(1024, 0, 672), (1024, 64, 624), (65_536, 64, 8192), (256, 64, 48), (64, 0, 16)],
)
def test_descriptors_are_left_for_the_rest_of_the_service(descriptors: int, upstream: int, places: int) -> None:
    assert default_places(descriptors, upstream=upstream) == places
