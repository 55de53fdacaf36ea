"""The tenants for which the next batch lines are claimed. Pure: the numbers come in as arguments.

Start-time fair queueing (Goyal et al. 1996) over tokens. `served` is the virtual time of a tenant: the tokens of its
finished lines, divided by its weight. A line in flight counts as the average tokens of its tenant's lines so far, so a
claim goes to the tenant whose `served` plus what it has in flight is least. Tenants with similar lines thus get lines
in flight in proportion to their weights; one whose lines are long gets fewer of them, and any difference is settled
when they finish.

A tenant that had nothing to compute starts at the virtual time of the others, not at its own old one: no tenant saves
up a share by sending nothing. A tenant that is alone gets everything, and owes nothing for it afterwards.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

WEIGHTS = (0.01, 1000.0)
"""Least and greatest weight that a tenant or a key may have."""


@dataclass(frozen=True, slots=True)
class Claimant:
    """A tenant with lines to compute."""

    tenant: str
    weight: float = 1.0
    """Weight of the tenant; above 0."""
    served: float = 0.0
    """Virtual time: tokens divided by the weight at the time when they were counted."""
    line_tokens: float = 0.0
    """Average tokens of one of its lines; 0: none has finished yet."""
    in_flight: int = 0
    """Its lines that workers hold."""


def turns(claimants: Sequence[Claimant], lines: int) -> list[str]:
    """Return the tenants that the next `lines` lines go to, in turn, as if each had any number of lines."""
    known = [each.line_tokens for each in claimants if each.line_tokens > 0.0]
    usual = sum(known) / len(known) if known else 1.0
    heap: list[tuple[float, float, str, float, float]] = []
    for each in claimants:
        share = 1.0 / each.weight
        step = (each.line_tokens or usual) * share
        # What is in flight decides between tenants at the same place.
        heap.append((each.served + step * each.in_flight, each.in_flight * share, each.tenant, step, share))
    heapq.heapify(heap)
    order: list[str] = []
    while heap and len(order) < lines:
        place, held, tenant, step, share = heap[0]
        order.append(tenant)
        heapq.heapreplace(heap, (place + step, held + share, tenant, step, share))
    return order


def place(claimant: Claimant) -> float:
    """Return the virtual time at which the tenant's next line starts."""
    return claimant.served + claimant.line_tokens * claimant.in_flight / claimant.weight


def virtual_time(before: float, active: Mapping[str, float], working: Collection[str]) -> float:
    """Return the virtual time at which a tenant that joins now starts. `before`: the virtual time at the last change.

    `active` has the places of tenants that were active until now, `working` those that have something to compute from
    now on. While some of them continue, it is the least of their places; when all have stopped, no tenant starts before
    the one that got most.
    """
    staying = [where for tenant, where in active.items() if tenant in working]
    return max(before, min(staying)) if staying else max([before, *active.values()])
