"""`Sharing`: what processes with the same key publish about an endpoint, and the share that each takes.

Each publishes a note about once a second: what it used of configured limits, what it wants, and what refusals have
shown it of the whole. From the notes of the others, each computes the same max-min fair parts: a process that wants
less than an equal part gets what it wants, and the others divide the rest. So no process has to ask before it sends a
request, and the use that it does not know yet is at most what the others send between two notes; `margin` keeps that
much of a configured limit free.

Notes are flat numbers above 0, so that versions may differ in what they publish. Pure, like the pacer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from batchwright.pacing.found_rate import FoundRate
from batchwright.pacing.limits import MINUTE

Note = Mapping[str, float]

ALL = 1e12
"""The demand of a process that has more to send than it may."""
PERIOD = 1.2
"""Seconds from one note to the next, plus a little for the store."""
_MOST_MARGIN = 0.1
_HEARD_ALL = 2.5
"""Seconds after which every other process has published: each looks once a second, including this one."""
_SILENT = 5.0
"""Seconds without a new note after which a process counts as ended, whatever its lease says."""
_LINGERS = 5.0
"""Seconds for which requests of a process that ended are assumed to be under way."""
_HEADROOM = 1.25
"""Demand of a process that may send everything it has, as a multiple of its recent use."""
_KEEP = 0.5


@dataclass(slots=True)
class _Peer:
    """Another process, as last heard."""

    note: Note
    changed_at: float
    is_there: bool = True

    def wants(self, now: float) -> bool:
        """Return whether its demand counts: a process that has ended, or is silent, leaves its part to others."""
        return self.is_there and now - self.changed_at <= _SILENT

    def used(self, kind: str, window: float, now: float) -> float:
        """Return its use of a configured limit: what it notes or, once it is silent, what is not too old yet."""
        amount, age = self.note.get(kind, 0.0), now - self.changed_at
        if self.is_there and (age <= 2.0 * PERIOD or "beat" not in self.note):
            return amount
        # Assume even use since the oldest of it, which went on for a while after the last note.
        since = min(window, max(PERIOD, self.note.get(oldest(kind), window)))
        amount += max(amount * PERIOD / since, self.note.get(each(kind), 0.0))
        return amount * min(1.0, max(0.0, (window - age) / since))


def fair_part(total: float, others: Iterable[float]) -> float:
    """Return the max-min fair part of `total` for one that wants it all, given what `others` want."""
    wanted = sorted(others)
    left, sharers = total, len(wanted) + 1
    for want in wanted:
        if want * sharers >= left:
            break
        left, sharers = left - want, sharers - 1
    return left / sharers


def margin(window: float) -> float:
    """Return the share of a configured limit that is kept free for what others send between two notes.

    All together send at the rate of the limit, so in that time they send at most that share of it.
    """
    return min(_MOST_MARGIN, PERIOD / window)


class Sharing:
    """The other processes, as seen by this one. `rank`: a number above 0 that no other process has."""

    def __init__(self, rank: float = 1.0) -> None:
        self.rank = rank
        self.is_hungry = False
        """Whether this process had more to send than it was allowed when it last published."""
        self.rate_part = 1.0
        """Share of the whole of a found rate that this process takes."""
        self._now = -math.inf
        self._peers: dict[float, _Peer] = {}
        self._wanting: list[Note] = []
        """Notes of the processes whose demand counts."""
        self._lingering = 0.0
        """Requests of ended processes that may still be under way."""
        self._hears_until = -math.inf
        self._places = 1.0
        """Number of requests under way and waiting, as last published."""
        self._sent: tuple[float, float] | None = None
        """When this process last published, and the amount that it had sent by then."""
        self._speed = 0.0

    @property
    def is_alone(self) -> bool:
        """Whether there is no other process, and was none recently."""
        return not self._peers

    @property
    def has_others(self) -> bool:
        """Whether another process uses the same endpoint with the same key."""
        return any(peer.is_there for peer in self._peers.values())

    def learn(self, notes: Sequence[Note], now: float, *, keep: float = MINUTE) -> bool:
        """Learn the latest notes of all others; return whether one was refused recently. `keep`: the longest window."""
        self._now, was_refused = now, False
        # Earlier versions publish what they use, and no rank.
        there = {note.get("rank", -1.0 - index): note for index, note in enumerate(notes)}
        for rank, peer in [*self._peers.items()]:
            peer.is_there = rank in there
            if not peer.is_there and now - peer.changed_at > keep:
                del self._peers[rank]
        for rank, note in there.items():
            known = self._peers.get(rank)
            if known is None or known.note != note:
                was_refused |= known is not None and note.get("refused", 0.0) > known.note.get("refused", 0.0)
                self._peers[rank] = _Peer(note, now)
        self._wanting = [peer.note for peer in self._peers.values() if peer.wants(now)]
        ended = [peer for peer in self._peers.values() if not peer.is_there and now - peer.changed_at < _LINGERS]
        self._lingering = sum(peer.note.get("under way", 0.0) for peer in ended)
        return was_refused

    def hear_until(self, since: float) -> None:
        """Send nothing that counts against configured limits until all processes since `since` have published."""
        self._hears_until = since + _HEARD_ALL

    def hearing(self, now: float) -> float:
        """Return the seconds until it is known what others use."""
        return max(0.0, self._hears_until - now)

    def used(self, kind: str, window: float) -> float:
        """Return the others' use of a configured limit; that of ended processes decreases over time."""
        return sum(peer.used(kind, window, self._now) for peer in self._peers.values())

    def part(self, total: float, kind: str) -> float:
        """Return the amount per second of `total` that this process may use."""
        return fair_part(total, self._values(wanted(kind)))

    def whole_rate(self, own: FoundRate) -> tuple[float, float] | None:
        """Return the total rate that refusals have shown, and the number of amounts from which each knows it.

        None: they have shown none. A process that does not want its whole part measures too little.
        """
        found = [(note["rate"], note["known"]) for note in self._wanting if "rate" in note and "known" in note]
        if own.rate is not None and own.is_measured and (self.is_hungry or not found):
            found.append((own.rate / self.rate_part, own.amounts))
        if not found:
            return None
        known = sum(amounts for _, amounts in found)
        return sum(rate * amounts for rate, amounts in found) / known, known / len(found)

    def part_of_rate(self, whole: float) -> float:
        """Return this process's part of a found rate, and remember it."""
        part = self.part(whole, "rate")
        self.rate_part = part / whole
        return part

    def measured_rate(self) -> None:
        """Note that this process was refused for a rate: it had its part of the whole, or its share of all sent."""
        if self._wanting and not self.shown_rate:
            self.rate_part = self._speed / max(self._speed + sum(self._values("speed")), 1e-9) or 1.0

    def mean_size(self, own: float) -> float:
        """Return the tokens of a request of the mean size over all processes."""
        if not self._wanting:
            return own
        sizes = [*self._values("size"), own]
        return sum(sizes) / len(sizes)

    @property
    def shown_rate(self) -> bool:
        """Whether another process has found a rate."""
        return bool(self._values("rate"))

    @property
    def verdict(self) -> tuple[int, bool]:
        """How often refusals have changed what the others know, and whether that is a limit on concurrency.

        0: none of them has found anything.
        """
        found = [(int(note.get("verdict", 1.0)), "cap" in note) for note in self._wanting if {"cap", "rate"} & {*note}]
        return max(found, default=(0, False))

    def latest_cap(self, verdict: int) -> tuple[int, int] | None:
        """Return the latest total concurrency limit that another process has learned, and its epoch."""
        caps = [
            (int(note["cap epoch"]), int(note["cap"]))
            for note in self._wanting
            if note.get("cap", 0.0) >= 1.0 and "cap epoch" in note and note.get("verdict", 1.0) >= verdict
        ]
        return (max(caps)[1], max(caps)[0]) if caps else None

    def may_probe(self, epoch: int) -> bool:
        """Return whether this process is the one that tries higher concurrency, and all know the present limit."""
        busy = [note for note in self._wanting if note.get("places", 0.0) > 1.0]
        return all(note.get("rank", 0.0) > self.rank and note.get("cap epoch", 0.0) >= epoch for note in busy)

    def places(self, total: int) -> int:
        """Return how many of `total` concurrent requests are this process's, without those that others still have."""
        others = [note for note in self._wanting if {"places", "rank"} <= {*note}]
        if not others:
            return max(1, int(total - self._lingering))
        wants = [(self._places, -self.rank), *((note["places"], -note["rank"]) for note in others)]
        left, sharers, mine = float(total), len(wants), 0.0
        for want, rank in sorted(wants):
            # The one that tries more comes last among those that want as much, and gets the remainder.
            part = min(want, left // sharers)
            mine = part if rank == -self.rank else mine
            left, sharers = left - part, sharers - 1
        spare = left // len(wants)
        theirs = self._lingering + sum(note.get("under way", 0.0) for note in others)
        return max(1, int(min(mine + spare, total - theirs)))

    @property
    def count(self) -> int:
        """Number of processes that have work, including this one."""
        return 1 + len(self._values("places"))

    @property
    def under_way(self) -> int:
        """Number of requests of others that are under way."""
        return int(sum(self._values("under way")))

    def note(self, now: float, sent: float, under_way: int, waiting: int, *, is_held_back: bool) -> dict[str, float]:
        """Return what this process publishes at `now` about itself. `sent`: amounts since it began."""
        self.is_hungry = waiting > 0 and is_held_back
        if self._sent is not None and now > self._sent[0]:
            speed = (sent - self._sent[1]) / (now - self._sent[0])
            self._speed = _KEEP * self._speed + (1.0 - _KEEP) * speed
        self._sent = now, sent
        self._places = max(1.0, under_way + waiting)
        return {
            "rank": self.rank,
            "beat": now,
            "under way": under_way,
            "places": self._places,
            "speed": self._speed,
            wanted("rate"): self.wants(self._speed),
        }

    def wants(self, speed: float) -> float:
        """Return the demand of a process that recently used `speed` per second."""
        return ALL if self.is_hungry else _HEADROOM * speed

    def _values(self, key: str) -> list[float]:
        return [note[key] for note in self._wanting if note.get(key, 0.0) > 0.0]


def wanted(kind: str) -> str:
    """Return the key of a note for the demand on a limit."""
    return f"{kind} wanted"


def oldest(kind: str) -> str:
    """Return the key of a note for the age of the oldest use that counts against a configured limit."""
    return f"{kind} oldest"


def each(kind: str) -> str:
    """Return the key of a note for the mean amount by which requests count against a configured limit."""
    return f"{kind} each"
