"""What becomes of lines without a result."""

from __future__ import annotations

from typing import get_args

import pytest

from batchwright.submitting.endings import (
    MOST_TRIES,
    Ending,
    Problem,
    fate_without_result,
    reason_without_result,
)


@pytest.mark.parametrize("ending", get_args(Ending))
def test_a_line_without_result_is_tried_again_and_not_for_ever(ending: Ending) -> None:
    fates = [fate_without_result(ending, tries, None, others_blamed=False) for tries in range(1, MOST_TRIES + 1)]
    assert fates == ["again"] * (MOST_TRIES - 1) + ["fail"]
    assert f"{MOST_TRIES} batches" in reason_without_result(ending, MOST_TRIES)


def test_the_line_that_is_to_blame_fails() -> None:
    problem = Problem("invalid", "no", 3)
    assert fate_without_result("failed", 1, problem, others_blamed=False) == "fail"
    assert fate_without_result("failed", 1, None, others_blamed=True) == "again"
    assert fate_without_result("expired", 1, problem, others_blamed=False) == "again"
