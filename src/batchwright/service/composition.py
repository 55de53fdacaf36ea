"""Composition of the objects behind the application, which are opened before it serves and closed after it stops."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field

from batchwright.clock import Clock, MonotonicClock
from batchwright.errors import InputError, StoreUnavailable
from batchwright.inference.inference import Inference, learn_use, shared_use
from batchwright.limiting.admission import AdmissionController, Size
from batchwright.service.access.api_keys import ApiKeys
from batchwright.service.access.audit import AuditLog
from batchwright.service.access.online_calls import OnlineCalls
from batchwright.service.access.online_quotas import OnlineQuotas
from batchwright.service.access.peers import Peers
from batchwright.service.batches.batch_forecasts import BatchForecasts
from batchwright.service.batches.batch_progress import BatchRates
from batchwright.service.batches.batch_service import BatchService
from batchwright.service.batches.line_reader import LineReader
from batchwright.service.files.blobs import Blobs
from batchwright.service.files.custody import database_of, joined, open_with_files
from batchwright.service.limits import ServiceLimits
from batchwright.service.loading import load_inference, model_times
from batchwright.service.observability.activity import Live
from batchwright.service.observability.figures import ConnectionFigures, HttpFigures
from batchwright.service.observability.logs import logger
from batchwright.service.observability.measured import MeasuredInference
from batchwright.service.observability.scrape import Scrape, StoreCounts
from batchwright.service.observability.timed_store import StoreFigures, timed_store
from batchwright.service.observability.trace_log import TraceLog
from batchwright.service.observability.traces import Tracing, configured
from batchwright.service.off_loop import off_loop
from batchwright.service.settings import Settings, is_loopback, limits_of
from batchwright.service.webhooks.addresses import AllowList
from batchwright.service.webhooks.courier import Courier
from batchwright.service.webhooks.sender import Sender
from batchwright.service.worker.worker import Worker, WorkerOptions
from batchwright.store import Store

_AUDIT = "audit"
_AUDIT_EVERY = 3600.0
_CHECK_EVERY = 1.0
"""Seconds for which the database's answer to a check is valid."""
_PATIENCE = 3.0
"""Seconds that a probe or a scrape waits for the database: they must be answered when it is away, too."""


