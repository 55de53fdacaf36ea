"""Errors as OpenAI clients read them: a status, and `{"error": {"message", "type", "param", "code"}}`.

The official client makes its exceptions from the status: 400 `BadRequestError`, 401 `AuthenticationError`, 403
`PermissionDeniedError`, 404 `NotFoundError`, 409 `ConflictError`, 422 `UnprocessableEntityError`, 429 `RateLimitError`,
500 and above `InternalServerError`. It tries 408, 409, 429 and 5xx again by itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from batchwright.errors import (
    BatcherClosed,
    BatchwrightError,
    Cancelled,
    Conflict,
    DeadlineExceeded,
    DownloadError,
    EndpointDown,
    EndpointError,
    EndpointUnreachable,
    EngineClosed,
    InputError,
    InvalidRequest,
    LeaseLost,
    MissingExtra,
    ModelCacheError,
    ModelNotFound,
    NotFound,
    Overloaded,
    QuotaExceeded,
    RunFailed,
    ServiceStopping,
    StoreUnavailable,
    UnsupportedModel,
)

BAD_GATEWAY = 502
_KEY_REFUSED = frozenset({401, 403, 407})
"""What an endpoint says of a key that is this service's, not the caller's."""

_STATUSES: tuple[tuple[type[BatchwrightError], int], ...] = (
    (InvalidRequest, 400),
    (InputError, 400),
    (UnsupportedModel, 400),
    (ModelNotFound, 404),
    (NotFound, 404),
    (DeadlineExceeded, 408),
    (Conflict, 409),
    (Overloaded, 429),
    (QuotaExceeded, 429),
    (Cancelled, 499),
    (BatcherClosed, 503),
    (DownloadError, 503),
    (EndpointDown, 503),
    (EngineClosed, 503),
    (LeaseLost, 503),
    (ServiceStopping, 503),
    (StoreUnavailable, 503),
)
"""Any other error is the service's own fault: 500."""

_TYPES = {401: "authentication_error", 403: "permission_error", 408: "timeout_error", 429: "rate_limit_error"}
_FOR_THE_OPERATOR = (DownloadError, MissingExtra, ModelCacheError, RunFailed)
_NO_DETAILS = "an error inside the service; its log has the details"
_LEAST_WAIT = 1
_LONGEST_WAIT = 600


def status_of(error: BaseException) -> int:
    """The HTTP status that stands for `error`.

    What an endpoint elsewhere refused is refused here in the same way. Its failures are a 502, and so is its refusal of
    a key, which is not the caller's.
    """
    if isinstance(error, EndpointError):
        passed_on = error.status is not None and 400 <= error.status < 500 and error.status not in _KEY_REFUSED
        return error.status if passed_on and error.status is not None else BAD_GATEWAY
    return next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)


def error_body(error: BaseException) -> dict[str, Any]:
    """The body that tells of `error`.

    Of an error that is not batchwright's own it tells nothing, and of a failed endpoint no more than that it failed:
    such messages may name hosts, paths and what else is inside. They are for the log.
    """
    status = status_of(error)
    if not isinstance(error, BatchwrightError):
        return _body(_NO_DETAILS, status, None, "internal_error")
    if isinstance(error, EndpointError):
        if status != BAD_GATEWAY and error.body:
            return _of_endpoint(error, error.body, status)
        return _body(_failure_of(error), status, None, error.code)
    param = "model" if isinstance(error, ModelNotFound) else getattr(error, "param", None)
    body = _body(_told(error), status, param, error.code)
    if isinstance(error, QuotaExceeded):
        body["error"]["type"] = error.kind
    return body


def hides_details(error: BaseException) -> bool:
    """Whether `error_body` leaves out what the message of `error` says of an endpoint elsewhere."""
    return isinstance(error, EndpointError) and (status_of(error) == BAD_GATEWAY or not error.body)


def retry_after(error: BaseException) -> int | None:
    """Whole seconds after which to try again, where that is known."""
    seconds = getattr(error, "retry_after", None)
    if not isinstance(seconds, (int, float)) or not math.isfinite(seconds):
        return None
    return min(_LONGEST_WAIT, max(_LEAST_WAIT, math.ceil(seconds)))


def _told(error: BatchwrightError) -> str:
    """What callers are told: no paths and hosts of the machine, which errors for its operator name."""
    if isinstance(error, StoreUnavailable):
        return error.told
    return _NO_DETAILS if isinstance(error, _FOR_THE_OPERATOR) else str(error)


def _failure_of(error: EndpointError) -> str:
    """What callers may know of an endpoint's failure."""
    if isinstance(error, EndpointUnreachable):
        return "the endpoint does not answer"
    if error.status is None:
        return "the endpoint sent an answer that cannot be used"
    if error.status in _KEY_REFUSED:
        return "the endpoint does not accept the key of this service"
    return f"the endpoint answered {error.status}"


def _of_endpoint(error: EndpointError, told: Mapping[str, object], status: int) -> dict[str, Any]:
    message, kind, param, code = (told.get(name) for name in ("message", "type", "param", "code"))
    body = _body(
        str(message or _failure_of(error)), status, None if param is None else str(param), str(code or error.code)
    )
    if kind:
        body["error"]["type"] = _sendable(str(kind))
    return body


def _body(message: str, status: int, param: str | None, code: str) -> dict[str, Any]:
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    param = None if param is None else _sendable(param)
    return {"error": {"message": _sendable(message), "type": kind, "param": param, "code": _sendable(code)}}


def _sendable(text: str) -> str:
    """Without halves of surrogate pairs, which have no UTF-8 form: Python's own JSON reader lets them in."""
    return text.encode(errors="replace").decode()
