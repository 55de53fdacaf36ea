"""`RoutedInference`: several models behind one `Inference`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Protocol, cast

from batchwright.errors import InputError, InvalidRequest, ModelNotFound, shown
from batchwright.inference.inference import Call, Inference, why_not_ready
from batchwright.wire.requests import read_model

ANY_MODEL = "*"
"""Every name, where the names of models are listed for which another stands."""


class Route(Inference, Protocol):
    """An `Inference` that says what it serves."""

    @property
    def endpoints(self) -> Collection[str]:
        """Those that it answers."""
        ...

    @property
    def room(self) -> int:
        """`wants`, and below zero where it holds more batch lines than it would like to."""
        ...


class RoutedInference:
    """Sends each call to the first of `routes` that serves its endpoint and its model.

    A call that names no model goes to the first that serves its endpoint. `aliases` are further names, each with the
    name of the model that it stands for; answers carry the one that was asked for. `close` closes all routes.

    Raises `InputError` for an alias that is a model's own name, or that stands for none.
    """

    def __init__(self, routes: Sequence[Route], aliases: Mapping[str, str] | None = None) -> None:
        self._routes = tuple(routes)
        self._aliases = dict(aliases or {})
        own = self._own_names()
        for alias, model in self._aliases.items():
            if alias in own:
                raise InputError(f"model_alias {alias}={model}: {alias} is the name of a model: choose another")
            # What an endpoint serves that does not answer yet is not known.
            if model not in own and all(route.models for route in self._routes):
                raise InputError(f"model_alias {alias}={model}: no such model is served: choose from {', '.join(own)}")

    @property
    def routes(self) -> Sequence[Route]:
        """As they were given."""
        return self._routes

    @property
    def models(self) -> Sequence[str]:
        return [*self._own_names(), *self._aliases]

    @property
    def wants(self) -> int:
        # Lines are claimed without a look at their endpoint: what one holds beyond its wish is taken off the others',
        # lest it be given more and more while they have room.
        return max(0, sum(route.room for route in self._routes))

    @property
    def why_not_ready(self) -> str | None:
        """Why one of them can compute no call now; None when all can."""
        return next((reason for route in self._routes if (reason := why_not_ready(route))), None)

    async def answer(self, call: Call) -> dict[str, Any]:
        route = self._route(call)
        alias, call = self._resolved(call)
        body = await route.answer(call)
        return body if alias is None else {**body, "model": alias}

    def stream(self, call: Call) -> AsyncIterator[dict[str, Any]]:
        route = self._route(call)
        alias, call = self._resolved(call)
        bodies = route.stream(call)
        return bodies if alias is None else _under_the_name(alias, bodies)

    async def close(self) -> None:
        for route in self._routes:
            await route.close()

    def _own_names(self) -> list[str]:
        return list(dict.fromkeys(name for route in self._routes for name in route.models))

    def _resolved(self, call: Call) -> tuple[str | None, Call]:
        """The alias that the call asks for, if it does, and the call as the model's own name would put it."""
        asked = read_model(call.body)
        if asked is None or asked not in self._aliases:
            return None, call
        return asked, replace(call, body={**call.body, "model": self._aliases[asked]})

    def _route(self, call: Call) -> Route:
        model = read_model(call.body)
        serving = [route for route in self._routes if call.endpoint in route.endpoints]
        if not serving:
            raise InvalidRequest(
                f"no model for {call.endpoint} is served here: start the service with one", code="unsupported_url"
            )
        meant = None if model is None else self._aliases.get(model, model)
        for route in serving:
            if meant is None or not route.models or meant in route.models:
                return route
        if model in self.models:
            raise ModelNotFound(f"model={shown(model)} does not serve {call.endpoint}: GET /v1/models lists all models")
        served = [name for route in serving for name in route.models]
        names = ", ".join([*served, *(alias for alias, name in self._aliases.items() if name in served)])
        raise ModelNotFound(f"model={shown(model)} is not served here: choose from {names}")


class StandIn:
    """Has `inner` answer for models of other names, `names`, as it answers calls that name none.

    `ANY_MODEL` among them stands for every name. Answers carry the name that was asked for.
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
        """Why the inner one can compute no call now; None when it can."""
        return why_not_ready(self._inner)

    async def answer(self, call: Call) -> dict[str, Any]:
        name, call = self._resolved(call)
        body = await self._inner.answer(call)
        return body if name is None else {**body, "model": name}

    def stream(self, call: Call) -> AsyncIterator[dict[str, Any]]:
        name, call = self._resolved(call)
        bodies = self._inner.stream(call)
        return bodies if name is None else _under_the_name(name, bodies)

    async def close(self) -> None:
        await self._inner.close()

    def _resolved(self, call: Call) -> tuple[str | None, Call]:
        """The name that the inner one does not know, if the call asks for one, and the call without it."""
        asked = read_model(call.body)
        stands_in = asked in self._names or ANY_MODEL in self._names
        if asked is None or not stands_in or asked in self._inner.models:
            return None, call
        return asked, replace(call, body={name: value for name, value in call.body.items() if name != "model"})


async def _under_the_name(name: str, bodies: AsyncIterator[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
    async with aclosing(cast("AsyncGenerator[dict[str, Any]]", bodies)) as chunks:
        async for chunk in chunks:
            yield {**chunk, "model": name}
