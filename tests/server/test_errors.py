"""Errors have one form, wherever they are raised; every answer has the id of its request."""

from __future__ import annotations

from typing import Any

import pytest
from structlog.typing import EventDict
from tests.server.conftest import Service, with_service

_JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("method", "path", "options", "status", "code"),
    [
        ("GET", "/v1/none", {}, 404, "unknown_url"),
        ("GET", "/v1/models/none", {}, 404, "model_not_found"),
        ("PUT", "/v1/models", {}, 405, "method_not_allowed"),
        ("POST", "/v1/batches", {"json": []}, 400, "invalid_json"),
        ("POST", "/v1/batches", {"content": b"{", "headers": _JSON}, 400, "invalid_json"),
        ("POST", "/v1/batches", {"content": b"{}"}, 400, "invalid_json"),
        ("POST", "/v1/batches", {}, 400, "invalid_json"),
        ("POST", "/v1/completions", {"content": rb'{"prompt": "\ud800"}', "headers": _JSON}, 400, "invalid_json"),
        ("POST", "/v1/completions", {"content": rb'{"\ud800": 1}', "headers": _JSON}, 400, "invalid_json"),
        ("POST", "/v1/completions", {"content": b'{"seed": NaN}', "headers": _JSON}, 400, "invalid_json"),
        ("POST", "/v1/completions", {"content": b'{"prompt": "x"}'}, 400, "invalid_json"),
        ("POST", "/v1/completions", {"content": b"[" * 100, "headers": _JSON}, 400, "json_too_complex"),
        ("POST", "/v1/completions", {"content": b"x", "headers": {"content-encoding": "gzip"}}, 415, None),
        ("GET", "/v1/batches?limit=0", {}, 400, "invalid_value"),
        ("GET", "/v1/batches?limit=x", {}, 400, "invalid_type"),
        ("GET", "/v1/files?after=%00", {}, 400, "invalid_value"),
        ("GET", "/v1/files/file-%00", {}, 404, "not_found"),
        ("POST", "/v1/files", {"json": {}}, 400, "invalid_form"),
    ],
)
@with_service()
async def test_they_have_one_form(
    service: Service, method: str, path: str, options: dict[str, Any], status: int, code: str | None
) -> None:
    answer = await service.http.request(method, path, **options)
    assert answer.status_code == status
    if code is not None:
        assert answer.headers["content-type"] == "application/json"
        assert answer.json().keys() == {"error"}
        assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
        assert answer.json()["error"]["code"] == code
    assert answer.headers["x-request-id"].startswith("req_")


@with_service()
async def test_a_defect_is_a_500_that_tells_nothing_and_is_logged(service: Service, logged: list[EventDict]) -> None:
    async def broken(*_: Any) -> None:
        raise RuntimeError("a secret of the inside")

    service.services.jobs.batch = broken  # type: ignore[method-assign, assignment]
    answer = await service.http.get("/v1/batches/batch_" + "0" * 24, headers={"x-request-id": "abc"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert "secret" not in answer.text
    failed = [each for each in logged if each["event"] == "request_failed"]
    assert [str(each["exc_info"]) for each in failed] == ["a secret of the inside"]
    assert answer.headers["x-request-id"] == "abc"


@pytest.mark.parametrize("given", ["", " ", "a b", "x" * 200, "ü", "-x", "a\tb"])
@with_service()
async def test_an_id_that_is_not_sane_is_replaced(service: Service, given: str) -> None:
    answer = await service.http.get("/health", headers=[(b"x-request-id", given.encode())])
    assert answer.headers["x-request-id"].startswith("req_")
