"""The page at `/` and its files. It holds no data: its modules fetch the state, with a key if need be."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fastapi import APIRouter, Request
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.exceptions import HTTPException
from starlette.responses import Response

_FOLDER = Path(__file__).parent
_KINDS = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}
_FOR_EVER = "public, max-age=31536000, immutable"

SECURITY: Mapping[str, str] = {
    # Trusted Types for nobody: no module can turn a text into HTML, whatever the text.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}

router = APIRouter(include_in_schema=False)


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    kind: str


@dataclass(frozen=True, slots=True)
class _Site:
    """The page and its files, as they were when they were first asked for."""

    page: bytes
    digest: str
    """Of all files. It is part of their addresses, so they can be kept for ever, and never mixed with other ones."""
    files: Mapping[str, _File]


@router.get("/")
def page(request: Request) -> Response:
    """The dashboard. Answers 304 to whoever has it already."""
    site = _site()
    tag = f'"{hashlib.sha256(site.page).hexdigest()[:32]}"'
    headers = {**SECURITY, "cache-control": "no-cache", "etag": tag}
    known = [each.strip().removeprefix("W/") for each in request.headers.get("if-none-match", "").split(",")]
    if tag in known:
        return Response(status_code=304, headers=headers)
    return Response(site.page, media_type="text/html", headers=headers)


@router.get("/dashboard/static/{digest}/{name}")
def static(digest: str, name: str) -> Response:
    """A module, a style sheet or the icon."""
    site = _site()
    file = site.files.get(name)
    if file is None or digest != site.digest:
        raise HTTPException(404)
    headers = {**SECURITY, "cache-control": _FOR_EVER, "content-type": file.kind}
    return Response(file.content, headers=headers)


@cache
def _site() -> _Site:
    # Takes a tenth of a second the first time, so the routes run in threads and not on the event loop.
    paths = sorted(path for path in (_FOLDER / "static").iterdir() if path.suffix in _KINDS)
    files = {path.name: _File(path.read_bytes(), _KINDS[path.suffix]) for path in paths}
    hashed = hashlib.sha256()
    for name, file in files.items():
        hashed.update(f"{name}\0{len(file.content)}\0".encode() + file.content)
    digest = hashed.hexdigest()[:20]
    environment = Environment(
        loader=FileSystemLoader(_FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    shown = environment.get_template("page.html").render(
        static=f"/dashboard/static/{digest}",
        sheets=[name for name in files if name.endswith(".css")],
        modules=[name for name in files if name.endswith(".js") and name not in ("main.js", "theme.js")],
    )
    return _Site(shown.encode(), digest, files)
