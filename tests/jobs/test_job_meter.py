"""Reservations of many requests at once, and those that wait for others."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.inference.running import in_real_time

from batchwright.errors import BudgetExhausted, InvalidRequest, RunFailed
from batchwright.inference.inference import Call
from batchwright.inference.metering import Reservation
from batchwright.jobs.job_meter import JobMeter
from batchwright.jobs.spend_journal import SpendJournal
from batchwright.pricing.price_sources import PriceBook

AT = datetime(2026, 11, 1, tzinfo=UTC)
CHAT = "/v1/chat/completions"
TOKEN = 10**6
"""Picodollars of a token of an answer; prompts are free."""


def meter(limit: int | None, path: Path | None = None, **options: Any) -> JobMeter:
    book = PriceBook(at=AT, given="input=0,output=1")
    return JobMeter(book, SpendJournal(path, "key"), limit=None if limit is None else limit * TOKEN, **options)


def call(name: str = "req_key_1") -> Call:
    return Call(CHAT, {}, name, "batch")


async def reserve(of: JobMeter, tokens: int, name: str = "req_key_1", *, batch: bool = False) -> Reservation:
    body = {"messages": [], "max_tokens": tokens, "model": "m"}
    return await of.reserve(call(name), body, 10, batch=batch)


def answer(tokens: int) -> dict[str, Any]:
    return {"usage": {"prompt_tokens": 1, "completion_tokens": tokens}}


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@in_real_time
async def test_requests_wait_for_the_reservations_of_others_in_turn() -> None:
    money = meter(100)
    first = await reserve(money, 60)
    large, small = asyncio.create_task(reserve(money, 70)), asyncio.create_task(reserve(money, 10))
    await settled()
    # The small one would fit, but then large ones would never get their turn.
    assert not large.done()
    assert not small.done()
    first.settle(CHAT, answer(20))
    await settled()
    assert large.done()
    assert small.done()
    assert money.committed == 100 * TOKEN
    with pytest.raises(BudgetExhausted, match=r"is left of the budget of .*, and the next request may cost up to"):
        await reserve(money, 81)


@in_real_time
async def test_who_waits_is_told_as_soon_as_it_is_hopeless() -> None:
    money = meter(100)
    first, second = await reserve(money, 50), await reserve(money, 50)
    waiting = [asyncio.create_task(reserve(money, tokens)) for tokens in (60, 40)]
    await settled()
    first.keep()
    await settled()
    assert isinstance(waiting[0].exception(), BudgetExhausted)
    assert not waiting[1].done()
    second.release()
    (await waiting[1]).settle(CHAT, answer(40))
    assert (money.totals.spent, money.totals.kept, money.committed) == (40 * TOKEN, 50 * TOKEN, 90 * TOKEN)


@in_real_time
async def test_one_that_is_cancelled_while_it_waits_holds_nothing() -> None:
    money = meter(100)
    first = await reserve(money, 100)
    waiting = [asyncio.create_task(reserve(money, 100)) for _ in range(3)]
    await settled()
    waiting[0].cancel()
    await settled()
    first.release()  # the second gets its turn, and is cancelled before it can take it
    waiting[1].cancel()
    await settled()
    (await waiting[2]).release()
    assert money.committed == 0


@in_real_time
async def test_costs_are_told_once() -> None:
    money = meter(None, states_costs=True)
    (await reserve(money, 5, "a")).settle(CHAT, answer(3))
    (await reserve(money, 5, "b")).settle(CHAT, {"choices": []})  # an answer without usage
    assert [money.cost_of(name) for name in ("a", "a", "b")] == [3 * TOKEN, None, None]
    assert (money.totals.lost, money.totals.kept) == (1, 5 * TOKEN)


@in_real_time
async def test_batches_cost_half_and_are_taken_up_after_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl.spend"
    money = meter(100, path)
    await reserve(money, 80, "a", batch=True)
    await reserve(money, 100, "b", batch=True)
    # Killed: the reservations of both are still open.
    money = meter(100, path)
    assert money.committed == 90 * TOKEN
    with pytest.raises(BudgetExhausted):  # it is not known whether they will ever come back
        await reserve(money, 20, "live")
    held = await reserve(money, 80, "a", batch=True)
    assert money.committed == 90 * TOKEN
    held.settle(CHAT, answer(20))
    assert (money.totals.spent, money.totals.saved_by_batch) == (10 * TOKEN, 10 * TOKEN)
    (await reserve(money, 20, "live")).release()
    money.close()
    assert meter(100, path).committed == 60 * TOKEN


@in_real_time
async def test_without_a_budget_nothing_is_refused() -> None:
    money = meter(None)
    body = {"messages": [{"role": "user", "content": [{"type": "image_url"}]}], "model": "m"}
    (await money.reserve(call(), body, 10)).keep()
    assert (money.totals.unbounded, money.totals.lost, money.totals.kept) == (1, 1, 0)
    (await money.reserve(call(), body, 10)).settle(CHAT, answer(7))
    assert money.totals.spent == 7 * TOKEN


@in_real_time
async def test_unknown_models() -> None:
    book = PriceBook(at=AT, table={})
    free = JobMeter(book, SpendJournal(None, "key"))
    (await reserve(free, 5)).settle(CHAT, answer(3))
    assert (free.unpriced, free.totals.answers) == (1, 0)
    with pytest.raises(InvalidRequest, match="price of the model 'm' is not known"):
        await reserve(JobMeter(book, SpendJournal(None, "key"), limit=1), 5)


@in_real_time
async def test_nothing_is_sent_whose_reservation_cannot_be_noted(tmp_path: Path) -> None:
    money = meter(100, tmp_path / "missing" / "out.jsonl.spend")
    with pytest.raises(RunFailed, match="what the job spends cannot be noted"):
        await reserve(money, 5)
    assert money.committed == 0


@in_real_time
async def test_an_answer_that_costs_more_than_it_may_is_counted_and_told(caplog: pytest.LogCaptureFixture) -> None:
    money = meter(100)
    (await reserve(money, 50)).settle(CHAT, answer(120))
    assert money.committed == 120 * TOKEN
    assert "req_key_1 cost $0.00012, more than the $0.000050 that were reserved" in caplog.text
    with pytest.raises(BudgetExhausted):
        await reserve(money, 1)


@in_real_time
async def test_absurd_limits(tmp_path: Path) -> None:
    money = meter(None, tmp_path / "out.jsonl.spend")
    (await reserve(money, 10**30)).keep()
    assert (money.totals.unbounded, money.totals.kept) == (1, 0)
    with pytest.raises(BudgetExhausted, match="may cost up to"):
        await reserve(meter(100), 10**30)
