"""Settings and tenants that make no sense are refused by name."""

from __future__ import annotations

import pytest

from batchwright.policies import Backlog, FairShare, Item, Policy, TargetLatency, adaptive
from batchwright.policies.checks import check_size, check_time
from batchwright.policies.simple import BySize

NO_NUMBERS = ["8", None, float("nan"), float("inf"), True, 10**400]


@pytest.mark.parametrize("value", [*NO_NUMBERS, 0, -1])
def test_a_weight_is_a_finite_number_above_0(value: object) -> None:
    with pytest.raises(ValueError, match=r"weights\['a'\]=.*must be"):
        FairShare({"a": value})  # type: ignore[dict-item]


def test_weights_are_a_mapping() -> None:
    with pytest.raises(TypeError, match="weights of type list: must map each tenant to its weight"):
        FairShare(["a"])  # type: ignore[arg-type]


def test_a_tenant_that_cannot_be_a_key_is_refused_by_name_and_leaves_nothing_behind() -> None:
    policy = Backlog(Policy(BySize(2), order=FairShare()))
    with pytest.raises(TypeError, match=r"tenant=\[1\]: must be hashable"):
        policy.add((Item(0.0, tenant=[1]),))  # type: ignore[arg-type]
    first, second = Item(0.0, 100, tenant="a"), Item(0.0, 100, tenant="a")
    for item in (first, second):
        policy.add((item,))
    assert len(policy) == 2
    policy.decide(0.0, drain=True)
    later = Item(1.0, tenant="a")
    policy.add((later,))
    assert later.key == first.key, "nobody waited for what was served, so nobody is owed anything"


@pytest.mark.parametrize("value", NO_NUMBERS)
def test_a_time_is_a_finite_number(value: object) -> None:
    with pytest.raises(ValueError, match=r"wait=.*must be a finite number"):
        check_time("wait", value)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["8", None, float("nan"), float("inf"), True, 2.0, 1])
def test_a_size_is_a_whole_number_and_not_too_small(value: object) -> None:
    with pytest.raises(ValueError, match=r"size=.*must be a whole number of at least 2"):
        check_size("size", value, least=2)  # type: ignore[arg-type]


def test_a_target_is_refused_under_the_name_that_it_was_given() -> None:
    with pytest.raises(ValueError, match=r"^target_latency=0:"):
        adaptive(0)
    with pytest.raises(ValueError, match=r"^target=0:"):
        TargetLatency(0, inner=BySize(2))
