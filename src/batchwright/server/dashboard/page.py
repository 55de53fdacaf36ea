"""The pages at `/` and `/docs`, and their files. They hold no data: the dashboard's modules fetch the state, with a key
where needed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fastapi import APIRouter, Request
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.exceptions import HTTPException
from starlette.responses import Response

from batchwright.server.reference.api_reference import Reference, read_reference

_FOLDER = Path(__file__).parent
_KINDS = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}
_FOR_EVER = "public, max-age=31536000, immutable"

SECURITY: Mapping[str, str] = {
    # Without any Trusted Types policy, no module can turn text into HTML.
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
class _Site:
    """The pages and their files, as they were at the first request."""

    page: bytes
    digest: str
    """Hash of all files, part of their addresses, so that they can be cached for ever and versions never mix."""
    files: Mapping[str, bytes]
    render: Callable[..., str]
    """Renders the template named by its first argument."""

    def reference(self, reference: Reference) -> bytes:
        """Return the page of the reference."""
        return self.render("reference.html", reference=reference).encode()


@router.get("/")
def page(request: Request) -> Response:
    """Return the dashboard, or 304 to a browser that has it."""
    return _answer(request, _site().page)


@router.get("/docs")
def docs(request: Request) -> Response:
    """Return the reference of the HTTP API, or 304 to a browser that has it."""
    content: bytes | None = getattr(request.app.state, "reference", None)
    if content is None:
        content = request.app.state.reference = _site().reference(read_reference(request.app.openapi()))
    return _answer(request, content)


def _answer(request: Request, content: bytes) -> Response:
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**SECURITY, "cache-control": "no-cache", "etag": tag}
    known = [each.strip().removeprefix("W/") for each in request.headers.get("if-none-match", "").split(",")]
    if tag in known:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type="text/html", headers=headers)


@router.get("/dashboard/static/{digest}/{name}")
def static(digest: str, name: str) -> Response:
    """Return a module, a style sheet or the icon."""
    site = _site()
    content = site.files.get(name)
    if content is None or digest != site.digest:
        raise HTTPException(404)
    headers = {**SECURITY, "cache-control": _FOR_EVER, "content-type": _KINDS[Path(name).suffix]}
    return Response(content, headers=headers)


@cache
def _site() -> _Site:
    # The first call takes a tenth of a second, so the routes run on threads and not on the event loop.
    paths = sorted(path for path in (_FOLDER / "static").iterdir() if path.suffix in _KINDS)
    files = {path.name: path.read_bytes() for path in paths}
    hashed = hashlib.sha256()
    for name, content in files.items():
        hashed.update(f"{name}\0{len(content)}\0".encode() + content)
    digest = hashed.hexdigest()[:20]
    environment = Environment(
        loader=FileSystemLoader(_FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    shared = {
        "static": f"/dashboard/static/{digest}",
        "sheets": [name for name in files if name.endswith(".css")],
        "modules": [name for name in files if name.endswith(".js") and name not in ("main.js", "theme.js")],
    }

    def render(template: str, **given: object) -> str:
        return environment.get_template(template).render(**shared, **given)

    return _Site(render("page.html").encode(), digest, files, render)
