"""The objects behind the application: opened before it serves, closed after it has stopped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field

from batchwright.clock import Clock, MonotonicClock
from batchwright.errors import InputError, StoreUnavailable
from batchwright.inference.inference import Inference
from batchwright.limiting.admission import AdmissionController, Size
from batchwright.service.access.api_keys import ApiKeys
from batchwright.service.access.audit import AuditLog
from batchwright.service.access.online_calls import OnlineCalls
from batchwright.service.access.online_quotas import OnlineQuotas
from batchwright.service.access.peers import Peers
from batchwright.service.batches.batch_progress import BatchRates
from batchwright.service.batches.batch_service import BatchService
from batchwright.service.files.blobs import Blobs
from batchwright.service.files.paired_store import database_of, joined, open_with_files
from batchwright.service.limits import ServiceLimits
from batchwright.service.loading import load_inference, model_times
from batchwright.service.observability.activity import Live
from batchwright.service.observability.engines import dispatch_reasons, engine_stats
from batchwright.service.observability.figures import ConnectionFigures, HttpFigures
from batchwright.service.observability.logs import logger
from batchwright.service.observability.measured import MeasuredInference
from batchwright.service.observability.scrape import QuotaFigures, Scrape, StoreCounts
from batchwright.service.observability.timed_store import StoreFigures, timed_store
from batchwright.service.observability.traces import Tracing, configured
from batchwright.service.off_loop import off_loop
from batchwright.service.settings import Settings, is_loopback, limits_of
from batchwright.service.webhooks.addresses import AllowList
from batchwright.service.webhooks.courier import Courier
from batchwright.service.webhooks.sender import Sender
from batchwright.service.worker.worker import Worker, WorkerOptions
from batchwright.store import Store
from batchwright.version import __version__

_AUDIT = "audit"
_AUDIT_EVERY = 3600.0
_CHECK_EVERY = 1.0
"""Seconds for which the database's answer to a check is good."""
_PATIENCE = 3.0
"""Seconds that a probe or a scrape waits for the database: they must be answered when it is away, too."""


@dataclass
class Services:
    """Objects behind the application, made by `open_services`."""

    settings: Settings
    limits: ServiceLimits
    clock: Clock
    unix_time: Callable[[], float]
    started_at: float
    """Unix seconds."""
    models_made_at: Mapping[str, float]
    """Unix seconds at which the files of the models in this process were made, by name."""
    store: Store
    blobs: Blobs
    jobs: BatchService
    keys: ApiKeys
    sender: Sender
    inference: MeasuredInference
    online: OnlineCalls
    quotas: OnlineQuotas
    audit: AuditLog
    peers: Peers
    worker: Worker
    live: Live
    http: HttpFigures
    store_figures: StoreFigures
    stopping: asyncio.Event
    """Event set by `drain`: endless streams end then."""
    connections: ConnectionFigures = field(default_factory=ConnectionFigures)
    _checked: tuple[float, str | None] | None = None
    _logged: str | None = None
    """Reason of the last check that was not ready, in the words of the log."""
    _worker_ends: asyncio.Task[None] | None = None

    @property
    def draining(self) -> bool:
        """Whether the service is stopping."""
        return self.online.closed

    def drain(self) -> None:
        """Take no new work: online requests inside are answered, batch lines that were not begun are given back.

        May be called again, which changes nothing.
        """
        self.online.closed = True
        self.stopping.set()
        if self._worker_ends is None:
            self._worker_ends = asyncio.create_task(self.worker.stop(self.settings.drain_grace))

    async def stopped(self) -> None:
        """Wait until the worker has ended, after `drain`."""
        self.drain()
        if self._worker_ends is not None:
            await self._worker_ends

    async def why_not_ready(self) -> str | None:
        """Return why no work can be taken now; None when it can."""
        if self.draining:
            return "the service is stopping"
        if (reason := self.inference.why_not_ready) is not None:
            return reason
        if self._checked is None or self.clock.now() - self._checked[0] >= _CHECK_EVERY:
            reason = await self._check()
            self._checked = self.clock.now(), reason
        return self._checked[1]

    async def _check(self) -> str | None:
        """Return the reason for callers, without paths and hosts; log the operator's version when it changes."""
        reason = logged = None
        try:
            async with asyncio.timeout(_PATIENCE):
                await self.store.check()
                await off_loop(self.blobs.require_room, self.limits.min_free_disk)
        except TimeoutError:
            reason = logged = f"the database has not answered for {_PATIENCE:g} s"
        except StoreUnavailable as error:
            reason, logged = error.told, str(error)
        if logged is not None and logged != self._logged:
            logger.warning("not_ready", reason=logged)
        self._logged = logged
        return reason

    async def scrape(self) -> Scrape:
        """Return everything for `/metrics`, without what the database would tell while that does not answer."""
        counts = None
        kept: list[tuple[str, int, int]] = []
        with suppress(StoreUnavailable, TimeoutError):
            async with asyncio.timeout(_PATIENCE):
                counts = StoreCounts(
                    await self.store.count_batches(),
                    await self.store.count_lines(),
                    await self.store.count_deliveries(),
                )
            async with asyncio.timeout(_PATIENCE):
                kept = await self.store.kept_quotas(self.limits.default_quotas)
        inner = self.inference.inner
        return Scrape(
            version=__version__,
            ready=await self.why_not_ready() is None,
            http=self.http,
            connections=self.connections,
            calls=self.inference.figures,
            engine=engine_stats(inner),
            reasons=dispatch_reasons(inner),
            worker=self.worker.stats,
            lines_in_flight=self.worker.in_flight,
            store=self.store_figures,
            quotas=QuotaFigures(
                refused=self.quotas.refused + self.store_figures.refused,
                kept=kept,
                online=sorted(self.quotas.limiter.standings(self.quotas.now)),
                servers=1 + len(self.peers.others),
            ),
            counts=counts,
        )


