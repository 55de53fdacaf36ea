"""Fair shares of the engine: between owners (API keys), and between the requests of one owner.

Each has a `Share`, in a tree of two levels. Three rules keep one that demands much from crowding out the others. They
apply only while there are sequences of several requests with a `Flow`; otherwise this module is not used.

- **Places.** The next place goes to the share that has the fewest in proportion to its weight. If none is free, a
  sequence of a share that has more loses its place, as long as that share still has at least as many afterwards
  (weighted max-min fairness): so places settle, and never move back and forth.
- **Tokens.** Prompts, and places between equals, are ordered by the tokens that their share has been served, divided by
  its weight: start-time fair queueing (Goyal et al. 1996) by what was computed instead of what was requested, as in the
  virtual token counter of Sheng et al. 2024. A share that becomes active starts at the virtual time of its parent, so
  no one accumulates a claim by sending nothing, and no one is penalized for having used an idle engine.
- **Rows.** A step with a request that has delivered nothing yet carries no more tokens of shares with more places than
  of such requests, or 16, and no more than are predicted to take half as long as these requests alone, or a single
  token. So the larger shares lengthen the step by about half at most, however many sequences there are and however long
  their contexts; and since they get a part of each step, they do not stop either. Sequences of a better priority are
  not limited, nor are the prompts of a step in which it is the turn of a larger share's prompt.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from batchwright.request import Flow
from batchwright.scheduling.plan import Chunk
from batchwright.scheduling.sequence import Sequence
from batchwright.scheduling.slo import SloController, StepRoom

_FEW_ROWS = 16
"""Number of decodes that cost little compared with the weights that a step reads anyway."""
_OWNERS_KEPT = 1024
"""Number of idle owners whose accounts are remembered while they are ahead of the virtual time."""


@dataclass(slots=True, eq=False)
class Share:
    """The account of one owner, of one request of an owner, or (the root) of all owners together."""

    parent: Share | None
    key: Hashable = None
    weight: float = 1.0
    served: float = 0.0
    """Tokens computed, divided by the weight; in the virtual time of the parent."""
    time: float = 0.0
    """Virtual time of the children: what each of them would have been served if all had been served evenly."""
    children: dict[Hashable, Share] = field(default_factory=dict)
    active_weight: float = 0.0
    """Sum of the weights of the children that have sequences."""
    sequences: int = 0
    """Number of waiting and running sequences."""
    places: int = 0
    """Number of running sequences."""
    began: int = 0
    """Serial number in the order of becoming active."""
    placed_at: float = 0.0
    """When a sequence was last given a place, or else when the first one arrived."""
    priorities: Counter[int] = field(default_factory=Counter)
    """Numbers of an owner's sequences by priority."""

    @property
    def weighted_places(self) -> float:
        """Running sequences in proportion to the weight."""
        return self.places / self.weight

    def starves(self, now: float, patience: float) -> bool:
        """Return whether the share has no place, and has been given none for `patience`."""
        return not self.places and now - self.placed_at >= patience


