"""Quotas of online requests: which are let in, the headers of their answers, and what other servers are told."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple, Protocol

from batchwright.clock import Clock
from batchwright.errors import (
    EndpointDown,
    EndpointError,
    EngineClosed,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    QuotaExceeded,
    ServiceStopping,
    StoreUnavailable,
)
from batchwright.inference.inference import Call
from batchwright.limiting.estimates import tokens_of_request
from batchwright.limiting.quotas import UNLIMITED, Quotas
from batchwright.limiting.rates import (
    KINDS,
    Change,
    Grant,
    Kind,
    RateLimiter,
    Refusal,
    Standing,
    Subject,
    oldest_slot,
    slot_of,
)
from batchwright.store.records import ApiKey
from batchwright.store.store import Store

_NEVER_BEGUN = (
    InvalidRequest, ModelNotFound, Overloaded, EndpointDown, EndpointError, EngineClosed, ServiceStopping,
    StoreUnavailable,
)  # fmt: skip
"""Errors of requests that computed nothing, if nothing was answered either."""
_REFRESH = 5.0
"""Seconds between reads of the quotas of tenants."""


class Use:
    """Record of an admitted request, called with the tokens that it used once they are known."""

    def __init__(self, settle: Callable[[int], None]) -> None:
        self.begun = False
        """Whether some of the answer was sent."""
        self.settled = False
        self._settle = settle

    def __call__(self, tokens: int) -> None:
        self.settled = True
        self._settle(tokens)


class Others(Protocol):
    """The other processes of a store, with which use is exchanged."""

    async def agree(self) -> None:
        """Return when an exchange that began after this call is over, if there are others and the store answers."""

    def tell(self) -> None:
        """Begin an exchange soon."""


class _Exchange(NamedTuple):
    """An exchange of use with the other processes."""

    came: asyncio.Future[tuple[float, list[Change]]]
    rates: Sequence[str]
    """Rates that are asked for whole."""


class OnlineQuotas:
    """The quotas of tenants and keys, and what online requests use of them.

    Requests are decided by what this process knows; where there are others, once more after an exchange with them.
    """

    def __init__(
        self,
        store: Store,
        defaults: Quotas,
        clock: Clock,
        unix_time: Callable[[], float] = time.time,
        *,
        others: Callable[[], Others],
    ) -> None:
        """`defaults`: quotas of tenants that have none of their own."""
        self.limiter = RateLimiter()
        self.refused: Counter[str] = Counter()
        """Refused requests, by the name of the quota."""
        self._store = store
        self._defaults = defaults
        self._others = others
        self._clock = clock
        self._ahead = unix_time() - clock.now()
        """Seconds by which the time of the store is ahead of the clock."""
        self._tenants: Mapping[str, Quotas] = {}
        self._refresh_at = float("-inf")
        self._sharing: _Exchange | None = None
        """Exchange that is under way. It is never cancelled: what it added could not be told from what it did not."""
        self._heard: float | None = None
        """Time of the store at the last exchange."""

    @property
    def now(self) -> float:
        """Time by which all processes count."""
        return self._clock.now() + self._ahead

    def subjects(self, tenant: str, key: ApiKey | None) -> list[Subject]:
        """Return the subjects whose quotas concern a request: its tenant and its key."""
        found = [Subject(f"tenant:{tenant}", self._tenants.get(tenant, UNLIMITED).over(self._defaults))]
        if key is not None:
            found.append(Subject(f"key:{key.id}", key.quotas))
        return [subject for subject in found if subject.quotas != UNLIMITED]

    @asynccontextmanager
    async def admitted(
        self, tenant: str, key: ApiKey | None, calls: Sequence[Call], told: Callable[[Mapping[Kind, Standing]], None]
    ) -> AsyncIterator[Use]:
        """Let a request in, which consists of these calls, for as long as the block lasts. Raises `QuotaExceeded`.

        `told` is called once with how the scarcest quotas stand, before that is raised too, and not where there are no
        quotas.

        The block is given a function, to be told how many tokens were used. Until then the request counts with what it
        may use at most, and also if its client hangs up or it fails in the midst; one that was refused, here or by an
        endpoint elsewhere, counts with none.
        """
        subjects = self.subjects(tenant, key)
        if not subjects:
            yield Use(lambda _: None)
            return
        asked = sum(tokens_of_request(call.endpoint, call.body) for call in calls)
        came = await self._decided(subjects, asked)
        told(self._standings(subjects))
        if isinstance(came, Refusal):
            self.refused[came.quota] += 1
            raise _exceeded(came)
        grant = came
        use = Use(lambda tokens: self.limiter.settle(grant, tokens, self.now))
        try:
            yield use
        except _NEVER_BEGUN:
            if not use.settled and not use.begun:
                use(0)
            raise
        finally:
            self.limiter.leave(grant)

    async def _decided(self, subjects: Sequence[Subject], tokens: int) -> Grant | Refusal:
        came = self.limiter.admit(subjects, tokens, self.now)
        if isinstance(came, Refusal) or not any(_concerns_online(subject.quotas) for subject in subjects):
            return came
        others = self._others()
        try:
            await others.agree()
        except BaseException:
            self.limiter.withdraw(came)
            others.tell()
            raise
        decided = self.limiter.confirm(came, subjects, self.now)
        if isinstance(decided, Refusal):
            others.tell()  # what it was counted with would keep out what there is room for
        return decided

    async def share(self) -> None:
        """Exchange recent use with the other processes. Raises `StoreUnavailable`."""
        if self._clock.now() >= self._refresh_at:
            before, self._refresh_at = self._refresh_at, self._clock.now() + _REFRESH
            try:
                self._tenants = await self._store.tenant_quotas()
            except BaseException:
                self._refresh_at = before
                raise
        if self._sharing is not None:
            await self._heard_of(self._sharing)  # it has not what was counted since it began
        if self._sharing is None:
            changes, rates = self.limiter.take_changes(self.now)
            oldest = oldest_slot(self.now)
            # A slot is still added to while it is the latest, and for the moment that an exchange takes.
            since = oldest if self._heard is None else slot_of(self._heard) - 1
            asked = self._store.share_rates(changes, rates, oldest=oldest, since=since)
            self._sharing = _Exchange(asyncio.ensure_future(asked), rates)
        await self._heard_of(self._sharing)

    async def _heard_of(self, sharing: _Exchange) -> None:
        try:
            now, counted = await asyncio.shield(sharing.came)
        except asyncio.CancelledError:
            raise  # it goes on, and the next call sees what comes of it
        except BaseException:
            self._sharing = None
            self.limiter.put_back()
            raise
        self._sharing = None
        self._ahead, self._heard = now - self._clock.now(), now
        self.limiter.learn(counted, sharing.rates)

    def refresh(self) -> None:
        """Read the quotas of tenants at the next `share`: they were changed."""
        self._refresh_at = float("-inf")

    def _standings(self, subjects: list[Subject]) -> dict[Kind, Standing]:
        """Return how the scarcest quota of each kind stands, where there is one."""
        found = {kind: self.limiter.standing(subjects, kind, self.now) for kind in KINDS}
        return {kind: standing for kind, standing in found.items() if standing is not None}


def _concerns_online(quotas: Quotas) -> bool:
    return not (quotas.requests_per_minute is quotas.tokens_per_minute is quotas.concurrent_requests is None)


def duration_text(seconds: float) -> str:
    """Return a duration as OpenAI writes it: `1m5.2s`, `850ms`."""
    if seconds < 1.0:
        return f"{seconds * 1e3:.0f}ms"
    minutes, rest = divmod(seconds, 60.0)
    return f"{minutes:.0f}m{rest:.3g}s" if minutes else f"{rest:.3g}s"


def _exceeded(refusal: Refusal) -> QuotaExceeded:
    what = refusal.quota.replace("_", " ")
    kind, _, name = refusal.subject.partition(":")
    told = f"rate limit reached for {kind} {name} on {what}: limit {refusal.limit:,}, used {refusal.used:,}, "
    told += f"requested {refusal.asked:,}; "
    if refusal.wait is None:
        told += "a request as large as this never fits: shorten its prompt or lower max_tokens"
    else:
        told += f"try again in {duration_text(refusal.wait)}"
    return QuotaExceeded(
        told,
        quota=refusal.quota,
        kind="tokens" if refusal.quota == "tokens_per_minute" else "requests",
        passing=refusal.wait is not None,
        retry_after=refusal.wait,
    )
