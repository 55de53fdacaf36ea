"""Parameters of routes: ids in paths, and bodies that make batches."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from fastapi import Header, Path, Query
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, StringConstraints, WithJsonSchema
from pydantic_core import PydanticCustomError
from starlette.convertors import StringConvertor, register_url_convertor

from batchwright.errors import NotFound, shown
from batchwright.service.batches.simple_batches import DEFAULT_MAX_TOKENS, DEFAULT_TEMPERATURE
from batchwright.store.records import Endpoint
from batchwright.wire import bounds
from batchwright.wire.api_model import ApiModel
from batchwright.wire.fields import DEFAULT_PRIORITY, MAX_TEMPERATURE, MAX_TOKENS, RANGES
from batchwright.wire.requests import ALIASES

NO_NUL = r"^[^\x00]*$"


class SimpleBatchConvertor(StringConvertor):
    """`{batch_id:simple}` in the path of a route: anything but the names of routes in the place of an id."""

    regex = "(?!(?:sync|async|stats)$)[^/]+"


register_url_convertor("simple", SimpleBatchConvertor())


def _id_of(kind: str, prefix: str) -> AfterValidator:
    """Return a validator that raises `NotFound` for a text that cannot be an id, so that it is not looked up."""
    form = re.compile(prefix + "[0-9a-f]{24}")

    def require(given: str) -> str:
        if not form.fullmatch(given):
            raise NotFound(f"no {kind} {shown(given)}")
        return given

    return AfterValidator(require)


FileId = Annotated[
    str, Path(description="Id of the file.", examples=["file-0123456789abcdef01234567"]), _id_of("file", "file-")
]
BatchId = Annotated[
    str, Path(description="Id of the batch.", examples=["batch_0123456789abcdef01234567"]), _id_of("batch", "batch_")
]
KeyId = Annotated[
    str, Path(description="Id of the key.", examples=["key_0123456789abcdef01234567"]), _id_of("key", "key_")
]
After = Annotated[
    str | None, Query(pattern=r"^[A-Za-z0-9_\-]*$", max_length=64, description="The last id of the page before.")
]
IdempotencyKey = Annotated[
    str | None,
    Header(
        description="The same key gives the same batch, however often it is asked for.", min_length=1, max_length=255
    ),
]


def _number(value: object) -> object:
    """Refuse texts and booleans, which pydantic would accept as numbers."""
    if isinstance(value, (bool, str)):
        raise PydanticCustomError("number_type", "Input should be a number")
    return value


_IsNumber = BeforeValidator(_number)
Metadata = Annotated[
    dict[
        Annotated[str, StringConstraints(min_length=1, max_length=bounds.MAX_METADATA_KEY, pattern=NO_NUL)],
        Annotated[str, StringConstraints(max_length=bounds.MAX_METADATA_VALUE, pattern=NO_NUL)],
    ],
    Field(max_length=bounds.MAX_METADATA),
    # pydantic's own schema would allow any value for a key with NUL.
    WithJsonSchema(
        {
            "type": "object",
            "maxProperties": bounds.MAX_METADATA,
            "propertyNames": {"minLength": 1, "maxLength": bounds.MAX_METADATA_KEY, "pattern": NO_NUL},
            "additionalProperties": {"type": "string", "maxLength": bounds.MAX_METADATA_VALUE, "pattern": NO_NUL},
        }
    ),
]
Model = Annotated[str, StringConstraints(min_length=1, max_length=bounds.MAX_MODEL, pattern=NO_NUL)]
Prompt = Annotated[str, StringConstraints(max_length=bounds.MAX_TEXT)]
Window = Annotated[
    str,
    StringConstraints(max_length=16),
    Field(
        description='"24h"; other durations of up to 30 days in s, m, h or d are honoured too: "90m", "7d".',
        examples=["24h"],
        json_schema_extra={
            "pattern": "^(([1-9]|[12][0-9]|30)d"
            "|([1-9][0-9]?|[1-6][0-9]{2}|7[01][0-9]|720)h"
            "|([1-9][0-9]{0,3}|[1-3][0-9]{4}|4[0-2][0-9]{3}|43[01][0-9]{2}|43200)m"
            "|([1-9][0-9]{0,5}|1[0-9]{6}|2[0-4][0-9]{5}|25[0-8][0-9]{4}|259[01][0-9]{3}|2592000)s)$"
        },
    ),
]


class OutputExpiresAfter(ApiModel):
    """The time after which the output files expire."""

    model_config = ConfigDict(extra="forbid")

    anchor: Literal["created_at"]
    """The moment from which the time is counted."""
    seconds: Annotated[int, Field(ge=3600, le=2_592_000), _IsNumber]


def _endpoint_meant(given: object) -> object:
    """Return the endpoint of which `given` is another path; any other value unchanged."""
    return ALIASES.get(given, given) if isinstance(given, str) else given


class BatchCreate(ApiModel):
    """A batch of the lines of an uploaded file."""

    model_config = ConfigDict(extra="forbid")

    input_file_id: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_\-]{1,64}$")]
    """Id of the uploaded file."""
    endpoint: Annotated[Endpoint, BeforeValidator(_endpoint_meant)]
    """The endpoint of all its lines."""
    completion_window: Window
    metadata: Metadata | None = None
    """Texts of your own, by name, kept with the batch; the dashboard shows `name`."""
    output_expires_after: OutputExpiresAfter | None = None
    """Null: the output files expire after the service's default."""


