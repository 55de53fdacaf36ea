"""The frame of a page of plots: one HTML file that needs no network, at any width, in light and dark colours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from batchwright.errors import MissingExtra
from batchwright.version import __version__

Spec = dict[str, Any]
_FOLDER = Path(__file__).parent
_HEIGHT = 190
_RIGHT_MARGIN = 4


@dataclass(frozen=True, slots=True)
class Chart:
    """A plot with what is said of it."""

    title: str
    about: str
    spec: Spec | None
    """None: there is nothing to show."""
    missing: str = ""
    """Why, in that case; empty if nobody expects it."""
    wide: bool = False
    legend: Sequence[str] = ()
    """What the colours stand for, in their order, if the page does not say it."""


def sized(content: Spec, height: int = _HEIGHT) -> Spec:
    """Return the specification of a plot that is as wide as its place on the page."""
    return {
        "width": "container",
        "height": height,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "padding": {"left": 0, "right": _RIGHT_MARGIN, "top": 4, "bottom": 4},
        **content,
    }


def require_libraries(what: str) -> None:
    """Raise `MissingExtra` if what draws the page is not installed; `what`: the page."""
    try:
        import jinja2  # noqa: F401
        import vl_convert  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingExtra.of_report(what, error) from error


def rendered(title: str, charts: Sequence[Chart], template: str = "frame.html", **values: object) -> str:
    """Return a page of the charts that have a plot; `values`: what else its template is given."""
    drawn = [chart for chart in charts if chart.spec is not None]
    if sum(not chart.wide for chart in drawn) % 2:
        drawn[-1] = replace(drawn[-1], wide=True)  # no gap beside the last one
    return str(
        _templates()
        .get_template(template)
        .render(
            title=title,
            charts=drawn,
            specs=[chart.spec for chart in drawn],
            version=__version__,
            style=(_FOLDER / "page.css").read_text(encoding="utf-8"),
            script=(_FOLDER / "page.js").read_text(encoding="utf-8"),
            library=_library(),
            **values,
        )
    )


@cache
def _library() -> str:
    import vl_convert

    # As in every script: what would end the element early.
    bundle = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return bundle.replace("</script", "<\\/script").replace("<!--", "<\\!--")


@cache
def _templates() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
