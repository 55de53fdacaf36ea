"""The benchmark of bounds: jobs by seed, and the page about them."""

from __future__ import annotations

from benchmarks.planning.bounds import Drawn, page_of

from batchwright.jobs.report import RunReport
from batchwright.planning.bound import PARTS


def test_a_seed_is_a_job() -> None:
    jobs = [Drawn.of(seed, 4.0) for seed in range(50)]
    assert [Drawn.of(seed, 4.0) for seed in range(50)] == jobs
    assert (
        {job.greedy for job in jobs}
        == {job.form for job in jobs}
        == {bool(job.shared) for job in jobs}
        == {True, False}
    )
    for job in jobs[:5]:
        requests = list(job.requests())
        assert requests == list(job.requests())
        assert len(requests) == job.lines >= 2


def test_the_page_says_whether_a_run_beat_its_bound() -> None:
    def report(share: float) -> RunReport:
        details = dict.fromkeys(("steps_seconds", "multiplying_seconds", "keys_seconds", "pairs_seconds"), 1.0)
        shares = dict.fromkeys(PARTS, (1.0 - share) / len(PARTS))
        bound = {**details, "lost": shares, "time": shares}
        return RunReport(
            output="o", model="m", total=1, loop_seconds=2.0, bound_seconds=2 * share, share_of_bound=share, bound=bound
        )

    page = page_of([(Drawn.of(seed, 4.0), report(share)) for seed, share in enumerate((0.4, 0.85, 1.01))])
    assert "beat their bound: **1**" in page
    assert "Median share: **85.0%**" in page
    assert "**Met.**" in page
    assert "The worst, job 0" in page
