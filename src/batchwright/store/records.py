"""Records that the store holds, as plain values. All times are Unix seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from batchwright.limiting.quotas import UNLIMITED, Quotas

Endpoint: TypeAlias = Literal[
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/rerank",
    "/v1/score",
    "/classify",
]
Purpose: TypeAlias = Literal["batch", "batch_output"]
FileStatus: TypeAlias = Literal["uploaded", "processed", "error"]
BatchStatus: TypeAlias = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
Ending: TypeAlias = Literal["completed", "expired", "cancelled"]
KeyScope: TypeAlias = Literal["online", "batches", "metrics", "admin"]
LineState: TypeAlias = Literal["pending", "suspect", "claimed", "succeeded", "failed"]
"""States of a line. `suspect`: pending, but in progress when a process died, and claimed only with few others."""

ENDED: frozenset[BatchStatus] = frozenset({"failed", "completed", "expired", "cancelled"})


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file that a tenant uploaded or a batch wrote. Its bytes lie in the blob of the same id."""

    id: str
    tenant: str
    filename: str
    purpose: Purpose
    bytes: int
    created_at: float
    expires_at: float | None = None
    status: FileStatus = "processed"
    status_details: str | None = None
    lines: int | None = None
    """Number of lines of an input, blank ones included; None: not known."""
    key_id: str | None = None
    """The key that uploaded it, or made the batch that wrote it; None where no keys are used."""


@dataclass(frozen=True, slots=True)
class LineCounts:
    """Numbers of lines of a batch. All others are pending; an ended batch has no others."""

    total: int = 0
    completed: int = 0
    """Lines that succeeded."""
    failed: int = 0


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Numbers of tokens, as counted by the model's tokenizer."""

    input_tokens: int = 0
    cached_tokens: int = 0
    """Input tokens found in a cache; `input_tokens` includes them."""
    output_tokens: int = 0
    reasoning_tokens: int = 0
    """Output tokens spent on reasoning; `output_tokens` includes them."""


