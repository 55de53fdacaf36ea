"""`/v1/models`, and the endpoints whose answers a client waits for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from fastapi import APIRouter, Path, Request
from starlette.responses import Response

from batchwright.errors import ModelNotFound
from batchwright.inference.calls import closing
from batchwright.inference.inference import Call
from batchwright.request import Flow
from batchwright.server.http.context import FlowOf, Key, RequestId, ServicesOf, SloNamed, needs, within_quotas
from batchwright.server.http.json_bodies import JsonRoute
from batchwright.server.http.sse import EventStream, first_of, while_connected
from batchwright.server.routes.openapi_answers import (
    ChatBody,
    ChatCompletion,
    Classes,
    ClassifyBody,
    Completion,
    CompletionBody,
    Embeddings,
    EmbeddingsBody,
    RerankBody,
    Reranked,
    ResponseBody,
    ResponseObject,
    ScoreBody,
    Scores,
)
from batchwright.service.access.api_keys import bounded_priority
from batchwright.service.composition import Services
from batchwright.service.observability.slo_classes import slo_class_of
from batchwright.store.records import ApiKey
from batchwright.wire.api_model import ApiModel
from batchwright.wire.bounds import require_sizes
from batchwright.wire.requests import (
    ALIASES,
    CHAT_URL,
    CLASSIFY_URL,
    COMPLETION_URL,
    EMBEDDINGS_URL,
    ENCODER_URLS,
    PAIR_FIELDS,
    RERANK_URL,
    RESPONSES_URL,
    SCORE_URL,
    wants_stream,
)

_Route = TypeVar("_Route", bound=Callable[..., Awaitable[Response]])

router = APIRouter(tags=["Online"], route_class=JsonRoute)

_LISTS = ("documents", *{name: None for names in PAIR_FIELDS for name in names})


def _options(answer: type, *, stream: bool = True) -> dict[str, Any]:
    """Return options of a route. OpenAPI 3.1 has no schema for the events of a stream."""
    answers = {200: {"model": answer, "content": {"text/event-stream": {}} if stream else {}}}
    return {"response_class": Response, "responses": answers, "dependencies": [needs("online")]}


def _also_at(endpoint: str) -> Callable[[_Route], _Route]:
    """Return a decorator that makes a route of `endpoint` answer at its other paths, too, which are not described."""

    def add(route: _Route) -> _Route:
        for path in (path for path, meant in ALIASES.items() if meant == endpoint):
            router.add_api_route(
                path,
                route,
                methods=["POST"],
                response_class=Response,
                dependencies=[needs("online")],
                include_in_schema=False,
            )
        return route

    return add


class Model(ApiModel):
    """A model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    """Time when the model's files were made; for a model elsewhere, when this service started."""
    owned_by: str = "batchwright"


class ModelList(ApiModel):
    """All models, the default one first."""

    object: Literal["list"] = "list"
    data: list[Model]


@router.post(CHAT_URL, **_options(ChatCompletion))
async def chat_completions(
    body: ChatBody,
    request: Request,
    services: ServicesOf,
    request_id: RequestId,
    flow: FlowOf,
    key: Key,
    slo: SloNamed = None,
) -> Response:
    """Answer a chat; with `stream: true` as server-sent events, the last of them `data: [DONE]`."""
    return await _answer(CHAT_URL, body, request, services, request_id, flow, key, slo)


@router.post(COMPLETION_URL, **_options(Completion))
async def completions(
    body: CompletionBody,
    request: Request,
    services: ServicesOf,
    request_id: RequestId,
    flow: FlowOf,
    key: Key,
    slo: SloNamed = None,
) -> Response:
    """Complete prompts; with `stream: true` as server-sent events, the last of them `data: [DONE]`."""
    return await _answer(COMPLETION_URL, body, request, services, request_id, flow, key, slo)