class FairShares:
    """Shares of all sequences of one class of traffic."""

    def __init__(self) -> None:
        self._root = Share(None)
        self._owners = 0
        """Owners with sequences."""
        self._requests = 0
        self._named = 0
        """Number of sequences that name their owner."""
        self._begun = 0

    @property
    def contended(self) -> bool:
        """Whether there are sequences of several requests."""
        return self._requests > 1

    @property
    def named(self) -> bool:
        """Whether there are sequences that name their owner."""
        return self._named > 0

    def enter(self, sequence: Sequence) -> None:
        """Add a new sequence; one without a flow belongs to a nameless request of a nameless owner."""
        flow = sequence.flow or _NAMELESS
        owner = self._root.children.get(flow.owner)
        if owner is None:
            owner = self._root.children[flow.owner] = Share(self._root, flow.owner)
        request = owner.children.get(flow.request)
        if request is None:
            request = owner.children[flow.request] = Share(owner, flow.request)
            self._requests += 1
        if not owner.sequences:
            owner.weight = flow.weight
            owner.placed_at = sequence.arrived_at
            self._owners += 1
            self._activate(owner)
        if not request.sequences:
            self._activate(request)
            request.placed_at = sequence.arrived_at
        self._named += sequence.flow is not None
        owner.sequences += 1
        owner.priorities[sequence.priority] += 1
        request.sequences += 1
        sequence.share = request

    def leave(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended, whatever its state."""
        request, owner = nodes(sequence)
        self._named -= sequence.flow is not None
        request.sequences -= 1
        owner.sequences -= 1
        owner.priorities -= Counter((sequence.priority,))
        if not request.sequences:
            owner.active_weight -= request.weight
            del owner.children[request.key]
            self._requests -= 1
        if not owner.sequences:
            self._root.active_weight -= owner.weight
            self._owners -= 1
            self._forget(owner)

    def place(self, sequence: Sequence, now: float) -> None:
        """Record that a sequence was given a place at `now`."""
        for share in nodes(sequence):
            share.places += 1
            share.placed_at = now

    def drop(self, sequence: Sequence) -> None:
        """Record that a sequence has lost its place."""
        for share in nodes(sequence):
            share.places -= 1

    def serve(self, sequence: Sequence, tokens: int) -> None:
        """Record that a step computes `tokens` of a sequence. Optional while nothing is `contended`."""
        request, owner = nodes(sequence)
        root = self._root
        root.time += tokens / root.active_weight
        owner.served += tokens / owner.weight
        owner.time += tokens / owner.active_weight
        request.served += tokens

    def _activate(self, share: Share) -> None:
        self._begun += 1
        share.began = self._begun
        parent = share.parent
        if parent is not None:
            share.served = max(share.served, parent.time)
            parent.active_weight += share.weight

    def _forget(self, idle: Share) -> None:
        """Forget an owner without sequences; if it is ahead of the others, and would be again, later."""
        owners = self._root.children
        if idle.served <= self._root.time:
            del owners[idle.key]
        if len(owners) > 2 * self._owners + _OWNERS_KEPT:
            self._root.children = {key: owner for key, owner in owners.items() if owner.sequences}
        if not self._requests:
            self._root = Share(None)  # no one is behind anyone, and rounding errors end here


def placeable(newcomer: Sequence, running: Items[Sequence]) -> list[Sequence]:
    """Return those of `running` (by urgency) whose place `newcomer` may take, the least urgent last.

    For each share, only as many as leave it at least as many places as the newcomer's share then has, from its largest
    requests; none of a higher rank.
    """
    allowed: dict[Share, int] = {}
    found: list[Sequence] = []
    for sequence in reversed(_by_place(running)):
        holder, claimant = _opponents(sequence, newcomer)
        if holder is claimant or sequence.priority < newcomer.priority:
            continue
        if holder not in allowed:
            # (places - n) / weight ≥ (places of the claimant + 1) / its weight
            target = (claimant.places + 1) / claimant.weight * holder.weight
            allowed[holder] = math.floor(holder.places - target + 1e-9)
        if allowed[holder] > 0:
            allowed[holder] -= 1
            found.append(sequence)
    found.reverse()
    return found


def _by_place(running: Items[Sequence]) -> list[Sequence]:
    """`running` (by urgency) by priority, then by which place of its request each has, the first of each before the
    second of any.
    """
    places: Counter[Share | None] = Counter()
    order: list[tuple[int, int]] = []
    for sequence in running:
        places[sequence.share] += 1
        order.append((sequence.priority, places[sequence.share]))
    return [running[at] for at in sorted(range(len(running)), key=order.__getitem__)]


@dataclass(slots=True)
class Precedence:
    """Limits on tokens of larger shares in a step that also serves newcomers, which are sequences without output so
    far.

    Only newcomers of the best priority count. Sequences of a better priority than theirs give way to no one.
    """

    priority: int
    fewest_of_owners: float
    """The fewest places of a newcomer's owner, in proportion to its weight."""
    fewest_of_requests: dict[Share, float]
    """The fewest places of a newcomer's request, by owner."""
    room: StepRoom
    """Room for sequences of shares with more places."""
    has_heavier: bool = False
    """Whether there are such shares."""

    def must_defer(self, sequence: Sequence) -> bool:
        """Return whether the share of `sequence` has more places than a newcomer's."""
        if sequence.priority < self.priority:
            return False
        request, owner = nodes(sequence)
        return owner.weighted_places > self.fewest_of_owners or request.weighted_places > self.fewest_of_requests.get(
            owner, math.inf
        )


def precedence(running: Items[Sequence], budget: int, slo: SloController) -> Precedence | None:
    """Return the limits for a step of at most `budget` tokens; None if no newcomer is among `running`."""
    silent = [each for each in running if each.is_silent]
    if not silent:
        return None
    priority = min(each.priority for each in silent)
    newcomers = [each for each in silent if each.priority == priority]
    fewest_of_owners = math.inf
    fewest_of_requests: dict[Share, float] = {}
    for sequence in newcomers:
        request, owner = nodes(sequence)
        fewest_of_owners = min(fewest_of_owners, owner.weighted_places)
        fewest_of_requests[owner] = min(fewest_of_requests.get(owner, math.inf), request.weighted_places)
    found = Precedence(priority, fewest_of_owners, fewest_of_requests, StepRoom(0))
    own = _first_parts((each for each in newcomers if not found.must_defer(each)), budget)
    most = max(_FEW_ROWS, min(sum(each.count for each in own), budget // 2))
    found.room = slo.room_beside(own, most)
    found.has_heavier = any(map(found.must_defer, running))
    return found


def _first_parts(newcomers: Iterable[Sequence], budget: int) -> list[Chunk]:
    """Return what a step of `budget` tokens would compute for `newcomers` if it computed nothing else."""
    parts: list[Chunk] = []
    for sequence in newcomers:
        if not (count := min(sequence.remaining, budget)):
            break
        budget -= count
        parts.append(Chunk(sequence, sequence.num_computed, count, fresh=False, samples=False))
    return parts


def decodes(running: Items[Sequence], first: Precedence | None) -> list[Sequence]:
    """Return the decoding sequences of `running` that get their token in this step, those of small shares first.

    Beside newcomers, sequences of larger shares are included as far as there is room, which is then used up; those that
    have gone without a token for longest come first.
    """
    ready = sorted((each for each in running if each.awaits_decode), key=_by_weighted_places)
    if first is None:
        return ready
    chosen = [each for each in ready if not first.must_defer(each)]
    for each in sorted((each for each in ready if first.must_defer(each)), key=_last_turn):
        if first.room.fits_row(len(each.tokens)):
            first.room.take_row(len(each.tokens))
            chosen.append(each)
    return chosen


def by_turn(sequence: Sequence) -> tuple[int, tuple[float, ...], int]:
    """Sort key of prompts: by priority, then by what their shares have been served, then by arrival.

    Among shares that were served equally, the newest goes first: what a share was served while it was alone is not
    counted.
    """
    request, owner = nodes(sequence)
    return sequence.priority, (owner.served, -owner.began, request.served, -request.began), sequence.ordinal


def by_burden(sequence: Sequence) -> tuple[bool, int, tuple[float, float], float, int]:
    """Sort key for giving up blocks, greatest first: batches, the worst priority, the share with the most places,
    then the least urgent.
    """
    request, owner = nodes(sequence)
    places = owner.weighted_places, request.weighted_places
    return sequence.is_batch, sequence.priority, places, sequence.deadline, sequence.ordinal


def _by_weighted_places(sequence: Sequence) -> tuple[int, float, float, int]:
    request, owner = nodes(sequence)
    return sequence.priority, owner.weighted_places, request.weighted_places, sequence.ordinal


def _last_turn(sequence: Sequence) -> int:
    return sequence.last_turn


def _opponents(holder: Sequence, newcomer: Sequence) -> tuple[Share, Share]:
    """Return the shares of two sequences at the level at which they differ; the same one twice if they do not."""
    (held, held_by), (wanted, wanted_by) = nodes(holder), nodes(newcomer)
    return (held, wanted) if held_by is wanted_by else (held_by, wanted_by)


def nodes(sequence: Sequence) -> tuple[Share, Share]:
    """Return the shares of its request and of its owner."""
    request = sequence.share
    if request is None or request.parent is None:
        raise ValueError("the sequence was not entered into the shares")
    return request, request.parent


_NAMELESS = Flow("", "")
