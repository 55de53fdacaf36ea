"""CORS: which pages of other sites a browser lets use the service."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from batchwright.server.http.error_answers import HttpError, error_response

_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")


class CrossOriginMiddleware(CORSMiddleware):
    """Starlette's, with refusals in the form of every error.

    It allows no credentials that a browser adds by itself: a page must know a key, which it sends as a header. What a
    page may do where no key is needed is judged by `auth.AuthMiddleware`.
    """

    def __init__(self, app: ASGIApp, *, origins: Sequence[str]) -> None:
        super().__init__(
            app, allow_origins=origins, allow_methods=_METHODS, allow_headers=("*",), expose_headers=("*",)
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code == 200:
            return response
        headers = {name: value for name, value in response.headers.items() if not name.startswith("content-")}
        message = f"{bytes(response.body).decode()}: see cors_origins of the service"
        return error_response(HttpError(400, message, code="cors_refused", headers=headers))