@router.post(RESPONSES_URL, **_options(ResponseObject))
async def responses(
    body: ResponseBody,
    request: Request,
    services: ServicesOf,
    request_id: RequestId,
    flow: FlowOf,
    key: Key,
    slo: SloNamed = None,
) -> Response:
    """Answer a text or a chat with a text; with `stream: true` as server-sent events. Nothing is stored."""
    return await _answer(RESPONSES_URL, body, request, services, request_id, flow, key, slo)


@router.post(EMBEDDINGS_URL, **_options(Embeddings, stream=False))
async def embeddings(
    body: EmbeddingsBody,
    request: Request,
    services: ServicesOf,
    request_id: RequestId,
    flow: FlowOf,
    key: Key,
    slo: SloNamed = None,
) -> Response:
    """Compute the vectors of texts."""
    return await _answer(EMBEDDINGS_URL, body, request, services, request_id, flow, key, slo)


@_also_at(RERANK_URL)
@router.post(RERANK_URL, **_options(Reranked, stream=False))
async def rerank(
    body: RerankBody,
    request: Request,
    services: ServicesOf,
    request_id: RequestId,
    flow: FlowOf,
    key: Key,
    slo: SloNamed = None,
) -> Response:
    """Rank documents by how well they answer a query, with a cross-encoder, or the vectors of an embedding model."""
    return await _answer(RERANK_URL, body, request, services, request_id, flow, key, slo)


@_also_at(SCORE_URL)
@router.post(SCORE_URL, **_options(Scores, stream=False))
async def score(
    body: ScoreBody,
    request: Request,
    services: ServicesOf,
    request_id: RequestId,
    flow: FlowOf,
    key: Key,
    slo: SloNamed = None,
) -> Response:
    """Score pairs of texts with a cross-encoder, or by the cosine similarity of an embedding model's vectors."""
    return await _answer(SCORE_URL, body, request, services, request_id, flow, key, slo)


@_also_at(CLASSIFY_URL)
@router.post(CLASSIFY_URL, **_options(Classes, stream=False))
async def classify(
    body: ClassifyBody,
    request: Request,
    services: ServicesOf,
    request_id: RequestId,
    flow: FlowOf,
    key: Key,
    slo: SloNamed = None,
) -> Response:
    """Classify texts with a sequence classifier."""
    return await _answer(CLASSIFY_URL, body, request, services, request_id, flow, key, slo)


@router.get("/v1/models")
async def list_models(services: ServicesOf) -> ModelList:
    """List the models that are served."""
    return ModelList(data=[_model(services, name) for name in services.inference.models])


@router.get("/v1/models/{model:path}")
async def retrieve_model(model: Annotated[str, Path(description="Name of the model.")], services: ServicesOf) -> Model:
    """Show a model. Its name may have slashes."""
    if model not in services.inference.models:
        raise ModelNotFound(f"model {model!r} is not served here: GET /v1/models lists those that are")
    return _model(services, model)


async def _answer(
    endpoint: str,
    body: dict[str, Any],
    request: Request,
    services: Services,
    request_id: str,
    flow: Flow,
    key: ApiKey | None,
    slo: str | None,
) -> Response:
    """Return the whole answer, or a stream of it. If the client hangs up, the request is cancelled at once."""
    # Checked before anything reads the contents of these lists.
    require_sizes({name: body.get(name) for name in ("messages", "prompt", "input", *_LISTS)})
    bounded = bounded_priority(body, None if key is None else key.best_priority)
    judged = slo_class_of(services.settings.slo, slo, key, bounded)
    call = Call(endpoint, bounded, request_id, flow=flow, slo=judged)
    if endpoint not in ENCODER_URLS and wants_stream(body):
        bodies = await first_of(request, _streamed(services, request, call))
        return EventStream(bodies, done=b"", named=True) if endpoint == RESPONSES_URL else EventStream(bodies)
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


def _model(services: Services, name: str) -> Model:
    return Model(id=name, created=int(services.models_made_at.get(name, services.started_at)))
