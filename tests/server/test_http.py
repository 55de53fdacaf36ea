"""HTTP as clients, browsers and proxies expect it: methods, slashes, origins, encodings, headers of every answer."""

from __future__ import annotations

import gzip
import inspect
import json
from collections.abc import Iterator
from types import ModuleType

import httpx2
import pytest
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from tests.server.conftest import Play, Service, with_service

from batchwright.server.routes import admin, batches, files, online
from batchwright.server.routes import dashboard as state
from batchwright.server.routes import simple_batches as simple

_PAGE = "https://chat.example.com"
_PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-stainless-os"}


@pytest.mark.parametrize("module", [admin, batches, files, online, simple, state])
def test_no_request_of_the_api_is_handed_to_a_thread_on_its_way(module: ModuleType) -> None:
    """FastAPI calls each dependency that is not a coroutine function on a thread, which takes a millisecond."""

    def parts(dependant: Dependant) -> Iterator[object]:
        yield dependant.call
        for each in dependant.dependencies:
            yield from parts(each)

    routes = [route for route in module.router.routes if isinstance(route, APIRoute)]
    assert routes
    assert [each for route in routes for each in parts(route.dependant) if not _is_coroutine(each)] == []


def _is_coroutine(call: object) -> bool:
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(getattr(call, "__call__", None))  # noqa: B004


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/v1/files", "GET, HEAD, POST, OPTIONS"),
        ("/v1/files/file-000000000000000000000000", "GET, HEAD, DELETE, OPTIONS"),
        ("/v1/batches", "GET, HEAD, POST, OPTIONS"),
        ("/v1/chat/completions", "POST, OPTIONS"),
        ("/v1/models", "GET, HEAD, OPTIONS"),
        ("/v1/batch/stats", "GET, HEAD, OPTIONS"),
        ("/v1/batch/sync", "POST, OPTIONS"),
        ("/v1/batch/batch_000000000000000000000000", "GET, HEAD, DELETE, OPTIONS"),
        ("/", "GET, HEAD, OPTIONS"),
    ],
)
@with_service()
async def test_allow_names_all_methods_of_a_path(service: Service, path: str, methods: str) -> None:
    answer = await service.http.options(path)
    assert (answer.status_code, answer.headers["allow"], answer.content) == (204, methods, b"")
    refused = await service.http.request("PATCH", path)
    assert (refused.status_code, refused.headers["allow"]) == (405, methods)
    assert refused.json()["error"]["code"] == "method_not_allowed"


@with_service()
async def test_options_of_nothing_is_not_found(service: Service) -> None:
    assert (await service.http.options("/v1/none")).status_code == 404


@pytest.mark.parametrize(
    "path", ["/", "/health", "/ready", "/metrics", "/openapi.json", "/v1/models", "/v1/batches", "/v1/none"]
)
@with_service()
async def test_head_is_get_without_a_body(service: Service, path: str) -> None:
    shown, head = await service.http.get(path), await service.http.head(path)
    assert (head.status_code, head.content) == (shown.status_code, b"")
    for name in ("content-type", "etag", "content-security-policy"):
        assert head.headers.get(name) == shown.headers.get(name)
    if path != "/metrics":
        assert head.headers["content-length"] == shown.headers["content-length"]


@with_service()
async def test_head_of_an_endless_stream_ends(service: Service) -> None:
    answer = await service.http.head("/dashboard/events")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream")
    assert service.services.http.requests["HEAD", "/dashboard/events", 200] == 1


def test_a_slash_at_the_end_changes_nothing(play: Play) -> None:
    async def main(service: Service) -> None:
        assert (await service.http.get("/v1/models/")).json() == (await service.http.get("/v1/models")).json()
        assert (await service.http.get("/v1/models/org/other/")).json()["id"] == "org/other"
        answer = await service.http.post("/v1/chat/completions/", json={"messages": [{"role": "user", "content": "a"}]})
        assert answer.status_code == 200
        assert (await service.http.post("/v1/batches//", json={})).json()["error"]["param"] == "input_file_id"
        stranger = service.as_tenant(None)
        assert [(await stranger.get(path)).status_code for path in ("/health/", "/metrics/")] == [200, 401]

    async def with_key(service: Service) -> None:
        service.http.headers["authorization"] = f"Bearer {await service.key('t')}"
        await main(service)

    play(with_key)


@with_service()
async def test_a_compressed_body_is_refused_in_one_form(service: Service) -> None:
    body = gzip.compress(json.dumps({"prompt": "x"}).encode())
    for path in ("/v1/completions", "/v1/files", "/v1/batches"):
        answer = await service.http.post(path, content=body, headers={"content-encoding": "gzip"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_content_encoding")
        assert answer.headers["accept-encoding"] == "identity"
    plain = {"content-encoding": "identity", "content-type": "application/json"}
    assert (await service.http.post("/v1/completions", content=b'{"prompt":"x"}', headers=plain)).status_code == 200


@with_service()
async def test_every_answer_says_how_long_it_took(service: Service) -> None:
    answers = [
        await service.http.post("/v1/completions", json={"prompt": "x"}),
        await service.http.post("/v1/completions", json={"prompt": "x", "stream": True}),
        await service.http.post("/v1/completions", json={}),
        await service.http.get("/v1/none"),
        await service.http.post("/v1/batches", content=b"x" * 200_000),
    ]
    assert [answer.status_code for answer in answers] == [200, 200, 400, 404, 413]
    assert all(answer.headers["openai-processing-ms"].isdecimal() for answer in answers)


async def _asked_by(page: str, http: httpx2.AsyncClient) -> httpx2.Response:
    """Send a request as a browser does for a page of another site."""
    headers = {"origin": page, "sec-fetch-site": "cross-site"}
    return await http.post("/v1/completions", json={"prompt": "x"}, headers=headers)


@with_service()
async def test_pages_of_other_sites_get_nothing_unless_told(service: Service) -> None:
    answer = await service.http.options("/v1/models", headers={"origin": _PAGE, **_PREFLIGHT})
    assert "access-control-allow-origin" not in answer.headers
    answer = await _asked_by(_PAGE, service.http)
    assert answer.status_code == 403
    assert "access-control-allow-origin" not in answer.headers


@with_service(cors_origins=[_PAGE])
async def test_a_page_that_is_named_is_let_through(service: Service) -> None:
    answer = await service.http.options("/v1/completions", headers={"origin": _PAGE, **_PREFLIGHT})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, _PAGE)
    assert "x-stainless-os" in answer.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in answer.headers
    answer = await _asked_by(_PAGE, service.http)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, _PAGE)
    # DNS rebinding: the page's own host name leads to this service.
    rebound = await service.http.get("/v1/models", headers={"host": "chat.example.com", "origin": _PAGE})
    assert rebound.status_code == 403
    other = await service.http.options("/v1/models", headers={"origin": "https://example.com", **_PREFLIGHT})
    assert (other.status_code, other.json()["error"]["code"]) == (400, "cors_refused")
    assert "access-control-allow-origin" not in other.headers
    assert (await _asked_by("https://example.com", service.http)).status_code == 403


@with_service(cors_origins=["*"])
async def test_all_pages_are_let_through_only_where_keys_are_needed(service: Service) -> None:
    assert (await _asked_by(_PAGE, service.http)).status_code == 403
    with_key = service.as_tenant(await service.key("t"))
    answer = await _asked_by(_PAGE, with_key)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")
    answer = await _asked_by(_PAGE, service.http)
    # Without this header the page could not read the error.
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (401, "*")
    assert (await service.http.options("/v1/models", headers={"origin": _PAGE, **_PREFLIGHT})).status_code == 200
