"""Every error leaves the service as `{"error": {"message", "type", "param", "code"}}` with the right status."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response

from batchwright.errors import BatchwrightError, InvalidRequest, QuotaExceeded
from batchwright.server.http.methods import allowed
from batchwright.service.observability.logs import logger
from batchwright.wire.error_bodies import error_body, hides_details, retry_after, status_of

RETRY_AFTER = 5
"""Seconds, where nothing better is known."""
_RETRIED = (429, 502, 503)
_CODES = {"missing": "missing_required_parameter", "extra_forbidden": "unknown_parameter"}
_LONGEST_PARAM = 200
_BY_CODE = {"file_too_large": 413, "upload_too_slow": 408, "idempotency_key_reused": 409}
"""Refusals that have a status of their own."""


class ErrorBody(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """The body of every answer with a status from 400 on, in the form that OpenAI clients read."""

    error: ErrorBody


class HttpError(Exception):
    """An error of the face itself: not of what a request means, but of how it was put, or by whom."""

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


def as_http(error: BaseException) -> HttpError:
    """The answer to any error. Of one that is not batchwright's own it tells nothing."""
    if isinstance(error, HttpError):
        return error
    told = error_body(error)["error"]
    code = told["code"]
    status = _BY_CODE.get(code, status_of(error)) if isinstance(error, InvalidRequest) else status_of(error)
    headers = {"retry-after": str(retry_after(error) or RETRY_AFTER)} if status in _RETRIED else {}
    if isinstance(error, QuotaExceeded):
        headers = _waits(error, headers)
    return HttpError(status, told["message"], kind=told["type"], param=told["param"], code=code, headers=headers)


def _waits(error: QuotaExceeded, headers: dict[str, str]) -> dict[str, str]:
    """When to try again, as OpenAI's clients read it."""
    if not error.passing:
        return {"x-should-retry": "false"}
    if error.retry_after is None:
        return headers
    return headers | {"retry-after-ms": str(math.ceil(error.retry_after * 1e3))}


def error_response(error: HttpError) -> Response:
    """As JSON, in ASCII: a message may quote what has no UTF-8 form."""
    return Response(json.dumps(error.body), error.status, error.headers, "application/json")


def install(app: FastAPI) -> None:
    """Have the framework's own errors answered in the one form; all others by `middleware.BodyMiddleware`."""

    async def refused(request: Request, error: Exception) -> Response:
        return error_response(_from_http(request, error) if isinstance(error, HTTPException) else as_http(error))

    async def invalid(_: Request, error: Exception) -> Response:
        return error_response(_from_validation(error) if isinstance(error, RequestValidationError) else as_http(error))

    app.add_exception_handler(HTTPException, refused)
    app.add_exception_handler(RequestValidationError, invalid)


def _from_http(request: Request, error: HTTPException) -> HttpError:
    """Those that the framework raises: no such path, another method, a body that cannot be read."""
    cause = error.__cause__
    if isinstance(cause, RequestValidationError):
        return _from_validation(cause)
    if cause is not None:
        # What stopped the reading of the body.
        raise cause
    if error.status_code == 405:
        # The framework names those of the first route that has the path.
        error.headers = {"allow": allowed(request.app.routes, request.scope)}
    told = {
        404: ("unknown_url", f"there is nothing at {request.method} {request.url.path}"),
        405: ("method_not_allowed", f"{request.method} is not possible at {request.url.path}"),
        400: ("invalid_request", f"the request cannot be read: {error.detail}"),
    }
    code, message = told.get(error.status_code, (None, str(error.detail)))
    return HttpError(error.status_code, message, code=code, headers=error.headers)


def _from_validation(error: RequestValidationError) -> HttpError:
    """The first thing that is wrong with the parameters or the body, by its name."""
    first = error.errors()[0]
    kind, place = str(first.get("type")), first.get("loc", ())[1:]
    param = "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in place).removeprefix(".")
    if not param:
        return HttpError(400, "the body must be a JSON object, sent as application/json", code="invalid_json")
    message = str(first.get("msg", "invalid")).removeprefix("Value error, ")
    param = param[:_LONGEST_PARAM]
    return HttpError(400, f"{param}: {message}", param=param, code=_code_of(kind))


def _code_of(kind: str) -> str:
    """OpenAI's code for a kind of error of pydantic's."""
    if kind in _CODES:
        return _CODES[kind]
    return "invalid_type" if kind.endswith(("_type", "_parsing")) else "invalid_value"


def log_failure(error: BaseException, answer: HttpError, **where: str) -> None:
    """Log an error that is the service's own fault, or of which its answer tells less than is known.

    With its traceback where its message does not explain it.
    """
    if answer.status >= 500 or hides_details(error):
        explained = isinstance(error, (BatchwrightError, HttpError))
        logger.error("request_failed", **where, error=str(error), exc_info=None if explained else error)
