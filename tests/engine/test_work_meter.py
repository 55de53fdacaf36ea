"""What the engine says that its steps computed, against what its answers needed, and the rates of this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchwright.clock import ManualClock
from batchwright.engine import machine_rates as rates_module
from batchwright.engine.engine import Engine
from batchwright.engine.machine_rates import keep_rates, kept_rates, machine_rates
from batchwright.engine.work_meter import WorkMeter
from batchwright.jobs.run_bound import RunBound
from batchwright.planning.bound import MachineRates, NoBound, Work, bound_of
from batchwright.planning.needed_work import Answered
from batchwright.request import InferenceRequest

from .support import engines_over, run

SLOW = MachineRates(products=1.0, attention=1.0, unshared_cost=3.0, least_step=1e9, bandwidth=1.0)
"""Rates that every step beats."""
STEPS = {"temperature": 0.0, "ignore_eos": True}


def metered(engine: Engine) -> WorkMeter:
    body = engine.core.body
    model, seconds = body.costs, body.watch()
    if model is None or seconds is None:
        pytest.skip("no compiled layers here")
    engine.core.meter = WorkMeter(model, seconds, SLOW, engine.stats.block_size)
    return engine.core.meter


def computed(engine: Engine, *requests: InferenceRequest) -> WorkMeter:
    """Compute `requests` and return what was measured; the bound of what they needed was not beaten."""
    meter = metered(engine)
    for request in requests:
        engine.submit(request)
    assert all(response.error is None for response in run(engine))
    bound = bound_of(meter.needed.work, meter.needed.steps, meter.model, meter.rates, places=engine.stats.max_num_seqs)
    assert 0.0 < bound.products_seconds <= meter.spent.products * (1 + 1e-9)
    assert 0.0 < bound.attention_seconds <= meter.spent.attention * (1 + 1e-9)
    assert meter.needed.work.unshared_prompt_keys <= meter.computed_work.unshared_prompt_keys
    assert meter.spent.products + meter.spent.attention <= meter.spent.forward
    assert meter.steps >= meter.needed.steps.least(engine.stats.max_num_seqs)
    return meter


def request(prompt: list[int], tokens: int, **others: Any) -> InferenceRequest:
    return InferenceRequest(prompt=prompt, max_tokens=tokens, **{**STEPS, **others})


def without_keys(work: Work) -> Work:
    return replace(work, unshared_prompt_keys=0.0, unshared_answer_keys=0.0)


@pytest.fixture(scope="module")
def make_engine(shallow_path: Path) -> Iterator[Callable[..., Engine]]:
    """Engines over six layers of the model, whatever the text is."""
    yield from engines_over(shallow_path)


@pytest.fixture(scope="module")
def alone(make_engine: Callable[..., Engine]) -> Engine:
    """An engine for tests whose prompts begin with tokens of their own: none finds what another one left."""
    return make_engine(dtype="bfloat16", max_num_seqs=4, max_batch_tokens=64, kv_memory="64MiB", drafting=False)


def test_what_shares_nothing_needs_all_that_is_computed(alone: Engine) -> None:
    lines = [request([7 + number] * (20 + 30 * number), 3 + number) for number in range(6)]
    drawn = request([3] * 5, 4, temperature=1.0, seed=1)
    meter = computed(alone, *lines, drawn)
    assert without_keys(meter.needed.work) == without_keys(meter.computed_work)
    assert meter.needed.work.rows == sum(len(each.prompt) + each.max_tokens - 1 for each in (*lines, drawn))
    assert (meter.needed.work.logit_rows, meter.needed.work.likeliest_rows) == (4, 33)
    assert meter.needed.steps.longest_chain == 8
    assert meter.needed.steps.of_all_chains == 37


def test_one_token_needs_no_second_step_and_none_no_logits(alone: Engine) -> None:
    meter = computed(alone, request([5] * 9, 1), request([6] * 9, 0, prompt_logprobs=0))
    assert meter.needed.work.rows == 9 + 8
    assert meter.needed.work.logit_rows == 8
    assert meter.needed.work.likeliest_rows == 1
    assert meter.needed.steps.longest_chain == 1


def test_a_prompt_is_needed_once(alone: Engine) -> None:
    others = [request([*[22] * 48, last], 2) for last in (4, 5)]
    meter = computed(alone, request([21] * 48, 6, n=3, temperature=1.0, seed=3), *others)
    assert meter.needed.work.rows == (48 + 3 * 5) + (48 + 2 * 2)
    # The block of the last token of a prompt is not shared.
    assert meter.computed_work.rows <= meter.needed.work.rows + 2 * 16


def test_what_was_computed_in_vain_is_not_needed(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(dtype="bfloat16", max_num_seqs=4, kv_memory=12 * 6 * 16 * 768, drafting=False)
    meter = computed(engine, *(request([20 + number] * 40, 60) for number in range(3)))
    assert engine.stats.preemptions
    assert meter.needed.work.rows == 3 * 99
    assert meter.computed_work.rows > meter.needed.work.rows


def test_right_guesses_make_chains_shorter(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(dtype="bfloat16", max_num_seqs=4)
    meter = computed(engine, request([9, 10, 11, 12] * 6, 40))
    assert engine.stats.accepted_tokens
    assert meter.needed.work.likeliest_rows == 40
    assert meter.needed.steps.longest_chain == 40 - engine.stats.accepted_tokens


def test_tokens_that_follow_from_the_form_are_not_chosen(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(dtype="bfloat16", max_num_seqs=4, drafting=False)
    schema = {
        "type": "object",
        "properties": {"population_of_the_city": {"enum": ["many", "few"]}},
        "required": ["population_of_the_city"],
        "additionalProperties": False,
    }
    meter = computed(engine, InferenceRequest(prompt="A city:", max_tokens=60, temperature=0.0, schema=schema))
    forced, generated = engine.stats.forced_tokens, engine.stats.generated_tokens
    assert forced
    assert meter.needed.work.likeliest_rows == generated - forced
    assert meter.needed.steps.longest_chain == generated - forced


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, alone: Engine) -> Engine:
    """An engine, a cache folder without rates, and measurements that end as soon as they can."""
    metered(alone)
    monkeypatch.setenv("BATCHWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setattr(rates_module, "_SECONDS", 0.0)
    monkeypatch.setattr(rates_module, "_MOST_SECONDS", 0.0)
    monkeypatch.setattr(rates_module, "_MOST_OPERATIONS", 0.0)
    return alone


def test_rates_are_measured_once(quick: Engine) -> None:
    blocks, said = quick.core.scheduler.blocks, list[str]()
    first = machine_rates(quick.core.body, blocks.block_size, blocks.num_blocks, said.append)
    assert first is not None
    assert min(first.products, first.attention, first.bandwidth) > 1e6
    assert 0.0 < first.least_step < 1e9
    assert first.unshared_cost >= 1.0
    assert machine_rates(quick.core.body, blocks.block_size, blocks.num_blocks, said.append) == first
    assert len(said) == 1


def test_rates_that_are_kept_rise_until_they_are_measured(quick: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    body, blocks = quick.core.body, quick.core.scheduler.blocks

    def rates(*, again: bool = False) -> MachineRates:
        found = machine_rates(body, blocks.block_size, blocks.num_blocks, again=again)
        assert found is not None
        return found

    keep_rates(replace(SLOW, products=1e18), body)
    keep_rates(replace(SLOW, attention=1e18), body)
    assert (rates().products, rates().attention, rates().bandwidth) == (1e18, 1e18, 1.0)
    monkeypatch.setattr(rates_module._Probe, "rates", lambda probe: replace(SLOW, products=3.0, settled=False))
    # A busy machine says nothing of what it can do.
    assert rates(again=True).products == 1e18
    monkeypatch.setattr(rates_module._Probe, "rates", lambda probe: replace(SLOW, products=3.0))
    assert rates().products == 1e18
    assert rates(again=True).products == rates().products == 3.0
    monkeypatch.setattr(rates_module._Probe, "rates", lambda probe: replace(SLOW, products=4.0))
    monkeypatch.setattr(rates_module, "_SETTLED_FOR", -1.0)
    assert rates().products == 4.0


def test_a_run_does_not_bring_back_rates_that_were_measured_anew(quick: Engine) -> None:
    body, meter = quick.core.body, quick.core.meter
    assert meter is not None
    keep_rates(replace(SLOW, products=5.0), body)
    known = keep_rates(meter.lasting_rates, body)
    keep_rates(SLOW, body, measured=True)
    RunBound(quick, meter, known).end()
    assert kept_rates(body) == SLOW
    RunBound(quick, meter, SLOW).end()
    assert kept_rates(body) == SLOW.with_best(meter.lasting_rates)


def test_runs_that_end_together_keep_their_rates(
    quick: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    body, sync, others = quick.core.body, os.fsync, [replace(SLOW, products=7.0)]

    def another_ends(descriptor: int) -> None:
        if others:
            keep_rates(others.pop(), body)
        sync(descriptor)

    keep_rates(SLOW, body)
    monkeypatch.setattr(os, "fsync", another_ends)
    with caplog.at_level("INFO"):
        keep_rates(replace(SLOW, attention=8.0), body)
    assert not others
    assert "not kept" not in caplog.text
    assert kept_rates(body) == replace(SLOW, attention=8.0)


def test_rates_of_a_run_do_not_put_off_the_next_measurement(quick: Engine) -> None:
    body = quick.core.body
    assert body.costs is not None
    path = rates_module._path(body.costs, body)
    keep_rates(SLOW, body, measured=True)
    os.utime(path, (1000, 1000))
    keep_rates(replace(SLOW, products=7.0), body)
    assert path.stat().st_mtime == 1000
    keep_rates(replace(SLOW, products=9.0), body, measured=True)
    assert path.stat().st_mtime > 1000


def test_the_least_time_of_what_was_answered_is_known_once_rates_are(quick: Engine) -> None:
    answered = Answered(lines=10, prompt_tokens=500, cached_tokens=100, generated_tokens=60)
    assert quick.least_seconds(answered) is None
    model = quick.core.body.costs
    assert model is not None
    operations = Work(rows=450, likeliest_rows=10).product_operations(model)
    for rates in (replace(SLOW, products=1e5, settled=False), replace(SLOW, products=1e6)):
        keep_rates(rates, quick.core.body)
        assert quick.least_seconds(answered) == pytest.approx(operations / rates.products)
    assert quick.least_seconds(replace(answered, generated_tokens=0)) is None


def test_rates_of_a_busy_machine_are_measured_again_before_long(quick: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    body, blocks = quick.core.body, quick.core.scheduler.blocks
    keep_rates(replace(SLOW, settled=False), body)
    assert machine_rates(body, blocks.block_size, blocks.num_blocks) == replace(SLOW, settled=False)
    monkeypatch.setattr(rates_module, "_UNSETTLED_FOR", -1.0)
    measured = machine_rates(body, blocks.block_size, blocks.num_blocks)
    assert measured is not None
    assert measured.products > SLOW.products


def slow_steps(monkeypatch: pytest.MonkeyPatch, seconds: float) -> ManualClock:
    """Return the clock of a machine on which each step of a measurement, and each sum, takes so many seconds."""
    clock, step, fewest = ManualClock(), rates_module._Probe._step, rates_module._Probe._fewest

    def slow(probe: Any, *given: Any) -> None:
        clock.advance(seconds)
        step(probe, *given)

    def slow_sums(probe: Any, timed: Callable[[], float]) -> float:
        def later() -> float:
            began = clock.now()
            took = timed()
            clock.advance(seconds if clock.now() == began else 0.0)
            return took

        return fewest(probe, later)

    monkeypatch.setattr(rates_module._Probe, "_step", slow)
    monkeypatch.setattr(rates_module._Probe, "_fewest", slow_sums)
    return clock


def test_few_repetitions_of_slow_steps_count_if_there_are_some_for_each_rate(
    quick: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, blocks = slow_steps(monkeypatch, 0.9), quick.core.scheduler.blocks
    rates = machine_rates(quick.core.body, blocks.block_size, blocks.num_blocks, lambda _: None, clock)
    assert clock.now() < 11.0
    assert not rates.settled
    assert kept_rates(quick.core.body) == rates


def test_rates_that_take_too_long_are_left_out(quick: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, blocks = slow_steps(monkeypatch, 4.0), quick.core.scheduler.blocks
    given = (quick.core.body, blocks.block_size, blocks.num_blocks, lambda _: None, clock)
    with pytest.raises(NoBound, match="could not be measured within 10 s: it was busy"):
        machine_rates(*given)
    assert clock.now() < 15.0
    assert kept_rates(quick.core.body) is None
    keep_rates(SLOW, quick.core.body)
    assert machine_rates(*given, again=True) == replace(SLOW, settled=False)
    assert kept_rates(quick.core.body) == replace(SLOW, settled=False)
    before = clock.now()
    machine_rates(*given)
    assert clock.now() == before


def test_a_run_does_not_put_off_the_next_measurement(quick: Engine) -> None:
    body = quick.core.body
    assert body.costs is not None
    keep_rates(replace(SLOW, settled=False), body)
    path = rates_module._path(body.costs, body)
    os.utime(path, (1e9, 1e9))
    keep_rates(replace(SLOW, products=7.0, settled=False), body)
    assert path.stat().st_mtime == 1e9
    keep_rates(replace(SLOW, products=8.0, settled=False), body, measured=True)
    assert path.stat().st_mtime > 1e9
