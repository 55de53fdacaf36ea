"""Who goes first, who is given up, and who is told."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import cast

import pytest

from batchwright import Engine, InferenceRequest, InferenceResponse, StreamEvent
from batchwright.clock import ManualClock
from batchwright.errors import Cancelled, DeadlineExceeded

from .support import GREEDY, LIST, STORY, nothing_left, only, run


@pytest.fixture
def narrow(shallow_path: Path) -> Iterator[Engine]:
    """One sequence at a time, by a clock that only the test moves."""
    with Engine(
        shallow_path, dtype="float32", kv_memory="20MB", max_num_seqs=1, max_model_len=256, clock=ManualClock()
    ) as engine:
        yield engine
        assert nothing_left(engine)


def clock_of(engine: Engine) -> ManualClock:
    clock = engine.core.clock
    assert isinstance(clock, ManualClock)
    return clock


def test_urgent_requests_overtake(narrow: Engine) -> None:
    order = {"later": 7, "urgent": 1, "normal-1": 5, "normal-2": 5}
    for name, priority in order.items():
        narrow.submit(InferenceRequest(STORY, request_id=name, priority=priority, max_tokens=3, temperature=0.0))
    assert [response.request_id for response in run(narrow)] == ["urgent", "normal-1", "normal-2", "later"]


def test_an_urgent_request_takes_the_place_of_one_that_runs(narrow: Engine) -> None:
    alone = only(narrow.generate(STORY, GREEDY))
    narrow.submit(InferenceRequest.of(STORY, GREEDY, request_id="slow"))
    for _ in range(4):
        assert narrow.step() == []
    narrow.submit(InferenceRequest(LIST, request_id="urgent", priority=0, max_tokens=3))
    urgent, slow = run(narrow)
    assert (urgent.request_id, slow.request_id) == ("urgent", "slow")
    assert slow.token_ids == alone.token_ids
    assert narrow.stats.preemptions == 1


def test_deadlines(narrow: Engine) -> None:
    narrow.submit(InferenceRequest(STORY, request_id="runs", deadline=5.0, max_tokens=50, n=1))
    narrow.submit(InferenceRequest(STORY, request_id="waits", deadline=2.0, max_tokens=5, priority=9, n=3))
    narrow.submit(InferenceRequest(STORY, request_id="free", max_tokens=2, priority=9, ignore_eos=True))
    assert narrow.step() == []
    clock_of(narrow).advance(2.0)
    waits = only(narrow.step())
    assert isinstance(waits.error, DeadlineExceeded)
    assert "deadline=2.0 s" in str(waits.error)
    assert (waits.request_id, waits.finish_reason, waits.tokens_generated) == ("waits", "error", 0)
    assert waits.latency_ms == waits.queue_ms == 2000.0
    assert waits.ttft_ms is None
    clock_of(narrow).advance(3.5)
    runs, free = run(narrow)
    assert isinstance(runs.error, DeadlineExceeded)
    assert runs.tokens_generated == len(runs.token_ids) == 2
    assert runs.output == narrow.core.tokenizer.decode(runs.token_ids)
    assert (free.request_id, free.error, free.tokens_generated) == ("free", None, 2)


def test_cancelling_frees_slot_and_blocks_at_once(narrow: Engine) -> None:
    for name in ("first", "second", "third"):
        narrow.submit(InferenceRequest(STORY, request_id=name, max_tokens=50, temperature=0.0, ignore_eos=True))
    for _ in range(3):
        narrow.step()
    assert narrow.core.scheduler.blocks.num_used > 0
    first, third = narrow.cancel("first"), narrow.cancel("third")
    assert first is not None
    assert third is not None
    assert isinstance(first.error, Cancelled)
    assert (first.finish_reason, first.tokens_generated) == ("cancelled", 3)
    assert (third.finish_reason, third.tokens_generated) == ("cancelled", 0)
    assert narrow.core.scheduler.blocks.num_used == 0
    assert narrow.cancel("first") is None
    assert narrow.cancel("nobody") is None
    second = only(run(narrow))
    assert (second.request_id, second.error, second.tokens_generated) == ("second", None, 50)


# Callbacks


def test_callbacks_get_the_response(engine: Engine) -> None:
    got: list[InferenceResponse] = []
    requests = [InferenceRequest(STORY, max_tokens=count, callback=got.append) for count in (4, 2)]
    responses = engine.generate(requests)
    assert got == [responses[1], responses[0]]


def test_a_callback_that_raises_costs_nobody_an_answer(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    def angry(response: InferenceResponse) -> None:
        raise ValueError("not today")

    responses = engine.generate([InferenceRequest(STORY, max_tokens=2, callback=angry) for _ in range(3)])
    assert [response.error for response in responses] == [None] * 3
    assert "not today" in caplog.text


def test_a_callback_may_submit_and_cancel(engine: Engine) -> None:
    got: list[str] = []

    def chain(response: InferenceResponse) -> None:
        got.append(response.request_id)
        engine.cancel("victim")
        engine.submit(InferenceRequest(LIST, request_id="second", max_tokens=2, callback=lambda r: got.append("done")))

    engine.submit(InferenceRequest(STORY, request_id="victim", max_tokens=2, n=2))
    engine.submit(InferenceRequest(STORY, request_id="first", max_tokens=1, callback=chain))
    run(engine)
    assert got == ["first", "done"]


def test_a_request_that_is_cancelled_ends_in_its_stream(engine: Engine) -> None:
    requests = [InferenceRequest(STORY, request_id=name, max_tokens=30) for name in ("a", "b")]
    ends: dict[str, InferenceResponse] = {}
    cancelled: list[InferenceResponse | None] = []
    for event in engine.stream(requests):
        if event.response is not None:
            ends[event.request_id] = event.response
        elif event.request_id == "a":
            cancelled.append(engine.cancel("b"))
    assert cancelled[0] is ends["b"]
    assert set(cancelled[1:]) == {None}
    assert isinstance(ends["b"].error, Cancelled)
    assert ends["a"].error is None
    assert nothing_left(engine)


def long_until_short_ends(engine: Engine) -> list[InferenceRequest]:
    """Two requests: the callback of the second cancels the first."""

    def stop(response: InferenceResponse) -> None:
        engine.cancel("long")

    return [
        InferenceRequest(STORY, request_id="long", max_tokens=200),
        InferenceRequest(STORY, request_id="short", max_tokens=6, callback=stop),
    ]


def test_a_callback_cancels_what_generate_waits_for(engine: Engine) -> None:
    long, short = engine.generate(long_until_short_ends(engine))
    assert isinstance(long.error, Cancelled)
    assert short.error is None
    assert nothing_left(engine)


def test_a_stream_that_a_callback_cancels_has_all_of_its_text(engine: Engine) -> None:
    events = [event for event in engine.stream(long_until_short_ends(engine)) if event.request_id == "long"]
    assert events[-1].response is not None
    assert isinstance(events[-1].response.error, Cancelled)
    assert "".join(event.text for event in events) == events[-1].response.output != ""
    assert nothing_left(engine)


def test_closing_a_stream_leaves_a_later_request_of_the_same_id_alone(engine: Engine) -> None:
    def asked(name: str, most: int) -> InferenceRequest:
        return InferenceRequest(STORY, request_id=name, max_tokens=most)

    first = cast("Generator[StreamEvent]", engine.stream([asked("x", 60), asked("a", 3)]))
    begun = next(first)
    while begun.request_id == "x" and "a" in engine.core._delivery.requests:
        engine.step()
    second = engine.stream([asked("a", 5)])
    started = next(second)
    first.close()
    events = [started, *second]
    assert events[-1].response is not None
    assert events[-1].response.tokens_generated == 5
    assert nothing_left(engine)


def test_each_of_two_streams_gets_what_is_its_own(engine: Engine) -> None:
    expected = {prompt: only(engine.generate(prompt, GREEDY)).output for prompt in (STORY, LIST)}
    first = engine.stream(STORY, GREEDY)
    begun = [next(first)]
    assert only(engine.generate(LIST, GREEDY)).output == expected[LIST]
    second = engine.stream(LIST, GREEDY)
    both = [[*begun], [next(second)]]
    engine.submit(InferenceRequest(LIST, request_id="mine", max_tokens=2))
    while len(stepped := engine.step()) == 0:
        pass
    assert only(stepped).request_id == "mine"
    both[1] += second
    both[0] += first
    for events, prompt in zip(both, (STORY, LIST), strict=True):
        assert "".join(event.text for event in events) == expected[prompt]
        assert [event.response is not None for event in events] == [False] * (len(events) - 1) + [True]
    assert nothing_left(engine)


def test_generate_leaves_other_requests_to_step(engine: Engine) -> None:
    engine.submit(InferenceRequest(STORY, request_id="mine", max_tokens=2))
    assert only(engine.generate(LIST, GREEDY)).error is None
    assert [event.request_id for event in engine.stream(LIST, GREEDY) if event.request_id == "mine"] == []
    assert only(engine.step()).request_id == "mine"
