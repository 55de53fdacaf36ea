"""Quotas of online requests: admission, standings for the headers of answers, exchange of use with other servers."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

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

if TYPE_CHECKING:
    from batchwright.service.access.peers import Peers

_NEVER_BEGUN = (
    InvalidRequest, ModelNotFound, Overloaded, EndpointDown, EndpointError, EngineClosed, ServiceStopping,
    StoreUnavailable,
)  # fmt: skip
"""Errors after which nothing was computed, unless some of the answer was sent."""
_REFRESH = 5.0
"""Seconds between reads of the tenants' quotas."""


class Use:
    """Use of quotas by an admitted request. Call it with the number of used tokens once that is known."""

    def __init__(self, settle: Callable[[int], None]) -> None:
        self.begun = False
        """Whether some of the answer was sent."""
        self.settled = False
        self._settle = settle

    def __call__(self, tokens: int) -> None:
        self.settled = True
        self._settle(tokens)


class _Exchange(NamedTuple):
    """Exchange of use with the other processes."""

    came: asyncio.Future[tuple[float, list[Change]]]
    rates: Sequence[str]
    """Rates whose use is read in full."""


class OnlineQuotas:
    """Quotas of tenants and keys, and their use by online requests.

    A request is admitted by what this process knows, and confirmed after an exchange if there are other processes.
    """

    def __init__(
        self,
        store: Store,
        defaults: Quotas,
        clock: Clock,
        unix_time: Callable[[], float] = time.time,
        *,
        others: Callable[[], Peers],
    ) -> None:
        """`defaults`: quotas of tenants that have none of their own. `others` returns the exchange with servers."""
        self.limiter = RateLimiter()
        self.refused: Counter[str] = Counter()
        """Numbers of refused requests, by the name of the quota."""
        self._store = store
        self._defaults = defaults
        self._others = others
        self._clock = clock
        self._ahead = unix_time() - clock.now()
        """Seconds by which the time of the store is ahead of the clock."""
        self._tenants: Mapping[str, Quotas] = {}
        self._refresh_at = float("-inf")
        self._sharing: _Exchange | None = None
        """Exchange under way. It is never cancelled, since what it has added to the store would be unknown."""
        self._heard: float | None = None
        """Time of the store at the last exchange; None: there was none yet."""

    @property
    def now(self) -> float:
        """Time of the store, by which all processes count."""
        return self._clock.now() + self._ahead

    def subjects(self, tenant: str, key: ApiKey | None) -> list[Subject]:
        """Return the subjects whose quotas concern a request: its tenant and its key."""
        found = [Subject(f"tenant:{tenant}", self._tenants.get(tenant, UNLIMITED).over(self._defaults))]
        if key is not None:
            found.append(Subject(f"key:{key.id}", key.quotas))
        return [subject for subject in found if subject.quotas != UNLIMITED]

    @asynccontextmanager
    async def admitted(
        self, tenant: str, key: ApiKey | None, calls: Sequence[Call], notify: Callable[[Mapping[Kind, Standing]], None]
    ) -> AsyncIterator[Use]:
        """Admit a request that consists of `calls` for the duration of the block. Raises `QuotaExceeded`.

        If there are quotas, `notify` is called once with the standings of the scarcest ones, even if the request
        is then refused.

        The block gets a function to be called with the number of used tokens. Until then, and if the client hangs up or
        the request fails midway, the request counts with the most it may use. A request that was refused, here
        or by an endpoint elsewhere, counts with none.
        """
        subjects = self.subjects(tenant, key)
        if not subjects:
            yield Use(lambda _: None)
            return
        asked = sum(tokens_of_request(call.endpoint, call.body) for call in calls)
        came = await self._decided(subjects, asked)
        notify(self._standings(subjects))
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
            others.notify()
            raise
        decided = self.limiter.confirm(came, subjects, self.now)
        if isinstance(decided, Refusal):
            others.notify()  # others must not be refused because of what this one was counted with
        return decided

    async def share(self) -> None:
        """Exchange recent use with the other processes, and read quotas when due. Raises `StoreUnavailable`."""
        if self._clock.now() >= self._refresh_at:
            before, self._refresh_at = self._refresh_at, self._clock.now() + _REFRESH
            try:
                self._tenants = await self._store.tenant_quotas()
            except BaseException:
                self._refresh_at = before
                raise
        if self._sharing is not None:
            await self._heard_of(self._sharing)  # it lacks what was counted since it began
        if self._sharing is None:
            changes, rates = self.limiter.take_changes(self.now)
            oldest = oldest_slot(self.now)
            # A slot can still change while it is the latest, and for as long as an exchange takes.
            since = oldest if self._heard is None else slot_of(self._heard) - 1
            asked = self._store.share_rates(changes, rates, oldest=oldest, since=since)
            self._sharing = _Exchange(asyncio.ensure_future(asked), rates)
        await self._heard_of(self._sharing)

    async def _heard_of(self, sharing: _Exchange) -> None:
        try:
            now, counted = await asyncio.shield(sharing.came)
        except asyncio.CancelledError:
            raise  # the exchange goes on, and the next call receives its result
        except BaseException:
            self._sharing = None
            self.limiter.put_back()
            raise
        self._sharing = None
        self._ahead, self._heard = now - self._clock.now(), now
        self.limiter.learn(counted, sharing.rates)

    def refresh(self) -> None:
        """Have the next `share` read the quotas of tenants, because they were changed."""
        self._refresh_at = float("-inf")

    def _standings(self, subjects: list[Subject]) -> dict[Kind, Standing]:
        """Return the standing of the scarcest quota of each kind that has one."""
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
    message = f"rate limit reached for {kind} {name} on {what}: limit {refusal.limit:,}, used {refusal.used:,}, "
    message += f"requested {refusal.asked:,}; "
    if refusal.wait is None:
        message += "a request as large as this never fits: shorten its prompt or lower max_tokens"
    else:
        message += f"try again in {duration_text(refusal.wait)}"
    return QuotaExceeded(
        message,
        quota=refusal.quota,
        kind="tokens" if refusal.quota == "tokens_per_minute" else "requests",
        passing=refusal.wait is not None,
        retry_after=refusal.wait,
    )
