"""Files and batches as the API shows them: OpenAI's objects, and for batches some fields of our own."""

from __future__ import annotations

import math
from typing import Generic, Literal, Self, TypeVar

from pydantic import BaseModel

from batchwright.service.batches.batch_progress import ProgressEstimate
from batchwright.store.records import BatchProblem, BatchRecord, BatchStatus, FileRecord, FileStatus, Purpose


class FileObject(BaseModel):
    """A file."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: Purpose
    status: FileStatus
    status_details: str | None

    @classmethod
    def of(cls, file: FileRecord) -> Self:
        return cls(
            id=file.id,
            bytes=file.bytes,
            created_at=math.floor(file.created_at),
            expires_at=_whole(file.expires_at),
            filename=file.filename,
            purpose=file.purpose,
            status=file.status,
            status_details=file.status_details,
        )


class FileDeleted(BaseModel):
    """What is left of a deleted file."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool


class Problem(BaseModel):
    """Why a batch failed validation."""

    code: str
    message: str
    param: str | None
    line: int | None
    """From 1; null where no line is to blame."""

    @classmethod
    def of(cls, problem: BatchProblem) -> Self:
        return cls(code=problem.code, message=problem.message, param=problem.param, line=problem.line)


class Problems(BaseModel):
    """All of them, or the first hundred."""

    object: Literal["list"] = "list"
    data: list[Problem]


class RequestCounts(BaseModel):
    """Lines of a batch."""

    total: int
    completed: int
    failed: int


class InputTokensDetails(BaseModel):
    cached_tokens: int


class OutputTokensDetails(BaseModel):
    reasoning_tokens: int


class BatchUsage(BaseModel):
    """Tokens of the lines that are finished."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class BatchProgress(BaseModel):
    """How far a batch is: not a part of OpenAI's object."""

    fraction: float
    """Share of its lines that are finished, 0..1."""
    lines_per_second: float | None
    eta_seconds: float | None
    """Until its last line, at this rate; null when it is not known."""

    @classmethod
    def of(cls, progress: ProgressEstimate) -> Self:
        return cls(
            fraction=progress.fraction, lines_per_second=progress.lines_per_second, eta_seconds=progress.eta_seconds
        )


class BatchObject(BaseModel):
    """A batch. `paused`, `parent_id` and `progress` are our own."""

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
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    paused: bool
    parent_id: str | None
    """The batch of which this one retries lines."""
    progress: BatchProgress

    @classmethod
    def of(cls, batch: BatchRecord, progress: ProgressEstimate) -> Self:
        problems = [Problem.of(each) for each in batch.errors]
        return cls(
            id=batch.id,
            endpoint=batch.endpoint,
            model=batch.model,
            errors=Problems(data=problems) if problems else None,
            input_file_id=batch.input_file_id,
            completion_window=batch.completion_window,
            status=batch.status,
            output_file_id=batch.output_file_id,
            error_file_id=batch.error_file_id,
            request_counts=RequestCounts(
                total=batch.counts.total, completed=batch.counts.completed, failed=batch.counts.failed
            ),
            usage=_usage(batch),
            metadata=dict(batch.metadata) or None,
            created_at=math.floor(batch.created_at),
            in_progress_at=_whole(batch.in_progress_at),
            expires_at=math.floor(batch.expires_at),
            finalizing_at=_whole(batch.finalizing_at),
            completed_at=_whole(batch.completed_at),
            failed_at=_whole(batch.failed_at),
            expired_at=_whole(batch.expired_at),
            cancelling_at=_whole(batch.cancelling_at),
            cancelled_at=_whole(batch.cancelled_at),
            paused=batch.paused,
            parent_id=batch.parent_id,
            progress=BatchProgress.of(progress),
        )


Item = TypeVar("Item", FileObject, BatchObject)


class Page(BaseModel, Generic[Item]):
    """A part of a list; `after=<last_id>` gives the next one."""

    object: Literal["list"] = "list"
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool

    @classmethod
    def of(cls, items: list[Item], limit: int) -> Self:
        """`items` are up to `limit` + 1: the one over the limit only says that there are more."""
        data = items[:limit]
        first, last = (data[0].id, data[-1].id) if data else (None, None)
        return cls(data=data, first_id=first, last_id=last, has_more=len(items) > limit)


def _usage(batch: BatchRecord) -> BatchUsage:
    usage = batch.usage
    return BatchUsage(
        input_tokens=usage.input_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=usage.cached_tokens),
        output_tokens=usage.output_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=usage.reasoning_tokens),
        total_tokens=usage.input_tokens + usage.output_tokens,
    )


def _whole(seconds: float | None) -> int | None:
    return None if seconds is None else math.floor(seconds)
