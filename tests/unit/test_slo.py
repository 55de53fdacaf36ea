"""Step times are learned, and no step carries more for batches than the SLO allows."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.long_form import examples

from batchwright.scheduling import Sequence, SloController, StepPlan
from batchwright.scheduling.plan import Chunk
from batchwright.scheduling.slo import StepRoom, StepShape, StepTimes

from .oracle import Bench

_QUICK = settings(max_examples=examples(15, long=40))

_COSTS = st.tuples(
    st.just(0.01), st.floats(0.0, 1e-3), st.floats(0.0, 1e-5), st.floats(1e-5, 1e-3), st.floats(0.0, 1e-5)
)
_USUAL_COSTS = (0.01, 3e-4, 2e-7, 4e-4, 9e-7)


def _shape(rng: random.Random) -> StepShape:
    rows, prompt = rng.randint(0, 64), rng.choice([0, rng.randint(2, 256)])
    return StepShape(prompt, prompt * prompt // 2, rows, rows * rng.randint(10, 400))


def _seconds(shape: StepShape, costs: tuple[float, ...] = _USUAL_COSTS) -> float:
    return sum(cost * feature for cost, feature in zip(costs, shape.features, strict=True))


def _chunk(start: int, count: int) -> Chunk:
    return Chunk(Sequence([0] * (start + count), start + count, 999), start, count, False, samples=True)


def _of(sequences: list[Sequence], now: float, slo: SloController, waiting: Sequence | None = None) -> float:
    return slo.limit(now, sequences, waiting, 16)


def _online(generated: int, *, first_at: float | None = None, prompt: int = 4, most: int = 100) -> Sequence:
    sequence = Sequence([0] * (prompt + generated), prompt, prompt + most, num_computed=prompt + generated - 1)
    sequence.first_token_at = first_at
    return sequence


def test_a_cost_model_is_learned_in_spite_of_noise() -> None:
    rng, times = random.Random(3), StepTimes()
    assert times.predict(StepShape()) is None
    for _ in range(600):
        shape = _shape(rng)
        times.observe(shape, _seconds(shape) * rng.uniform(0.95, 1.05))
    for _ in range(20):
        shape = _shape(rng)
        assert times.predict(shape) == pytest.approx(_seconds(shape), rel=0.06)
    assert 1.0 < times.margin_of_runs < times.margin < 1.08


def test_work_of_a_kind_that_was_never_seen_is_learned_at_once() -> None:
    """It would be taken for an outlier each time, since what is known comes in between."""
    rng, times = random.Random(5), StepTimes()
    prompts = [StepShape(rng.randint(300, 450)) for _ in range(100)]
    for shape in prompts:
        times.observe(shape, _seconds(shape) * rng.uniform(0.95, 1.05))
    rows = StepShape(0, 0, 100, 30_000)
    for shape in prompts[:10]:
        times.observe(rows, _seconds(rows) * rng.uniform(0.95, 1.05))
        times.observe(shape, _seconds(shape) * rng.uniform(0.95, 1.05))
    assert times.predict(rows) == pytest.approx(_seconds(rows), rel=0.1)


def test_a_model_that_is_learned_anew_says_nothing_of_large_steps() -> None:
    rng, slo = random.Random(5), SloController(tpot=1.0)
    for _ in range(100):
        shape = _shape(rng)
        slo.times.observe(shape, _seconds(shape))
    assert slo.room(1.0, [_chunk(0, 1)], 512, 0).tokens > 256
    slow = StepShape(0, 0, 8, 800)
    for _ in range(4):
        slo.times.observe(slow, 10 * _seconds(slow))
    assert slo.room(1.0, [_chunk(0, 1)], 512, 0).tokens == 15


def test_margins_follow_the_noise() -> None:
    rng, times = random.Random(3), StepTimes()
    for noise in (0.02, 0.3, 0.02):
        for _ in range(1500):
            shape = _shape(rng)
            times.observe(shape, _seconds(shape) * rng.uniform(1 - noise, 1 + noise))
        assert 1.0 + 0.5 * noise < times.margin < 1.0 + 1.5 * noise


def test_the_shape_of_a_step_tells_decodes_from_prompts() -> None:
    shape = StepShape.of([_chunk(9, 1), _chunk(0, 3), _chunk(5, 2)])
    assert shape == StepShape(5, 1 + 2 + 3 + 6 + 7, 1, 10, 3)
    assert shape.num_tokens == 6


@_QUICK
@given(
    costs=_COSTS,
    seconds=st.floats(0.0, 0.2),
    tokens=st.integers(0, 300),
    owed=st.integers(0, 5),
    wants=st.lists(st.tuples(st.integers(0, 400), st.integers(1, 300)), max_size=20),
)
def test_a_room_gives_as_much_as_its_seconds_pay_for_and_no_more(
    costs: tuple[float, ...], seconds: float, tokens: int, owed: int, wants: list[tuple[int, int]]
) -> None:
    room, taken, owing = StepRoom(tokens, owed, seconds, costs), list[Chunk](), owed
    for start, wanted in wants:
        count = room.most_prompt(start, wanted) if wanted > 1 else int(room.fits_row(start + 1))
        assert 0 <= count <= wanted
        if not count:
            continue
        room.take_prompt(start, count)
        taken.append(_chunk(start, count))
        owing = max(0, owing - count)
        assert (room.owed, room.tokens) == (owing, tokens - sum(chunk.count for chunk in taken))
        spent = _seconds(StepShape.of(taken), costs) - costs[0]
        if not owed:
            assert spent <= seconds + 1e-9
            if 1 < count < wanted and count < room.tokens:  # one more would not have fitted
                more = StepShape.of([*taken[:-1], _chunk(start, count + 1)])
                assert _seconds(more, costs) - costs[0] > seconds - 1e-9
    assert room.tokens >= 0


def test_without_an_slo_a_room_is_all_that_is_left() -> None:
    room = SloController().room(math.inf, [_chunk(0, 9)], 55, 3)
    assert (room.tokens, room.owed, room.seconds) == (55, 3, math.inf)
    assert room.most_prompt(0, 100) == 55
    assert room.fits_rows(55, 10**9)


def test_nothing_is_believed_that_was_not_seen() -> None:
    slo = SloController(tpot=1.0)
    seen = []
    for _ in range(5):
        room = slo.room(1.0, [_chunk(0, 1)], 512, 0)
        seen.append(room.tokens + 1)
        sequence = Sequence([0] * (room.tokens + 1), 1, 999)
        plan = StepPlan([Chunk(sequence, 0, room.tokens + 1, False, samples=False)])
        slo.observe(plan, StepShape.of(plan.chunks), 0.001)
    assert seen == [16, 32, 64, 128, 256]


def test_a_step_may_take_half_of_the_time_to_a_first_token() -> None:
    assert _of([], 0.0, SloController(ttft=3.0, tpot=0.1)) == 1.5
    assert _of([], 0.0, SloController(tpot=0.1)) == math.inf


def test_those_without_a_first_token_leave_what_they_still_have() -> None:
    slo = SloController(ttft=3.0)
    fits_this_step = Sequence([0] * 16, 16, 20, arrived_at=5.0)
    needs_three = Sequence([0] * 33, 33, 40, arrived_at=5.0)
    assert _of([fits_this_step], 7.0, slo) == pytest.approx(1.0)
    assert _of([needs_three], 6.2, slo) == pytest.approx(0.6)
    assert _of([], 7.5, slo, waiting=fits_this_step) == pytest.approx(0.5)
    assert _of([], 9.0, slo, waiting=fits_this_step) < 0.0


def test_one_that_is_behind_catches_up_and_one_that_is_ahead_asks_for_no_more() -> None:
    slo = SloController(tpot=1.0)
    assert _of([_online(1, first_at=0.0)], 0.0, slo) == 1.0
    assert _of([_online(5, first_at=0.0)], 2.0, slo) == 1.0
    assert _of([_online(5, first_at=0.0)], 5.6, slo) == pytest.approx(0.8)
    # With two tokens to go there are only these to catch up in.
    assert _of([_online(5, first_at=0.0, most=7)], 4.6, slo) == pytest.approx(0.7)
    assert _of([_online(5, first_at=0.0), _online(5, first_at=2.0)], 5.6, slo) == pytest.approx(0.8)
    assert _of([_online(5)], 5.6, slo) == 1.0


def test_margins_tighten_the_limits() -> None:
    slo, rng = SloController(ttft=10.0, tpot=1.0), random.Random(0)
    for _ in range(300):
        shape = _shape(rng)
        slo.times.observe(shape, _seconds(shape) * rng.uniform(0.8, 1.2))
    assert _of([_online(1, first_at=0.0)], 0.0, slo) == pytest.approx(1.0 / slo.times.margin_of_runs)
    assert _of([], 0.0, slo) == pytest.approx(5.0 / slo.times.margin)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan])
def test_an_slo_must_be_positive(seconds: float) -> None:
    with pytest.raises(ValueError, match="ttft"):
        SloController(ttft=seconds)
    with pytest.raises(ValueError, match="tpot"):
        SloController(tpot=seconds)


class _Watched(SloController):
    """Keeps what it was asked last."""

    last_limit = math.inf
    online: StepShape

    def room(self, limit: float, online: object, tokens: int, owed: int) -> StepRoom:
        assert isinstance(online, list)
        self.last_limit, self.online = limit, StepShape.of(online)
        return super().room(limit, online, tokens, owed)


class _Timed(Bench):
    """Steps take the time that `costs` give, and the clock advances by it."""

    def __init__(self, costs: tuple[float, ...], slo: SloController) -> None:
        super().__init__(num_blocks=400, max_batch_tokens=128, max_num_seqs=24, slo=slo)
        self.costs = costs

    def seconds(self, plan: StepPlan) -> float:
        return _seconds(StepShape.of(plan.chunks), self.costs)


@_QUICK
@given(
    costs=_COSTS,
    tpot=st.floats(0.012, 0.1),
    arrivals=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30), st.integers(2, 20)), max_size=12),
)
def test_no_planned_step_is_longer_than_its_limit_by_the_model(
    costs: tuple[float, ...], tpot: float, arrivals: list[tuple[int, int, int]]
) -> None:
    slo = _Watched(ttft=tpot * 10, tpot=tpot)
    bench = _Timed(costs, slo)
    for number in range(40):
        while bench.scheduler.waiting_of("batch") < 3:
            bench.add([number % 2] * (1 + 7 * number % 40), 1 + 5 * number % 12, traffic="batch")
        for at, prompt, output in arrivals:
            if at == number:
                bench.add([1] * prompt, output)
        plan = bench.schedule()
        planned = StepShape.of(plan.chunks)
        predicted, largest = slo.times.predict(planned), slo.times.largest
        if plan.num_batch_tokens and predicted is not None:
            assert planned.num_tokens <= max(16, 2 * largest)
            # One token is computed in any case where no online sequence is.
            assert predicted <= slo.last_limit + 1e-9 or plan.num_tokens == 1
        bench.commit()
        bench.now += bench.seconds(plan)
