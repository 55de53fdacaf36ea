"""Error answers: `{"error": {"message", "type", "param", "code"}}` with the right status, for every error."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import Scope

from batchwright.errors import BatchwrightError, InvalidRequest, QuotaExceeded
from batchwright.service.observability.logs import logger
from batchwright.wire.api_model import ApiModel
from batchwright.wire.error_bodies import error_body, hides_details, retry_after, status_of

RETRY_AFTER = 5
"""Value of `Retry-After` in seconds where nothing better is known."""
_RETRIED = (429, 502, 503)
_CODES = {"missing": "missing_required_parameter", "extra_forbidden": "unknown_parameter"}
_LONGEST_PARAM = 200
_BY_CODE = {"file_too_large": 413, "upload_too_slow": 408, "idempotency_key_reused": 409}
"""Statuses, by code, of invalid requests for which 400 is not right."""
_OWN_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")


class ErrorBody(ApiModel):
    """The error of an answer."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(ApiModel):
    """The body of every answer with a status of 400 or more, in the form that OpenAI clients read."""

    error: ErrorBody


class HttpError(Exception):
    """An error of the HTTP layer: in the form of a request or the right to make it, not in what it asks for."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": code}}
        self.headers = dict(headers or {})


def unavailable(message: str, code: str) -> HttpError:
    """Return a 503 that asks the client to try again later."""
    return HttpError(503, message, kind="server_error", code=code, headers={"retry-after": str(RETRY_AFTER)})


def as_http(error: BaseException) -> HttpError:
    """Return the answer to any error. It gives no details of an error that is not batchwright's own."""
    if isinstance(error, HttpError):
        return error
    body = error_body(error)["error"]
    code = body["code"]
    status = _BY_CODE.get(code, status_of(error)) if isinstance(error, InvalidRequest) else status_of(error)
    headers = {"retry-after": str(retry_after(error) or RETRY_AFTER)} if status in _RETRIED else {}
    # Headers from which OpenAI's clients decide when to try again.
    if isinstance(error, QuotaExceeded) and not error.passing:
        headers = {"x-should-retry": "false"}
    elif isinstance(error, QuotaExceeded) and error.retry_after is not None:
        headers["retry-after-ms"] = str(math.ceil(error.retry_after * 1e3))
    return HttpError(status, body["message"], kind=body["type"], param=body["param"], code=code, headers=headers)


def error_response(error: HttpError) -> Response:
    """Return the answer as ASCII JSON, since a message may quote text that has no UTF-8 form."""
    return Response(json.dumps(error.body), error.status, error.headers, "application/json")


def install(app: FastAPI) -> None:
    """Make the framework answer its own errors in this form; `middleware.BodyMiddleware` answers all others."""

    async def refused(request: Request, error: Exception) -> Response:
        if isinstance(error, RequestValidationError):
            return error_response(_from_validation(error))
        return error_response(_from_http(request, error) if isinstance(error, HTTPException) else as_http(error))

    app.add_exception_handler(HTTPException, refused)
    app.add_exception_handler(RequestValidationError, refused)


def _from_http(request: Request, error: HTTPException) -> HttpError:
    """Return the answer to an error that the framework raised: unknown path or method, or unreadable body."""
    cause = error.__cause__
    if isinstance(cause, RequestValidationError):
        return _from_validation(cause)
    if cause is not None:
        # The framework wraps errors that were raised while it read the body.
        raise cause
    if error.status_code == 405:
        # The framework names only the methods of the first route that has the path.
        error.headers = {"allow": allowed(request.app.routes, request.scope)}
    known = {
        404: ("unknown_url", f"there is nothing at {request.method} {request.url.path}"),
        405: ("method_not_allowed", f"{request.method} is not possible at {request.url.path}"),
        400: ("invalid_request", f"the request cannot be read: {error.detail}"),
    }
    code, message = known.get(error.status_code, (None, str(error.detail)))
    return HttpError(error.status_code, message, code=code, headers=error.headers)


def allowed(routes: Sequence[BaseRoute], scope: Scope) -> str:
    """Return the `Allow` header for the path of `scope`, with HEAD and OPTIONS; empty for an unknown path."""
    found = [
        method
        for method in _OWN_METHODS
        if any(route.matches({**scope, "method": method})[0] is Match.FULL for route in routes)
    ]
    if "GET" in found:
        found.insert(1, "HEAD")
    return ", ".join([*found, "OPTIONS"]) if found else ""


def _from_validation(error: RequestValidationError) -> HttpError:
    """Return the answer to the first error in the parameters or the body, with the name of what is wrong."""
    first = error.errors()[0]
    kind, place = str(first.get("type")), first.get("loc", ())[1:]
    param = "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in place).removeprefix(".")
    if not param:
        return HttpError(400, "the body must be a JSON object, sent as application/json", code="invalid_json")
    message = str(first.get("msg", "invalid")).removeprefix("Value error, ")
    param = param[:_LONGEST_PARAM]
    code = _CODES.get(kind, "invalid_type" if kind.endswith(("_type", "_parsing")) else "invalid_value")
    return HttpError(400, f"{param}: {message}", param=param, code=code)


def log_failure(error: BaseException, answer: HttpError, **where: str) -> None:
    """Log an error that is the service's own fault, or whose answer hides details.

    The traceback is added to an error that is not batchwright's own, whose message does not explain it.
    """
    if answer.status >= 500 or hides_details(error):
        explained = isinstance(error, (BatchwrightError, HttpError))
        logger.error("request_failed", **where, error=str(error), exc_info=None if explained else error)
