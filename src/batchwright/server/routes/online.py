"""`/v1/chat/completions`, `/v1/completions` and `/v1/embeddings`: requests that somebody waits for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from batchwright.inference.calls import closing
from batchwright.inference.inference import Call
from batchwright.request import Flow
from batchwright.server.http.context import FlowOf, Key, RequestId, ServicesOf, needs
from batchwright.server.http.json_bodies import JsonRoute
from batchwright.server.http.rate_limits import within_quotas
from batchwright.server.http.sse import EventStream, first_of, while_connected
from batchwright.server.routes.openapi_answers import (
    ChatBody,
    ChatCompletion,
    Completion,
    CompletionBody,
    Embeddings,
    EmbeddingsBody,
)
from batchwright.service.access.api_keys import bounded_priority
from batchwright.service.composition import Services
from batchwright.store.records import ApiKey
from batchwright.wire.bounds import require_sizes
from batchwright.wire.requests import CHAT_URL, COMPLETION_URL, EMBEDDINGS_URL, wants_stream

router = APIRouter(tags=["Online"], dependencies=[needs("online")], route_class=JsonRoute)

# Without a schema: in OpenAPI 3.1 there is none for the events of a stream.
_STREAM: dict[str, Any] = {"text/event-stream": {}}


def _answers(model: type, *, stream: bool = True) -> dict[int | str, dict[str, Any]]:
    return {200: {"model": model, "content": _STREAM if stream else {}}}


@router.post(CHAT_URL, response_class=Response, responses=_answers(ChatCompletion))
async def chat_completions(
    body: ChatBody, request: Request, services: ServicesOf, request_id: RequestId, flow: FlowOf, key: Key
) -> Response:
    """Answer a chat; with `stream: true` as server-sent events, closed by `data: [DONE]`."""
    return await _answer(CHAT_URL, body, request, services, request_id, flow, key)


@router.post(COMPLETION_URL, response_class=Response, responses=_answers(Completion))
async def completions(
    body: CompletionBody, request: Request, services: ServicesOf, request_id: RequestId, flow: FlowOf, key: Key
) -> Response:
    """Go on with prompts; with `stream: true` as server-sent events, closed by `data: [DONE]`."""
    return await _answer(COMPLETION_URL, body, request, services, request_id, flow, key)


@router.post(EMBEDDINGS_URL, response_class=Response, responses=_answers(Embeddings, stream=False))
async def embeddings(
    body: EmbeddingsBody, request: Request, services: ServicesOf, request_id: RequestId, flow: FlowOf, key: Key
) -> Response:
    """The vectors of texts."""
    return await _answer(EMBEDDINGS_URL, body, request, services, request_id, flow, key)


async def _answer(
    endpoint: str,
    body: dict[str, Any],
    request: Request,
    services: Services,
    request_id: str,
    flow: Flow,
    key: ApiKey | None,
) -> Response:
    """The whole answer, or the stream of it. A client that hangs up has its request cancelled at once."""
    # Before anything looks at what is in these lists.
    require_sizes({name: body.get(name) for name in ("messages", "prompt", "input")})
    bounded = bounded_priority(body, None if key is None else key.best_priority)
    call = Call(endpoint, bounded, request_id, flow=flow)
    if endpoint != EMBEDDINGS_URL and wants_stream(body):
        return EventStream(await first_of(request, _streamed(services, request, call)))
    async with within_quotas(services, request, call) as used:
        answer = await while_connected(request.receive, services.online.answer(replace(call, used=used)))
    return Response(msgspec.json.encode(answer), media_type="application/json")


async def _streamed(services: Services, request: Request, call: Call) -> AsyncIterator[dict[str, Any]]:
    async with (
        within_quotas(services, request, call) as used,
        closing(services.online.stream(replace(call, used=used))) as bodies,
    ):
        async for body in bodies:
            used.begun = True
            yield body
