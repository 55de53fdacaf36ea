"""`Router`: decides which replica computes which request, and when.

- A request goes to the replica that would finish it first: the one with the least work, counting what the cached prefix
  of its prompt saves. So requests with a common prefix stay together until that replica is busier than the prefix is
  worth (for lines of batches, which no one waits for, several times longer); then another replica computes the prefix
  once more, and has it too.
- Lines of batches wait here for a place, in the queue of their replica. Online requests are sent at once: an engine
  gives them the places of batch lines.
- A replica with a free place and nothing in its queue takes the most expensive request from the longest queue, if it
  would finish it sooner; one that has nothing at all always takes something.
- When a replica dies, what waited for it goes to others, and so do the online requests that it was computing. A batch
  line may be what killed it, so it is tried again beside few others, or alone, by a replica that holds nothing else
  (`policies/suspects.py`); if online requests keep it from being empty for long, also beside these. A request that was
  being computed in `most_deaths` deaths fails, a batch line only if it was alone in the last one, or if it was the only
  line in more deaths than any online request beside it has seen.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, TypeVar

from batchwright.policies.suspects import MAX_CRASHES, at_once
from batchwright.routing.prefixes import KEY_TOKENS, CachedPrefixes
from batchwright.routing.work import ExpectedAnswers, TokenCosts, Work

_Key = TypeVar("_Key", bound=Hashable)

_STICKY = 16
"""Factor by which a prefix's tokens on another replica count for lines of batches. A wait that is longer than the
prefix is worth costs nothing as long as there is other work: in simulations, a factor of 1 lost 13% of what could be
reused.
"""
_LEAD = 16
"""Places per line that is sent ahead, for the first place that becomes free."""
_PATIENCE = 60.0
"""Seconds for which suspects wait for an empty replica before one begins no other lines, and after which they are then
tried beside its online requests, which may follow one another without end.
"""
_SPEEDS = (0.25, 4.0)
"""Bounds of a replica's speed, as a multiple of the mean."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one replica can hold at once."""

    places: int
    """Sequences."""
    kv_tokens: int
    """Tokens in its KV cache."""

    @property
    def most_sent(self) -> int:
        """Most sequences of batch lines that it is sent at once."""
        return self.places + max(1, self.places // _LEAD)


@dataclass(slots=True, eq=False)
class _Item(Generic[_Key]):
    key: _Key
    work: Work
    order: int
    replica: int | None = None
    """Replica that computes it or whose queue it is in; None: it waits for a replica."""
    is_sent: bool = False
    cost: float = 0.0
    """Cost that it adds to the work of its replica."""
    tokens: float = 0.0
    """Expected tokens in the KV cache when it was sent."""
    deaths: int = 0
    """Number of replicas that died while computing it."""
    deaths_as_only_line: int = 0
    """Those of them that computed no other line."""
    at_once: int | None = None
    """For a suspect: number of lines, including itself, that may be computed together."""
    since: float = 0.0
    """When it became a suspect."""


@dataclass(slots=True, eq=False)
class _Replica(Generic[_Key]):
    capacity: Capacity
    queued: dict[_Item[_Key], None] = field(default_factory=dict)
    heap: list[tuple[bool, int, int, int, _Item[_Key]]] = field(default_factory=list)
    """Items in `queued`, the next first, and some that were removed from it."""
    sent: dict[_Item[_Key], None] = field(default_factory=dict)
    lines: int = 0
    """Number of batch lines that it computes."""
    suspects: int = 0
    """Number of suspects that it computes; it computes no other batch lines beside them."""
    sequences: int = 0
    tokens: float = 0.0
    """Expected tokens in the KV cache of what was sent."""
    waiting_cost: float = 0.0
    """Cost of what is in the queue."""
    sent_cost: float = 0.0
    online_cost: float = 0.0
    """Cost of online requests that were sent or wait."""
    speed: float = 1.0
    drains_since: float = math.inf
    """Time from which on it begins no batch lines but suspects, once it holds no others; infinite: it begins any."""

    @property
    def busy(self) -> float:
        return (self.waiting_cost + self.sent_cost) / self.speed

    @property
    def is_reserved(self) -> bool:
        """Whether it is now reserved for suspects."""
        return self.drains_since < math.inf or self.suspects > 0


class Router(Generic[_Key]):
    """Assigns requests, each with its own key, to replicas, which are numbered from 0."""

    def __init__(self, *, most_deaths: int = MAX_CRASHES) -> None:
        """Raises ValueError for `most_deaths` below 2: the last try of a line is made alone."""
        if most_deaths < 2:
            raise ValueError(f"most_deaths={most_deaths}: must be at least 2")
        self._most_deaths = most_deaths
        self._items: dict[_Key, _Item[_Key]] = {}
        self._replicas: dict[int, _Replica[_Key]] = {}
        self._unplaced: dict[_Item[_Key], None] = {}
        """Requests that arrived while there was no replica."""
        self._suspects: dict[_Item[_Key], None] = {}
        """Suspects that wait, in the order in which they came to wait."""
        self._prefixes = CachedPrefixes()
        self._answers = ExpectedAnswers()
        self._costs = TokenCosts()
        self._measured: dict[int, tuple[float, float]] = {}
        self._order, self._entries = count(), count()
        self._queued = 0
        """Requests in queues of replicas."""

    def __len__(self) -> int:
        """Return the number of requests that were submitted and have not ended."""
        return len(self._items)

    @property
    def replicas(self) -> Mapping[int, int]:
        """Numbers of requests that each replica computes."""
        return {number: len(replica.sent) for number, replica in self._replicas.items()}

    @property
    def waiting(self) -> Iterator[tuple[_Key, Work]]:
        """Requests that no replica computes now."""
        return ((item.key, item.work) for item in self._items.values() if not item.is_sent)

    def join(self, replica: int, capacity: Capacity) -> None:
        """Add a replica, which holds nothing yet. Raises ValueError if it exists already or has no capacity."""
        if replica in self._replicas or min(capacity.places, capacity.kv_tokens) < 1:
            raise ValueError(f"join({replica}, {capacity}): must be a new replica that takes at least one sequence")
        self._replicas[replica] = _Replica(capacity)
        self._prefixes.join(replica, capacity.kv_tokens)
        self._set_speeds()
        unplaced, self._unplaced = self._unplaced, {}
        for item in unplaced:
            self._place(item)

    def leave(self, replica: int, now: float) -> list[_Key]:
        """Remove a replica that died. Returns the keys of requests that fail: too many died while computing them."""
        gone = self._replicas.pop(replica)
        self._queued -= len(gone.queued)
        self._prefixes.leave(replica)
        self._measured.pop(replica, None)
        self._set_speeds()
        beside = max((item.deaths for item in gone.sent if item.work.traffic == "online"), default=-1)
        failed = []
        for item in sorted([*gone.sent, *gone.queued], key=lambda item: item.order):
            if not item.is_sent:
                self._place(item)
                continue
            item.is_sent, item.replica = False, None
            is_to_blame = gone.lines == 1 and item.deaths_as_only_line > beside
            item.deaths += 1
            item.deaths_as_only_line += gone.lines == 1
            if item.work.traffic == "online":
                if item.deaths >= self._most_deaths:
                    failed.append(item.key)
                    del self._items[item.key]
                else:
                    self._place(item)
                continue
            item.at_once = at_once(item.deaths, gone.lines, alone=is_to_blame, most=self._most_deaths)
            if item.at_once:
                item.since = now
                self._suspects[item] = None
            else:
                failed.append(item.key)
                del self._items[item.key]
        return failed

    def learn(self, replica: int, prefill_seconds: float, decode_seconds: float) -> None:
        """Learn the seconds that `replica` took per prompt token and per answer token; both above 0."""
        self._measured[replica] = prefill_seconds, decode_seconds
        ratios = [decode / prefill for prefill, decode in self._measured.values()]
        self._costs = TokenCosts(sum(ratios) / len(ratios))
        self._set_speeds()

    def submit(self, key: _Key, work: Work) -> None:
        """Add a request. Raises ValueError for a key that exists already."""
        if key in self._items:
            raise ValueError(f"submit({key!r}): a request with this key has not ended")
        item = _Item(key, work, next(self._order))
        self._items[key] = item
        self._place(item)

    def finish(self, key: _Key, tokens: int | None = None) -> None:
        """Remove a request that a replica finished; `tokens`: those of all its answers, if it succeeded."""
        item = self._items[key]
        if item.replica is None or not item.is_sent:
            raise ValueError(f"finish({key!r}): no replica was computing it")
        del self._items[key]
        self._unsend(item)
        if tokens is not None and item.work.limit:
            self._answers.observe(item.work.limit, tokens / item.work.sequences)
            self._prefixes.note_answer(item.replica, tokens)

    def recall(self, key: _Key) -> None:
        """Make an assigned request wait again: its replica never received it."""
        item = self._items[key]
        self._unsend(item)
        item.is_sent = False
        if item.at_once is None:
            self._place(item)
        else:
            item.replica = None
            self._suspects[item] = None

    def withdraw(self, key: _Key) -> None:
        """Remove a request, wherever it is; does nothing if there is none."""
        item = self._items.pop(key, None)
        if item is None:
            return
        if item.is_sent:
            self._unsend(item)
        elif item.replica is not None:
            self._unqueue(item)
        else:
            self._unplaced.pop(item, None)
            self._suspects.pop(item, None)

    def assign(self, now: float) -> list[tuple[_Key, int]]:
        """Return the requests to send now, each with its replica, which counts as computing it from now on."""
        self._drain_for_suspects(now)
        assigned = []
        for number, replica in self._replicas.items():
            while (item := self._next_of(replica, now)) is not None:
                self._send(item, number, replica)
                assigned.append((item.key, number))
        # Only now is it certain that what is still in a queue would have to wait.
        for number, replica in self._replicas.items() if self._queued else ():
            while (item := self._stolen_by(number, replica)) is not None:
                self._send(item, number, replica)
                assigned.append((item.key, number))
        return assigned

    def _place(self, item: _Item[_Key]) -> None:
        """Put `item` into the queue of the replica that would finish it first."""
        if not self._replicas:
            item.replica = None
            self._unplaced[item] = None
            return
        known = self._prefixes.known(item.work.prefixes)
        answer = self._answers.of(item.work.limit)
        whole = self._costs.of(item.work, answer, 0)
        longest = max(known.values(), default=0)
        is_online = item.work.traffic == "online"
        best, best_rank = -1, (True, 0.0, 0.0)
        for number, replica in self._replicas.items():
            cost = self._costs.of(item.work, answer, known[number]) if number in known else whole
            load = replica.online_cost if is_online else replica.waiting_cost + replica.sent_cost
            again = 0.0 if is_online else (_STICKY - 1) * KEY_TOKENS * (longest - known.get(number, 0))
            rank = replica.is_reserved, (load + cost + again) / replica.speed, replica.busy
            if best < 0 or rank < best_rank:
                best, best_rank, item.cost = number, rank, cost
        self._enqueue(item, best)

    def _enqueue(self, item: _Item[_Key], number: int) -> None:
        replica = self._replicas[number]
        item.replica, is_batch = number, item.work.traffic == "batch"
        replica.queued[item] = None
        heapq.heappush(replica.heap, (is_batch, item.work.priority, item.order, next(self._entries), item))
        replica.waiting_cost += item.cost
        replica.online_cost += 0.0 if is_batch else item.cost
        self._queued += 1
        self._prefixes.promise(number, item.work.prefixes)

    def _unqueue(self, item: _Item[_Key]) -> None:
        assert item.replica is not None
        replica = self._replicas[item.replica]
        del replica.queued[item]
        self._queued -= 1
        replica.waiting_cost = replica.waiting_cost - item.cost if replica.queued else 0.0
        if item.work.traffic == "online":
            replica.online_cost = max(0.0, replica.online_cost - item.cost)
        self._prefixes.withdraw(item.replica, item.work.prefixes)

    def _next_of(self, replica: _Replica[_Key], now: float) -> _Item[_Key] | None:
        """Return what `replica` is sent next from its own queue or from suspects; None: nothing."""
        first = self._first_queued(replica)
        if first is not None and first.work.traffic == "online":
            return first
        if (suspect := self._next_suspect(replica, now)) is not None or replica.is_reserved:
            return suspect
        return first if first is not None and self._has_room(replica, first) else None

    def _first_queued(self, replica: _Replica[_Key]) -> _Item[_Key] | None:
        while replica.heap:
            item = replica.heap[0][-1]
            if item in replica.queued:
                return item
            heapq.heappop(replica.heap)
        return None

    def _next_suspect(self, replica: _Replica[_Key], now: float) -> _Item[_Key] | None:
        """Return a suspect that `replica` may try now, beside few enough other suspects and no other line.

        It is tried beside online requests only if these have kept the replica from being empty for long.
        """
        if not self._suspects or replica.lines > replica.suspects:
            return None
        if len(replica.sent) > replica.lines and now - replica.drains_since < _PATIENCE:
            return None
        most = min((item.at_once for item in replica.sent if item.at_once), default=None)
        for suspect in self._suspects:
            allowed = min(each for each in (most, suspect.at_once) if each is not None)
            # The engine makes room for it among online requests, which are not counted here.
            if replica.suspects < allowed and (not replica.lines or self._has_room(replica, suspect)):
                return suspect
            if most is None or replica.suspects >= most:
                return None
        return None

    def _has_room(self, replica: _Replica[_Key], item: _Item[_Key]) -> bool:
        if not replica.sent:
            return True
        sequences, tokens = replica.sequences + item.work.sequences, replica.tokens + self._tokens_of(item.work)
        return sequences <= replica.capacity.most_sent and tokens <= replica.capacity.kv_tokens

    def _stolen_by(self, number: int, replica: _Replica[_Key]) -> _Item[_Key] | None:
        """Return what `replica` takes from another's queue; None: nothing would finish sooner."""
        if replica.is_reserved or self._first_queued(replica) is not None:
            return None
        victim = max(
            (each for each in self._replicas.values() if each is not replica),
            key=lambda each: each.waiting_cost / each.speed,
            default=None,
        )
        if victim is None or not victim.queued or (replica.sent and not self._may_have_room(replica)):
            return None
        item, cost = max(
            ((item, self._cost_at(number, item)) for item in victim.queued),
            # The most expensive, unless its prefix would have to be computed again.
            key=lambda pair: (2 * pair[0].cost - pair[1], -pair[0].order),
        )
        is_sooner = (replica.waiting_cost + replica.sent_cost + cost) / replica.speed < victim.busy
        if replica.sent and not (self._has_room(replica, item) and (is_sooner or victim.is_reserved)):
            return None
        self._unqueue(item)
        item.cost = cost
        self._enqueue(item, number)
        return item

    def _may_have_room(self, replica: _Replica[_Key]) -> bool:
        return replica.sequences < replica.capacity.most_sent and replica.tokens < replica.capacity.kv_tokens

    def _tokens_of(self, work: Work) -> float:
        return work.prompt_tokens + work.sequences * self._answers.of(work.limit)

    def _cost_at(self, number: int, item: _Item[_Key]) -> float:
        known = self._prefixes.known_to(number, item.work.prefixes) if item.work.prefixes else 0
        return self._costs.of(item.work, self._answers.of(item.work.limit), known)

    def _send(self, item: _Item[_Key], number: int, replica: _Replica[_Key]) -> None:
        if item.at_once is None:
            self._unqueue(item)
            if item.work.traffic == "online":
                replica.online_cost += item.cost
        else:
            del self._suspects[item]
            item.replica, item.cost = number, self._cost_at(number, item)
            replica.suspects += 1
            if len(replica.sent) == replica.lines:
                replica.drains_since = math.inf
        replica.lines += item.work.traffic == "batch"
        item.is_sent, item.tokens = True, self._tokens_of(item.work)
        replica.sent[item] = None
        replica.sequences += item.work.sequences
        replica.tokens += item.tokens
        replica.sent_cost += item.cost
        self._prefixes.note(number, item.work.prefixes)

    def _unsend(self, item: _Item[_Key]) -> None:
        assert item.replica is not None
        replica = self._replicas[item.replica]
        del replica.sent[item]
        replica.sequences -= item.work.sequences
        replica.lines -= item.work.traffic == "batch"
        replica.suspects -= item.at_once is not None
        # Sums of floats drift unless they are reset.
        replica.tokens = replica.tokens - item.tokens if replica.sent else 0.0
        replica.sent_cost = replica.sent_cost - item.cost if replica.sent else 0.0
        if item.work.traffic == "online":
            replica.online_cost = max(0.0, replica.online_cost - item.cost)

    def _drain_for_suspects(self, now: float) -> None:
        """Empty a replica for suspects that have waited long, unless one is trying some."""
        if not self._suspects:
            for replica in self._replicas.values():
                replica.drains_since = math.inf
            return
        first = next(iter(self._suspects))
        has_taker = any(each.is_reserved or not each.sent for each in self._replicas.values())
        if self._replicas and not has_taker and now - first.since >= _PATIENCE:
            min(self._replicas.values(), key=lambda each: (each.online_cost, len(each.sent))).drains_since = now

    def _set_speeds(self) -> None:
        measured = {number: prefill + decode for number, (prefill, decode) in self._measured.items()}
        mean = sum(measured.values()) / len(measured) if measured else 1.0
        for number, replica in self._replicas.items():
            low, high = _SPEEDS
            replica.speed = min(high, max(low, mean / measured.get(number, mean)))
