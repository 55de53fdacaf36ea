"""`batchwright report`: a page of plots from reports of runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

HELP = "\n\n".join(
    (
        "Make a page of plots of one or several runs.",
        "REPORT is what `batchwright run … --report FILE` wrote. The page is one file that needs no network: "
        "throughput, occupancy, KV cache, reuse, lengths of answers, and where the time went, of several runs in the "
        "same plots.",
        "Example: batchwright report before.json after.json -o report.html",
    )
)


def report_command(
    reports: Annotated[list[Path], typer.Argument(metavar="REPORT...", help="Reports of runs, as JSON.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The page; - is standard output.")],
    title: Annotated[str | None, typer.Option(help="Its title (default: the names of the runs).")] = None,
) -> None:
    """See `HELP`."""
    from batchwright.durable_files import replacing, require_writable
    from batchwright.jobs.report_page.charts import Run
    from batchwright.jobs.report_page.page import page_of, require_libraries
    from batchwright.jobs.report_page.reading import names_of, read_report

    to_stream = str(output) == "-"
    if not to_stream:
        require_writable("page", output, {"one of the reports": reports})
    require_libraries()
    runs = [Run(name, read_report(path)) for name, path in zip(names_of(reports), reports, strict=True)]
    page = page_of(runs, title).encode()
    if to_stream:
        sys.stdout.buffer.write(page)
        return
    with replacing(output) as file:
        file.write(page)
    print(f"{output}: {len(page) / 1e6:.1f} MB, {len(runs)} run{'' if len(runs) == 1 else 's'}", file=sys.stderr)
