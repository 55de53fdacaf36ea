"""Files and batches as the API shows them: OpenAI's objects, and for batches some fields of our own."""

from __future__ import annotations

import math
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

from pydantic import BeforeValidator, ConfigDict

from batchwright.service.batches.batch_progress import ProgressEstimate
from batchwright.store.records import BatchRecord, BatchStatus, FileRecord, FileStatus, Purpose
from batchwright.wire.api_model import ApiModel

Moment = Annotated[int, BeforeValidator(math.floor)]
"""Time in whole Unix seconds."""
MomentOrNone = Annotated[int | None, BeforeValidator(lambda value: None if value is None else math.floor(value))]


class FileObject(ApiModel):
    """A file."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: Moment
    expires_at: MomentOrNone
    filename: str
    purpose: Purpose
    status: FileStatus
    status_details: str | None

    @classmethod
    def of(cls, file: FileRecord) -> Self:
        return cls.model_validate(file, from_attributes=True)


class ConvertedTable(ApiModel):
    """Input of a batch that was made from a table."""

    object: Literal["table.requests"] = "table.requests"
    file: FileObject
    rows: int
    """Number of rows that became requests."""
    skipped: int
    """Number of rows that were left out, since they have nothing in the columns of the template."""
    first_skipped: int | None
    """Number of the first of these."""


class FileDeleted(ApiModel):
    """Answer to the deletion of a file."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool


class Problem(ApiModel):
    """Reason why a batch failed validation."""

    model_config = ConfigDict(from_attributes=True)

    code: str
    message: str
    param: str | None
    line: int | None
    """Number of the line, from 1; null if it is not about a line."""


class Problems(ApiModel):
    """Reasons why a batch failed validation: all, or the first hundred."""

    model_config = ConfigDict(from_attributes=True)

    object: Literal["list"] = "list"
    data: list[Problem]


class RequestCounts(ApiModel):
    """Numbers of lines of a batch."""

    model_config = ConfigDict(from_attributes=True)

    total: int
    completed: int
    failed: int


class InputTokensDetails(ApiModel):
    cached_tokens: int


class OutputTokensDetails(ApiModel):
    reasoning_tokens: int


class BatchUsage(ApiModel):
    """Numbers of tokens of the finished lines of a batch."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class BatchProgress(ApiModel):
    """Progress of a batch, which OpenAI's object does not have."""

    model_config = ConfigDict(from_attributes=True)

    fraction: float
    """Share of its tokens that are computed, or of its lines that are finished while its tokens are not known, 0..1."""
    lines_per_second: float | None
    eta_seconds: float | None
    """Seconds until its last line, as foreseen from its tokens; null when it is not known."""


class BatchObject(ApiModel):
    """A batch. OpenAI's object has no `paused`, `parent_id` and `progress`."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None
    errors: Problems | None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    request_counts: RequestCounts
    usage: BatchUsage
    metadata: dict[str, str] | None
    created_at: Moment
    in_progress_at: MomentOrNone
    expires_at: Moment
    finalizing_at: MomentOrNone
    completed_at: MomentOrNone
    failed_at: MomentOrNone
    expired_at: MomentOrNone
    cancelling_at: MomentOrNone
    cancelled_at: MomentOrNone
    paused: bool
    parent_id: str | None
    """Id of the batch whose lines this one retries."""
    progress: BatchProgress

    @classmethod
    def of(cls, batch: BatchRecord, progress: ProgressEstimate) -> Self:
        shown: dict[str, Any] = {name: getattr(batch, name) for name in cls.model_fields if hasattr(batch, name)}
        usage = batch.usage
        shown["errors"] = {"data": batch.errors} if batch.errors else None
        shown["request_counts"] = batch.counts
        shown["usage"] = BatchUsage(
            input_tokens=usage.input_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=usage.cached_tokens),
            output_tokens=usage.output_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=usage.reasoning_tokens),
            total_tokens=usage.input_tokens + usage.output_tokens,
        )
        shown["metadata"] = dict(batch.metadata) or None
        shown["progress"] = progress
        return cls(**shown)


Item = TypeVar("Item", FileObject, BatchObject)


class Page(ApiModel, Generic[Item]):
    """One page of a list; `after=<last_id>` gives the next page."""

    object: Literal["list"] = "list"
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool

    @classmethod
    def of(cls, items: list[Item], limit: int) -> Self:
        """Return a page of up to `limit` items; one more in `items` says that there are more."""
        data = items[:limit]
        first, last = (data[0].id, data[-1].id) if data else (None, None)
        return cls(data=data, first_id=first, last_id=last, has_more=len(items) > limit)