@dataclass(frozen=True, slots=True)
class BatchProblem:
    """A reason why a batch failed validation: an entry of `errors.data`."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None
    """Number of the line, from 1; None if no line is to blame."""


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """A batch. Its life is described in `store/store.py`."""

    id: str
    tenant: str
    endpoint: Endpoint
    input_file_id: str
    completion_window: str
    """The completion window in the form in which the client gave it, such as "24h"."""
    created_at: float
    expires_at: float
    metadata: Mapping[str, str] = field(default_factory=dict)
    model: str | None = None
    """Name of the model; None until the input has been validated."""
    output_expires_after: float | None = None
    """Seconds from the creation of an output file to its expiry; None: the service's default."""
    idempotency_key: str | None = None
    callback_url: str | None = None
    """URL that is notified of the end of the batch, in addition to the tenant's webhooks."""
    simple: bool = False
    """Whether it was made by `POST /v1/batch/async`, and is listed there instead of under `/v1/batches`."""
    parent_id: str | None = None
    """The batch whose lines it retries."""
    status: BatchStatus = "validating"
    ending: Ending | None = None
    """How the batch ends, from that decision until its output is built. During that time, no line is claimed and no
    result is taken."""
    paused: bool = False
    errors: tuple[BatchProblem, ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    counts: LineCounts = LineCounts()
    usage: TokenUsage = TokenUsage()
    in_progress_at: float | None = None
    finalizing_at: float | None = None
    completed_at: float | None = None
    failed_at: float | None = None
    expired_at: float | None = None
    cancelling_at: float | None = None
    cancelled_at: float | None = None
    lines_removed_at: float | None = None
    """When it lost its lines and results: its files were removed, or it ended before its lines were complete."""
    key_id: str | None = None
    """The key that made it; None where no keys are used."""
    best_priority: int | None = None
    """The smallest `priority` that its lines get; None: any."""
    enqueued_lines: int = 0
    """Estimated number of lines, for quotas: known when the batch is made, before its lines are read."""
    enqueued_tokens: int = 0
    """Estimated number of tokens in the prompts of those lines."""
    shared: float | None = None
    """Share of the text of its prompts that lines claimed earlier begin with too, in blocks of 128 bytes. None: not
    known (yet), as for a retry."""


@dataclass(frozen=True, slots=True)
class NewLine:
    """A line of a validated input, and its place in the input file, in bytes."""

    number: int
    """Number of the line, from 1; blank lines count."""
    custom_id: str
    offset: int
    length: int
    position: int = 0
    """Lines with lower positions are claimed first; of those with equal ones, the one with the lowest number."""


@dataclass(frozen=True, slots=True)
class ClaimedLine:
    """A line that a worker is to compute."""

    batch_id: str
    number: int
    attempt: int
    """Number of this claim of the line: a result is taken only while the line is still at this attempt."""
    custom_id: str
    offset: int
    length: int
    input_file_id: str
    endpoint: Endpoint
    expires_at: float
    """When the batch of the line expires."""
    best_priority: int | None = None
    """`best_priority` of the batch of the line."""
    tenant: str = ""
    """Tenant that owns the batch of the line."""
    crashes: int = 0
    """How often a process died with the line in progress; 0 if the line is not under suspicion."""
    given_up: bool = False
    """Whether the line crashed too many processes, and is to fail without being computed."""


@dataclass(frozen=True, slots=True)
class LineResult:
    """The result of a claimed line."""

    batch_id: str
    number: int
    attempt: int
    succeeded: bool
    output: bytes
    """The line of the output (or error) file, without its newline."""
    usage: TokenUsage = TokenUsage()


@dataclass(frozen=True, slots=True)
class StoredLine:
    """A line with its result, or without one if it was never finished."""

    number: int
    custom_id: str
    state: LineState
    sequence: int | None
    """Place among the finished lines of its batch, from 1, in the order of commits; None if it is not finished."""
    output: bytes | None
    offset: int | None = None
    """Place in the input file, in bytes, and its length there; None where these were not read."""
    length: int | None = None


@dataclass(frozen=True, slots=True)
class Webhook:
    """An endpoint of a tenant that is notified of how batches end."""

    id: str
    tenant: str
    url: str
    secrets: tuple[str, ...]
    """`whsec_…`; more than one while a secret rotates, newest first."""
    created_at: float
    disabled_at: float | None = None
    """When it was turned off, because it answered 410 or by hand; None if it is on."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message of the outbox on its way to one address."""

    id: str
    """Id of the outbox entry: unique for each pair of event and address."""
    event_id: str
    """Id of the event, sent as `webhook-id` and as the event's `id`: the same on each try."""
    tenant: str
    type: str
    batch_id: str
    created_at: float
    url: str
    webhook_id: str | None
    """Webhook that it goes to; None: a `callback_url`, which is signed with the tenant's own secret."""
    tries: int
    """Number of tries before this one."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An API key that was issued. Its secret is not stored."""

    id: str
    tenant: str
    name: str
    prefix: str
    """The first characters of the secret, to recognize it by."""
    created_at: float
    revoked_at: float | None = None
    expires_at: float | None = None
    scopes: tuple[KeyScope, ...] = ("online", "batches")
    """Parts of the API that the key gives access to."""
    weight: float = 1.0
    """Share of the capacity, relative to other keys."""
    best_priority: int | None = None
    """The smallest `priority` that its requests get; None: any."""
    last_used_at: float | None = None
    """When the key was last used; recorded up to about a minute late."""
    previous_until: float | None = None
    """When the secret from before the last rotation stops working; None: the key was never rotated."""
    quotas: Quotas = UNLIMITED


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """Marks by which a store and the folder with its files recognize each other."""

    store_id: str
    """Id of the store, which never changes, and is the same in backups."""
    mark: str
    """Mark of the last time that the store and the folder were seen together."""
    next_mark: str | None = None
    """The mark that is being written to the folder; None: the folder has `mark`."""


@dataclass(frozen=True, slots=True)
class QuotaUse:
    """Amounts that a tenant or a key uses in the store."""

    storage_bytes: int
    enqueued_lines: int
    enqueued_tokens: int


@dataclass(frozen=True, slots=True)
class Peer:
    """A process that works on this store, with a valid lease."""

    worker: str
    name: str
    snapshot: str | None
    """Its last published snapshot of itself, as JSON; None if it published none."""
