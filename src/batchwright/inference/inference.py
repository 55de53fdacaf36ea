"""What lines and services need of whatever computes: bodies of OpenAI requests in, bodies of OpenAI responses out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from batchwright.request import Flow, SamplingParams, Traffic


@dataclass(frozen=True, slots=True)
class Call:
    """One request to one endpoint."""

    endpoint: str
    """`/v1/chat/completions`, `/v1/completions` or `/v1/embeddings`."""
    body: Mapping[str, Any]
    request_id: str
    traffic: Traffic = "online"
    timeout: float | None = None
    """Seconds after which the answer is of no use; None: what the body says (`deadline_ms`), or none."""
    pauses: Callable[[bool], None] | None = None
    """Told that the call failed and waits to be tried again (true), and that it is (false): nothing is lost by giving
    it up in between. Only where what computes tries again by itself."""
    flow: Flow | None = None
    """Whose share of what computes it takes; None: one that all who say nothing have together."""
    used: Callable[[int], None] | None = None
    """Told how many tokens the prompts and the answers have, where that comes to be known."""
    defaults: SamplingParams | None = None
    """For what the body leaves out; None: OpenAI's defaults."""


class Inference(Protocol):
    """Computes calls. All methods are called on one event loop; cancelling the awaiting task frees what it holds."""

    @property
    def models(self) -> Sequence[str]:
        """Names that bodies may give as `model`."""
        ...

    @property
    def wants(self) -> int:
        """How many more batch lines it would like to hold now, so that its batches are full."""
        ...

    async def answer(self, call: Call) -> dict[str, Any]:
        """The body of the response, `stream` being off.

        Raises `BatchwrightError`: `InvalidRequest` for what can never be served as written, `ModelNotFound`,
        `Overloaded`, `DeadlineExceeded`, `EndpointError` for what an endpoint elsewhere answered, and others.
        """
        ...

    def stream(self, call: Call) -> AsyncIterator[dict[str, Any]]:
        """The bodies of the chunks, the last with `usage` where `stream_options` asks for it. Raises as `answer`,
        before the first chunk where it can; leaving the iterator early frees what it holds.
        """
        ...

    async def close(self) -> None:
        """Answer what is being computed with an error, and give the memory back."""
        ...


@runtime_checkable
class MayBeAway(Protocol):
    """An `Inference` that has calls computed where they may not be answered for a while."""

    @property
    def why_not_ready(self) -> str | None:
        """Why no call can be computed now, fit to be told to callers; None when it can."""
        ...


def why_not_ready(inference: Inference) -> str | None:
    """Why `inference` can compute no call now; None when it can."""
    return inference.why_not_ready if isinstance(inference, MayBeAway) else None
