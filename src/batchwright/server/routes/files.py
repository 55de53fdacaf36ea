"""`/v1/files`: input and output files of batches."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any, Literal
from urllib.parse import quote

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from batchwright.errors import InvalidRequest
from batchwright.jobs.table_requests import TableOptions
from batchwright.server.http.audit_trail import Deed, audited
from batchwright.server.http.context import Key, ServicesOf, Tenant, needs
from batchwright.server.http.json_bodies import JsonRoute
from batchwright.server.http.multipart import Form
from batchwright.server.http.sse import ByteStream
from batchwright.server.routes.parameters import After, FileId, TableRequests
from batchwright.service.batches.api_objects import ConvertedTable, FileDeleted, FileObject, Page
from batchwright.store.records import Purpose
from batchwright.wire.requests import CHAT_URL, COMPLETION_URL

router = APIRouter(tags=["Files"], dependencies=[needs("batches")], route_class=JsonRoute)

_FORM: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {
                            "type": "string",
                            "contentMediaType": "application/octet-stream",
                            "minLength": 1,
                            "description": "The file, with a name.",
                        },
                        "purpose": {"enum": ["batch"], "description": "What the file is for."},
                        "expires_after[anchor]": {
                            "enum": ["created_at"],
                            "description": "The moment from which the time is counted.",
                        },
                        "expires_after[seconds]": {
                            "type": "integer",
                            "minimum": 3600,
                            "maximum": 2_592_000,
                            "description": "Seconds after which the file expires.",
                        },
                    },
                    "dependentRequired": {
                        "expires_after[anchor]": ["expires_after[seconds]"],
                        "expires_after[seconds]": ["expires_after[anchor]"],
                    },
                }
            }
        },
    }
}
_CONTENT: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}
}


@router.post("/v1/files", openapi_extra=_FORM)
async def upload_file(
    request: Request, services: ServicesOf, tenant: Tenant, key: Key, deed: Annotated[Deed, audited("file.upload")]
) -> FileObject:
    """Upload the input file of a batch as a form; it is stored as it arrives."""
    form = Form(request.headers.get("content-type", ""), request.stream())
    filename = await form.begin()
    async with aclosing(_described(form)) as chunks:
        file = await services.jobs.upload(tenant, filename, chunks, expires_after=lambda: _expiry(form.fields), key=key)
    deed.object = file.id
    return FileObject.of(file)


@router.get("/v1/files")
async def list_files(
    services: ServicesOf,
    tenant: Tenant,
    purpose: Annotated[Purpose | None, Query(description="Only files of this purpose.")] = None,
    limit: Annotated[int, Query(ge=1, le=10_000, description="Most files of a page.")] = 10_000,
    order: Annotated[Literal["asc", "desc"], Query(description="`desc`: the newest first.")] = "desc",
    after: After = None,
) -> Page[FileObject]:
    """List input and output files by time of creation."""
    files = await services.jobs.files(tenant, limit=limit + 1, purpose=purpose, order=order, after=after)
    return Page[FileObject].of([FileObject.of(file) for file in files], limit)


@router.get("/v1/files/{file_id}")
async def retrieve_file(file_id: FileId, services: ServicesOf, tenant: Tenant) -> FileObject:
    """Show a file."""
    return FileObject.of(await services.jobs.file(tenant, file_id))


@router.delete("/v1/files/{file_id}", dependencies=[audited("file.delete", "file_id")])
async def delete_file(file_id: FileId, services: ServicesOf, tenant: Tenant) -> FileDeleted:
    """Delete a file. 409 for the input of a batch that has not ended."""
    await services.jobs.delete_file(tenant, file_id)
    return FileDeleted(id=file_id, deleted=True)


@router.get(
    "/v1/files/{file_id}/content",
    response_class=Response,
    responses=_CONTENT,
    dependencies=[audited("file.content", "file_id")],
)
async def file_content(file_id: FileId, services: ServicesOf, tenant: Tenant) -> Response:
    """Download the bytes of a file."""
    file, chunks = await services.jobs.content(tenant, file_id)
    headers = {
        "content-type": "application/octet-stream",
        "content-length": str(file.bytes),
        "content-disposition": f"attachment; filename*=UTF-8''{quote(file.filename, safe='', errors='replace')}",
        "x-content-type-options": "nosniff",
    }
    return ByteStream(chunks, headers)


@router.post("/v1/files/{file_id}/requests")
async def requests_of_table(
    file_id: FileId,
    services: ServicesOf,
    tenant: Tenant,
    key: Key,
    deed: Annotated[Deed, audited("file.requests", "file_id")],
    body: TableRequests | None = None,
) -> ConvertedTable:
    """Make the input of a batch from an uploaded table or list of prompts: CSV, TSV, Parquet, JSON, JSON Lines or text.

    The extension of the file's name gives its format. Rows that have nothing in the columns of the template are left
    out.
    """
    body = body or TableRequests()
    if body.system_template is not None and body.endpoint == COMPLETION_URL:
        raise InvalidRequest(
            f"system_template: {COMPLETION_URL} has no system messages: leave it out, or choose {CHAT_URL}",
            param="system_template",
        )
    fields = body.model_dump(include={"model", "max_tokens", "temperature"}, exclude_none=True)
    options = TableOptions(
        name="",
        endpoint=body.endpoint,
        prompt_template=body.prompt_template,
        system_template=body.system_template,
        body=fields,
    )
    file, outcome = await services.jobs.requests_of_table(tenant, file_id, options, key=key)
    deed.object = f"{file_id} as {file.id}"
    first = outcome.first_skipped[0] if outcome.first_skipped else None
    return ConvertedTable(file=FileObject.of(file), rows=outcome.rows, skipped=outcome.skipped, first_skipped=first)


async def _described(form: Form) -> AsyncGenerator[bytes]:
    """Yield the bytes of the file, then check the other fields, which may follow it in the form."""
    empty = True
    async for chunk in form.chunks():
        empty = empty and (not chunk or chunk.isspace())
        yield chunk
    if empty:
        raise InvalidRequest(
            "file: it has no lines: send one with a line for each request", param="file", code="empty_file"
        )
    purpose = form.fields.get("purpose")
    if purpose != "batch":
        code = "invalid_value" if purpose is not None else "missing_required_parameter"
        raise InvalidRequest(f"purpose={purpose!r}: must be 'batch'", param="purpose", code=code)
    _expiry(form.fields)


def _expiry(fields: dict[str, str]) -> float | None:
    """Return the seconds after which the file expires, by `expires_after`; None if that is not given."""
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise InvalidRequest(f"expires_after[anchor]={anchor!r}: must be 'created_at'", param="expires_after")
    if seconds is None or not (seconds.isascii() and seconds.isdigit() and len(seconds) < 10):
        raise InvalidRequest(f"expires_after[seconds]={seconds!r}: must be a whole number", param="expires_after")
    return float(seconds)
