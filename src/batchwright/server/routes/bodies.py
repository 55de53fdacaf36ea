"""Bodies that make batches."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from batchwright.jobs.store.records import Endpoint

MetadataKey = Annotated[str, StringConstraints(max_length=64)]
MetadataValue = Annotated[str, StringConstraints(max_length=512)]


class OutputExpiresAfter(BaseModel):
    """When the output files expire."""

    model_config = ConfigDict(extra="forbid")

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=3600, le=2_592_000)]


class BatchCreate(BaseModel):
    """A batch of the lines of an uploaded file."""

    model_config = ConfigDict(extra="forbid")

    input_file_id: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_\-]{1,64}$")]
    endpoint: Endpoint
    completion_window: Annotated[
        str, Field(description='"24h"; other durations in h, m or d are honoured too: "90m", "7d".', examples=["24h"])
    ]
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] | None = None
    output_expires_after: OutputExpiresAfter | None = None


class BatchRetry(BaseModel):
    """How the lines that did not succeed are tried again."""

    model_config = ConfigDict(extra="forbid")

    completion_window: str | None = None
    """Left out: that of the old batch."""


class SimpleBatch(BaseModel):
    """Prompts, all with the same parameters."""

    model_config = ConfigDict(extra="forbid")

    prompts: Annotated[list[str], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] = 256
    temperature: Annotated[float, Field(ge=0.0, le=10.0)] = 0.7
    model: str | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1, description="Lower is sooner.")] = 5


class SimpleBatchAsync(SimpleBatch):
    """Prompts to be computed as a durable job."""

    callback_url: Annotated[str, StringConstraints(max_length=2048)] | None = None
    """Told of the end, with a signature as webhooks have it."""
