"""`Inference`, the interface of everything that computes: OpenAI request bodies in, OpenAI response bodies out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from batchwright.pacing.figures import PacerFigures
from batchwright.planning.needed_work import Answered
from batchwright.request import Flow, SamplingParams, Traffic

if TYPE_CHECKING:
    from batchwright.engine.engine_stats import EngineStats


@dataclass(frozen=True, slots=True)
class Call:
    """One request to one endpoint."""

    endpoint: str
    """Path of an endpoint of OpenAI's API, or `/v1/rerank`, `/v1/score` or `/classify`; see `wire/requests.py`."""
    body: Mapping[str, Any]
    request_id: str
    traffic: Traffic = "online"
    timeout: float | None = None
    """Seconds after which the answer is of no use. None: as the body says (`deadline_ms`), else no limit."""
    pauses: Callable[[Exception | None], None] | None = None
    """Called with the error when the call failed and waits for a retry, and with None when the retry begins.

    Nothing is lost by giving the call up in between. Only used by an `Inference` that retries by itself."""
    flow: Flow | None = None
    """Owner and request whose fair share the call uses. None: one share for all calls without a flow."""
    slo: str | None = None
    """Class of service level objectives by which the call is judged."""
    used: Callable[[int], None] | None = None
    """Called with the number of tokens of prompts and answers, once it is known."""
    defaults: SamplingParams | Mapping[str, Any] | None = None
    """Values of parameters that the body leaves out, by the names in `SamplingParams`. None: OpenAI's defaults.

    An endpoint elsewhere is sent those in a mapping, or those of `SamplingParams` that differ from OpenAI's defaults;
    it has defaults of its own for the rest."""


class Inference(Protocol):
    """Computes calls. All methods are called on one event loop; cancelling the awaiting task frees what it holds."""

    @property
    def models(self) -> Sequence[str]:
        """Names that bodies may give as `model`."""

    @property
    def wants(self) -> int:
        """Number of batch lines that it can take now to keep its batches full."""

    async def answer(self, call: Call) -> dict[str, Any]:
        """Return the body of the response, without streaming.

        Raises `BatchwrightError`: `InvalidRequest` for a call that can never be served as written, `ModelNotFound`,
        `Overloaded`, `DeadlineExceeded`, `EndpointError` for an error of an endpoint elsewhere, and others.
        """

    def stream(self, call: Call) -> AsyncIterator[dict[str, Any]]:
        """Yield the bodies of the chunks, the last with `usage` if `stream_options` asks for it.

        Raises as `answer` does, before the first chunk if possible. Closing the iterator early frees what it holds.
        """

    async def close(self) -> None:
        """Answer the calls under way with an error, and release the memory."""


class Route(Inference, Protocol):
    """An `Inference` that can be one of several: it knows its endpoints, and by how much it is overfull."""

    @property
    def endpoints(self) -> Collection[str]:
        """Endpoints whose calls it answers."""

    @property
    def room(self) -> int:
        """Number of batch lines that it can take now, negative when it holds more than it wants."""

    @property
    def wants(self) -> int:
        return max(0, self.room)


@runtime_checkable
class MayBeAway(Protocol):
    """An `Inference` whose calls are computed elsewhere, where they may go unanswered for a while."""

    @property
    def why_not_ready(self) -> str | None:
        """Reason why no call can be computed now, fit to be shown to callers; None when calls can be computed."""


@runtime_checkable
class Paced(Protocol):
    """An `Inference` whose calls wait before they are sent elsewhere, where they are limited and cost something."""

    def pacing(self) -> Mapping[str, PacerFigures]:
        """Return what was found of the limits, by model."""

    def send_no_more(self) -> None:
        """Raise `EndpointDown` in batch calls that were not sent yet."""


