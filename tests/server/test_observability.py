"""Metrics, the dashboard's state, logs and traces."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import sys
from pathlib import Path

import pytest
import stamina
import structlog
from prometheus_client.parser import text_string_to_metric_families
from tests.server.batch_files import begin, line
from tests.server.conftest import Service, with_service

from batchwright.engine.engine_stats import EngineStats
from batchwright.errors import EndpointError, MissingExtra
from batchwright.pacing.figures import LimitFigures, PacerFigures
from batchwright.server.dashboard.dashboard_state import DashboardState
from batchwright.service.observability.logs import configure_logging, logger
from batchwright.service.observability.scrape import engine_families
from batchwright.service.observability.slo_classes import SloClass
from batchwright.service.observability.traces import Tracing, configured

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text()


def _documented() -> dict[str, tuple[str, set[str]]]:
    """Return kind and labels by name, from the tables of the page."""
    rows = re.findall(r"^\| `(batchwright_\w+)` \| (\w+) \| (.*?)\| ", PAGE, re.MULTILINE)
    return {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}


async def _shown(service: Service) -> dict[str, tuple[str, set[str]]]:
    text = (await service.http.get("/metrics")).text
    families = [*text_string_to_metric_families(text), *engine_families(EngineStats())]
    shown = {}
    for family in families:
        if not family.name.startswith("batchwright_"):
            continue
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        shown[name] = (family.type, labels or set(getattr(family, "_labelnames", ())))
    return shown


def asked_elsewhere(monkeypatch: pytest.MonkeyPatch, service: Service) -> None:
    """Have the model be one of an endpoint elsewhere."""
    stated, told = (LimitFigures("requests", limit, 60.0, 40.0, limit == 600.0) for limit in (600.0, 900.0))
    figures = PacerFigures(
        sent=70, refused=3, under_way=5, concurrency=64, found_concurrency=False, found_per_minute=480.0,
        limits=[stated, told], blocked_seconds=0.0, waiting=2, next_in=0.5, waits_for=stated,
    )  # fmt: skip
    monkeypatch.setattr(service.stub, "address", "http://far/v1", raising=False)
    monkeypatch.setattr(service.stub, "pacing", lambda: {"m": figures}, raising=False)
    monkeypatch.setattr(service.stub, "send_no_more", lambda: None, raising=False)


@with_service()
async def test_what_is_found_of_an_endpoint_is_shown(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "batchwright_endpoint_requests_total{" not in (await service.http.get("/metrics")).text
    asked_elsewhere(monkeypatch, service)
    text = (await service.http.get("/metrics")).text
    of_endpoint = 'endpoint="http://far/v1",model="m"'
    for told in (
        f"requests_total{{{of_endpoint}}} 70.0",
        f"refusals_total{{{of_endpoint}}} 3.0",
        f"requests_under_way{{{of_endpoint}}} 5.0",
        f"requests_waiting{{{of_endpoint}}} 2.0",
        f"most_under_way{{{of_endpoint}}} 64.0",
        f"wait_seconds{{{of_endpoint}}} 0.5",
    ):
        assert f"\nbatchwright_endpoint_{told}\n" in text
    families = {each.name: each for each in text_string_to_metric_families(text)}
    limits = {each.labels["source"]: each for each in families["batchwright_endpoint_limit"].samples}
    assert {source: each.value for source, each in limits.items()} == {"stated": 600, "told": 900, "found": 480}
    assert {(each.labels["kind"], each.labels["window_seconds"]) for each in limits.values()} == {("requests", "60")}
    assert [each.value for each in families["batchwright_endpoint_limit_left"].samples] == [40, 40]


@with_service(slo={"any": SloClass(ttft_ms=1.0)})
async def test_the_page_tells_of_every_metric_and_of_no_other(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_elsewhere(monkeypatch, service)
    await service.http.post("/v1/completions", json={"prompt": "a"}, headers={"X-SLO-Class": "any"})
    shown = await _shown(service)
    # The stub dispatches nothing.
    shown["batchwright_dispatches_total"] = ("counter", {"reason"})
    # Nothing is limited.
    shown["batchwright_quota_limit"] = shown["batchwright_quota_used"] = ("gauge", {"quota"})
    assert shown == _documented()


def test_guesses_of_the_engine_are_counted() -> None:
    told = {
        each.name: each.samples[0].value for each in engine_families(EngineStats(drafted_tokens=9, accepted_tokens=7))
    }
    assert told["batchwright_engine_drafted_tokens"] == 9
    assert told["batchwright_engine_accepted_tokens"] == 7


@with_service()
async def test_requests_calls_and_batches_are_counted(service: Service) -> None:
    await service.http.post("/v1/completions", json={"prompt": "one two"})
    await service.http.post("/v1/completions", json={"prompt": "fail"})
    await service.http.get("/v1/none")
    batch = await service.ended((await begin(service, line("a", "x"))).id)
    await service.http.get(f"/v1/batches/{batch.id}")
    text = (await service.http.get("/metrics")).text
    for told in (
        'http_requests_total{method="POST",route="/v1/completions",status="200"} 1.0',
        'http_requests_total{method="POST",route="/v1/completions",status="500"} 1.0',
        'http_requests_total{method="GET",route="(none)",status="404"} 1.0',
        'http_request_seconds_count{route="/v1/completions"} 2.0',
        'route="/v1/batches/{batch_id}"',
        'calls_total{outcome="answered",traffic="online"} 1.0',
        'calls_total{outcome="failed",traffic="online"} 1.0',
        'calls_total{outcome="answered",traffic="batch"} 1.0',
        'generated_tokens_total{traffic="online"} 2.0',
        'batches{status="completed"} 1.0',
        'batches{status="failed"} 0.0',
        'worker_lines_total{outcome="succeeded"} 1.0',
        'store_seconds_count{operation="commit"} 1.0',
    ):
        assert f"batchwright_{told}" in text or (told.startswith("route") and told in text), told
    assert batch.id not in text


@with_service()
async def test_the_dashboard_sees_traffic_and_jobs(service: Service) -> None:
    await service.http.post("/v1/completions", json={"prompt": "one two", "stream": True})
    done = await service.ended((await begin(service, line("a", "x"))).id)
    running = await begin(service, line("a", "wait"), line("b", "y"))

    async def one_is_done() -> bool:
        counts = (await service.client.batches.retrieve(running.id)).request_counts
        return counts is not None and counts.completed == 1

    await service.until(one_is_done)
    service.services.live.tick()
    state = DashboardState.model_validate((await service.http.get("/dashboard/state")).json())
    assert (state.ready, state.keys_required, state.backend, state.models[0]) == (True, False, "engine", "stub")
    assert (state.online.answered, state.online.ttft_ms.count) == (1, 1)
    assert (state.batch.answered, state.batch.running) == (2, 1)
    assert [(job.id, job.status, job.progress) for job in state.jobs] == [
        (running.id, "in_progress", 0.5),
        (done.id, "completed", 1.0),
    ]
    assert (state.job_counts.in_progress, state.job_counts.completed) == (1, 1)
    assert state.history[-1].batch == 1
    assert state.tokens.generated > 0


@with_service()
async def test_the_dashboards_events_come_until_the_service_stops(service: Service) -> None:
    service.services.drain()
    answer = await service.http.get("/dashboard/events")
    assert answer.headers["content-type"] == "text/event-stream"
    state = DashboardState.model_validate_json(answer.text.removeprefix("data: "))
    assert state.draining


def test_logs_are_a_line_of_json_each_with_the_id_of_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    configure_logging("json", "info")
    with structlog.contextvars.bound_contextvars(request_id="req_1"):
        logger.info("request", status=200)
        logging.getLogger("uvicorn.error").warning("of %s", "uvicorn")
        logger.debug("not shown")
        try:
            raise ValueError("bad")
        except ValueError:
            logger.exception("request_failed")
    told = [json.loads(each) for each in written.getvalue().splitlines()]
    assert [(each["event"], each["level"], each["request_id"]) for each in told] == [
        ("request", "info", "req_1"),
        ("of uvicorn", "warning", "req_1"),
        ("request_failed", "error", "req_1"),
    ]
    assert told[0]["status"] == 200
    assert told[2]["exception"][0]["exc_value"] == "bad"


def test_of_retries_only_those_are_told_that_somebody_should_know_of(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    configure_logging("json", "info")
    errors: list[Exception] = [OSError("a connection was lost"), EndpointError("it does not answer")]
    for error in errors:
        for attempt in stamina.retry_context(on=type(error), attempts=2, wait_initial=0, wait_max=0):
            with attempt:
                if attempt.num == 1:
                    raise error
    [told] = map(json.loads, written.getvalue().splitlines())
    assert (told["event"], told["error"], told["tries"]) == ("trying_again", "it does not answer", 1)


@with_service()
async def test_a_database_that_does_not_answer_keeps_neither_probe_nor_scrape_waiting(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = service.services.store

    async def silent() -> None:
        await asyncio.sleep(3600)

    monkeypatch.setattr("batchwright.service.composition._PATIENCE", 0.01)
    for name in ("check", "count_batches"):
        monkeypatch.setattr(store, name, silent)
    ready = await service.http.get("/ready")
    assert (ready.status_code, ready.json()["error"]["code"]) == (503, "not_ready")
    assert "has not answered" in ready.json()["error"]["message"]
    told = (await service.http.get("/metrics")).text
    assert "batchwright_ready 0.0" in told
    assert "batchwright_batches{" not in told


def test_traces_are_made_where_the_environment_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not configured({})
    assert configured({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318"})
    assert not configured({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318", "OTEL_SDK_DISABLED": "true"})
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with Tracing().span("nothing"):
        pass
    with pytest.raises(MissingExtra, match=r"batchwright\[otel\]"):
        Tracing(enabled=True)


def test_a_span_has_its_attributes_and_its_error() -> None:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    kept = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    tracing = Tracing(enabled=True)
    tracing._tracer = trace.get_tracer("batchwright", tracer_provider=provider)
    with pytest.raises(ValueError, match="bad"), tracing.span("inference", traffic="batch"):
        raise ValueError("bad")
    (span,) = kept.get_finished_spans()
    assert (span.name, dict(span.attributes or {})) == ("inference", {"batchwright.traffic": "batch"})
    assert span.status.is_ok is False


@with_service()
async def test_methods_that_clients_invent_are_one_series(service: Service) -> None:
    for method in ("FOO", "BAR", "GET"):
        await service.http.request(method, "/v1/models")
    assert {method for method, _, _ in service.services.http.requests} == {"other", "GET"}
