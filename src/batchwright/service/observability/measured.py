"""An `Inference` that counts the calls that pass through it, for both classes of traffic."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from batchwright.clock import Clock
from batchwright.errors import DeadlineExceeded, InvalidRequest, Overloaded, ServiceStopping
from batchwright.histograms import Histogram, Recent
from batchwright.inference.calls import closing
from batchwright.inference.inference import Call, Inference, WorkUnderWay, why_not_ready, work_of
from batchwright.priority_levels import LevelFigures
from batchwright.request import Traffic
from batchwright.service.observability.figures import CallFigures
from batchwright.service.observability.slo_classes import SloClass, SloFigures
from batchwright.service.observability.trace_log import TraceLog
from batchwright.service.observability.traces import Tracing
from batchwright.wire.fields import deadline_seconds, priority_or_default
from batchwright.wire.requests import RESPONSES_URL

_GENERATED = ("content", "reasoning_content", "tool_calls")
"""Fields of the deltas of a chat that a model has generated."""


class MeasuredInference:
    """`Inference` that passes calls on to `inner`, and counts them.

    Usage is requested for every stream, since tokens are counted from it, and removed if the client did not request it.
    """

    def __init__(
        self,
        inner: Inference,
        clock: Clock,
        tracing: Tracing,
        objectives: Mapping[str, SloClass] | None = None,
        trace_log: TraceLog | None = None,
    ) -> None:
        self.inner = inner
        self._trace_log = trace_log
        self.slos = {name: SloFigures(each) for name, each in (objectives or {}).items()}
        """Figures of the classes of service level objectives, by name."""
        self.figures: Mapping[Traffic, CallFigures] = {"online": CallFigures(), "batch": CallFigures()}
        self._clock = clock
        self._tracing = tracing

    @property
    def models(self) -> Sequence[str]:
        return self.inner.models

    @property
    def wants(self) -> int:
        return self.inner.wants

    @property
    def why_not_ready(self) -> str | None:
        """Reason why no call can be computed now; None when it can."""
        return why_not_ready(self.inner)

    async def answer(self, call: Call) -> dict[str, Any]:
        with self._counted(call) as (figures, _):
            started = self._clock.now()
            body = await self.inner.answer(call)
            self._count_tokens(figures, body.get("usage"), call, started)
            return body

    async def stream(self, call: Call) -> AsyncIterator[dict[str, Any]]:
        # The events of a response always end with its usage.
        is_response = call.endpoint == RESPONSES_URL
        options = call.body.get("stream_options")
        # Options that are not an object are left as they are: they are refused later.
        asked = is_response or (
            options is not None and (not isinstance(options, Mapping) or bool(options.get("include_usage")))
        )
        if not asked:
            call = replace(call, body={**call.body, "stream_options": {**(options or {}), "include_usage": True}})
        with self._counted(call) as (figures, times):
            started, first, last, usage = self._clock.now(), None, 0.0, None
            try:
                async with closing(self.inner.stream(call)) as bodies:
                    async for body in bodies:
                        answer = body.get("response") or {} if is_response else body
                        usage = answer.get("usage") or usage
                        if _has_text(body):
                            last = self._clock.now()
                            if first is None:
                                first = last
                                times["ttft_ms"] = (first - started) * 1e3
                                _add(figures.ttft_ms, figures.recent_ttft_ms, times["ttft_ms"])
                        if asked:
                            yield body
                        elif body.get("choices"):
                            yield {name: value for name, value in body.items() if name != "usage"}
            finally:
                generated = self._count_tokens(figures, usage, call, started)
                if first is not None and generated > 1:
                    times["tpot_ms"] = (last - first) * 1e3 / (generated - 1)
                    _add(figures.tpot_ms, figures.recent_tpot_ms, times["tpot_ms"])

    async def work_of(self, prefix: str) -> WorkUnderWay | None:
        return await work_of(self.inner, prefix)

    async def close(self) -> None:
        await self.inner.close()

    def refused(self, call: Call, error: Exception) -> None:
        """Count a call that was refused before it got here."""
        self._count_error(call, error)

    @contextmanager
    def _counted(self, call: Call) -> Iterator[tuple[CallFigures, dict[str, float]]]:
        """Count a call. Yields the figures of its traffic, and a mapping for its times in milliseconds."""
        figures = self.figures[call.traffic]
        times: dict[str, float] = {}
        started = self._clock.now()
        figures.in_flight += 1
        try:
            with self._tracing.span("inference", endpoint=call.endpoint, traffic=call.traffic):
                yield figures, times
        except (asyncio.CancelledError, GeneratorExit):
            figures.cancelled += 1
            raise
        except Exception as error:
            figures.failed += 1
            self._count_error(call, error)
            raise
        else:
            figures.answered += 1
            times["latency_ms"] = (self._clock.now() - started) * 1e3
            _add(figures.latency_ms, figures.recent_latency_ms, times["latency_ms"])
            self._count_answer(call, times)
        finally:
            figures.in_flight -= 1

    def _count_tokens(self, figures: CallFigures, usage: Any, call: Call, started: float) -> int:
        """Add the tokens that `usage` reports to `figures`, and return the number of generated ones."""
        if not isinstance(usage, Mapping):
            return 0
        # Responses have names of their own.
        prompt_name, generated_name = "prompt_tokens", "completion_tokens"
        if "input_tokens" in usage and prompt_name not in usage:
            prompt_name, generated_name = "input_tokens", "output_tokens"
        prompt, generated = int(usage.get(prompt_name) or 0), int(usage.get(generated_name) or 0)
        cached = int((usage.get(f"{prompt_name}_details") or {}).get("cached_tokens") or 0)
        figures.prompt_tokens += prompt
        figures.embedded_tokens += prompt if generated_name not in usage else 0
        figures.cached_tokens += cached
        figures.generated_tokens += generated
        if call.used is not None:
            call.used(prompt + generated)
        if self._trace_log is not None:
            self._trace_log.record(call, self._clock.now() - started, prompt, cached, generated)
        return generated

    def _count_answer(self, call: Call, times: Mapping[str, float]) -> None:
        latency_ms = times["latency_ms"]
        level = self._level(call)
        level.succeeded += 1
        level.latency_ms.add(latency_ms)
        if (deadline_ms := _deadline_ms(call)) is not None:
            in_time = latency_ms <= deadline_ms
            level.in_time += in_time
            level.late += not in_time
        if call.slo is not None:
            self.slos[call.slo].answered(times)

    def _count_error(self, call: Call, error: Exception) -> None:
        level = self._level(call)
        if isinstance(error, DeadlineExceeded):
            level.late += 1
        elif isinstance(error, (Overloaded, ServiceStopping)):
            level.refused += 1
        else:
            level.failed += 1
        if call.slo is not None:
            self.slos[call.slo].failed(error)

    def _level(self, call: Call) -> LevelFigures:
        return self.figures[call.traffic].levels.at(priority_or_default(call.body))


def _deadline_ms(call: Call) -> float | None:
    try:
        seconds = deadline_seconds(call.body)
    except InvalidRequest:
        # An endpoint elsewhere, which knows no deadlines, has answered it.
        return None
    return None if seconds is None else seconds * 1e3


def _add(histogram: Histogram, recent: Recent, value: float) -> None:
    histogram.add(value)
    recent.add(value)


def _has_text(body: Mapping[str, Any]) -> bool:
    """Return whether a chunk of a stream has generated text: of an answer, a thought or a tool call.

    The first chunk of a chat only names the role.
    """
    if "delta" in body:  # of a response: its text, a thought, or the arguments of a call
        return True
    choices = body.get("choices") or ()
    return any(choice.get("text") or any(map((choice.get("delta") or {}).get, _GENERATED)) for choice in choices)
