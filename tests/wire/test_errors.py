"""Errors as the official client sees them."""

from __future__ import annotations

from typing import Any

import httpx2
import openai
import pytest

from batchwright import errors
from batchwright.errors import (
    BatchwrightError,
    Conflict,
    ContextLengthExceeded,
    DeadlineExceeded,
    EndpointDown,
    EndpointError,
    EndpointUnreachable,
    EngineClosed,
    GenerationError,
    InvalidRequest,
    ModelNotFound,
    NotFound,
    Overloaded,
    StoreUnavailable,
)
from batchwright.wire.error_bodies import error_body, hides_details, retry_after, status_of


def raised_by_client(error: BaseException) -> openai.APIStatusError:
    """What the official client raises for our answer to `error`."""
    answer = httpx2.Response(
        status_of(error), json=error_body(error), request=httpx2.Request("POST", "http://localhost/v1/completions")
    )
    client = openai.OpenAI(api_key="none", base_url="http://localhost/v1")
    return client._make_status_error_from_response(answer)


@pytest.mark.parametrize(
    ("error", "kind", "code", "param", "type_"),
    [
        (InvalidRequest("no", param="n"), openai.BadRequestError, "invalid_request", "n", "invalid_request_error"),
        (
            ContextLengthExceeded("long"),
            openai.BadRequestError,
            "context_length_exceeded",
            "prompt",
            "invalid_request_error",
        ),
        (ModelNotFound("no"), openai.NotFoundError, "model_not_found", "model", "invalid_request_error"),
        (NotFound("no"), openai.NotFoundError, "not_found", None, "invalid_request_error"),
        (Conflict("no"), openai.ConflictError, "conflict", None, "invalid_request_error"),
        (Overloaded("full"), openai.RateLimitError, "overloaded", None, "rate_limit_error"),
        (DeadlineExceeded("late"), openai.APIStatusError, "deadline_exceeded", None, "timeout_error"),
        (GenerationError("bad"), openai.InternalServerError, "generation_failed", None, "server_error"),
        (EngineClosed("bye"), openai.InternalServerError, "engine_closed", None, "server_error"),
        (
            StoreUnavailable("/var/x", public_message="disk"),
            openai.InternalServerError,
            "store_unavailable",
            None,
            "server_error",
        ),
        (EndpointDown("away"), openai.InternalServerError, "endpoint_down", None, "server_error"),
    ],
)
def test_each_becomes_the_clients_own_exception(
    error: BatchwrightError, kind: type[openai.APIStatusError], code: str, param: str | None, type_: str
) -> None:
    raised = raised_by_client(error)
    assert type(raised) is kind
    assert (raised.code, raised.param, raised.type) == (code, param, type_)
    assert (error.public_message if isinstance(error, StoreUnavailable) else str(error)) in raised.message


def test_every_error_has_a_status_and_a_body() -> None:
    arguments: dict[type, dict[str, Any]] = {
        errors.QuotaExceeded: {"quota": "concurrent_requests"},
        errors.RowsFailed: {"frame": None, "report": None},
    }
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, BatchwrightError):
            error: Any = kind("why", **arguments.get(kind, {}))
            assert 400 <= status_of(error) < 600
            assert error_body(error)["error"]["code"] == error.code


@pytest.mark.parametrize(
    ("kind", "status", "body", "becomes", "told"),
    [
        (EndpointUnreachable, None, None, 502, "the endpoint does not answer"),
        (EndpointError, None, None, 502, "the endpoint sent an answer that cannot be used"),
        (EndpointError, 500, {"message": "/srv/model.py, line 3"}, 502, "the endpoint answered 500"),
        (EndpointError, 401, {"message": "sk-1"}, 502, "the endpoint does not accept the key of this service"),
        (EndpointError, 429, None, 429, "the endpoint answered 429"),
        (EndpointError, 404, {"type": "x"}, 404, "the endpoint answered 404"),
        (EndpointError, 400, {"message": "too long"}, 400, "too long"),
    ],
)
def test_callers_are_told_nothing_of_what_is_inside(
    kind: type[EndpointError], status: int | None, body: dict[str, object] | None, becomes: int, told: str
) -> None:
    message = "http://10.0.0.5:8000/v1: /srv/model.py"
    error = kind(message) if kind is EndpointUnreachable else kind(message, status=status, body=body)
    answer = error_body(error)["error"]
    assert (status_of(error), answer["message"]) == (becomes, told)
    assert hides_details(error) is (becomes == 502 or body is None)


def test_what_an_endpoint_refused_is_handed_on() -> None:
    told: dict[str, object] = {"message": "too long", "type": "bad_thing", "param": "messages", "code": "too_long"}
    raised = raised_by_client(EndpointError("http://x answered 400: too long", status=400, body=told))
    assert type(raised) is openai.BadRequestError
    assert raised.body == told


def test_nothing_is_told_of_errors_that_are_not_ours() -> None:
    assert status_of(RuntimeError("secret")) == 500
    assert "secret" not in str(error_body(RuntimeError("secret")))


def test_half_a_surrogate_pair_can_be_sent() -> None:
    message = error_body(InvalidRequest("\ud800 is unknown", param="\ud800"))
    httpx2.Response(400, json=message)


def test_when_to_try_again() -> None:
    assert retry_after(Overloaded("full")) is None
    assert retry_after(Overloaded("full", retry_after=0.01)) == 1
    assert retry_after(Overloaded("full", retry_after=2.1)) == 3
    assert retry_after(Overloaded("full", retry_after=1e9)) == 600
    assert retry_after(EndpointError("busy", status=429, retry_after=7)) == 7