@dataclass
class Services:
    """Objects behind the application. Made by `open_services`."""

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
    lines: LineReader
    keys: ApiKeys
    sender: Sender
    courier: Courier
    inference: MeasuredInference
    online: OnlineCalls
    quotas: OnlineQuotas
    audit: AuditLog
    peers: Peers
    worker: Worker
    live: Live
    store_figures: StoreFigures
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """Event set by `drain`, at which endless streams end."""
    http: HttpFigures = field(default_factory=HttpFigures)
    connections: ConnectionFigures = field(default_factory=ConnectionFigures)
    _checked: tuple[float, str | None] | None = None
    """Time and result of the last check of the database and the disk."""
    _logged: str | None = None
    """Reason found by the last check, as it was logged; None: there was none."""
    _worker_ends: asyncio.Task[None] | None = None

    @property
    def draining(self) -> bool:
        """Whether the service is stopping."""
        return self.online.closed

    def drain(self) -> None:
        """Take no new work: admitted online requests are answered, batch lines that were not begun are given back.

        Calling it again changes nothing.
        """
        self.online.closed = True
        self.stopping.set()
        if self._worker_ends is None:
            self._worker_ends = asyncio.create_task(self.worker.stop(self.settings.drain_grace))

    async def stopped(self) -> None:
        """Wait until the worker has ended, after `drain`."""
        self.drain()
        assert self._worker_ends is not None
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
            reason, logged = error.public_message, str(error)
        if logged is not None and logged != self._logged:
            logger.warning("not_ready", reason=logged)
        self._logged = logged
        return reason

    async def scrape(self) -> Scrape:
        """Return everything for `/metrics`; while the database does not answer, all but what only it knows."""
        counts, kept = None, list[tuple[str, int, int]]()
        with suppress(StoreUnavailable, TimeoutError):
            async with asyncio.timeout(_PATIENCE):
                batches, lines = await self.store.count_batches(), await self.store.count_lines()
                counts = StoreCounts(batches, lines, await self.store.count_deliveries())
            async with asyncio.timeout(_PATIENCE):
                kept = await self.store.kept_quotas(self.limits.default_quotas)
        return Scrape(self, await self.why_not_ready() is None, counts, kept)


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
    """Open the store, load the model, and process batches and deliver webhooks until the end of the block.

    A `store` or `inference` that is given is closed with the rest. Raises `InputError` for an address that needs an API
    key where there is none, and what opening the store and loading the model raise.
    """
    clock = clock or MonotonicClock()
    tracing = Tracing(configured())
    store_figures = StoreFigures()
    async with AsyncExitStack() as opened:
        settings.data.mkdir(mode=0o700, parents=True, exist_ok=True)
        if store is None:
            store, blobs = await open_with_files(database_of(settings.database, settings.data), settings.data)
            opened.push_async_callback(store.close)
        else:
            opened.push_async_callback(store.close)
            blobs = await joined(store, settings.data)
        store = timed_store(store, store_figures, clock, tracing)
        audit = audit_log(settings, unix_time)
        opened.callback(audit.close)
        keys = ApiKeys(store, clock=clock, now=unix_time)
        opened.push_async_callback(keys.note_uses)
        if not is_loopback(settings.host) and not await keys.required():
            raise InputError(
                f"--host {settings.host}: others than this machine could reach the service, and there is no API key "
                "yet; make one in this store: batchwright keys create NAME, with the --data and --database of this "
                "command"
            )
        sender = Sender(AllowList.parse(settings.webhook_allow))
        opened.callback(sender.close)
        trace_log = None if settings.trace_log is None else TraceLog(settings.trace_log, unix_time)
        if trace_log is not None:
            opened.callback(trace_log.close)
        computing = inference or await load_inference(settings)
        measured = MeasuredInference(computing, clock, tracing, settings.slo, trace_log)
        opened.push_async_callback(measured.close)
        made_at = {} if inference is not None else await asyncio.to_thread(model_times, settings)
        limits = limits_of(settings)
        forecasts = BatchForecasts(lambda: [snapshot for _, snapshot in peers.others])
        rates = BatchRates(forecasts)
        options = options or WorkerOptions(
            concurrency=settings.batch_concurrency,
            lease=settings.lease,
            request_timeout=settings.line_timeout,
            asks_once=inference is None,  # nothing is known of one that is given
            computes_here=settings.backend == "engine",
            max_crashes=settings.max_crashes,
            limits=limits,
        )
        worker = Worker(store, blobs, measured, options=options, rates=rates, clock=clock, unix_time=unix_time)
        jobs = BatchService(
            store, blobs, limits=limits, rates=rates, clock=clock, unix_time=unix_time, on_work=worker.wake
        )
        quotas = OnlineQuotas(store, limits.default_quotas, clock, unix_time, others=lambda: peers)
        live = Live(measured, clock, unix_time)
        peers = Peers(
            store,
            quotas,
            lambda: worker.id,
            lambda: (
                live.snapshot(worker.in_flight)
                | {"forecasts": forecasts.published(clock.now()), "limits": shared_use(computing)}
            ),
            learn_limits=lambda others: learn_use(computing, others),
        )
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
            lines=LineReader(jobs, store, blobs),
            keys=keys,
            sender=sender,
            courier=Courier(store, sender, now=unix_time),
            inference=measured,
            online=OnlineCalls(
                measured, AdmissionController(Size(settings.max_online_sequences, settings.max_online_tokens)), clock
            ),
            worker=worker,
            quotas=quotas,
            audit=audit,
            peers=peers,
            live=live,
            store_figures=store_figures,
        )
        # Before the first request, so that none is admitted against the quotas of its tenant, or against a limit of an
        # endpoint that other processes use up.
        with suppress(StoreUnavailable):
            await peers.exchange()
        await worker.start()
        opened.push_async_callback(services.stopped)
        for name, work in (
            ("courier", services.courier.run(lambda: worker.id)),
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


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    [error] = await asyncio.gather(task, return_exceptions=True)
    if isinstance(error, Exception):
        logger.error("task_failed", task=task.get_name(), exc_info=error)
