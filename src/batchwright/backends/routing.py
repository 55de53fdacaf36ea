"""`RoutedInference`: several models behind one `Inference`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from typing import Any, Protocol

from batchwright.backends.inference import Call, Inference, why_not_ready
from batchwright.errors import InvalidRequest, ModelNotFound, shown
from batchwright.wire.requests import read_model


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

    A call that names no model goes to the first that serves its endpoint. `close` closes all of them.
    """

    def __init__(self, routes: Sequence[Route]) -> None:
        self._routes = tuple(routes)

    @property
    def routes(self) -> Sequence[Route]:
        """As they were given."""
        return self._routes

    @property
    def models(self) -> Sequence[str]:
        return list(dict.fromkeys(name for route in self._routes for name in route.models))

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
        return await self._route(call).answer(call)

    def stream(self, call: Call) -> AsyncIterator[dict[str, Any]]:
        return self._route(call).stream(call)

    async def close(self) -> None:
        for route in self._routes:
            await route.close()

    def _route(self, call: Call) -> Route:
        model = read_model(call.body)
        serving = [route for route in self._routes if call.endpoint in route.endpoints]
        if not serving:
            raise InvalidRequest(
                f"no model for {call.endpoint} is served here: start the service with one", code="unsupported_url"
            )
        for route in serving:
            if model is None or model in route.models:
                return route
        if model in self.models:
            raise InvalidRequest(f"model={shown(model)} does not serve {call.endpoint}", param="model")
        names = ", ".join(name for route in serving for name in route.models)
        raise ModelNotFound(f"model={shown(model)} is not served here: choose from {names}")