@runtime_checkable
class SharesLimits(Protocol):
    """An `Inference` with limits that hold for several processes together, which inform each other of what they use."""

    def shared_use(self) -> dict[str, dict[str, float]]:
        """Return what this process uses, wants and has found of each shared limit."""

    def learn_use(self, others: Sequence[Mapping[str, Mapping[str, float]]]) -> None:
        """Learn what `shared_use` is in each of the other processes."""


def shared_use(inference: Inference) -> dict[str, dict[str, float]]:
    """Return what this process used lately of each limit that `inference` shares with other processes."""
    return inference.shared_use() if isinstance(inference, SharesLimits) else {}


def learn_use(inference: Inference, others: Sequence[Mapping[str, Mapping[str, float]]]) -> None:
    """Inform `inference` of what each of the other processes used lately of the limits that they share."""
    if isinstance(inference, SharesLimits):
        inference.learn_use(others)


def pacing_of(inference: Inference) -> Mapping[str, PacerFigures]:
    """Return what `inference` found of the limits of endpoints elsewhere, by model."""
    return inference.pacing() if isinstance(inference, Paced) else {}


def send_no_more(inference: Inference) -> None:
    """Give batch calls that `inference` has not sent anywhere yet back to their owners."""
    if isinstance(inference, Paced):
        inference.send_no_more()


def why_not_ready(inference: Inference) -> str | None:
    """Return why `inference` can compute no call now; None when it can."""
    return inference.why_not_ready if isinstance(inference, MayBeAway) else None


@runtime_checkable
class ComputesSlowly(Protocol):
    """An `Inference` whose calls may take hours, and which can report where they are."""

    @property
    def standing(self) -> str | None:
        """Where the calls are, fit to be shown; None if there is none."""


def standing_of(inference: Inference) -> str | None:
    """Return where the calls of `inference` are, if they take long; None: there is nothing to report."""
    return inference.standing if isinstance(inference, ComputesSlowly) else None


@runtime_checkable
class CountsSteps(Protocol):
    """An `Inference` behind which engines of ours compute."""

    @property
    def engine_stats(self) -> EngineStats | None:
        """Figures of the engines; None if none of them generates."""


def engine_stats_of(inference: Inference) -> EngineStats | None:
    """Return the figures of the engines behind `inference`; None if there are none."""
    return inference.engine_stats if isinstance(inference, CountsSteps) else None


@dataclass(frozen=True, slots=True)
class WorkUnderWay:
    """What an engine has computed, and what it holds of one job."""

    steps: int
    step_tokens: int
    """Tokens of prompts and answers that the steps computed, of all work."""
    running: Sequence[tuple[int, int]]
    """Tokens of each unfinished answer of the job so far, and its limit."""
    prompt_tokens: int
    """Prompt tokens of these answers that are computed."""
    prompt_tokens_left: int
    places: int
    """Answers of the job that are computed at once."""
    longest: int
    """Most tokens of an answer whose request names no limit."""


@runtime_checkable
class KnowsWork(Protocol):
    """An `Inference` that may know how far its calls are."""

    async def work_of(self, prefix: str) -> WorkUnderWay | None:
        """Return the work of the job the ids of whose calls begin with `prefix`; None if it is not known here.

        Raises `EngineClosed` if the engine is closed.
        """


@runtime_checkable
class KnowsRates(Protocol):
    """An `Inference` that may know how fast its machine can be."""

    def least_seconds(self, endpoint: str, model: str | None, answered: Answered) -> float | None:
        """Return the least time in which the machine computes what `model` answered; None if that is not known."""


def least_seconds_of(inference: Inference, endpoint: str, model: str | None, answered: Answered) -> float | None:
    """Return the least time in which the machine behind `inference` computes what `model` answered; None: unknown."""
    return inference.least_seconds(endpoint, model, answered) if isinstance(inference, KnowsRates) else None


async def work_of(inference: Inference, prefix: str) -> WorkUnderWay | None:
    """Return what `inference` knows of the job the ids of whose calls begin with `prefix`; None: nothing."""
    return await inference.work_of(prefix) if isinstance(inference, KnowsWork) else None