class TableRequests(ApiModel):
    """How the rows of a table become requests."""

    model_config = ConfigDict(extra="forbid")

    prompt_template: Annotated[str, StringConstraints(min_length=1, max_length=65_536, pattern=NO_NUL)] | None = None
    """Text with columns as `{column}`. Null: the file has prompts, one on each line or in the field `prompt`."""
    system_template: Annotated[str, StringConstraints(min_length=1, max_length=65_536, pattern=NO_NUL)] | None = None
    """System message of each chat, in the same way."""
    endpoint: Literal["/v1/chat/completions", "/v1/completions"] = "/v1/chat/completions"
    """The endpoint of the requests."""
    model: Model | None = None
    """The model of the requests; null: the first that serves the endpoint."""
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS), _IsNumber] | None = None
    """Most tokens of an answer; null: as many as the model's context holds."""
    temperature: Annotated[float, Field(ge=0.0, le=MAX_TEMPERATURE), _IsNumber] | None = None
    """Null: 1."""


class BatchRetry(ApiModel):
    """Options of a batch that retries the lines that did not succeed."""

    model_config = ConfigDict(extra="forbid")

    completion_window: Window | None = None
    """Default: that of the old batch."""


class SimpleBatch(ApiModel):
    """Prompts, all with the same parameters."""

    model_config = ConfigDict(extra="forbid")

    prompts: Annotated[list[Prompt], Field(min_length=1, max_length=bounds.MAX_PROMPTS)]
    """The prompts, each of which gets one answer."""
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS), _IsNumber] | None = DEFAULT_MAX_TOKENS
    """Most tokens of an answer; null: the default."""
    temperature: Annotated[float, Field(ge=0.0, le=MAX_TEMPERATURE), _IsNumber] | None = DEFAULT_TEMPERATURE
    """0: the likeliest token each time; null: the default."""
    model: Model | None = None
    """Null: the first that generates."""
    priority: Annotated[
        int, Field(ge=RANGES["priority"][0], le=RANGES["priority"][1], description="Lower is sooner."), _IsNumber
    ] = DEFAULT_PRIORITY


class SimpleBatchAsync(SimpleBatch):
    """Prompts that are computed as a durable job."""

    callback_url: (
        Annotated[str, Field(max_length=2048, json_schema_extra={"format": "uri", "pattern": "^https?://[^/]"})] | None
    ) = None
    """Address that is notified of the end, signed like webhooks. Its host must have only global addresses."""
