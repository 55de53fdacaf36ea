"""`RoutedInference`: several models behind one `Inference`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from batchwright.errors import InputError, InvalidRequest, ModelNotFound, shown
from batchwright.inference.inference import (
    Call,
    Inference,
    Route,
    WorkUnderWay,
    engine_stats_of,
    learn_use,
    least_seconds_of,
    pacing_of,
    send_no_more,
    shared_use,
    standing_of,
    why_not_ready,
    work_of,
)
from batchwright.models import served_name
from batchwright.pacing.figures import PacerFigures
from batchwright.planning.needed_work import Answered
from batchwright.wire.requests import (
    CLASSIFIER_URLS,
    CLASSIFY_URL,
    EMBEDDINGS_URL,
    read_model,
)

if TYPE_CHECKING:
    from batchwright.engine.engine_stats import EngineStats

ANY_MODEL = "*"
"""Wildcard for every name, in the names of a `StandIn`."""


class _Renaming:
    """Base class of inferences that have further names for models. Answers carry the name in the call."""

    def _resolved(self, call: Call) -> tuple[Inference, str | None, Call]:
        """Return what computes the call, the further name in it (None if there is none), and the call without it."""
        raise NotImplementedError

    async def answer(self, call: Call) -> dict[str, Any]:
        inference, name, call = self._resolved(call)
        body = await inference.answer(call)
        return body if name is None else {**body, "model": name}

    def stream(self, call: Call) -> AsyncIterator[dict[str, Any]]:
        inference, name, call = self._resolved(call)
        bodies = inference.stream(call)
        return bodies if name is None else _renamed(name, bodies)


class RoutedInference(_Renaming):
    """Sends each call to the first of `routes` that serves its endpoint and its model.

    A call that names no model goes to the first route that serves its endpoint. `aliases` maps further names to the
    names of models; answers carry the name in the call. `close` closes all routes.

    Raises `InputError` for an alias that is a model's own name, or whose model is not served.
    """

    def __init__(self, routes: Sequence[Route], aliases: Mapping[str, str] | None = None) -> None:
        self.routes = tuple(routes)
        own = self._own_names()
        self._aliases = {
            alias: model if model in own else served_name(model) for alias, model in (aliases or {}).items()
        }
        for alias, model in self._aliases.items():
            if alias in own:
                raise InputError(f"model_alias {alias}={model}: {alias} is the name of a model: choose another")
            # The models of an endpoint that does not answer yet are unknown.
            if model not in own and all(route.models for route in self.routes):
                raise InputError(f"model_alias {alias}={model}: no such model is served: choose from {', '.join(own)}")

    @property
    def models(self) -> Sequence[str]:
        return [*self._own_names(), *self._aliases]

    @property
    def wants(self) -> int:
        # Lines are claimed regardless of their endpoint. An overfull route lowers the sum; otherwise it would be given
        # more and more lines while the others have room.
        return max(0, sum(route.room for route in self.routes))

    @property
    def why_not_ready(self) -> str | None:
        """Reason why some route cannot compute any call now; None if all can."""
        return next((reason for route in self.routes if (reason := why_not_ready(route))), None)

    def pacing(self) -> Mapping[str, PacerFigures]:
        """Return what routes have learned about the limits of remote endpoints, by model; numbered if several have."""
        found = [figures for route in self.routes if (figures := pacing_of(route))]
        if len(found) == 1:
            return found[0]
        return {
            f"{number} {name}".rstrip(): each for number, part in enumerate(found, 1) for name, each in part.items()
        }

    def send_no_more(self) -> None:
        """Return batch calls that no route has sent anywhere yet to their owners."""
        for route in self.routes:
            send_no_more(route)

    def shared_use(self) -> dict[str, dict[str, float]]:
        """Return this process's recent use of each limit that a route shares with other processes."""
        return {name: used for route in self.routes for name, used in shared_use(route).items()}

    def learn_use(self, others: Sequence[Mapping[str, Mapping[str, float]]]) -> None:
        """Inform the routes of each other process's recent use of the limits that they share."""
        for route in self.routes:
            learn_use(route, others)

    @property
    def engine_stats(self) -> EngineStats | None:
        """Statistics of the engines of the first route that has any."""
        return next((stats for route in self.routes if (stats := engine_stats_of(route)) is not None), None)

    async def work_of(self, prefix: str) -> WorkUnderWay | None:
        found = [work for route in self.routes if (work := await work_of(route, prefix)) is not None]
        return next((work for work in found if work.running), None)

    def least_seconds(self, endpoint: str, model: str | None, answered: Answered) -> float | None:
        """Return the least time in which the route of such calls computes what `model` answered."""
        route = self._meant(endpoint, model)
        return None if route is None else least_seconds_of(route, endpoint, model, answered)

    async def close(self) -> None:
        for route in self.routes:
            await route.close()

    def _own_names(self) -> list[str]:
        return list(dict.fromkeys(name for route in self.routes for name in route.models))

    def _resolved(self, call: Call) -> tuple[Inference, str | None, Call]:
        route, asked = self._route(call), read_model(call.body)
        if asked is None or asked not in self._aliases:
            return route, None, call
        return route, asked, replace(call, body={**call.body, "model": self._aliases[asked]})

    def _route(self, call: Call) -> Route:
        model = read_model(call.body)
        serving = [route for route in self.routes if call.endpoint in route.endpoints]
        if not serving:
            raise not_served(call.endpoint)
        if (route := self._meant(call.endpoint, model)) is not None:
            return route
        served = [name for route in serving for name in route.models]
        served += [alias for alias, name in self._aliases.items() if name in served]
        raise not_found(call.endpoint, model, served, self.models)

    def _meant(self, endpoint: str, model: str | None) -> Route | None:
        """Return the route to which requests for `model` go, None if there is none."""
        meant = None if model is None else self._aliases.get(model, model)
        for route in self.routes:
            serves = meant is None or not route.models or meant in route.models or served_name(meant) in route.models
            if serves and endpoint in route.endpoints:
                return route
        return None


