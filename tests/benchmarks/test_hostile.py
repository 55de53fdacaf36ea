"""The page of the attacks: both columns, bars, and what was missed."""

from __future__ import annotations

from pathlib import Path

from benchmarks.attacks import report
from benchmarks.attacks.attack import Figure
from benchmarks.attacks.quiet import Felt
from benchmarks.attacks.sections import ATTACKS


def test_the_sections_have_names_of_their_own() -> None:
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS)


def test_runs_of_both_columns_are_kept_and_shown_side_by_side(tmp_path: Path) -> None:
    kept = tmp_path / "hostile.json"
    findings = report.load(kept)
    name = ATTACKS[0].name
    slow, fast = [Figure("p99", None, "ms", 1000)], [Figure("p99", 12.34, "ms", 1000), Figure("cut", 3)]
    findings[name] = {report.BEFORE: report.entry(slow, "abc1234")}
    report.save(kept, findings)
    findings = report.load(kept)
    findings[name][report.AFTER] = report.entry(fast, "def5678")
    page = report.page(ATTACKS, findings)
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("|")]
    assert cells[2:] == [["p99", "**none**", "12.3 ms", "≤ 1,000 ms"], ["cut", "", "3", ""]]
    assert "`abc1234`" in page


def test_a_client_that_got_no_answer_misses_its_bar() -> None:
    answered, silent = Felt([5.0, 7.0]), Felt(failed=2)
    assert [each.missed for each in answered.figures(p99_ms=10)] == [False, False, False, False]
    assert [each.missed for each in silent.figures(p99_ms=10)] == [False, True, False, True]
