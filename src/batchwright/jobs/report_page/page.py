"""The page of reports: one HTML file with everything in it, which needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from batchwright.durable_files import replacing
from batchwright.jobs.report import RunReport
from batchwright.jobs.report_page import frame
from batchwright.jobs.report_page.charts import Run, charts_of
from batchwright.jobs.report_page.frame import Chart
from batchwright.jobs.report_page.reading import report_of
from batchwright.jobs.report_page.table import rows_of, state_of

_FAILURES_SHOWN = 10
_NO_REASON = "the report has no bound, and does not say why, as those of earlier versions"


def require_libraries() -> None:
    """Raise `MissingExtra` if what draws the page is not installed."""
    frame.require_libraries("a page of reports")


def page_of(runs: Sequence[Run], title: str | None = None) -> str:
    """Return the page of one or several runs. Raises `MissingExtra`."""
    require_libraries()
    charts = charts_of(runs)
    return frame.rendered(
        title or ("Run: " + runs[0].name if len(runs) == 1 else f"{len(runs)} runs"),
        charts,
        "page.html",
        runs=[{"name": run.name, "report": run.report, "state": state_of(run.report)} for run in runs],
        rows=rows_of(runs),
        missing=_missing(charts, runs),
        failures_shown=_FAILURES_SHOWN,
    )


def save_page(report: RunReport, path: Path) -> None:
    """Write the page of a run, whole or not at all. Raises OSError."""
    values = report_of(msgspec.json.decode(report.to_json()), "the report")
    name = values.output.rstrip("/").rpartition("/")[2] if values.output != "-" else values.model
    page = page_of([Run(name, values)])
    try:
        with replacing(path) as file:
            file.write(page.encode())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _missing(charts: Sequence[Chart], runs: Sequence[Run]) -> list[tuple[str, str]]:
    """The titles of what is not shown, with the reason that they have in common."""
    titles: dict[str, list[str]] = {}
    for chart in charts:
        if chart.spec is None and chart.missing:
            titles.setdefault(chart.missing, []).append(chart.title)
    names: dict[str, list[str]] = {}
    for run in runs:
        if run.report.has_engine and run.report.share_of_bound is None:
            names.setdefault(run.report.no_bound or _NO_REASON, []).append(run.name)
    for reason, each in names.items():
        which = "" if len(each) == len(runs) else f"{', '.join(each)}: "
        titles.setdefault(which + reason, []).append("Share of the bound")
    return [(", ".join(each), reason) for reason, each in titles.items()]