def not_found(endpoint: str, model: str | None, serving: Sequence[str], models: Sequence[str]) -> ModelNotFound:
    """Return the error for a call whose `model` is none of those `serving` the endpoint, nor maybe of `models`."""
    problem = f"does not serve {endpoint}" if model in models else "is not served here"
    return ModelNotFound(f"model={shown(model)} {problem}: choose from {', '.join(serving)}")


def not_served(endpoint: str) -> InvalidRequest:
    """Return the error for a call for which no model is loaded."""
    return InvalidRequest(
        f"no model here serves {endpoint}: one is loaded with {_flag_for(endpoint)}", code="unsupported_url"
    )


def _flag_for(endpoint: str) -> str:
    """Return the flag that loads a model for `endpoint`."""
    if endpoint in CLASSIFIER_URLS:
        if endpoint == CLASSIFY_URL:
            return "--classifier NAME"
        return (
            "--classifier NAME, a cross-encoder: a sequence classifier with one label; or with --embedding-model NAME, "
            "whose vectors are compared"
        )
    return "--embedding-model NAME" if endpoint == EMBEDDINGS_URL else "--model NAME"


class StandIn(_Renaming):
    """Lets `inner` answer calls for models that it does not have, `names`, like calls that name no model.

    `ANY_MODEL` among the names stands for every name. Answers carry the name in the call.
    """

    def __init__(self, inner: Inference, names: Collection[str]) -> None:
        self._inner = inner
        self._names = frozenset(names)

    @property
    def models(self) -> Sequence[str]:
        return [*self._inner.models, *sorted(self._names - {ANY_MODEL})]

    @property
    def wants(self) -> int:
        return self._inner.wants

    @property
    def why_not_ready(self) -> str | None:
        """Reason why `inner` cannot compute any call now; None if it can."""
        return why_not_ready(self._inner)

    def pacing(self) -> Mapping[str, PacerFigures]:
        """Return what `inner` has learned about the limits of remote endpoints, by model."""
        return pacing_of(self._inner)

    def send_no_more(self) -> None:
        """Return batch calls that `inner` has not sent anywhere yet to their owners."""
        send_no_more(self._inner)

    @property
    def standing(self) -> str | None:
        """Where the calls of `inner` are, if they take long."""
        return standing_of(self._inner)

    @property
    def engine_stats(self) -> EngineStats | None:
        """Statistics of the engines behind `inner`."""
        return engine_stats_of(self._inner)

    async def work_of(self, prefix: str) -> WorkUnderWay | None:
        return await work_of(self._inner, prefix)

    def least_seconds(self, endpoint: str, model: str | None, answered: Answered) -> float | None:
        """Return the least time in which `inner` computes what was answered."""
        return least_seconds_of(self._inner, endpoint, None if self._stands_in_for(model) else model, answered)

    async def close(self) -> None:
        await self._inner.close()

    def _resolved(self, call: Call) -> tuple[Inference, str | None, Call]:
        asked = read_model(call.body)
        if not self._stands_in_for(asked):
            return self._inner, None, call
        body = {name: value for name, value in call.body.items() if name != "model"}
        return self._inner, asked, replace(call, body=body)

    def _stands_in_for(self, model: str | None) -> bool:
        """Whether `inner` answers for `model` without having it."""
        if model is None or {model, served_name(model)} & {*self._inner.models}:
            return False
        return model in self._names or ANY_MODEL in self._names


async def _renamed(name: str, bodies: AsyncIterator[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
    async with aclosing(cast("AsyncGenerator[dict[str, Any]]", bodies)) as chunks:
        async for chunk in chunks:
            yield {**chunk, "model": name}
