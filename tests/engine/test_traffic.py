"""Online requests and batch lines on one engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from batchwright import AsyncEngine, Engine, InferenceRequest, InferenceResponse
from batchwright.clock import ManualClock
from batchwright.engine.engine_stats import EngineStats
from batchwright.request import Traffic

from .support import GREEDY, LIST, STORY, engines_over, nothing_left, run


class _Ticking:
    """A clock that goes on by a millisecond whenever it is read: the same plans in every run."""

    def __init__(self) -> None:
        self._reads = 0

    def now(self) -> float:
        self._reads += 1
        return self._reads / 1e3


@pytest.fixture(scope="module")
def make_engine(shallow_path: Path) -> Iterator[Callable[..., Engine]]:
    yield from engines_over(shallow_path)


@pytest.fixture
def narrow(shallow_path: Path) -> Iterator[Engine]:
    """One sequence at a time, by a clock that only the test moves."""
    with Engine(
        shallow_path, dtype="float32", kv_memory="20MB", max_num_seqs=1, max_model_len=256, clock=ManualClock()
    ) as engine:
        yield engine
        assert nothing_left(engine)


_TIGHT: dict[str, Any] = {"max_num_seqs": 5, "max_batch_tokens": 48, "kv_memory": "20MB", "max_model_len": 256}


@pytest.fixture(scope="module")
def alone(make_engine: Callable[..., Engine], prompts: list[list[int]]) -> dict[int, tuple[list[int], tuple[int, ...]]]:
    """Some prompts, and what each gets when it has the engine to itself."""
    with make_engine(**_TIGHT) as engine:
        chosen = [prompt for prompt in prompts if len(prompt) <= 60][:12]
        return {n: (prompt, engine.generate([prompt], GREEDY)[0].token_ids) for n, prompt in enumerate(chosen)}


@pytest.mark.parametrize("slo", [{}, {"ttft_ms": 40.0, "tpot_ms": 4.0}, {"tpot_ms": 0.1, "batch_share": 0.3}])
def test_what_is_generated_does_not_depend_on_the_other_class(
    make_engine: Callable[..., Engine], alone: dict[int, tuple[list[int], tuple[int, ...]]], slo: dict[str, float]
) -> None:
    """Preempted, skipped, in chunks of whatever size: each output is the one that the request has alone."""
    with make_engine(**_TIGHT, **slo, clock=_Ticking()) as engine:
        answers: list[InferenceResponse] = []
        for number, (prompt, _) in alone.items():
            is_batch = number < 7
            if not is_batch:
                answers += [response for _ in range(3) for response in engine.step()]
            traffic: Traffic = "batch" if is_batch else "online"
            priority = 0 if is_batch else 9
            engine.submit(
                InferenceRequest.of(prompt, GREEDY, request_id=f"{number}", traffic=traffic, priority=priority)
            )
        answers += run(engine)
        assert nothing_left(engine)
        assert {int(answer.request_id): answer.token_ids for answer in answers} == {
            n: ids for n, (_, ids) in alone.items()
        }


def test_an_online_request_takes_the_place_of_a_batch_line_in_the_next_step(narrow: Engine) -> None:
    narrow.submit(InferenceRequest.of(STORY, GREEDY, request_id="line", traffic="batch", priority=0))
    for _ in range(4):
        assert narrow.step() == []
    narrow.submit(InferenceRequest(LIST, request_id="online", priority=9, max_tokens=1))
    if narrow.core.launcher.runs_ahead:  # the next step has been launched before
        assert narrow.step() == []
    assert [response.request_id for response in narrow.step()] == ["online"]
    assert [response.request_id for response in run(narrow)] == ["line"]


def test_figures_are_kept_by_class(narrow: Engine) -> None:
    line = InferenceRequest.of(STORY, GREEDY, request_id="line", traffic="batch")
    narrow.submit(line)
    narrow.step()
    narrow.submit(InferenceRequest.of(LIST, GREEDY, request_id="online"))
    waiting = narrow.stats.copy()
    assert (waiting.traffic["online"].waiting, waiting.traffic["batch"].running) == (1, 1)
    assert waiting.kv_blocks_used > 0
    narrow.step()
    assert (narrow.stats.traffic["online"].running, narrow.stats.traffic["batch"].waiting) == (1, 1)
    assert narrow.stats.traffic["batch"].preemptions == 1
    done = {response.request_id: response for response in run(narrow)}
    for name, traffic in (("online", narrow.stats.traffic["online"]), ("line", narrow.stats.traffic["batch"])):
        assert (traffic.submitted, traffic.completed, traffic.failed) == (1, 1, 0)
        assert (traffic.waiting, traffic.running) == (0, 0)
        assert traffic.prefill_tokens >= done[name].usage.prompt_tokens - done[name].usage.cached_tokens > 0
        assert traffic.generated_tokens == done[name].tokens_generated
        assert (len(traffic.recent_ttft_ms), len(traffic.recent_tpot_ms)) == (1, 1)
        assert (traffic.ttft_ms.count, traffic.tpot_ms.count) == (1, 1)
    stats = narrow.stats
    assert sum(each.computed_tokens for each in stats.traffic.values()) == stats.prefill_tokens + stats.decode_tokens
    assert stats.last_step_predicted is not None
    assert (stats.kv_blocks_used, stats.step_margin >= 1.0) == (0, True)
    narrow.submit(InferenceRequest.of(LIST, GREEDY, request_id="cancelled", traffic="batch"))
    narrow.cancel("cancelled")
    assert (stats.traffic["batch"].failed, stats.traffic["batch"].waiting) == (1, 0)
    assert waiting.traffic["batch"].generated_tokens < stats.traffic["batch"].generated_tokens


def test_without_promotion_a_priority_waits_for_as_long_as_it_takes(shallow_path: Path) -> None:
    clock = ManualClock()
    with Engine(
        shallow_path, dtype="float32", kv_memory="20MB", max_num_seqs=1, promote_after=None, clock=clock
    ) as engine:
        engine.submit(InferenceRequest(STORY, request_id="low", priority=9, max_tokens=2))
        clock.advance(1e6)
        engine.submit(InferenceRequest(STORY, request_id="high", priority=0, max_tokens=2))
        assert [response.request_id for response in run(engine)] == ["high", "low"]


def test_the_figures_of_an_async_engine_can_be_kept(shallow_path: Path) -> None:
    async def main() -> None:
        async with AsyncEngine(shallow_path, dtype="float32", kv_memory="20MB", ttft_ms=1000, tpot_ms=80) as engine:
            before = engine.stats
            await engine.generate(InferenceRequest.of(STORY, GREEDY, traffic="batch"))
            after = engine.stats
            assert isinstance(after, EngineStats)
            assert (before.generated_tokens, after.generated_tokens) == (0, GREEDY.max_tokens)
            assert after.traffic["batch"].completed == 1
            assert before.traffic["batch"].submitted == 0

    asyncio.run(main())


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("ttft_ms", 0.0),
        ("tpot_ms", -1.0),
        ("tpot_ms", float("nan")),
        ("batch_share", 1.0),
        ("batch_share", -0.1),
        ("promote_after", 0.0),
    ],
)
def test_settings_out_of_range_are_refused_by_name(shallow_path: Path, setting: str, value: float) -> None:
    with pytest.raises(ValueError, match=setting):
        Engine(shallow_path, kv_memory="20MB", **{setting: value})  # type: ignore[arg-type]


def test_waiting_for_the_step_that_was_being_computed_is_part_of_the_time_to_the_first_token(narrow: Engine) -> None:
    late = InferenceRequest.of(STORY, GREEDY, request_id="late", deadline=2.0)
    narrow.core.add(InferenceRequest.of(STORY, GREEDY, request_id="waited"), submitted_at=-1.5)
    narrow.core.add(late, submitted_at=-2.5)
    done = {response.request_id: response for response in run(narrow)}
    assert (done["waited"].ttft_ms, done["waited"].queue_ms) == (1500.0, 1500.0)
    assert done["late"].error is not None


def test_prompt_tokens_count_when_they_are_computed(shallow_path: Path) -> None:
    with Engine(shallow_path, dtype="float32", kv_memory="40MB", max_batch_tokens=32) as engine:
        for index in range(4):
            engine.submit(InferenceRequest.of([index + 5, *range(100, 159)], GREEDY, traffic="batch"))
        assert engine.stats.traffic["batch"].prefill_tokens == 0
        for steps in range(1, 5):
            engine.step()
            assert 0 < engine.stats.traffic["batch"].prefill_tokens <= 32 * steps
        run(engine)
        assert engine.stats.traffic["batch"].prefill_tokens == engine.stats.prefill_tokens == 240
