"""`EndpointInference`: calls computed by a remote endpoint, in any supported dialect."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing
from typing import Any, TypeVar

import msgspec
import stamina

from batchwright.errors import (
    AnswerBroken,
    BudgetExhausted,
    DeadlineExceeded,
    EndpointDown,
    EndpointError,
    EndpointUnreachable,
    EngineClosed,
    InvalidRequest,
    Overloaded,
)
from batchwright.inference.calls import LEAVE_OUT_MODEL, InFlight, chosen_model, time_left
from batchwright.inference.endpoint_client import EndpointClient
from batchwright.inference.endpoint_gate import Gate, Places, Turn, usage_of
from batchwright.inference.endpoint_keys import EndpointKey, is_provider
from batchwright.inference.endpoint_retries import REFUSED, RETRIES, EndpointRetries, is_outage, pause_before_retry
from batchwright.inference.endpoint_watch import SILENCE, EndpointWatch
from batchwright.inference.engine_queue import EngineQueueWatch
from batchwright.inference.inference import Call, Route
from batchwright.inference.metering import CountingMeter, Meter, metered_answer, metered_chunks
from batchwright.limiting.estimates import prompt_tokens_of_request
from batchwright.models import served_name
from batchwright.pacing.figures import PacerFigures
from batchwright.pacing.limits import ConfiguredLimit, Use
from batchwright.pacing.pacer import Pacer
from batchwright.pacing.retry_budget import RetryBudget
from batchwright.request import Traffic
from batchwright.wire.bounds import require_sizes
from batchwright.wire.dialects import OPENAI, Dialect, require_endpoint
from batchwright.wire.engine_gauges import Queue
from batchwright.wire.fields import deadline_seconds, priority_of, stated_limit
from batchwright.wire.requests import (
    CHAT_URL,
    CLASSIFY_URL,
    COMPLETION_URL,
    EMBEDDINGS_URL,
    ENCODER_URLS,
    RERANK_URL,
    RESPONSES_URL,
    SCORE_URL,
    filled,
    read_model,
    require_few_completions,
    require_response_now,
)

_T = TypeVar("_T")

_AHEAD = 0.25
_LEAST_AHEAD = 32
"""Calls to hold besides those in progress, at least and in proportion, so that the next one is ready in time."""
_LIST_OF = {
    CHAT_URL: "choices",
    COMPLETION_URL: "choices",
    EMBEDDINGS_URL: "data",
    RESPONSES_URL: "output",
    RERANK_URL: "results",
    SCORE_URL: "data",
    CLASSIFY_URL: "data",
}
"""Field of answers that holds the results."""
_PROBE_SECONDS = 10.0
_FOREVER = 1e6
_PATIENCE = 5.0
"""Seconds for which online calls wait for a pause to end: as long as pacers pause if the endpoint names no time."""
_CLOSING = "nothing more is sent to the endpoint: the service is closing"


class EndpointInference(Route):
    """Passes calls on to a remote endpoint, at most `max_concurrency` at once, online calls first.

    - `base_url`: as for the official client, `https://host/v1`; `api_key`: the endpoint's key, if it requires one.
    - `models`: names of models in calls, each with the name that the endpoint has for it. None: names are passed on
      unchanged; `discover` requests the list of its models.
    - `dialect`: the form of its requests and answers; by default OpenAI's.
    - `timeout`: seconds without any data after which a try is given up.
    - `max_waiting`: online calls that may wait for their turn; more are refused with `Overloaded`.
    - `meter`: reserves money for every try, and counts its cost; None: nothing is counted.

    Calls answered with 408, 409, 429 or 5xx, and unanswered calls, are retried (`retries`); an overloaded endpoint gets
    fewer concurrent calls for a while. While the endpoint is known to be down it gets none: calls raise `EndpointDown`
    until a probe is answered. Raises ValueError for an invalid setting.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | EndpointKey | None = None,
        models: Mapping[str, str] | None = None,
        *,
        dialect: Dialect = OPENAI,
        max_concurrency: int = 64,
        first_concurrency: int | None = None,
        limits: Sequence[ConfiguredLimit] = (),
        timeout: float = 600.0,
        max_waiting: int = 1000,
        retries: Mapping[Traffic, EndpointRetries] = RETRIES,
        draw: random.Random | None = None,
        meter: Meter | None = None,
    ) -> None:
        self._max_concurrency = max_concurrency
        self._first_concurrency = max_concurrency if first_concurrency is None else first_concurrency
        self._limits = tuple(limits)
        Pacer(max_concurrency)  # which checks it
        self._gates: dict[str, Gate] = {}
        """A gate for each model, by the endpoint's name for it, since providers limit models separately."""
        self._places = Places(max_concurrency)
        self._rank = 1.0 - random.SystemRandom().random()
        """A number that identifies this process to others with the same key."""
        self._others: Sequence[Mapping[str, Mapping[str, float]]] = ()
        """What each of them last published, by `_shared_name`."""
        self._others_since: float | None = None
        """Since when there have been any."""
        self._stopped: EndpointDown | None = None
        """The error for further batch calls; None: they are sent."""
        self._dialect = dialect
        self._client = EndpointClient(
            base_url,
            api_key,
            dialect=dialect,
            timeout=timeout,
            connections=max_concurrency,
            # A request that the client resends by itself could be charged twice, but counted once.
            resends=meter is None,
        )
        self._meter = None if meter is None else CountingMeter(meter, self._model_of)
        self._watch = EndpointWatch(self._probe)
        self._queue_watch = EngineQueueWatch(self._client.beside, lambda: self._under_way, self._learn_queue)
        self._shows_queue = not is_provider(base_url)
        self._theirs = dict(models or {})
        self._asks_for_models = False
        """Whether the models are taken from the endpoint's list."""
        self._has_no_list = False
        """Whether the endpoint has no list of models."""
        self._max_waiting = max_waiting
        self._retries = retries
        self._held = InFlight()
        self._pausing = InFlight()
        """Calls among them that failed and wait for a retry, while others use their places."""
        self._retry_budget = RetryBudget()
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop of the calls, whose clock still provides the time for figures after it has ended."""
        self._draw = draw or random.Random()
        self._closed = False

    @property
    def endpoints(self) -> Collection[str]:
        return self._dialect.endpoints

    @property
    def models(self) -> Sequence[str]:
        return tuple(self._theirs)

    @property
    def room(self) -> int:
        under_way = self._under_way
        ahead = max(_LEAST_AHEAD, int(_AHEAD * under_way))
        held = min(under_way + ahead, int((1.0 + _AHEAD) * self._concurrency))
        places = 0 if self._watch.down else held - self._held.total() + self._pausing.total()
        return max(places, -self._held["batch"])

    @property
    def address(self) -> str:
        """Address of the endpoint."""
        return self._client.url

    def wait_for(self, call: Call) -> tuple[float, float]:
        """Return the rank of this endpoint among several: the seconds until `call` could be sent, and how busy it is.

        Calls that wait ahead of it are counted as seconds, since only their number matters.
        """
        gate = self._gates.get(self._model_of(call))
        if gate is None:
            return 0.0, 0.0
        now = asyncio.get_running_loop().time()
        wait = gate.pacer.wait(self._expected(gate, call), now)
        return min(wait, _FOREVER) + gate.waiting, gate.pacer.under_way / gate.pacer.concurrency

    @property
    def _under_way(self) -> int:
        return sum(gate.pacer.under_way for gate in self._gates.values())

    @property
    def _concurrency(self) -> int:
        if not self._gates:
            return min(self._first_concurrency, self._max_concurrency)
        return min(sum(gate.pacer.concurrency for gate in self._gates.values()), self._max_concurrency)

    def pacing(self) -> Mapping[str, PacerFigures]:
        """Return what was learned about the limits of the endpoint, by model."""
        if self._loop is None:
            return {}
        now = self._loop.time()
        unpaid = {} if self._meter is None else self._meter.waiting
        return {
            model: gate.figures(now, unsent=unpaid.get(model, 0))
            for model, gate in self._gates.items()
            if gate.pacer.sent
        }

    def shared_use(self) -> dict[str, dict[str, float]]:
        """Return what other processes need to know of the limits, by a name for address, key and model."""
        if self._loop is None:
            return {}
        now, is_full = self._loop.time(), self._places.are_full
        notes = {model: gate.pacer.note(now, 0 if is_full else gate.waiting) for model, gate in self._gates.items()}
        return {self._shared_name(model): note for model, note in notes.items() if note}

    def learn_use(self, others: Sequence[Mapping[str, Mapping[str, float]]]) -> None:
        """Take over `shared_use` of each of the other processes of the same store."""
        now = asyncio.get_running_loop().time()
        self._others = others
        self._others_since = None if not others else now if self._others_since is None else self._others_since
        for model, gate in self._gates.items():
            if others or not gate.pacer.sharing.is_alone:
                self._share(model, gate.pacer, now)
                gate.look()

    def _share(self, model: str, pacer: Pacer, now: float) -> None:
        name = self._shared_name(model)
        pacer.share([each[name] for each in self._others if name in each], now, since=self._others_since)

    def _shared_name(self, model: str) -> str:
        return hashlib.sha256(f"{self._client.identity}\n{model}".encode()).hexdigest()[:16]

    def send_no_more(self) -> None:
        """Return batch calls that are not sent yet, or that wait for a retry, to their owners, by `EndpointDown`."""
        self._stopped = EndpointDown("nothing more is sent to the endpoint: the run is stopping")
        for gate in self._gates.values():
            gate.refuse_waiting(self._stopped)

    @property
    def why_not_ready(self) -> str | None:
        """Reason why no call can be computed now, without details of the endpoint; None if calls can be computed."""
        return SILENCE if self._watch.down else None

    async def discover(self, *, waits: bool = True) -> None:
        """Request the list of the endpoint's models, if none were given. Without `waits`, ensure that it answers now.

        With `waits`, an endpoint that does not answer is tried again in the background; until it answers, there are no
        models. Otherwise, and for an answer that is not a list of models, raises `EndpointError`.
        """
        if self._theirs and waits and not self._watch.down:
            return
        self._asks_for_models = not self._theirs
        try:
            await self._watch.look()
        except EndpointError as error:
            if not waits or not is_outage(error):
                if error.is_no_such_path and not waits:
                    error.args = (f"{error}; without a list of models, name the one to ask with --model",)
                raise
            self._watch.suspect(error)

    async def _probe(self) -> None:
        try:
            async with asyncio.timeout(_PROBE_SECONDS):
                listed = (await self._client.send(self._dialect.models_path)).get("data")
        except TimeoutError:
            raise EndpointUnreachable(f"{self._client.url}/models gave no answer in {_PROBE_SECONDS:g} s") from None
        except EndpointError as error:
            if is_outage(error) or not self._theirs:
                raise
            self._has_no_list = error.is_no_such_path
            return  # it answers, though it has no list of models
        if self._asks_for_models:
            entries = listed if isinstance(listed, list) else []
            names = [entry.get("id") for entry in entries if isinstance(entry, dict)]
            found = {name: name for name in names if isinstance(name, str) and name}
            if not found:
                raise EndpointError(f"{self._client.url}/models lists no models: name those that it has")
            self._theirs = found

    async def answer(self, call: Call) -> dict[str, Any]:
        path, fields, body, until = self._prepared(call, stream=False)
        with self._held.hold(call.traffic):
            answer = await _within(until, self._retried(call, lambda: self._posted(call, path, fields, body)))
        return self._ours(call, answer)

    async def stream(self, call: Call) -> AsyncIterator[dict[str, Any]]:
        path, fields, body, until = self._prepared(call, stream=True)
        with self._held.hold(call.traffic):
            async with AsyncExitStack() as held:
                opening = self._retried(call, lambda: self._opened(call, path, fields, body, held))
                turn, chunks, chunk = await _within(until, opening)
                usage = None
                while chunk is not None:
                    usage = usage_of(chunk) or usage
                    yield self._ours(call, chunk)
                    try:
                        # A separate timeout for each chunk, since a timeout belongs to one task and another task may
                        # ask for the next chunk.
                        chunk = await _within(until, anext(chunks, None))
                    except EndpointError as error:
                        turn.failed(error)
                        raise
                turn.answered(usage)

    async def close(self) -> None:
        self._closed = True
        for gate in self._gates.values():
            gate.close(EngineClosed(_CLOSING))
        await self._watch.close()
        await self._queue_watch.close()
        await self._client.close()

    def _require_open(self, call: Call) -> None:
        if self._closed:
            raise EngineClosed(_CLOSING)
        if self._stopped is not None and call.traffic == "batch":
            raise self._stopped
        self._watch.require_answering()

    def _require_still_open(self, call: Call, turn: Turn) -> None:
        """Withdraw a try that was let in, and raise the error, if nothing is sent any more."""
        try:
            self._require_open(call)
        except (EndpointDown, EngineClosed):
            turn.withdraw()
            raise

    def _prepared(self, call: Call, *, stream: bool) -> tuple[str, Mapping[str, Any], bytes, float | None]:
        """Return the path, the body, the body as JSON, and the deadline in the event loop's time.

        Raises `BatchwrightError`.
        """
        self._require_open(call)
        if call.traffic == "online" and self._waiting_online >= self._max_waiting:
            raise Overloaded(f"{self._max_waiting} requests wait for the endpoint already: try again later")
        require_endpoint(self._dialect, call.endpoint)
        if stream and call.endpoint == RESPONSES_URL:
            raise InvalidRequest(
                f"stream is not possible with {RESPONSES_URL} of an endpoint elsewhere: leave it out", param="stream"
            )
        require_sizes(call.body)
        if call.endpoint == RESPONSES_URL:
            require_response_now(call.body)
        elif call.endpoint not in ENCODER_URLS:
            require_few_completions(call.body)
        left = time_left(call, deadline_seconds(call.body))
        until = None if left is None else asyncio.get_running_loop().time() + min(left, _FOREVER)
        body = filled(call.endpoint, call.body, call.defaults)
        model = read_model(call.body)
        if self._theirs:
            remedy = "" if self._asks_for_models else LEAVE_OUT_MODEL
            body["model"] = self._theirs[chosen_model(model, tuple(self._theirs), remedy=remedy)]
        if stream:
            body["stream"] = True
        try:
            sent = self._dialect.body(call.endpoint, body)
            return self._dialect.path(call.endpoint), body, msgspec.json.encode(sent), until
        except InvalidRequest:
            raise
        except (ValueError, OverflowError, TypeError, RecursionError) as error:
            raise InvalidRequest(f"the body has no form as JSON: {error}") from error

    @property
    def _waiting_online(self) -> int:
        return sum(gate.waiting_online for gate in self._gates.values())

    def _model_of(self, call: Call) -> str:
        """Return the endpoint's name for the model of `call`; empty if it is not known."""
        asked = read_model(call.body)
        if asked is None:
            return next(iter(self._theirs.values()), "")
        return self._theirs.get(asked) or self._theirs.get(served_name(asked), asked)

    def _gate_of(self, model: str) -> Gate:
        gate = self._gates.get(model)
        if gate is None:
            pacer = Pacer(self._max_concurrency, self._limits, first=self._first_concurrency, rank=self._rank)
            if self._others:
                self._share(model, pacer, asyncio.get_running_loop().time())
            gate = self._gates[model] = Gate(pacer, patience=_PATIENCE, places=self._places)
        return gate

    def _expected(self, gate: Gate, call: Call) -> Use:
        return gate.pacer.expected.of(prompt_tokens_of_request(call.endpoint, call.body), answer_bound(call))

    def _learn_queue(self, queue: Queue) -> None:
        if len(busy := [gate for gate in self._gates.values() if gate.pacer.under_way]) == 1:
            # With several models the figures are a sum whose parts are unknown.
            busy[0].pacer.guide(queue.running, queue.waiting, asyncio.get_running_loop().time())
            busy[0].look()

    def _enter(self, call: Call) -> AbstractAsyncContextManager[Turn]:
        self._require_open(call)
        owner, weight = (None, 1.0) if call.flow is None else (call.flow.owner, call.flow.weight)
        gate = self._gate_of(self._model_of(call))
        self._loop = asyncio.get_running_loop()
        if self._shows_queue:
            self._queue_watch.wake()
        return gate.enter(
            self._expected(gate, call), call.traffic, owner, weight=weight, priority=priority_of(call.body)
        )

    async def _posted(self, call: Call, path: str, fields: Mapping[str, Any], body: bytes) -> dict[str, Any]:
        async with self._enter(call) as turn:
            self._require_still_open(call, turn)
            if call.pauses is not None:
                call.pauses(None)
            answer = await self._noticed(turn, self._sent(call, path, fields, body, turn))
            turn.answered(usage_of(answer))
        name = _LIST_OF[call.endpoint]
        if not isinstance(answer.get(name), list) or (name == "choices" and not answer[name]):
            error = answer.get("error")
            reason = f": {error.get('message')}" if isinstance(error, dict) else ""
            raise AnswerBroken(f"{self._client.url} answers without {name}{reason}")
        return answer

    def _sent(
        self, call: Call, path: str, fields: Mapping[str, Any], body: bytes, turn: Turn
    ) -> Awaitable[dict[str, Any]]:
        if self._meter is None:
            return self._client.send(path, body, turn.heard)

        return self._paid(self._meter, call, path, fields, body, turn)

    async def _paid(
        self, meter: Meter, call: Call, path: str, fields: Mapping[str, Any], body: bytes, turn: Turn
    ) -> dict[str, Any]:
        is_sent = False

        async def send() -> dict[str, Any]:
            nonlocal is_sent
            self._require_open(call)  # the money may have become available after the last request
            is_sent = True
            return await self._client.send(path, body, turn.heard)

        try:
            return await metered_answer(meter, call, fields, len(body), send)
        except BaseException:
            if not is_sent:
                turn.withdraw()
            raise

    def _streamed(
        self, call: Call, path: str, fields: Mapping[str, Any], body: bytes, turn: Turn
    ) -> AsyncGenerator[dict[str, Any]]:
        if self._meter is None:
            return self._client.stream(path, body, turn.heard)
        return metered_chunks(self._meter, call, fields, len(body), lambda: self._client.stream(path, body, turn.heard))

    async def _opened(
        self, call: Call, path: str, fields: Mapping[str, Any], body: bytes, held: AsyncExitStack
    ) -> tuple[Turn, AsyncGenerator[dict[str, Any]], dict[str, Any] | None]:
        """Return a turn, its stream and the first chunk. From then on `held` owns its place and its connection."""
        async with AsyncExitStack() as opening:
            turn = await opening.enter_async_context(self._enter(call))
            self._require_still_open(call, turn)
            if call.pauses is not None:
                call.pauses(None)
            chunks = await opening.enter_async_context(aclosing(self._streamed(call, path, fields, body, turn)))
            first = await self._noticed(turn, anext(chunks, None))
            if first is None:
                raise EndpointError(f"{self._client.url} ended its stream without a chunk")
            held.push_async_exit(opening.pop_all())
            return turn, chunks, first

    async def _noticed(self, turn: Turn, answer: Awaitable[_T]) -> _T:
        """Await `answer`, let the pacer and the watch learn from its outcome, and return its result."""
        try:
            result = await answer
        except EndpointError as error:
            turn.failed(error)
            if is_outage(error):
                self._watch.suspect()
            error.is_wrong_address |= self._has_no_list and error.is_no_such_path
            raise
        except (BudgetExhausted, EndpointDown, InvalidRequest, EngineClosed):
            turn.withdraw()  # raised before anything is sent
            raise
        self._retry_budget.succeeded()
        self._watch.answered()
        return result

    async def _retried(self, call: Call, attempt_once: Callable[[], Awaitable[_T]]) -> _T:
        """Return the result of the first try that succeeds. A place is held during a try, but not between tries."""
        retries, failures, notify = self._retries[call.traffic], list[Exception](), call.pauses or (lambda _: None)

        def pause(error: Exception) -> bool | float:
            failing = self._retry_budget.failing
            found = pause_before_retry(error, call.traffic, retries, failures, self._draw, failing=failing)
            if found is not None and not self._retry_budget.spend():
                found = None
            failures.append(error)
            notify(None if found is None else error)
            return False if found is None else found

        try:
            # Nearly all calls succeed the first time, and the retry code itself would cost a third of such a call.
            return await self._let_through(call, attempt_once)
        except Exception as error:
            failure = error
        with self._pausing.hold(call.traffic):
            async for attempt in stamina.retry_context(on=pause, attempts=retries.attempts, timeout=None):
                with attempt:
                    if attempt.num == 1:
                        raise failure
                    with self._pausing.hold(call.traffic, -1):
                        return await self._let_through(call, attempt_once)
        raise failure

    async def _let_through(self, call: Call, attempt_once: Callable[[], Awaitable[_T]]) -> _T:
        """Return the result of a try. A try refused for a rate limit is repeated when the pacer allows it."""
        retries, refusals = self._retries[call.traffic], 0
        while True:
            try:
                return await attempt_once()
            except EndpointError as error:
                refusals += 1
                if error.status != REFUSED or not error.may_pass or refusals >= retries.attempts:
                    raise
                if call.traffic == "online" and (error.retry_after or 0.0) > retries.wait_max:
                    raise
                if error.waits_alone and error.retry_after:
                    await asyncio.sleep(error.retry_after)

    def _ours(self, call: Call, answer: dict[str, Any]) -> dict[str, Any]:
        """Return `answer` with the model name of the call in place of the endpoint's."""
        if self._theirs and "model" in answer:
            # The name is not checked again, since the endpoint may have come back with different models.
            answer["model"] = read_model(call.body) or self.models[0]
        return answer


def answer_bound(call: Call) -> int | None:
    """Return the most tokens that the answers to a call may have together; None: no limit."""
    if call.endpoint in ENCODER_URLS:
        return 0
    limit, defaults = stated_limit(call.body), call.defaults
    if limit is None and defaults is not None:
        limit = stated_limit(defaults) if isinstance(defaults, Mapping) else defaults.max_tokens
    number = call.body.get("n")
    completions = number if isinstance(number, int) and number > 0 else 1
    return None if limit is None else limit * completions


async def _within(until: float | None, work: Awaitable[_T]) -> _T:
    """Await `work`. Raises `DeadlineExceeded` at `until`, a time of the event loop."""
    limit = asyncio.timeout_at(until)
    try:
        async with limit:
            return await work
    except TimeoutError as error:
        if limit.expired():
            raise DeadlineExceeded("the time for this request passed before the endpoint answered") from error
        raise
