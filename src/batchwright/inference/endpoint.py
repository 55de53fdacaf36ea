"""`EndpointInference`: calls computed by an OpenAI-compatible endpoint elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import stamina

from batchwright.backoff import Backoff
from batchwright.errors import (
    DeadlineExceeded,
    EndpointError,
    EndpointUnreachable,
    EngineClosed,
    InvalidRequest,
    Overloaded,
)
from batchwright.inference.calls import InFlight, chosen_model, time_left
from batchwright.inference.endpoint_client import EndpointClient
from batchwright.inference.endpoint_concurrency import AimdLimit, Gate
from batchwright.inference.endpoint_watch import SILENCE, EndpointWatch
from batchwright.inference.inference import Call, Route
from batchwright.inference.metering import Meter, metered_answer, metered_chunks
from batchwright.request import Traffic
from batchwright.wire.bounds import require_sizes
from batchwright.wire.fields import deadline_seconds, priority_of
from batchwright.wire.requests import (
    CHAT_URL,
    COMPLETION_URL,
    EMBEDDINGS_URL,
    read_model,
    require_few_completions,
    with_defaults,
)

_T = TypeVar("_T")

_AHEAD = 1.25
"""Calls to hold per call that may be under way, so that none is missing while the next lines are fetched."""
_OURS = ("deadline", "deadline_ms", "priority")
"""Fields of batchwright that endpoints elsewhere do not know."""
_LIST_OF = {CHAT_URL: "choices", COMPLETION_URL: "choices", EMBEDDINGS_URL: "data"}
_GATEWAY_STATUSES = frozenset({502, 503, 504})
"""Statuses with which a proxy answers for an endpoint that it cannot reach."""
_PROBE_SECONDS = 10.0
_LONGEST_PAUSE = 600.0
_TRIES_OF_500 = 5
"""Tries of a call whose answer is 500 each time: that is more often the fault of the call than of the moment."""
_FOREVER = 1e6


@dataclass(frozen=True, slots=True)
class EndpointRetries:
    """Number of tries of a call, and bounds of the pause before the next try, in seconds."""

    attempts: int
    wait_initial: float
    wait_max: float


RETRIES: Mapping[Traffic, EndpointRetries] = {
    "online": EndpointRetries(3, 0.25, 2.0),
    "batch": EndpointRetries(30, 1.0, 60.0),
}
"""Online a client is waiting, so there are few tries; a line of a batch outlasts half an hour of refusals. While the
endpoint does not answer at all, the line goes back to its owner."""


class EndpointInference(Route):
    """Passes calls on to an endpoint elsewhere, at most `max_concurrency` at once, online calls first.

    - `base_url`: as for the official client, `https://host/v1`; `api_key`: the endpoint's key, if it requires one.
    - `models`: names of models in calls, each with the name that the endpoint has for it. None: names are passed on
      unchanged; `discover` asks the endpoint for its models.
    - `timeout`: seconds without any data, after which a try is given up.
    - `max_waiting`: online calls that may wait for their turn; more are refused with `Overloaded`.
    - `meter`: reserves money for every try, and counts what it cost; None: nothing is counted.

    Calls that are answered with 408, 409, 429 or 5xx, and calls that are not answered, are retried (`retries`); an
    overloaded endpoint gets fewer calls at once for a while. While the endpoint is known to be down it gets none: calls
    raise `EndpointDown` until a probe is answered. Raises ValueError for an invalid setting.
    """

    endpoints = frozenset(_LIST_OF)

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        models: Mapping[str, str] | None = None,
        *,
        max_concurrency: int = 64,
        timeout: float = 600.0,
        max_waiting: int = 1000,
        retries: Mapping[Traffic, EndpointRetries] = RETRIES,
        meter: Meter | None = None,
    ) -> None:
        self._limit = AimdLimit(max_concurrency)
        self._gate = Gate(self._limit)
        # A request that the client sends again by itself could be paid twice, and counted once.
        self._client = EndpointClient(
            base_url, api_key, timeout=timeout, connections=max_concurrency, resends=meter is None
        )
        self._meter = meter
        self._watch = EndpointWatch(self._probe)
        self._theirs = dict(models or {})
        self._asks_for_models = False
        """Whether the models are taken from the endpoint's list."""
        self._max_waiting = max_waiting
        self._retries = retries
        self._held = InFlight()
        self._closed = False

    @property
    def models(self) -> Sequence[str]:
        return tuple(self._theirs)

    @property
    def room(self) -> int:
        places = 0 if self._watch.down else int(self._limit.value * _AHEAD) - self._held.total()
        return max(places, -self._held["batch"])

    @property
    def why_not_ready(self) -> str | None:
        """Reason why no call can be computed now, without details of the endpoint; None when calls can be computed."""
        return SILENCE if self._watch.down else None

    async def discover(self, *, waits: bool = True) -> None:
        """Ask the endpoint for its models, if none were given. Without `waits`, make sure that it answers now.

        With `waits`, an endpoint that does not answer is asked again in the background, and until then there are no
        models. Raises `EndpointError` otherwise, and for an answer that is not a list of models.
        """
        if self._theirs and waits:
            return
        self._asks_for_models = not self._theirs
        try:
            await self._watch.look()
        except EndpointError as error:
            if not waits or not _is_outage(error):
                raise
            self._watch.suspect(error)

    async def _probe(self) -> None:
        try:
            async with asyncio.timeout(_PROBE_SECONDS):
                listed = (await self._client.send("/models")).get("data")
        except TimeoutError:
            raise EndpointUnreachable(f"{self._client.url}/models gave no answer in {_PROBE_SECONDS:g} s") from None
        except EndpointError as error:
            if _is_outage(error) or not self._theirs:
                raise
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
                chunks, chunk = await _within(until, opening)
                while chunk is not None:
                    yield self._ours(call, chunk)
                    # A timeout for each chunk, since it belongs to one task and another task may ask for the next.
                    chunk = await _within(until, anext(chunks, None))

    async def close(self) -> None:
        self._closed = True
        await self._watch.close()
        await self._client.close()

    def _require_open(self) -> None:
        if self._closed:
            raise EngineClosed("the endpoint is not asked any more: the service is closing")
        self._watch.require_answering()

    def _prepared(self, call: Call, *, stream: bool) -> tuple[str, Mapping[str, Any], bytes, float | None]:
        """Return the path, the body, the same as JSON, and the deadline in the event loop's time.

        Raises `BatchwrightError`.
        """
        self._require_open()
        if call.traffic == "online" and self._gate.waiting_online >= self._max_waiting:
            raise Overloaded(f"{self._max_waiting} requests wait for the endpoint already: try again later")
        require_sizes(call.body)
        if call.endpoint != EMBEDDINGS_URL:
            require_few_completions(call.body)
        left = time_left(call, deadline_seconds(call.body))
        until = None if left is None else asyncio.get_running_loop().time() + min(left, _FOREVER)
        body = {name: value for name, value in call.body.items() if name not in _OURS}
        if call.defaults is not None and call.endpoint != EMBEDDINGS_URL:
            body = with_defaults(body, call.defaults, chat=call.endpoint == CHAT_URL)
        model = read_model(call.body)
        if self._theirs:
            body["model"] = self._theirs[chosen_model(model, tuple(self._theirs))]
        if stream:
            body["stream"] = True
        try:
            return call.endpoint.removeprefix("/v1"), body, msgspec.json.encode(body), until
        except (ValueError, OverflowError, TypeError, RecursionError) as error:
            raise InvalidRequest(f"the body has no form as JSON: {error}") from error

    def _enter(self, call: Call) -> AbstractAsyncContextManager[int]:
        owner, weight = (None, 1.0) if call.flow is None else (call.flow.owner, call.flow.weight)
        return self._gate.enter(call.traffic, owner, weight=weight, priority=priority_of(call.body))

    async def _posted(self, call: Call, path: str, fields: Mapping[str, Any], body: bytes) -> dict[str, Any]:
        async with self._enter(call) as began:
            self._require_open()
            answer = await self._noticed(began, self._sent(call, path, fields, body))
        if not isinstance(answer.get(_LIST_OF[call.endpoint]), list):
            raise EndpointError(f"{self._client.url} answers without a list of {_LIST_OF[call.endpoint]}")
        return answer

    def _sent(self, call: Call, path: str, fields: Mapping[str, Any], body: bytes) -> Awaitable[dict[str, Any]]:
        if self._meter is None:
            return self._client.send(path, body)
        return metered_answer(self._meter, call, fields, len(body), lambda: self._client.send(path, body))

    def _streamed(
        self, call: Call, path: str, fields: Mapping[str, Any], body: bytes
    ) -> AsyncGenerator[dict[str, Any]]:
        if self._meter is None:
            return self._client.stream(path, body)
        return metered_chunks(self._meter, call, fields, len(body), lambda: self._client.stream(path, body))

    async def _opened(
        self, call: Call, path: str, fields: Mapping[str, Any], body: bytes, held: AsyncExitStack
    ) -> tuple[AsyncGenerator[dict[str, Any]], dict[str, Any] | None]:
        """Return a stream and its first chunk. From then on `held` holds its place and its connection."""
        async with AsyncExitStack() as opening:
            began = await opening.enter_async_context(self._enter(call))
            self._require_open()
            chunks = await opening.enter_async_context(aclosing(self._streamed(call, path, fields, body)))
            first = await self._noticed(began, anext(chunks, None))
            if first is None:
                raise EndpointError(f"{self._client.url} ended its stream without a chunk")
            held.push_async_exit(opening.pop_all())
            return chunks, first

    async def _noticed(self, began: int, answer: Awaitable[_T]) -> _T:
        """Return `answer`, and let the limit and the watch learn from its outcome."""
        try:
            result = await answer
        except EndpointError as error:
            if error.status in (429, 503):
                self._limit.overloaded(began)
            if _is_outage(error):
                self._watch.suspect()
            raise
        self._limit.succeeded()
        self._watch.answered()
        return result

    async def _retried(self, call: Call, attempt_once: Callable[[], Awaitable[_T]]) -> _T:
        """Return the result of the first try that succeeds. A place is held during a try, but not between tries."""
        retries, failures, tell = self._retries[call.traffic], list[Exception](), call.pauses or (lambda _: None)

        def pause(error: Exception) -> bool | float:
            found = pause_before_retry(error, call.traffic, retries, failures)
            failures.append(error)
            tell(None if found is False else error)
            return found

        try:
            # Nearly all calls succeed at once, and the retrying itself would cost a third of such a call.
            return await attempt_once()
        except Exception as error:
            failure = error
        async for attempt in stamina.retry_context(
            on=pause,
            attempts=retries.attempts,
            timeout=None,
            wait_initial=retries.wait_initial,
            wait_max=retries.wait_max,
            wait_jitter=retries.wait_initial,
        ):
            with attempt:
                if attempt.num == 1:
                    raise failure
                tell(None)
                return await attempt_once()
        raise failure

    def _ours(self, call: Call, answer: dict[str, Any]) -> dict[str, Any]:
        """Return `answer` with the model name of the call in place of the endpoint's."""
        if self._theirs and "model" in answer:
            # The name is not checked again, since the endpoint may have come back with other models meanwhile.
            answer["model"] = read_model(call.body) or self.models[0]
        return answer


def pause_before_retry(
    error: Exception, traffic: Traffic, retries: EndpointRetries, failures: Sequence[Exception]
) -> bool | float:
    """Return the seconds before the next try if the endpoint named them, else whether to try again at all.

    Pauses grow with the number of earlier `failures` even when the endpoint keeps naming short ones, or all tries would
    soon be used up. Online, a pause longer than `retries.wait_max` is left to the caller.
    """
    if not isinstance(error, EndpointError) or not error.may_pass:
        return False
    if sum(getattr(each, "status", None) == 500 for each in (*failures, error)) >= _TRIES_OF_500:
        return False
    if error.retry_after is None:
        return True
    if traffic == "online" and error.retry_after > retries.wait_max:
        return False
    least = Backoff(retries.wait_initial, retries.wait_max).pause(len(failures)) if failures else 0.0
    return min(max(error.retry_after, least), _LONGEST_PAUSE)


def _is_outage(error: EndpointError) -> bool:
    """Return whether the endpoint may be down."""
    return isinstance(error, EndpointUnreachable) or error.status in _GATEWAY_STATUSES


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
