"""`/v1/batch/*`: batches of prompts, computed while the client waits or as durable jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field

from batchwright.errors import (
    BatcherClosed,
    BatchwrightError,
    EndpointDown,
    EngineClosed,
    InvalidRequest,
    ModelNotFound,
    NotFound,
    Overloaded,
)
from batchwright.inference.inference import Call
from batchwright.server.http.audit_trail import Deed, audited, not_audited
from batchwright.server.http.context import FlowOf, Key, ServicesOf, SloNamed, Tenant, needs, within_quotas
from batchwright.server.http.error_answers import as_http, log_failure
from batchwright.server.http.json_bodies import JsonRoute
from batchwright.server.http.sse import while_connected
from batchwright.server.routes.parameters import BatchId, IdempotencyKey, SimpleBatch, SimpleBatchAsync
from batchwright.service.access.api_keys import bounded_priority
from batchwright.service.batches.simple_batches import Prompts, SimpleStatus, share_computed, status_of
from batchwright.service.composition import Services
from batchwright.service.new_ids import new_id
from batchwright.service.observability.figures import batcher_stats, engine_stats
from batchwright.service.observability.slo_classes import slo_class_of
from batchwright.store.records import ENDED, BatchRecord
from batchwright.wire.api_model import ApiModel
from batchwright.wire.requests import COMPLETION_URL

router = APIRouter(prefix="/v1/batch", tags=["Simple batches"], route_class=JsonRoute)

_CONCERNS_ALL = (ModelNotFound, Overloaded, EngineClosed, BatcherClosed, EndpointDown)
"""Errors that concern the whole batch: if every prompt failed with one of them, it is the answer."""


class PromptError(ApiModel):
    """The reason why a prompt has no output."""

    index: int
    """Index of the prompt, from 0."""
    code: str
    message: str


class SyncAnswer(ApiModel):
    """Results of the prompts, in their order."""

    batch_id: str
    outputs: list[str | None]
    """Null for a prompt that failed, which is listed in `errors`."""
    errors: list[PromptError] = Field(default_factory=list)
    total_tokens: int
    """Number of generated tokens, by the model's tokenizer."""
    latency_ms: float
    throughput_tokens_per_sec: float


class AsyncAnswer(ApiModel):
    """The job that was created."""

    batch_id: str
    status: SimpleStatus


class SimpleState(ApiModel):
    """A job of prompts."""

    batch_id: str
    status: SimpleStatus
    progress: float
    """Share that is done, 0..1; once the job has ended, the share of its prompts that were computed."""
    outputs: list[str | None] | None = None
    """Outputs, once the job has ended and until its files expire or are deleted; null for a prompt without one."""
    errors: list[PromptError] | None = None
    """Errors, there as long as `outputs` are."""


class SimpleStats(ApiModel):
    """Counts of the tenant's jobs of prompts, and how full the batches of this process are."""

    total_batches: int
    completed: int
    pending: int
    processing: int
    failed: int
    cancelled: int
    padding_efficiency: float | None
    """Useful tokens divided by computed ones; null when an endpoint elsewhere computes."""
    occupancy: float | None
    """Mean number of sequences in a step of the engine; null when there was no step."""
    tokens_per_sec: float
    """Rate of generated tokens over the last ten seconds."""


@router.post("/sync", dependencies=[needs("online")])
async def batch_sync(
    body: SimpleBatch, request: Request, services: ServicesOf, flow: FlowOf, key: Key, slo: SloNamed = None
) -> SyncAnswer:
    """Compute prompts and wait for all of them. A prompt that fails has an entry in `errors`; the others are answered.

    When the client hangs up, unfinished prompts are cancelled.
    """
    prompts = _prompts(body)
    prompts.check(services.limits)
    batch_id = new_id("batch_")
    started = services.clock.now()
    best = None if key is None else key.best_priority
    bodies = [bounded_priority(each, best) for each in prompts.bodies()]
    judged = slo_class_of(services.settings.slo, slo, key, bodies[0])
    calls = [
        Call(COMPLETION_URL, each, f"req_{batch_id.removeprefix('batch_')}_{place}", flow=flow, slo=judged)
        for place, each in enumerate(bodies)
    ]
    async with within_quotas(services, request, *calls) as used:
        results = await while_connected(request.receive, _computed(services, calls))
        used(sum(result["usage"]["total_tokens"] for result in results if isinstance(result, Mapping)))
    seconds = services.clock.now() - started
    failures = [result for result in results if isinstance(result, BatchwrightError)]
    if len(failures) == len(results) and isinstance(failures[0], _CONCERNS_ALL):
        raise failures[0]
    tokens = sum(result["usage"]["completion_tokens"] for result in results if isinstance(result, Mapping))
    return SyncAnswer(
        batch_id=batch_id,
        outputs=[result["choices"][0]["text"] if isinstance(result, Mapping) else None for result in results],
        errors=[_prompt_error(place, each) for place, each in enumerate(results) if isinstance(each, BatchwrightError)],
        total_tokens=tokens,
        latency_ms=seconds * 1e3,
        throughput_tokens_per_sec=tokens / seconds if seconds > 0 else 0.0,
    )


