"""`Inference`, the interface of all that computes requests: OpenAI request bodies in, OpenAI response bodies out."""

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
    """Path of an OpenAI API endpoint, or `/v1/rerank`, `/v1/score` or `/classify`; see `wire/requests.py`."""
    body: Mapping[str, Any]
    request_id: str
    traffic: Traffic = "online"
    timeout: float | None = None
    """Seconds after which the answer is useless. None: as in the body (`deadline_ms`), otherwise no limit."""
    pauses: Callable[[Exception | None], None] | None = None
    """Called with the error when the call has failed and waits for a retry, and with None when the retry begins.

    Nothing is lost by giving the call up in between. Only used by an `Inference` that retries by itself."""
    flow: Flow | None = None
    """Owner and request whose fair share the call uses. None: all calls without a flow have one share."""
    slo: str | None = None
    """Class of service level objectives that applies to the call."""
    used: Callable[[int], None] | None = None
    """Called with the number of tokens of prompts and answers, once it is known."""
    defaults: SamplingParams | Mapping[str, Any] | None = None
    """Values of parameters that the body omits, by their names in `SamplingParams`. None: OpenAI's defaults.

    A remote endpoint is sent those in a mapping, or those in `SamplingParams` that differ from OpenAI's defaults; it
    has its own defaults for the rest."""


class Inference(Protocol):
    """Computes calls. All methods are called on one event loop; cancelling the awaiting task frees what it holds."""

    @property
    def models(self) -> Sequence[str]:
        """Names that bodies may give as `model`."""

    @property
    def wants(self) -> int:
        """Number of further batch lines that it needs now to keep its batches full."""

    async def answer(self, call: Call) -> dict[str, Any]:
        """Return the body of the response, without streaming.

        Raises `BatchwrightError`: `InvalidRequest` for a call that can never be served as written, `ModelNotFound`,
        `Overloaded`, `DeadlineExceeded`, `EndpointError` for an error of a remote endpoint, and others.
        """

    def stream(self, call: Call) -> AsyncIterator[dict[str, Any]]:
        """Yield the bodies of the chunks, the last one with `usage` if `stream_options` requests it.

        Raises the errors of `answer`, before the first chunk if possible. Closing the iterator early frees its
        resources.
        """

    async def close(self) -> None:
        """Answer the calls in progress with an error, and release the memory."""


class Route(Inference, Protocol):
    """An `Inference` that can be one of several: it knows its endpoints, and its spare or exceeded capacity."""

    @property
    def endpoints(self) -> Collection[str]:
        """Endpoints whose calls it answers."""

    @property
    def room(self) -> int:
        """Number of batch lines that it can take now, negative if it holds more than it wants."""

    @property
    def wants(self) -> int:
        return max(0, self.room)


@runtime_checkable
class MayBeAway(Protocol):
    """An `Inference` whose calls are computed elsewhere, and may go unanswered for a while."""

    @property
    def why_not_ready(self) -> str | None:
        """Reason why no call can be computed now, suitable for callers; None if calls can be computed."""


@runtime_checkable
class Paced(Protocol):
    """An `Inference` whose calls wait before they are sent elsewhere, where they are limited and may cost money."""

    def pacing(self) -> Mapping[str, PacerFigures]:
        """Return what was learned about the limits, by model."""

    def send_no_more(self) -> None:
        """Raise `EndpointDown` in batch calls that have not been sent yet."""


@runtime_checkable
class SharesLimits(Protocol):
    """An `Inference` with limits that several processes share, which inform each other of their use."""

    def shared_use(self) -> dict[str, dict[str, float]]:
        """Return what this process uses, wants and has learned of each shared limit."""

    def learn_use(self, others: Sequence[Mapping[str, Mapping[str, float]]]) -> None:
        """Take over `shared_use` of each of the other processes."""


def shared_use(inference: Inference) -> dict[str, dict[str, float]]:
    """Return this process's recent use of each limit that `inference` shares with other processes."""
    return inference.shared_use() if isinstance(inference, SharesLimits) else {}


def learn_use(inference: Inference, others: Sequence[Mapping[str, Mapping[str, float]]]) -> None:
    """Inform `inference` of each other process's recent use of the limits that they share."""
    if isinstance(inference, SharesLimits):
        inference.learn_use(others)


def pacing_of(inference: Inference) -> Mapping[str, PacerFigures]:
    """Return what `inference` has learned about the limits of remote endpoints, by model."""
    return inference.pacing() if isinstance(inference, Paced) else {}


def send_no_more(inference: Inference) -> None:
    """Return batch calls that `inference` has not sent anywhere yet to their owners."""
    if isinstance(inference, Paced):
        inference.send_no_more()


def why_not_ready(inference: Inference) -> str | None:
    """Return why `inference` cannot compute any call now; None if it can."""
    return inference.why_not_ready if isinstance(inference, MayBeAway) else None


@runtime_checkable
class ComputesSlowly(Protocol):
    """An `Inference` whose calls may take hours, and that can report their progress."""

    @property
    def standing(self) -> str | None:
        """A displayable text that says where the calls are; None if there are none."""


def standing_of(inference: Inference) -> str | None:
    """Return where the calls of `inference` are, if they take long; None if there is nothing to report."""
    return inference.standing if isinstance(inference, ComputesSlowly) else None


@runtime_checkable
class CountsSteps(Protocol):
    """An `Inference` that uses our own engines."""

    @property
    def engine_stats(self) -> EngineStats | None:
        """Statistics of the engines; None if none of them generates."""


def engine_stats_of(inference: Inference) -> EngineStats | None:
    """Return the statistics of the engines behind `inference`; None if there are none."""
    return inference.engine_stats if isinstance(inference, CountsSteps) else None


@dataclass(frozen=True, slots=True)
class WorkUnderWay:
    """What an engine has computed, and the work of one job that it holds."""

    steps: int
    step_tokens: int
    """Tokens of prompts and answers that the steps computed for all work."""
    running: Sequence[tuple[int, int]]
    """For each unfinished answer of the job, its tokens so far and its limit."""
    prompt_tokens: int
    """Prompt tokens of these answers that have been computed."""
    prompt_tokens_left: int
    places: int
    """Answers of the job that are computed concurrently."""
    longest: int
    """Most tokens of an answer whose request sets no limit."""


@runtime_checkable
class KnowsWork(Protocol):
    """An `Inference` that may know the progress of its calls."""

    async def work_of(self, prefix: str) -> WorkUnderWay | None:
        """Return the work of the job whose calls have ids that begin with `prefix`; None if it is not known here.

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
    """Return what `inference` knows of the job whose calls have ids that begin with `prefix`, or None."""
    return await inference.work_of(prefix) if isinstance(inference, KnowsWork) else None
