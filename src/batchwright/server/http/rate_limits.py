"""Online requests within their quotas, with the `x-ratelimit-*` headers that OpenAI's clients read."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager

from starlette.requests import Request

from batchwright.inference.inference import Call
from batchwright.limiting.rates import Kind, Standing
from batchwright.server.http.middleware import ANSWER_HEADERS
from batchwright.service.access.online_quotas import Use, duration_text
from batchwright.service.composition import Services


def within_quotas(services: Services, request: Request, *calls: Call) -> AbstractAsyncContextManager[Use]:
    """Hold what these calls of one request take of its quotas; its answer says how they stand.

    Raises `QuotaExceeded`.
    """

    def tell(standings: Mapping[Kind, Standing]) -> None:
        setattr(request.state, ANSWER_HEADERS, _headers(standings))

    return services.quotas.admitted(request.state.tenant, request.state.key, calls, tell)


def _headers(standings: Mapping[Kind, Standing]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for kind, standing in standings.items():
        headers[f"x-ratelimit-limit-{kind}"] = str(standing.limit)
        headers[f"x-ratelimit-remaining-{kind}"] = str(standing.remaining)
        headers[f"x-ratelimit-reset-{kind}"] = duration_text(standing.reset)
    return headers
