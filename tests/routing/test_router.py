"""Which replica computes what: any history of requests, answers, deaths and returns keeps the promises."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.long_form import examples

from batchwright.request import Traffic
from batchwright.routing.prefixes import KEY_TOKENS
from batchwright.routing.router import Capacity, Router
from batchwright.routing.work import Work

MOST_DEATHS = 3
SMALL = Capacity(places=4, kv_tokens=4096)


def line(tokens: int = 100, group: int | None = None, keys: int = 8, limit: int = 16) -> Work:
    prefixes = () if group is None else tuple(group * 1000 + each for each in range(keys))
    return Work(tokens, limit, prefixes=prefixes)


def joined(*replicas: int, capacity: Capacity = SMALL) -> Router[str]:
    router = Router[str](most_deaths=MOST_DEATHS)
    for each in replicas:
        router.join(each, capacity)
    return router


def test_lines_with_a_common_prefix_go_together_until_it_is_not_worth_it() -> None:
    router = joined(0, 1)
    work = line(8 * KEY_TOKENS + 10, group=1)
    for number in range(4):
        router.submit(f"a{number}", work)
    assert {replica for _, replica in router.assign(0.0)} == {0}
    for number in range(40):
        router.submit(f"online {number}", replace(work, traffic="online"))
    assert {replica for _, replica in router.assign(0.0)} == {0, 1}  # somebody waits for each


def test_a_prefix_is_computed_again_when_lines_would_wait_many_times_longer() -> None:
    router = joined(0, 1)
    for number in range(1000):
        router.submit(str(number), line(8 * KEY_TOKENS + 10, group=1))
    where = [router._items[key].replica for key, _ in router.waiting]
    assert set(where[:250]) == {0}
    assert set(where[250:]) == {0, 1}


def test_groups_are_spread() -> None:
    router = joined(0, 1, 2, 3)
    for group in range(4):
        for number in range(3):
            router.submit(f"{group}-{number}", line(8 * KEY_TOKENS + 10, group=group))
    where: dict[str, set[int]] = {}
    for key, replica in router.assign(0.0):
        where.setdefault(key[0], set()).add(replica)
    assert sorted(map(sorted, where.values())) == [[0], [1], [2], [3]]


def test_an_idle_replica_takes_the_longest_line_that_waits() -> None:
    router = joined(0)
    for number, tokens in enumerate((50, 50, 50, 50, 50, 100, 300, 200)):
        router.submit(str(number), line(tokens))
    router.assign(0.0)
    router.join(1, Capacity(1, 4096))
    assert [key for key, _ in router.assign(0.0)] == ["6", "7"]  # its place, and one ahead


def test_a_faster_replica_gets_more() -> None:
    router = joined(0, 1, capacity=Capacity(100, 10**6))
    router.learn(0, 0.001, 0.003)
    router.learn(1, 0.003, 0.009)
    for number in range(40):
        router.submit(str(number), line())
    counts = [0, 0]
    for _, replica in router.assign(0.0):
        counts[replica] += 1
    assert counts == [30, 10]


def test_online_requests_are_sent_at_once_and_to_the_one_with_fewest() -> None:
    router = joined(0, 1)
    for number in range(20):
        router.submit(f"line {number}", line())
    router.assign(0.0)
    for number in range(8):
        router.submit(f"online {number}", Work(10, 16, traffic="online"))
    sent = router.assign(0.0)
    assert len(sent) == 8
    assert sorted(replica for _, replica in sent) == [0] * 4 + [1] * 4


def test_better_priorities_go_first() -> None:
    router = joined(0)
    for number in range(10):
        router.submit(f"usual {number}", line())
    router.submit("urgent", Work(100, 16, priority=1))
    assert router.assign(0.0)[0] == ("urgent", 0)


def test_a_line_that_kills_is_found_and_all_others_are_answered() -> None:
    router = Router[int](most_deaths=MOST_DEATHS)
    capacity = Capacity(64, 10**6)
    for replica in range(3):
        router.join(replica, capacity)
    for number in range(300):
        router.submit(number, line())
    failed: list[int] = []
    answered: list[int] = []
    deaths = 0
    computing: dict[int, int] = {}
    while len(router):
        computing |= dict(router.assign(float(deaths)))
        deadly = computing.pop(77, None)
        if deadly is None:
            key = next(iter(computing))
            router.finish(key, 8)
            del computing[key]
            answered.append(key)
            continue
        deaths += 1
        failed += router.leave(deadly, float(deaths))
        computing = {key: replica for key, replica in computing.items() if replica != deadly}
        router.join(deadly, capacity)
    assert (failed, deaths) == ([77], MOST_DEATHS)
    assert sorted(answered) == [number for number in range(300) if number != 77]


def test_suspects_get_an_emptied_replica_if_none_is_idle() -> None:
    router = joined(0, 1)
    for number in range(100):
        router.submit(str(number), line())
    sent = router.assign(0.0)
    assert router.leave(1, 0.0) == []
    mine = [key for key, replica in sent if replica == 0]
    suspects = {key for key, replica in sent if replica == 1}
    for key in mine:
        assert suspects.isdisjoint(key for key, _ in router.assign(30.0))
        router.finish(key, 8)
        mine += [key for key, _ in router.assign(30.0)]
        if len(mine) > 20:
            break
    held = router.replicas[0]
    assert router.assign(70.0) == []
    for key in mine[-held:]:
        router.finish(key, 8)
        if key != mine[-1]:
            assert router.assign(70.0) == []
    assert {key for key, _ in router.assign(70.0)} < suspects


def _beside_online_requests(deadly: str | None) -> tuple[list[str], list[str], int]:
    """Answer 12 lines on the only replica, on which always two online requests are being computed, and which died once.

    It dies 1 s after it was sent the line `deadly`. Returns the lines and requests that were answered, those that
    failed, and the number of deaths.
    """
    router, now, deaths = joined(0), 0.0, 0
    answered, failed, computing = list[str](), list[str](), dict[str, float]()
    for number in range(12):
        router.submit(f"line {number}", line())
    asked = 0
    while now < 4000.0 and len({key for key in [*answered, *failed] if key.startswith("line")}) < 12:
        while asked - sum(key.startswith("online") for key in [*answered, *failed]) < 2:
            router.submit(f"online {asked}", replace(line(), traffic="online"))
            asked += 1
        for key, _ in router.assign(now):
            # The two online requests end at different times, so that the replica is never empty.
            computing[key] = now + (7.0 + int(key.split()[1]) % 2 if key.startswith("online") else 3.0)
        now += 1.0
        if (deaths == 0 and now > 2.0) or deadly in computing:
            deaths += 1
            failed += router.leave(0, now)
            computing.clear()
            router.join(0, SMALL)
            continue
        for key in [key for key, ends in computing.items() if ends <= now]:
            router.finish(key, 8)
            del computing[key]
            answered.append(key)
    return answered, failed, deaths


def test_suspects_are_tried_beside_online_requests_that_do_not_end() -> None:
    answered, failed, deaths = _beside_online_requests(None)
    assert {key for key in answered if key.startswith("line")} == {f"line {number}" for number in range(12)}
    assert (failed, deaths) == ([], 1)


def test_a_fatal_line_is_found_beside_online_requests_that_do_not_end() -> None:
    answered, failed, deaths = _beside_online_requests("line 5")
    assert {key for key in answered if key.startswith("line")} == {f"line {each}" for each in range(12) if each != 5}
    assert failed == ["line 5"]
    assert deaths <= MOST_DEATHS + 2


def test_a_fatal_online_request_fails_and_not_the_line_beside_it() -> None:
    router = joined(0)
    router.submit("online", replace(line(), traffic="online"))
    router.submit("line", line())
    for death in range(MOST_DEATHS):
        now = 1000.0 * death
        sent = [*router.assign(now), *router.assign(now + 400.0), *router.assign(now + 470.0)]
        assert {key for key, _ in sent} == {"online", "line"}
        failed = router.leave(0, now + 471.0)
        router.join(0, SMALL)
    assert failed == ["online"]
    assert [key for key, _ in router.assign(9000.0)] == ["line"]
    router.finish("line", 8)


def test_a_line_does_not_fail_for_a_fatal_request_that_came_at_its_last_try() -> None:
    router = joined(0)
    for name in "abc":
        router.submit(name, line())
    now = 0.0
    for _ in range(MOST_DEATHS - 1):
        assert router.assign(now)
        assert router.leave(0, now) == []
        router.join(0, SMALL)
    router.submit("fatal", replace(line(), traffic="online"))
    for _ in range(2 * MOST_DEATHS):
        now += 1000.0
        if not (router.assign(now) + router.assign(now + 400.0) + router.assign(now + 470.0)):
            break
        computing = [key for key, item in router._items.items() if item.is_sent]
        if "fatal" not in computing:
            break
        assert set(router.leave(0, now + 500.0)) <= {"fatal"}
        router.join(0, SMALL)
    assert set(router._items) == {"a", "b", "c"}


def test_a_suspect_of_many_sequences_is_tried_beside_online_requests() -> None:
    router = joined(0)
    router.submit("wide", replace(line(), sequences=4))
    router.assign(0.0)
    router.leave(0, 0.0)
    router.join(0, SMALL)
    for name in ("one", "two"):
        router.submit(name, replace(line(), traffic="online"))
    assert {key for key, _ in router.assign(1.0)} == {"one", "two"}
    assert [router.assign(now) for now in (100.0, 110.0)] == [[], []]
    assert [key for key, _ in router.assign(161.0)] == ["wide"]


def test_what_is_no_use_is_refused() -> None:
    router = joined(0)
    router.submit("a", line())
    with pytest.raises(ValueError, match="has not ended"):
        router.submit("a", line())
    with pytest.raises(ValueError, match="no replica"):
        router.finish("a")
    with pytest.raises(ValueError, match="new replica"):
        router.join(0, SMALL)
    with pytest.raises(ValueError, match="most_deaths=1"):
        Router(most_deaths=1)


class Histories(RuleBasedStateMachine):
    """A router beside a model of it that only knows who computes what."""

    @initialize(replicas=st.integers(0, 4))
    def begin(self, replicas: int) -> None:
        self.router = Router[int](most_deaths=MOST_DEATHS)
        self.now = 0.0
        self.count = 0
        self.works: dict[int, Work] = {}
        self.computing: dict[int, int] = {}
        self.deaths: dict[int, int] = {}
        self.up: set[int] = set()
        for replica in range(replicas):
            self.join(replica)

    def join(self, replica: int) -> None:
        self.router.join(replica, SMALL)
        self.up.add(replica)

    @rule(
        tokens=st.integers(1, 3000),
        group=st.none() | st.integers(0, 3),
        traffic=st.sampled_from(["batch", "batch", "batch", "online"]),
        sequences=st.integers(1, 6),
    )
    def submit(self, tokens: int, group: int | None, traffic: Traffic, sequences: int) -> None:
        prefixes = () if group is None else tuple(group * 1000 + each for each in range(tokens // KEY_TOKENS))
        self.works[self.count] = Work(tokens, 16, sequences, prefixes, traffic)
        self.router.submit(self.count, self.works[self.count])
        self.count += 1

    @rule(later=st.sampled_from([0.0, 1.0, 100.0]))
    def assign(self, later: float) -> None:
        self.now += later
        for key, replica in self.router.assign(self.now):
            assert key in self.works
            assert key not in self.computing
            assert replica in self.up
            self.computing[key] = replica
        self.settled()

    def settled(self) -> None:
        """After an assignment, nobody idles while there is something that it may do, and none is overfull."""
        waiting = [key for key in self.works if key not in self.computing]
        held: dict[int, list[int]] = {replica: [] for replica in self.up}
        for key, replica in self.computing.items():
            held[replica].append(key)
        if waiting:
            assert all(held.values())
        assert all(self.works[key].traffic == "batch" for key in waiting if self.up)
        for keys in held.values():
            lines = [key for key in keys if self.works[key].traffic == "batch"]
            sequences = sum(self.works[key].sequences for key in lines)
            assert len(lines) <= 1 or sequences <= SMALL.most_sent
            if any(self.deaths.get(key) for key in lines):  # suspects have no other lines beside them
                assert all(self.deaths.get(key) for key in lines)

    @precondition(lambda self: self.computing)
    @rule(data=st.data(), tokens=st.none() | st.integers(0, 16))
    def finish(self, data: st.DataObject, tokens: int | None) -> None:
        key = data.draw(st.sampled_from(sorted(self.computing)))
        self.router.finish(key, tokens)
        del self.computing[key], self.works[key]

    @precondition(lambda self: self.computing)
    @rule(data=st.data())
    def recall(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.computing)))
        self.router.recall(key)
        del self.computing[key]

    @precondition(lambda self: self.works)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.works)))
        self.router.withdraw(key)
        self.computing.pop(key, None)
        del self.works[key]

    @precondition(lambda self: self.up)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        replica = data.draw(st.sampled_from(sorted(self.up)))
        lost = [key for key, where in self.computing.items() if where == replica]
        traffics = {key: self.works[key].traffic for key in lost}
        failed = self.router.leave(replica, self.now)
        self.up.discard(replica)
        for key in lost:
            del self.computing[key]
            self.deaths[key] = self.deaths.get(key, 0) + 1
        for key in failed:
            assert key in lost
            assert self.deaths[key] >= MOST_DEATHS
            if self.works[key].traffic == "batch":
                beside = [each for each in lost if each != key]
                assert all(traffics[each] == "online" and self.deaths[each] < self.deaths[key] for each in beside)
            del self.works[key]

    @precondition(lambda self: len(self.up) < 4)
    @rule()
    def return_one(self) -> None:
        self.join(min(set(range(4)) - self.up))

    @invariant()
    def nothing_is_lost(self) -> None:
        assert len(self.router) == len(self.works)
        assert {key for key, _ in self.router.waiting} == self.works.keys() - self.computing.keys()
        counts = dict.fromkeys(self.up, 0)
        for replica in self.computing.values():
            counts[replica] += 1
        assert dict(self.router.replicas) == counts

    def teardown(self) -> None:
        """With one replica that lives, everything ends."""
        if not self.up:
            self.join(0)
        for _ in range(4 * len(self.works) + 4):
            self.assign(100.0)
            for key in list(self.computing):
                self.router.finish(key, 1)
                del self.computing[key], self.works[key]
        assert not self.works


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=examples(50, long=150), stateful_step_count=60)
