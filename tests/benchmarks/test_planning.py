"""The benchmark of scheduling: real steps around a model that computes nothing."""

from __future__ import annotations

import pytest
from benchmarks.planning.cli import report
from benchmarks.planning.run import PIECES, Case, Steps, measure


@pytest.mark.parametrize("case", [Case("few", 4), Case("mixed", 4, batch=2, tpot_ms=80.0)])
def test_all_of_a_step_is_in_its_pieces(case: Case) -> None:
    steps = measure(case, 1)
    assert len(steps.total) > 100
    assert [len(steps.pieces[piece]) for piece in PIECES] == [len(steps.total)] * len(PIECES)
    assert min(min(values) for values in steps.pieces.values()) > 0.0
    for number, total in enumerate(steps.total):
        assert sum(values[number] for values in steps.pieces.values()) == pytest.approx(total)


def test_the_page_says_whether_the_bar_is_met() -> None:
    def steps(total: float) -> Steps:
        return Steps([total, 9.0, total], {piece: [0.1, 0.2, 0.3] for piece in PIECES}, [0.5])

    page = report({"64 sequences": steps(0.5), "256 sequences": steps(1.25)}, 1)
    assert "|   1.25 | 3.83 | 9.00 |" in page
    assert "**Met.**" in page
    assert "**Missed.**" in report({"256 sequences": steps(1.75)}, 1)
