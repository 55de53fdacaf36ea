"""`/v1/batches`: OpenAI's batches, with retry, pause, resume and early results in addition."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.responses import Response

from batchwright.server.http.audit_trail import Deed, audited
from batchwright.server.http.context import Key, ServicesOf, Tenant, needs
from batchwright.server.http.json_bodies import JsonRoute
from batchwright.server.routes.parameters import NO_NUL, After, BatchCreate, BatchId, BatchRetry, IdempotencyKey
from batchwright.service.batches.api_objects import BatchObject, Page
from batchwright.service.batches.readable_lines import ErrorGroups, ReadableLines
from batchwright.service.composition import Services
from batchwright.store.records import BatchRecord, LineState
from batchwright.wire.api_model import ApiModel

router = APIRouter(prefix="/v1/batches", tags=["Batches"], dependencies=[needs("batches")], route_class=JsonRoute)


class ResultPage(ApiModel):
    """Lines of the output and error files, in the order in which they finished."""

    object: str = "list"
    data: list[dict[str, Any]]
    next_after: int
    """Value of `after` for the next page; unchanged when there is nothing new."""
    has_more: bool
    """Whether the next page has lines now. A batch that has not ended may have more later."""


@router.post("")
async def create_batch(
    body: BatchCreate,
    services: ServicesOf,
    tenant: Tenant,
    key: Key,
    deed: Annotated[Deed, audited("batch.create")],
    idempotency_key: IdempotencyKey = None,
) -> BatchObject:
    """Create a batch of the lines of an uploaded file. They are validated first: see its `status` and `errors`."""
    expires = body.output_expires_after
    batch = await services.jobs.create_batch(
        tenant,
        input_file_id=body.input_file_id,
        endpoint=body.endpoint,
        completion_window=body.completion_window,
        metadata=body.metadata,
        output_expires_after=None if expires is None else float(expires.seconds),
        idempotency_key=idempotency_key,
        key=key,
    )
    deed.object = batch.id
    return _shown(services, batch)


@router.get("")
async def list_batches(
    services: ServicesOf,
    tenant: Tenant,
    limit: Annotated[int, Query(ge=1, le=100, description="Most batches of a page.")] = 20,
    after: After = None,
) -> Page[BatchObject]:
    """List batches, the newest first."""
    batches = await services.jobs.batches(tenant, limit=limit + 1, after=after)
    return Page[BatchObject].of([_shown(services, batch) for batch in batches], limit)


@router.get("/{batch_id}")
async def retrieve_batch(batch_id: BatchId, services: ServicesOf, tenant: Tenant) -> BatchObject:
    """Show a batch, with its progress and the time when it will be done."""
    return _shown(services, await services.jobs.batch(tenant, batch_id))


@router.post("/{batch_id}/cancel", dependencies=[audited("batch.cancel", "batch_id")])
async def cancel_batch(batch_id: BatchId, services: ServicesOf, tenant: Tenant) -> BatchObject:
    """Cancel a batch, and keep what is done of it. A batch that has ended does not change."""
    return _shown(services, await services.jobs.cancel(tenant, batch_id))


@router.post("/{batch_id}/pause", dependencies=[audited("batch.pause", "batch_id")])
async def pause_batch(batch_id: BatchId, services: ServicesOf, tenant: Tenant) -> BatchObject:
    """Begin no further lines of a batch until it is resumed. Its completion window goes on."""
    return _shown(services, await services.jobs.pause(tenant, batch_id))


@router.post("/{batch_id}/resume", dependencies=[audited("batch.resume", "batch_id")])
async def resume_batch(batch_id: BatchId, services: ServicesOf, tenant: Tenant) -> BatchObject:
    """Resume a paused batch."""
    return _shown(services, await services.jobs.resume(tenant, batch_id))


@router.post("/{batch_id}/retry")
async def retry_batch(
    batch_id: BatchId,
    services: ServicesOf,
    tenant: Tenant,
    key: Key,
    deed: Annotated[Deed, audited("batch.retry", "batch_id")],
    body: BatchRetry | None = None,
    idempotency_key: IdempotencyKey = None,
) -> BatchObject:
    """Create a new batch of the lines of an ended one that did not succeed.

    409 when there are none, when it has not ended, and when its output files are gone, and with them its lines.
    """
    window = None if body is None else body.completion_window
    batch = await services.jobs.retry(
        tenant, batch_id, completion_window=window, idempotency_key=idempotency_key, key=key
    )
    deed.object = f"{batch_id} as {batch.id}"
    return _shown(services, batch)


@router.get(
    "/{batch_id}/results",
    response_class=Response,
    responses={200: {"model": ResultPage}},
    dependencies=[audited("batch.results", "batch_id")],
)
async def batch_results(
    batch_id: BatchId,
    services: ServicesOf,
    tenant: Tenant,
    after: Annotated[int, Query(ge=0, le=2**53, description="`next_after` of the page before.")] = 0,
    limit: Annotated[int, Query(ge=1, le=1000, description="Most lines of a page.")] = 100,
) -> Response:
    """List the results so far, while the batch runs and after it; 404 once its output files are gone.

    A page of large results has fewer than `limit`.
    """
    page = await services.jobs.results(tenant, batch_id, after=after, limit=limit)
    last = after if not page else page[-1].sequence or after
    more = page and await services.jobs.results(tenant, batch_id, after=last, limit=1)
    # Each line is JSON already, as in the output file.
    data = b",".join(line.output for line in page if line.output is not None)
    rest = b'],"next_after":%d,"has_more":%s}' % (last, b"true" if more else b"false")
    return Response(b'{"object":"list","data":[' + data + rest, media_type="application/json")


@router.get("/{batch_id}/lines", dependencies=[audited("batch.lines", "batch_id")])
async def batch_lines(
    batch_id: BatchId,
    services: ServicesOf,
    tenant: Tenant,
    after: Annotated[int, Query(ge=0, le=2**53, description="`next_after` of the page before.")] = 0,
    limit: Annotated[int, Query(ge=1, le=100, description="Most lines of a page.")] = 20,
    state: Annotated[LineState | None, Query(description="Only lines in this state.")] = None,
    search: Annotated[
        str, Query(max_length=256, pattern=NO_NUL, description="Only lines whose prompt, answer, id or error has it.")
    ] = "",
) -> ReadableLines:
    """List lines in the order of the input, each with its prompt and its answer or error as text.

    A page of a search looks at up to 5,000 lines and about 64 MiB of input, and at the first 20,000 characters of each
    text. It may have no line although `next_after` says that there are more.
    """
    return await services.lines.lines(tenant, batch_id, after=after, limit=limit, state=state, search=search)


@router.get("/{batch_id}/errors", dependencies=[audited("batch.errors", "batch_id")])
async def batch_errors(batch_id: BatchId, services: ServicesOf, tenant: Tenant) -> ErrorGroups:
    """Count the failed lines by the code of their errors, with an example of each. Looks at up to 10,000 of them."""
    return await services.lines.errors(tenant, batch_id)


def _shown(services: Services, batch: BatchRecord) -> BatchObject:
    return BatchObject.of(batch, services.jobs.progress(batch))
