"""What `auto` does for urgent requests among others."""

from __future__ import annotations

from batchwright.policies import Backlog, Dispatch, Item, auto


def _informed(base: float, by_token: float) -> Backlog:
    policy = Backlog(auto(32))
    for count in (1, 2, 4, 8, 16, 32):
        for length in (10, 20):
            policy.observe(count * length, count * length, count, base + by_token * count * length)
    return policy


def _sizes(policy: Backlog, now: float) -> list[tuple[int, int]]:
    """Of each batch, as the queue is worked off at `now`: how many urgent ones, how many others."""
    sizes = []
    while isinstance(decision := policy.decide(now), Dispatch):
        urgent = sum(item.priority < 5 for item in decision.items)
        sizes.append((urgent, len(decision.items) - urgent))
    return sizes


def _filled(policy: Backlog, urgent: int, others: int) -> Backlog:
    for _ in range(others):
        policy.add((Item(0.0, 10),))
    for _ in range(urgent):
        policy.add((Item(0.0, 10, priority=1),))
    return policy


def test_without_urgent_requests_batches_are_as_large_as_can_be() -> None:
    assert _sizes(_filled(_informed(0.001, 0.0001), 0, 64), 0.0) == [(0, 32), (0, 32)]


def test_urgent_requests_take_others_along_for_little_time_only() -> None:
    # A request takes 1 ms, any batch 1 ms by itself: 10 ms are nine requests.
    assert _sizes(_filled(_informed(0.001, 0.0001), 4, 20), 0.0)[0] == (4, 5)


def test_batches_of_others_are_short_while_urgent_requests_are_expected() -> None:
    sizes = _sizes(_filled(_informed(0.001, 0.0001), 4, 41), 0.0)
    assert sizes == [(4, 5)] + [(0, 9)] * 4


def test_where_a_batch_costs_much_by_itself_it_is_filled() -> None:
    assert _sizes(_filled(_informed(0.1, 0.0001), 4, 28), 0.0) == [(4, 28)]


def test_a_backlog_makes_batches_larger() -> None:
    # After 300 ms of waiting a batch may take 30: 29 requests.
    assert _sizes(_filled(_informed(0.001, 0.0001), 4, 60), 0.3)[:2] == [(4, 25), (0, 29)]


def test_urgent_requests_that_no_longer_come_are_forgotten() -> None:
    policy = _filled(_informed(0.001, 0.0001), 1, 1000)
    sizes = _sizes(policy, 0.0)
    assert sizes[1] == (0, 9)
    assert sizes[-2] == (0, 32)
