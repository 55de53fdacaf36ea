"""How lines are split into batches."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from batchwright.submitting.drafts import BatchLimits, Draft, Drafts

LINES = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50), st.floats(0, 20), st.floats(0, 10)))
LIMITS = st.builds(BatchLimits, st.integers(1, 10), st.integers(1, 200), st.floats(1, 100))


@given(LINES, LIMITS, st.integers(1, 3), st.floats(0, 5))
def test_every_line_is_in_one_batch_within_the_limits(
    lines: list[tuple[str, int, float, float]], limits: BatchLimits, most: int, patience: float
) -> None:
    drafts, now = Drafts(patience, most), 0.0
    done: list[Draft] = []
    held: dict[Draft, list[tuple[str, int, float]]] = {}
    for kind, size, tokens, wait in lines:
        now += wait
        due = drafts.due(now)
        assert all(draft.last_at + patience <= now for draft in due)
        done += due
        draft, full = drafts.place(kind, size, tokens, now, limits)
        assert draft not in done
        held.setdefault(draft, []).append((kind, size, tokens))
        done += full
        assert len(drafts) <= most
        assert drafts.next_due() >= now
    assert drafts.lines == sum(len(each) for draft, each in held.items() if draft not in done)
    done += drafts.due(now, more_may_come=False)
    assert len(drafts) == 0
    assert drafts.next_due() == math.inf
    assert len(done) == len({*done}) == len(held)
    for draft in done:
        content = held[draft]
        assert {kind for kind, _, _ in content} == {draft.kind}
        assert (draft.lines, draft.size) == (len(content), sum(size for _, size, _ in content))
        if len(content) > 1:
            assert len(content) <= limits.lines
            assert draft.size <= limits.size
            assert draft.tokens <= limits.tokens * (1 + 1e-9)


def test_batches_are_full_before_another_is_begun() -> None:
    drafts, limits = Drafts(5.0), BatchLimits(lines=3)
    done = [draft for number in range(7) for draft in drafts.place("a", 1, 1.0, 0.0, limits)[1]]
    assert [draft.lines for draft in done] == [3, 3]
    assert drafts.due(4.9) == []
    assert [draft.lines for draft in drafts.due(5.0)] == [1]
