"""The records of the store, as plain values. All times are Unix seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from batchwright.limiting.quotas import UNLIMITED, Quotas

Endpoint: TypeAlias = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
Purpose: TypeAlias = Literal["batch", "batch_output"]
FileStatus: TypeAlias = Literal["uploaded", "processed", "error"]
BatchStatus: TypeAlias = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
Ending: TypeAlias = Literal["completed", "expired", "cancelled"]
KeyScope: TypeAlias = Literal["online", "batches", "metrics", "admin"]
LineState: TypeAlias = Literal["pending", "suspect", "claimed", "succeeded", "failed"]
"""State of a line. `suspect`: pending, but was in work when a process died, and is claimed only with few others."""

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
    """Number of lines of an input, blank ones counted; None: not known."""
    key_id: str | None = None
    """Key that uploaded it, or made the batch that wrote it; None where no keys are used."""


@dataclass(frozen=True, slots=True)
class LineCounts:
    """Numbers of lines of a batch. The others are pending; at the end of a batch there are none."""

    total: int = 0
    completed: int = 0
    """Lines that succeeded."""
    failed: int = 0


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Numbers of tokens, by the model's tokenizer."""

    input_tokens: int = 0
    cached_tokens: int = 0
    """Input tokens that were found in the prefix cache."""
    output_tokens: int = 0
    reasoning_tokens: int = 0
    """Output tokens that are reasoning."""


@dataclass(frozen=True, slots=True)
class BatchProblem:
    """Reason why a batch failed validation: an entry of `errors.data`."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None
    """Number of the line, from 1; None where it is not about a line."""


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """A batch. Its life cycle is described in `store/store.py`."""

    id: str
    tenant: str
    endpoint: Endpoint
    input_file_id: str
    completion_window: str
    """Window as it was asked for: "24h"."""
    created_at: float
    expires_at: float
    metadata: Mapping[str, str] = field(default_factory=dict)
    model: str | None = None
    """Model, known when the input has been validated."""
    output_expires_after: float | None = None
    """Seconds from the creation of an output file; None: the service's default."""
    idempotency_key: str | None = None
    callback_url: str | None = None
    """Address that is told of the end beside the tenant's own webhooks."""
    simple: bool = False
    """Whether it was made by `POST /v1/batch/async`: it is listed there, not among `/v1/batches`."""
    parent_id: str | None = None
    """Batch of which it retries lines."""
    status: BatchStatus = "validating"
    ending: Ending | None = None
    """Final status, decided before the output is built. From here on no line is claimed, no result taken."""
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
    """When its lines and results were removed: its files are gone, or it ended before its lines were complete."""
    key_id: str | None = None
    """Key that made it; None where no keys are used."""
    best_priority: int | None = None
    """Smallest `priority` that its lines may have, by that key; None: any."""
    enqueued_lines: int = 0
    """Estimated number of lines, for quotas: known when it is made, before they are read."""
    enqueued_tokens: int = 0
    """Estimated number of tokens of their prompts."""


@dataclass(frozen=True, slots=True)
class NewLine:
    """A line of a validated input: where it lies in the input file, in bytes."""

    number: int
    """Number from 1, blank lines counted."""
    custom_id: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class ClaimedLine:
    """A line that a worker is to compute."""

    batch_id: str
    number: int
    attempt: int
    """Try that this is: a result is taken only while the line is still at this attempt."""
    custom_id: str
    offset: int
    length: int
    input_file_id: str
    endpoint: Endpoint
    expires_at: float
    """When its batch expires."""
    best_priority: int | None = None
    """Smallest `priority` that it may have, by the key of its batch."""
    tenant: str = ""
    """Tenant of its batch."""
    crashes: int = 0
    """Deaths of a process while computing it, as long as it is a suspect."""
    given_up: bool = False
    """Whether it has ended too many processes: it is not to be computed, but to fail."""


@dataclass(frozen=True, slots=True)
class LineResult:
    """Result of a claimed line."""

    batch_id: str
    number: int
    attempt: int
    succeeded: bool
    output: bytes
    """Line of the output (or error) file, without its newline."""
    usage: TokenUsage = TokenUsage()


@dataclass(frozen=True, slots=True)
class StoredLine:
    """A line with its result, or without one where it was never finished."""

    number: int
    custom_id: str
    state: LineState
    sequence: int | None
    """Place among the finished lines of its batch in the order in which they were committed, from 1."""
    output: bytes | None


@dataclass(frozen=True, slots=True)
class Webhook:
    """Endpoint of a tenant that is told how batches end."""

    id: str
    tenant: str
    url: str
    secrets: tuple[str, ...]
    """Secrets, `whsec_…`; more than one while a secret rotates, the newest first."""
    created_at: float
    disabled_at: float | None = None
    """When it answered 410, or was disabled by hand."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message of the outbox on its way to one address."""

    id: str
    """Id of the outbox entry; unique for each (event, address)."""
    event_id: str
    """`webhook-id` and the event's `id`: the same on each try."""
    tenant: str
    type: str
    batch_id: str
    created_at: float
    url: str
    webhook_id: str | None
    """Id of the webhook; None: a callback_url, signed with the tenant's own secret."""
    tries: int
    """Number of tries before this one."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An API key; its secret is not kept."""

    id: str
    tenant: str
    name: str
    prefix: str
    """First characters of the secret, to recognize it by."""
    created_at: float
    revoked_at: float | None = None
    expires_at: float | None = None
    scopes: tuple[KeyScope, ...] = ("online", "batches")
    """Scopes that the key opens."""
    weight: float = 1.0
    """Share of the capacity, relative to other keys."""
    best_priority: int | None = None
    """Smallest `priority` that its requests may have; None: any."""
    last_used_at: float | None = None
    """When it was last used; about a minute late at most."""
    previous_until: float | None = None
    """Time until which the secret before the last rotation works, too; None: it was never rotated."""
    quotas: Quotas = UNLIMITED


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """Identity by which a store and the folder with its files recognize each other."""

    store_id: str
    """Id of the store, the same for ever, in backups too."""
    mark: str
    """Mark of the last time that the store and the folder were seen together."""
    next_mark: str | None = None
    """Mark that is being written to the folder; None: the folder has `mark`."""


class Enqueued(NamedTuple):
    """Lines of batches without a result, and the estimated number of tokens of their prompts."""

    lines: int
    tokens: int


@dataclass(frozen=True, slots=True)
class QuotaUse:
    """What a tenant or a key uses of what the store holds."""

    storage_bytes: int
    enqueued_lines: int
    enqueued_tokens: int


@dataclass(frozen=True, slots=True)
class Peer:
    """A process that works on this store."""

    worker: str
    name: str
    snapshot: str | None
    """Figures that it last published, as JSON."""
