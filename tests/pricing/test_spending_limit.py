"""The budget, in any order of reservations and outcomes."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from batchwright.pricing.spending_limit import SpendingLimit

amounts = st.integers(0, 60)


class Budget(RuleBasedStateMachine):
    """A budget, and a plain account of the same."""

    @initialize(limit=st.integers(0, 200), spent=amounts, inherited=st.lists(amounts, max_size=3))
    def begin(self, limit: int, spent: int, inherited: list[int]) -> None:
        self.inherited = inherited
        self.budget = SpendingLimit(limit, spent, inherited=sum(inherited))
        self.paid = spent
        self.lost = 0
        self.began_above = self.budget.committed > limit
        self.held: list[int] = []

    @rule(amount=amounts)
    def ask(self, amount: int) -> None:
        assert self.budget.limit is not None
        before = self.budget.committed
        gone = self.paid + self.lost + sum(self.inherited)
        verdict = self.budget.judge(amount)
        if gone + sum(self.held) + amount <= self.budget.limit:
            assert verdict == "fits"
            self.budget.reserve(amount)
            self.held.append(amount)
        else:
            # Only if giving back everything that is under way made room is it worth waiting.
            assert verdict == ("wait" if gone + amount <= self.budget.limit else "never")
            assert self.budget.committed == before

    @precondition(lambda self: self.inherited)
    @rule()
    def take_up(self) -> None:
        amount = self.inherited.pop()
        self.budget.take_up(amount)
        self.held.append(amount)

    @precondition(lambda self: self.held)
    @rule(share=st.floats(0, 1))
    def settle(self, share: float) -> None:
        amount = self.held.pop(0)
        self.budget.settle(amount, int(amount * share))
        self.paid += int(amount * share)

    @precondition(lambda self: self.held)
    @rule()
    def release(self) -> None:
        left = self.budget.left
        amount = self.held.pop()
        self.budget.release(amount)
        assert self.budget.left is not None
        assert left is not None
        if not self.began_above:
            assert self.budget.left == left + amount

    @precondition(lambda self: self.held)
    @rule()
    def keep(self) -> None:
        amount = self.held.pop()
        self.budget.keep(amount)
        self.lost += amount

    @invariant()
    def never_above(self) -> None:
        budget = self.budget
        assert (budget.spent, budget.kept, budget.reserved) == (self.paid, self.lost, sum(self.held))
        assert budget.limit is not None
        assert self.began_above or budget.committed <= budget.limit


TestBudget = Budget.TestCase


def test_without_a_limit_everything_fits() -> None:
    budget = SpendingLimit()
    assert budget.judge(10**18) == "fits"
    budget.reserve(10**18)
    budget.settle(10**18, 5)
    assert (budget.spent, budget.committed, budget.left) == (5, 5, None)