@router.post("/async", dependencies=[needs("batches")])
async def batch_async(
    body: SimpleBatchAsync,
    services: ServicesOf,
    tenant: Tenant,
    key: Key,
    deed: Annotated[Deed, audited("batch.create")],
    idempotency_key: IdempotencyKey = None,
) -> AsyncAnswer:
    """Create a durable job of prompts; `callback_url` is notified of its end as webhooks are."""
    if body.callback_url is not None:
        try:
            await services.sender.check_host_for_client(body.callback_url)
        except InvalidRequest as error:
            raise InvalidRequest(f"callback_{error}", param="callback_url", code=error.code) from error
    batch = await services.jobs.create_simple(
        tenant, _prompts(body), callback_url=body.callback_url, idempotency_key=idempotency_key, key=key
    )
    deed.object = batch.id
    return AsyncAnswer(batch_id=batch.id, status=status_of(batch))


@router.get("/stats", dependencies=[needs("batches")])
async def batch_stats(services: ServicesOf, tenant: Tenant) -> SimpleStats:
    """Count the jobs of prompts, and report how full the batches of this process are."""
    counts = await services.jobs.count_batches(tenant, simple=True)
    inner = services.inference.inner
    engine, batchers = engine_stats(inner), batcher_stats(inner)
    efficiencies = [each.padding_efficiency for each in ([engine] if engine is not None else batchers)]
    return SimpleStats(
        total_batches=sum(counts.values()),
        completed=counts.get("completed", 0),
        pending=counts.get("validating", 0),
        processing=sum(counts.get(status, 0) for status in ("in_progress", "finalizing", "cancelling")),
        failed=counts.get("failed", 0) + counts.get("expired", 0),
        cancelled=counts.get("cancelled", 0),
        padding_efficiency=efficiencies[0] if efficiencies else None,
        occupancy=engine.occupancy_mean if engine is not None and engine.steps else None,
        tokens_per_sec=sum(services.live.rates(name).generated for name in services.inference.figures),
    )


@router.get("/{batch_id:simple}", dependencies=[needs("batches"), audited("batch.results", "batch_id")])
async def retrieve_simple_batch(
    batch_id: BatchId, request: Request, services: ServicesOf, tenant: Tenant
) -> SimpleState:
    """Show the progress of a job of prompts, and its outputs once it has ended."""
    state = await _state(services, await _simple(services, tenant, batch_id))
    if state.outputs is None:
        not_audited(request)
    return state


@router.delete("/{batch_id:simple}", dependencies=[needs("batches"), audited("batch.cancel", "batch_id")])
async def cancel_simple_batch(batch_id: BatchId, services: ServicesOf, tenant: Tenant) -> SimpleState:
    """Cancel a job of prompts. A job that has ended does not change."""
    await _simple(services, tenant, batch_id)
    return await _state(services, await services.jobs.cancel(tenant, batch_id))


def _prompts(body: SimpleBatch) -> Prompts:
    given = {name: getattr(body, name) for name in SimpleBatch.model_fields}
    return Prompts(**{name: value for name, value in given.items() if value is not None})


async def _computed(services: Services, calls: list[Call]) -> list[Mapping[str, Any] | BatchwrightError]:
    """Return the answer to each call, or the error in its place."""

    async def one(call: Call) -> Mapping[str, Any] | BatchwrightError:
        try:
            return await services.inference.answer(call)
        except BatchwrightError as error:
            return error

    with services.online.admitted(calls):
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(call)) for call in calls]
        return [task.result() for task in tasks]


def _prompt_error(place: int, error: BatchwrightError) -> PromptError:
    answer = as_http(error)
    log_failure(error, answer)
    body = answer.body["error"]
    return PromptError(index=place, code=body["code"], message=body["message"])


async def _simple(services: Services, tenant: str, batch_id: str) -> BatchRecord:
    batch = await services.jobs.batch(tenant, batch_id)
    if not batch.simple:
        raise NotFound(f"no simple batch {batch_id!r}")
    return batch


async def _state(services: Services, batch: BatchRecord) -> SimpleState:
    outputs: list[str | None] | None = None
    errors: list[PromptError] | None = None
    found = await services.jobs.outputs(batch.tenant, batch.id) if batch.status in ENDED else None
    if found is not None:
        outputs = [each.text for each in found]
        errors = [
            PromptError(index=place, code=each.code or "", message=each.message or "")
            for place, each in enumerate(found)
            if each.text is None
        ]
    progress = share_computed(batch, found) if batch.status in ENDED else services.jobs.progress(batch).fraction
    return SimpleState(batch_id=batch.id, status=status_of(batch), progress=progress, outputs=outputs, errors=errors)
