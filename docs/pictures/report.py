"""Take the pictures of a page of reports: `python docs/pictures/report.py BEFORE.json AFTER.json`.

The reports are those of two runs of the same file. Needs the extra `report` and chromium.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from batchwright.jobs.report_page.charts import Run
from batchwright.jobs.report_page.page import page_of
from batchwright.jobs.report_page.reading import names_of, read_report

FOLDER = Path(__file__).resolve().parent


def main() -> None:
    """Run the command."""
    # What drives the browser is the tests' own, and lies outside this file's folder.
    sys.path.insert(0, str(FOLDER.parents[1]))
    from tests.dashboard.browser import Browser

    parser = argparse.ArgumentParser(description="Take the pictures of a page of reports.")
    parser.add_argument("reports", type=Path, nargs="+", help="as `run --report` wrote them")
    parser.add_argument("--to", type=Path, default=FOLDER, metavar="FOLDER", help="where to write pictures")
    chosen = parser.parse_args()
    names = names_of(chosen.reports)
    runs = [Run(name, read_report(path)) for name, path in zip(names, chosen.reports, strict=True)]
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "report.html"
        file.write_text(page_of(runs), encoding="utf-8")
        browser = Browser(Path(scratch) / "profile")
        try:
            for name, width, height, dark in (("light", 1280, 1750, False), ("phone", 390, 1750, True)):
                with browser.page(width=width, dark=dark) as page:
                    page.go(file.as_uri())
                    page.until("document.documentElement.dataset.drawn")
                    page.picture(chosen.to / f"report-{name}.png", height=height)
        finally:
            browser.close()


if __name__ == "__main__":
    main()