@asynccontextmanager
async def open_services(
    settings: Settings,
    *,
    store: Store | None = None,
    inference: Inference | None = None,
    clock: Clock | None = None,
    unix_time: Callable[[], float] = time.time,
    options: WorkerOptions | None = None,
) -> AsyncIterator[Services]:
    """Open the store, load the model, start to work on batches and to deliver webhooks; at the end stop all of it.

    `store` and `inference` may be given, and are closed with the rest. Raises `InputError` for an address that needs an
    API key where there is none, and what opening the store and loading the model raise.
    """
    clock = clock or MonotonicClock()
    tracing = Tracing(configured())
    store_figures = StoreFigures()
    async with AsyncExitStack() as opened:
        settings.data.mkdir(mode=0o700, parents=True, exist_ok=True)
        if store is None:
            raw_store, blobs = await open_with_files(database_of(settings.database, settings.data), settings.data)
            opened.push_async_callback(raw_store.close)
        else:
            raw_store = store
            opened.push_async_callback(raw_store.close)
            blobs = await joined(store, settings.data)
        store = timed_store(raw_store, store_figures, clock, tracing)
        audit = audit_log(settings, unix_time)
        opened.callback(audit.close)
        keys = ApiKeys(store, clock=clock, now=unix_time)
        opened.push_async_callback(keys.note_uses)
        await _require_key(settings, keys)
        sender = Sender(AllowList.parse(settings.webhook_allow))
        opened.callback(sender.close)
        measured = MeasuredInference(inference or await load_inference(settings), clock, tracing)
        opened.push_async_callback(measured.close)
        made_at = {} if inference is not None else await asyncio.to_thread(model_times, settings)
        limits = limits_of(settings)
        rates = BatchRates()
        worker = Worker(
            store,
            blobs,
            measured,
            options=options or _worker_options(settings),
            rates=rates,
            clock=clock,
            unix_time=unix_time,
        )
        jobs = BatchService(
            store, blobs, limits=limits, rates=rates, clock=clock, unix_time=unix_time, on_work=worker.wake
        )
        quotas = OnlineQuotas(store, limits.default_quotas, clock, unix_time, others=lambda: peers)
        live = Live(measured, clock, unix_time)
        peers = Peers(store, quotas, lambda: worker.id, lambda: live.snapshot(worker.in_flight))
        stopping = asyncio.Event()
        services = Services(
            settings=settings,
            limits=limits,
            clock=clock,
            unix_time=unix_time,
            started_at=unix_time(),
            models_made_at=made_at,
            store=store,
            blobs=blobs,
            jobs=jobs,
            keys=keys,
            sender=sender,
            inference=measured,
            online=OnlineCalls(
                measured, AdmissionController(Size(settings.max_online_sequences, settings.max_online_tokens)), clock
            ),
            worker=worker,
            quotas=quotas,
            audit=audit,
            peers=peers,
            live=live,
            http=HttpFigures(),
            store_figures=store_figures,
            stopping=stopping,
        )
        # Before the first request, so that none is let in that the quotas of its tenant forbid.
        with suppress(StoreUnavailable):
            await quotas.share()
        await worker.start()
        opened.push_async_callback(services.stopped)
        courier = Courier(store, sender, now=unix_time)
        for name, work in (
            ("courier", courier.run(lambda: worker.id)),
            ("live", live.run()),
            ("peers", peers.run()),
            ("audit", _keep_audit(audit)),
            ("keys", keys.run()),
        ):
            opened.push_async_callback(_end, asyncio.create_task(work, name=name))
        try:
            yield services
        finally:
            services.drain()


def audit_log(settings: Settings, now: Callable[[], float] = time.time) -> AuditLog:
    """Return the audit log of this data folder."""
    return AuditLog(settings.data / _AUDIT, retention=settings.audit_retention, now=now)


async def _keep_audit(audit: AuditLog) -> None:
    """Remove days that are over, now and every hour."""
    while True:
        try:
            removed = await off_loop(audit.remove_old)
        except OSError as error:
            logger.warning("audit_not_removed", error=str(error))
        else:
            if removed:
                logger.info("audit_removed", days=[day.isoformat() for day in sorted(removed)])
        await asyncio.sleep(_AUDIT_EVERY)


def _worker_options(settings: Settings) -> WorkerOptions:
    return WorkerOptions(
        concurrency=settings.batch_concurrency,
        lease=settings.lease,
        request_timeout=settings.line_timeout,
        max_crashes=settings.max_crashes,
        limits=limits_of(settings),
    )


async def _require_key(settings: Settings, keys: ApiKeys) -> None:
    if not is_loopback(settings.host) and not await keys.required():
        raise InputError(
            f"--host {settings.host}: others than this machine could reach the service, and there is no API key yet; "
            "make one in this store: batchwright keys create NAME, with the --data and --database of this command"
        )


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    done = await asyncio.gather(task, return_exceptions=True)
    for error in done:
        if isinstance(error, Exception):
            logger.error("task_failed", task=task.get_name(), exc_info=error)
