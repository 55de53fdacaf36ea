"""An engine whose output is a pure function of the request, several steps long, with several requests in flight."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec

from batchwright.clock import MonotonicClock
from batchwright.engine.engine_stats import EngineStats
from batchwright.engine_config import EngineConfig
from batchwright.errors import ContextLengthExceeded, NonFiniteLogits
from batchwright.jobs.line_orders import EngineOrder
from batchwright.jobs.report import RunReport
from batchwright.jobs.run import run
from batchwright.request import (
    Choice,
    InferenceRequest,
    InferenceResponse,
    Prompt,
    TokenLogprob,
    Usage,
)

LONGEST_PROMPT = 5000
POISON = "poison"


def encode(prompt: Prompt) -> list[int]:
    """A token a character."""
    if isinstance(prompt, str):
        return [*map(ord, prompt)]
    return [*map(ord, json.dumps(prompt))] if isinstance(prompt[0], dict) else cast("list[int]", [*prompt])


def decode(prompt: Prompt) -> Any:
    """What `encode` made tokens of, if that was a text or messages."""
    text = "".join(map(chr, cast("list[int]", prompt)))
    return json.loads(text) if text.startswith('[{"role"') else text


def answer(request: InferenceRequest, index: int = 0) -> str:
    """What the fake model says."""
    said = repr((request.prompt, request.max_tokens, request.temperature, request.seed, index))
    return f"answer {zlib.crc32(said.encode())}"


@dataclass
class FakeEngine:
    """Takes up to `slots` requests; each takes 1 to 5 steps. `on_step` is called with the number of each step."""

    slots: int = 4
    model_name: str = "fake-model"
    on_step: Callable[[int], None] = lambda number: None
    submitted: list[InferenceRequest] = field(default_factory=list)
    closed: bool = False
    peak: int = 0
    keep_requests: bool = True
    stats: EngineStats = field(default_factory=EngineStats)
    max_model_len: int = 2**20
    config: EngineConfig = field(default_factory=EngineConfig)
    core: Any = field(
        default_factory=lambda: SimpleNamespace(
            tokenizer=SimpleNamespace(encode=encode, decode=decode, chat_template=None),
            scheduler=SimpleNamespace(forget_answers=lambda: None),
        )
    )
    _running: dict[str, tuple[InferenceRequest, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.stats.max_num_seqs, self.stats.kv_blocks, self.stats.block_size = self.slots, 2**16, 16
        self.core.clock = MonotonicClock()
        self.core.body = SimpleNamespace(costs=None)
        self.core.grammars = SimpleNamespace(form=lambda constraint: SimpleNamespace(is_compiled=True))
        self.core.add = lambda request, **more: self.submit(request)

    @property
    def unfinished(self) -> int:
        return len(self._running)

    @property
    def prompts(self) -> list[Any]:
        """Those of all requests, as they were before they were encoded."""
        return [decode(request.prompt) for request in self.submitted]

    def keep_costs(self) -> None:
        """What its steps took is nothing to keep."""

    def submit(self, request: InferenceRequest) -> None:
        if len(request.prompt) > LONGEST_PROMPT:
            raise ContextLengthExceeded(f"prompt of {len(request.prompt)} tokens is too long")
        if self.keep_requests:
            self.submitted.append(request)
        self._running[request.request_id] = (request, 1 + zlib.crc32(repr(request.prompt).encode()) % 5)
        self.peak = max(self.peak, len(self._running))

    def step(self, most: int = 1) -> list[InferenceResponse]:
        self.stats.steps += 1
        self.on_step(self.stats.steps)
        ended = []
        for request_id, (request, left) in [*self._running.items()]:
            self._running[request_id] = (request, left - 1)
            if left == 1:
                del self._running[request_id]
                ended.append(self._response(request))
        return ended

    def cancel(self, request_id: str) -> InferenceResponse | None:
        entry = self._running.pop(request_id, None)
        return None if entry is None else self._response(entry[0])

    def _response(self, request: InferenceRequest) -> InferenceResponse:
        choices = tuple(self._choice(request, index) for index in range(request.n))
        failed = POISON in str(decode(request.prompt))
        usage = Usage(len(request.prompt), 3 * request.n, cached_tokens=1)
        self.stats.generated_tokens += usage.completion_tokens
        return InferenceResponse(
            request_id=request.request_id,
            output=choices[0].text,
            tokens_generated=usage.completion_tokens,
            latency_ms=1.0,
            queue_ms=0.0,
            finish_reason="error" if failed else "stop",
            usage=usage,
            error=NonFiniteLogits("the model gave NaN") if failed else None,
            choices=choices,
        )

    def _choice(self, request: InferenceRequest, index: int) -> Choice:
        logprobs = None
        if request.logprobs is not None:
            top = ((7, "an", -0.5), (8, "�", float("-inf")))[: request.logprobs]
            logprobs = (TokenLogprob(7, "an", -0.5, top), TokenLogprob(9, "swer", -1.0, top))
        return Choice(index, answer(request, index), (7, 9), "stop", logprobs)

    def close(self) -> None:
        self.closed = True


def fake(**options: Any) -> Any:
    """A `FakeEngine` for `run`."""
    return FakeEngine(**options)


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of an output."""
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]


def by_id(path: Path) -> dict[str, dict[str, Any]]:
    """The lines of an output by custom id, without what differs from run to run. An id that is twice is an error."""
    lines = {}
    for line in read(path):
        if line["response"] is not None:
            line["response"]["body"].pop("created", None)
        assert line["custom_id"] not in lines
        lines[line["custom_id"]] = line
    return lines


def codes(report: RunReport) -> dict[str, int]:
    """The number of failed lines by code."""
    return {failure.code: failure.count for failure in report.failures}


def text_of(line: dict[str, Any]) -> str:
    """Text of the first choice of an output line."""
    choice = line["response"]["body"]["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    assert isinstance(text, str)
    return text


def killed(source: Path, output: Path, step: int, *, ordered: bool = False, window: int | None = None) -> None:
    """Run a job in a process that is killed in step number `step`; `window`: lines that are put in order together."""
    process = multiprocessing.get_context("spawn").Process(
        target=_run_and_die, args=(str(source), str(output), ordered, step, window)
    )
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def _run_and_die(input_path: str, output_path: str, ordered: bool, step: int, window: int | None) -> None:
    if window is not None:
        EngineOrder.window = window, EngineOrder.window[1]

    def die(number: int) -> None:
        if number == step:
            os.kill(os.getpid(), signal.SIGKILL)

    run(input_path, output_path, ordered=ordered, model=fake(on_step=die))
