"""One computation of the state for all watchers, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack
from itertools import count
from typing import Any

import pytest
from tests.dashboard.states import state

from batchwright.clock import ManualClock
from batchwright.errors import StoreUnavailable
from batchwright.server.dashboard.dashboard_state import DashboardState
from batchwright.server.dashboard.feed import Feeds
from batchwright.server.http.error_answers import HttpError
from batchwright.testing import play


def _states(made: list[str], tenant: str) -> Callable[[], Any]:
    numbers = count(1)

    async def compute() -> DashboardState:
        made.append(tenant)
        return state(lines_pending=next(numbers))

    return compute


async def _read(events: AsyncGenerator[bytes], number: int) -> list[int]:
    found: list[int] = []
    async for event in events:
        found.append(DashboardState.model_validate_json(event.removeprefix(b"data: ")).lines_pending)
        if len(found) == number:
            break
    return found


def test_a_state_is_computed_once_a_second_for_a_tenant_however_many_look() -> None:
    async def main(clock: ManualClock) -> None:
        feeds, made = Feeds(800, asyncio.Event()), list[str]()
        with ExitStack() as opened:
            mine = [opened.enter_context(feeds.watched("mine", "", _states(made, "mine"))) for _ in range(100)]
            theirs = opened.enter_context(feeds.watched("theirs", "", _states(made, "theirs")))
            read = await asyncio.gather(*(_read(each, 5) for each in (*mine, theirs)))
            assert read == [[1, 2, 3, 4, 5]] * 101
            assert (made.count("mine"), made.count("theirs")) == (5, 5)
            assert clock.now() == 4.0
            late = opened.enter_context(feeds.watched("mine", "", _states(made, "mine")))
            assert await _read(late, 1) == [5]
        made.clear()
        await asyncio.sleep(10.0)
        assert made == []

    play(main)


def test_one_tenant_may_have_a_quarter_of_the_streams_and_all_tenants_no_more_than_there_are() -> None:
    async def main(clock: ManualClock) -> None:
        feeds = Feeds(8, asyncio.Event())
        with ExitStack() as opened:
            for tenant in "abcd":
                for _ in range(2):
                    opened.enter_context(feeds.watched(tenant, "", _states([], tenant)))
                with pytest.raises(HttpError) as caught:
                    opened.enter_context(feeds.watched(tenant, "", _states([], tenant)))
                assert caught.value.status == 429
            with pytest.raises(HttpError) as caught:
                opened.enter_context(feeds.watched("e", "", _states([], "e")))
            assert (caught.value.status, caught.value.body["error"]["code"]) == (503, "too_many_page_streams")
        with feeds.watched("a", "", _states([], "a")) as events:
            assert await _read(events, 1) == [1]

    play(main)


def test_a_state_that_cannot_be_made_ends_the_feed_with_the_error_and_the_next_watcher_begins_anew() -> None:
    async def main(clock: ManualClock) -> None:
        feeds, made = Feeds(16, asyncio.Event()), list[str]()

        async def broken() -> DashboardState:
            raise StoreUnavailable("the database is away")

        with feeds.watched("a", "", broken) as events, feeds.watched("a", "", broken) as others:
            for each in (events, others):
                told = [event async for event in each]
                assert len(told) == 1
                assert b"the database does not answer" in told[0]
            with feeds.watched("a", "", _states(made, "a")) as again:
                assert await _read(again, 2) == [1, 2]

    play(main)


def test_feeds_end_when_the_service_stops() -> None:
    async def main(clock: ManualClock) -> None:
        stopping = asyncio.Event()
        feeds = Feeds(8, stopping)
        with feeds.watched("a", "", _states([], "a")) as events:
            assert await _read(events, 2) == [1, 2]
        with feeds.watched("a", "", _states([], "a")) as events:
            reading = asyncio.create_task(_read(events, 100))
            await asyncio.sleep(2.5)
            stopping.set()
            assert await reading == [1, 2, 3]

    play(main)
