"""Bodies that make batches."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from batchwright.jobs.store.records import Endpoint
from batchwright.wire import bounds
from batchwright.wire.fields import DEFAULT_PRIORITY, MAX_TEMPERATURE, MAX_TOKENS, RANGES
from batchwright.wire.texts import flaw_of


def _whole(text: str) -> str:
    if (flaw := flaw_of(text)) is not None:
        raise ValueError(flaw)
    return text


Text = Annotated[str, AfterValidator(_whole)]
Model = Annotated[Text, StringConstraints(min_length=1, max_length=bounds.MAX_MODEL)]
Prompt = Annotated[Text, StringConstraints(max_length=bounds.MAX_TEXT)]
MetadataKey = Annotated[Text, StringConstraints(max_length=bounds.MAX_METADATA_KEY)]
MetadataValue = Annotated[Text, StringConstraints(max_length=bounds.MAX_METADATA_VALUE)]
Window = Annotated[
    str,
    StringConstraints(max_length=16),
    Field(description='"24h"; other durations in h, m or d are honoured too: "90m", "7d".', examples=["24h"]),
]


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
    completion_window: Window
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=bounds.MAX_METADATA)] | None = None
    output_expires_after: OutputExpiresAfter | None = None


class BatchRetry(BaseModel):
    """How the lines that did not succeed are tried again."""

    model_config = ConfigDict(extra="forbid")

    completion_window: Window | None = None
    """Left out: that of the old batch."""


class SimpleBatch(BaseModel):
    """Prompts, all with the same parameters."""

    model_config = ConfigDict(extra="forbid")

    prompts: Annotated[list[Prompt], Field(min_length=1, max_length=bounds.MAX_PROMPTS)]
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] = 256
    temperature: Annotated[float, Field(ge=0.0, le=MAX_TEMPERATURE)] = 0.7
    model: Model | None = None
    priority: Annotated[
        int, Field(ge=RANGES["priority"][0], le=RANGES["priority"][1], description="Lower is sooner.")
    ] = DEFAULT_PRIORITY


class SimpleBatchAsync(SimpleBatch):
    """Prompts to be computed as a durable job."""

    callback_url: Annotated[str, StringConstraints(max_length=2048)] | None = None
    """Told of the end, with a signature as webhooks have it."""
