"""Hooks of MkDocs: pages that are made from the code or lie elsewhere in the repository, and links between them."""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "docs"), str(ROOT / "src")]

from site_pages import cli_reference, http_reference, python_reference  # noqa: E402 - after the path is set

GENERATED: Mapping[str, Callable[[], str]] = {
    "reference/python.md": python_reference.page,
    "reference/cli.md": cli_reference.page,
    "reference/http.md": http_reference.page,
}
_RESULTS = "benchmarks/results"
_LINK = re.compile(r"(!?\[(?:[^\]\[]|\[[^\]]*\])*\])\(([^)\s]+)\)")


def elsewhere() -> dict[str, str]:
    """Return the addresses in the site of pages outside `docs/`, by their paths in the repository."""
    results = sorted(path.name for path in (ROOT / _RESULTS).glob("*.md") if path.name != "README.md")
    return {
        "README.md": "index.md",
        "CHANGELOG.md": "changelog.md",
        f"{_RESULTS}/README.md": "benchmarks/index.md",
        **{f"{_RESULTS}/{name}": f"benchmarks/{name}" for name in results},
    }


def on_config(config: Any) -> Any:
    """Name the pages of measurements in the navigation."""
    reference = next(entry["Reference"] for entry in config.nav if "Reference" in entry)
    measurements = next(entry["Measurements"] for entry in reference if "Measurements" in entry)
    pages = [address for address in elsewhere().values() if address.startswith("benchmarks/")]
    measurements[:] = ["benchmarks/index.md", *(page for page in pages if page != "benchmarks/index.md")]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that do not lie in `docs/`."""
    from mkdocs.structure.files import File

    for address, make in GENERATED.items():
        files.append(File.generated(config, address, content=make()))
    for source, address in elsewhere().items():
        files.append(File.generated(config, address, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links to where the pages are in the site; what is no page of the site is only named."""
    address = page.file.src_uri
    if address in GENERATED:
        return markdown
    sources = {there: source for source, there in elsewhere().items()}
    source = sources.get(address, f"docs/{address}")
    return re.sub(_LINK, lambda link: _led(link, source, address), markdown)


def _led(link: re.Match[str], source: str, address: str) -> str:
    """Return a link of the page `source` of the repository as it must be at `address` in the site."""
    text, target = link.groups()
    path, mark, anchor = target.partition("#")
    if not path or "://" in target:
        return link.group()
    there = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    mapped = elsewhere().get(there, there.removeprefix("docs/") if there.startswith("docs/") else None)
    if there == _RESULTS:
        mapped = "benchmarks/index.md"
    if mapped is None:
        return text.removeprefix("[").removesuffix("]")
    relative = posixpath.relpath(mapped, posixpath.dirname(address) or ".")
    return f"{text}({relative}{mark}{anchor})"
