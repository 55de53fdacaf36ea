"""Errors in OpenAI's form: a status, and the body `{"error": {"message", "type", "param", "code"}}`.

The official client chooses its exception by the status: 400 `BadRequestError`, 401 `AuthenticationError`, 403
`PermissionDeniedError`, 404 `NotFoundError`, 409 `ConflictError`, 422 `UnprocessableEntityError`, 429 `RateLimitError`,
500 and above `InternalServerError`. It retries 408, 409, 429 and 5xx by itself.
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
"""Statuses with which an endpoint refuses the key, which is this service's, not the caller's."""

_UNAVAILABLE = (BatcherClosed, DownloadError, EndpointDown, EngineClosed, LeaseLost, ServiceStopping, StoreUnavailable)
_STATUSES: tuple[tuple[int, tuple[type[BatchwrightError], ...]], ...] = (
    (400, (InvalidRequest, InputError, UnsupportedModel)),
    (404, (ModelNotFound, NotFound)),
    (408, (DeadlineExceeded,)),
    (409, (Conflict,)),
    (429, (Overloaded, QuotaExceeded)),
    (499, (Cancelled,)),
    (503, _UNAVAILABLE),
)
"""Statuses of errors. Any other error is the service's own fault: 500."""

_TYPES = {401: "authentication_error", 403: "permission_error", 408: "timeout_error", 429: "rate_limit_error"}
_FOR_THE_OPERATOR = (DownloadError, MissingExtra, ModelCacheError, RunFailed)
_NO_DETAILS = "an error inside the service; its log has the details"
_LEAST_WAIT = 1
_LONGEST_WAIT = 600


_KINDS = {
    **dict.fromkeys(("invalid_request_error", "content_policy_violation", "context_length_exceeded"), 400),
    **dict.fromkeys(("authentication_error", "invalid_api_key"), 401),
    "permission_error": 403,
    **dict.fromkeys(("not_found_error", "model_not_found"), 404),
    **dict.fromkeys(("rate_limit_error", "rate_limit_exceeded", "insufficient_quota", "requests", "tokens"), 429),
    **dict.fromkeys(("server_error", "internal_server_error", "internal_error", "api_error"), 500),
    **dict.fromkeys(("service_unavailable", "service_unavailable_error"), 503),
    "overloaded_error": 529,
}
"""Statuses with which errors of these codes and types are answered."""


def status_of_kind(error: Mapping[str, object]) -> int | None:
    """Return the status of an error object in OpenAI's form that came without one; None if that is not known.

    Its code may be the status itself, for example if a router passes on another endpoint's answer.
    """
    for kind in (error.get("code"), error.get("status"), error.get("type")):
        text = str(kind)
        if text.isascii() and text.isdigit() and 400 <= int(text[:4]) < 600:
            return int(text)
        if text in _KINDS:
            return _KINDS[text]
    return None


def status_of(error: BaseException) -> int:
    """Return the HTTP status for `error`.

    A refusal by an endpoint elsewhere keeps its status. The endpoint's failures become 502, as does its refusal of the
    key, which is not the caller's.
    """
    if isinstance(error, EndpointError):
        status = error.status
        return BAD_GATEWAY if status is None or not 400 <= status < 500 or status in _KEY_REFUSED else status
    return next((status for status, kinds in _STATUSES if isinstance(error, kinds)), 500)


def error_body(error: BaseException) -> dict[str, Any]:
    """Return the response body for `error`.

    It gives no details of an error that is not batchwright's own, or that is for the operator, and says of a failed
    endpoint only that it failed: such messages may name hosts, paths and other internals. They belong in the log.
    """
    status = status_of(error)
    if not isinstance(error, BatchwrightError):
        return _body(_NO_DETAILS, status, None, "internal_error")
    if isinstance(error, EndpointError):
        reported = {} if hides_details(error) else error.body or {}
        message, kind, param, code = (reported.get(name) for name in ("message", "type", "param", "code"))
        param = None if param is None else str(param)
        return _body(str(message or _failure_of(error)), status, param, str(code or error.code), str(kind or ""))
    param = "model" if isinstance(error, ModelNotFound) else getattr(error, "param", None)
    message = _NO_DETAILS if isinstance(error, _FOR_THE_OPERATOR) else str(error)
    if isinstance(error, StoreUnavailable):
        message = error.public_message
    return _body(message, status, param, error.code, error.kind if isinstance(error, QuotaExceeded) else "")


def hides_details(error: BaseException) -> bool:
    """Return whether `error_body` leaves out details in the message of `error` about an endpoint elsewhere."""
    return isinstance(error, EndpointError) and (status_of(error) == BAD_GATEWAY or not error.body)


def retry_after(error: BaseException) -> int | None:
    """Return the whole seconds after which to try again; None if that is not known."""
    seconds = getattr(error, "retry_after", None)
    if not isinstance(seconds, (int, float)) or not math.isfinite(seconds):
        return None
    return min(_LONGEST_WAIT, max(_LEAST_WAIT, math.ceil(seconds)))


def _failure_of(error: EndpointError) -> str:
    """Return what callers may know about an endpoint's failure."""
    if isinstance(error, EndpointUnreachable):
        return "the endpoint does not answer"
    if error.status is None:
        return "the endpoint sent an answer that cannot be used"
    if error.status in _KEY_REFUSED:
        return "the endpoint does not accept the key of this service"
    return f"the endpoint answered {error.status}"


def _body(message: str, status: int, param: str | None, code: str, kind: str = "") -> dict[str, Any]:
    kind = kind or _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    param = None if param is None else _sendable(param)
    return {"error": {"message": _sendable(message), "type": _sendable(kind), "param": param, "code": _sendable(code)}}


def _sendable(text: str) -> str:
    """Replace lone surrogates, which have no UTF-8 form but are accepted by Python's own JSON parser."""
    return text.encode(errors="replace").decode()
