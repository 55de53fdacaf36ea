"""Simple batches, from prompts to texts: batches of completions whose input file is written by the service."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import msgspec

from batchwright.errors import InvalidRequest
from batchwright.service.limits import ServiceLimits
from batchwright.service.worker.output_lines import UNFINISHED
from batchwright.store.records import BatchRecord, BatchStatus, Endpoint, StoredLine
from batchwright.store.store import Store
from batchwright.wire.requests import read_generation

DEFAULT_MAX_TOKENS = 256
DEFAULT_TEMPERATURE = 0.7
ENDPOINT: Endpoint = "/v1/completions"
SimpleStatus: TypeAlias = Literal["pending", "processing", "completed", "failed", "cancelled"]
# "cancelled" is final: it is not shown before the results are available.
_STATUSES: dict[BatchStatus, SimpleStatus] = {
    "validating": "pending",
    "failed": "failed",
    "in_progress": "processing",
    "finalizing": "processing",
    "completed": "completed",
    "expired": "failed",
    "cancelling": "processing",
    "cancelled": "cancelled",
}
_PAGE_LINES = 500
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Prompts of a simple batch, and parameters for all of them."""

    prompts: Sequence[str]
    max_tokens: int = DEFAULT_MAX_TOKENS
    temperature: float = DEFAULT_TEMPERATURE
    model: str | None = None
    priority: int | None = None

    def bodies(self) -> list[dict[str, Any]]:
        """Return the body of the completion for each prompt."""
        given = {name: getattr(self, name) for name in ("max_tokens", "temperature", "model", "priority")}
        rest = {name: value for name, value in given.items() if value is not None}
        return [{"prompt": prompt, **rest} for prompt in self.prompts]

    def check(self, limits: ServiceLimits) -> None:
        """Raise `InvalidRequest` for prompts or parameters that no model could compute."""
        if not 0 < len(self.prompts) <= limits.max_prompts:
            raise InvalidRequest(
                f"prompts has {len(self.prompts):,} entries: it must have 1 to {limits.max_prompts:,}", param="prompts"
            )
        read_generation(self.bodies()[0], chat=False)


@dataclass(frozen=True, slots=True)
class SimpleOutput:
    """Output for one prompt."""

    text: str | None
    """Generated text; None: the prompt failed."""
    code: str | None = None
    message: str | None = None
    was_computed: bool = True
    """Whether the prompt was computed, with whatever result, before the batch ended."""


async def input_of(prompts: Prompts) -> AsyncGenerator[bytes]:
    """Yield the lines of the input file; the custom_id of a prompt is its index, from 0."""
    for place, body in enumerate(prompts.bodies()):
        line = {"custom_id": str(place), "method": "POST", "url": ENDPOINT, "body": body}
        yield _encode(line) + b"\n"


def status_of(batch: BatchRecord) -> SimpleStatus:
    """Return the status as the simple endpoints show it."""
    return _STATUSES[batch.status]


async def outputs_of(store: Store, batch: BatchRecord, most_characters: int | None = None) -> list[SimpleOutput] | None:
    """Return the output for each prompt of an ended batch, in order.

    None: they were removed with its files, or are longer than `most_characters` in total.
    """
    if not batch.counts.total and batch.status != "failed":
        # It ended before its prompts became lines.
        return [_unfinished(batch.status)] * batch.enqueued_lines
    outputs: list[SimpleOutput] = []
    after = characters = 0
    while page := await store.lines(batch.id, after=after, limit=_PAGE_LINES):
        after = page[-1].number
        found = [output_of(line, batch.status) for line in page]
        outputs += found
        characters += sum(len(each.text or each.message or "") for each in found)
        if most_characters is not None and characters > most_characters:
            return None
    return None if len(outputs) < batch.counts.total else outputs


def share_computed(batch: BatchRecord, outputs: Sequence[SimpleOutput] | None) -> float:
    """Return the share of the prompts of an ended batch that were computed, given its outputs; None: removed."""
    if outputs is None:
        # It is no longer known whether the failed ones were computed.
        return 1.0 if batch.status == "completed" else batch.counts.completed / max(1, batch.counts.total)
    return sum(each.was_computed for each in outputs) / max(1, len(outputs))


def output_of(line: StoredLine, status: BatchStatus) -> SimpleOutput:
    """Return the output for a prompt, given its line and the status of its batch."""
    if line.output is None:
        return _unfinished(status)
    found = msgspec.json.decode(line.output)
    if line.state == "succeeded":
        return SimpleOutput(found["response"]["body"]["choices"][0]["text"])
    error: Mapping[str, Any] = found["error"] or found["response"]["body"]["error"]
    return SimpleOutput(None, error["code"], error["message"])


def _unfinished(status: BatchStatus) -> SimpleOutput:
    """Return the output for a prompt that was not computed before its batch ended."""
    return SimpleOutput(None, *UNFINISHED["expired" if status == "expired" else "cancelled"], was_computed=False)
