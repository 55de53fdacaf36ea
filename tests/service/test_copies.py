"""Lines of a batch that ask the same: asked once, each with a result of its own, whatever happens to the worker."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.long_form import examples
from tests.service.support import ENDPOINT, TENANT, House, Model, codes, in_house, refuse, run, texts
from tests.service.test_crashes import Chaos
from tests.stores import in_memory

from batchwright.errors import EndpointDown, StoreUnavailable
from batchwright.lines.batch_line import encode_answer
from batchwright.planning.identical import RepeatFinder, Sharing
from batchwright.service.worker import copies
from batchwright.service.worker.claimed_lines import ClaimedLines
from batchwright.service.worker.copies import Copies
from batchwright.service.worker.worker import Worker
from batchwright.store.records import BatchRecord, ClaimedLine, LineCounts, LineResult, TokenUsage


def greedy(prompt: str, custom_id: str, **body: Any) -> bytes:
    fields = {"model": "model", "prompt": prompt, "temperature": 0, **body}
    return msgspec.json.encode({"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": fields}) + b"\n"


async def submit(house: House, prompts: Iterable[str], **body: Any) -> BatchRecord:
    lines = [greedy(prompt, f"{number}-{prompt}", **body) for number, prompt in enumerate(prompts)]
    file_id = await house.upload(*lines)
    return await house.jobs.create_batch(TENANT, input_file_id=file_id, endpoint=ENDPOINT)


async def check(house: House, batch: BatchRecord, prompts: Iterable[str]) -> list[dict[str, Any]]:
    """Each line has the answer to its own prompt, under its own ids."""
    output = await house.content(batch.output_file_id)
    assert texts(output) == {f"{number}-{prompt}": prompt.upper() for number, prompt in enumerate(prompts)}
    hexes = batch.id.removeprefix("batch_")
    assert [each["id"] for each in output] == [f"batch_req_{hexes}_{number + 1}" for number in range(len(output))]
    return output


def marks(output: list[dict[str, Any]]) -> list[bool]:
    return [each["response"]["body"]["usage"].get("deduplicated", False) for each in output]


@in_house
async def test_identical_lines_are_asked_once_and_have_results_of_their_own(house: House) -> None:
    model, prompts = Model(slots=2), ["a", "b", "a", "a", "c", "b", "a"] * 20
    async with house.worker(model, asks_once=True) as worker:
        batch = await house.ended(await submit(house, prompts))
    output = await check(house, batch, prompts)
    assert model.calls == {"a": 1, "b": 1, "c": 1}
    assert marks(output).count(False) == 3
    assert batch.counts == LineCounts(140, 140, 0)
    # The tokens are those of what was asked.
    assert batch.usage == TokenUsage(3, 3, 6, 0)
    assert worker.stats.succeeded == 140
    assert worker._copies._fresh.keys() <= worker._copies._committed


@in_house
async def test_only_lines_with_the_same_answer_each_time_are_shared(house: House) -> None:
    model = Model()
    async with house.worker(model, asks_once=True):
        sampled = await house.ended(await submit(house, "aa", temperature=1))
        seeded = await house.ended(await submit(house, "bb", temperature=1, seed=3))
        batches = [await house.ended(await submit(house, "cc")) for _ in range(2)]
    assert model.calls == {"a": 2, "b": 1, "c": 2}
    assert len({batch.tenant for batch in (sampled, seeded, *batches)}) == 1
    async with house.worker(model):
        await house.ended(await submit(house, "dd"))
    assert model.calls["d"] == 2


@pytest.mark.parametrize("here", [True, False])
@in_house
async def test_a_model_here_is_asked_once_whatever_the_seeds_of_greedy_lines(house: House, here: bool) -> None:
    fields: list[dict[str, Any]] = [
        {"max_tokens": 4, "seed": 1},
        {"max_completion_tokens": 4, "top_p": 0.5},
        {"max_tokens": 4, "user": 5},
        {"max_tokens": 4, "seed": "x"},
        {"max_tokens": 4.0},
    ]
    lines = [greedy("a", f"{number}-a", **each) for number, each in enumerate(fields)]
    async with house.worker(Model(), asks_once=True, computes_here=here):
        file_id = await house.upload(*lines)
        batch = await house.jobs.create_batch(TENANT, input_file_id=file_id, endpoint=ENDPOINT)
        batch = await house.ended(batch)
    marked = marks(await check(house, batch, "aaaaa"))
    # Lines that a model here has to refuse are asked, or they would be answered. Of an endpoint that is not known.
    assert sorted(marked[:2]) == [False, here]
    assert sorted([marked[2], marked[4]]) == [False, not here]
    assert not marked[3]


@in_house
async def test_an_error_is_that_of_one_line_and_the_next_asks(house: House) -> None:
    model = Model()
    model.faults = refuse("a")
    async with house.worker(model, asks_once=True):
        batch = await house.ended(await submit(house, "aaaaab"))
    assert batch.counts == LineCounts(6, 1, 5)
    assert len(codes(await house.content(batch.error_file_id))) == 5
    assert model.calls == {"a": 5, "b": 1}


@in_house
async def test_after_a_death_what_was_committed_is_not_asked_again(house: House) -> None:
    model = Model(slots=1)
    prompts = ["a", *"bcdefghij", "a", "a", "b"]
    first = house.worker(model, asks_once=True, lease=5.0)
    await first.start()
    batch = await submit(house, prompts)
    await house.until(lambda: first.stats.succeeded >= 3)
    await house.die(first)
    async with house.worker(model, asks_once=True, lease=5.0):
        batch = await house.ended(batch)
    await check(house, batch, prompts)
    assert model.calls["a"] == 1
    # That which was in progress at the death may be asked twice, as any line.
    assert model.calls.total() <= 11


@in_house
async def test_copies_are_given_back_with_the_line_that_they_wait_for(house: House) -> None:
    model = Model(slots=2, seconds=5.0)
    worker = house.worker(model, asks_once=True)
    await worker.start()
    batch = await submit(house, "aaaa")
    await house.until(lambda: worker._claimed._held[batch.id] == 4)
    await worker.stop(grace=0.0)
    assert (await house.store.count_lines())["pending"] == 4
    async with house.worker(model, asks_once=True):
        batch = await house.ended(batch)
    await check(house, batch, "aaaa")


@in_house
async def test_a_worker_that_stops_answers_the_copies_of_what_it_finishes(house: House) -> None:
    model = Model(slots=2, seconds=5.0)
    worker = house.worker(model, asks_once=True)
    await worker.start()
    batch = await submit(house, "aaabbc")
    await house.until(lambda: worker._claimed._held[batch.id] == 4)
    await worker.stop()
    assert (worker.stats.succeeded, model.calls) == (4, {"a": 1, "b": 1})
    async with house.worker(model, asks_once=True):
        await check(house, await house.ended(batch), "aaabbc")
    assert model.calls == {"a": 1, "b": 1, "c": 1}


@in_house
async def test_a_model_that_is_away_loses_no_copy(house: House) -> None:
    model = Model()
    away = [EndpointDown("away", retry_after=1.0) for _ in range(3)]
    model.faults = lambda prompt: away.pop() if away else None
    async with house.worker(model, asks_once=True):
        batch = await house.ended(await submit(house, "aaaa"))
    await check(house, batch, "aaaa")
    assert model.calls == {"a": 4}


@in_house
async def test_a_batch_that_is_cancelled_takes_its_copies_along(house: House) -> None:
    model = Model(seconds=1000.0)
    async with house.worker(model, asks_once=True) as worker:
        batch = await submit(house, "aaaa")
        await house.until(lambda: worker.in_flight == 1)
        await asyncio.sleep(5.0)
        assert (worker.in_flight, worker._claimed._held[batch.id]) == (1, 4)
        await house.jobs.cancel(TENANT, batch.id)
        batch = await house.ended(batch)
        assert (batch.status, batch.counts) == ("cancelled", LineCounts(4, 0, 4))
        model.seconds = 1.0
        await check(house, await house.ended(await submit(house, "bb")), "bb")
        assert worker._claimed.empty


@in_house
async def test_more_batches_with_copies_than_are_known_at_once(house: House) -> None:
    model = Model(slots=8, seconds=5.0)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(copies, "_MOST_BATCHES", 1)
        async with house.worker(model, asks_once=True):
            batches = [await submit(house, prompts) for prompts in ("aaa", "bb", "cc")]
            for batch, prompts in zip(batches, ("aaa", "bb", "cc"), strict=True):
                await check(house, await house.ended(batch), prompts)
    assert model.calls["a"] == 1


@in_house
async def test_two_workers_ask_at_most_once_each(house: House) -> None:
    models, prompts = [Model(slots=2), Model(slots=2)], "ab" * 50
    async with house.worker(models[0], asks_once=True), house.worker(models[1], asks_once=True):
        batch = await house.ended(await submit(house, prompts))
    await check(house, batch, prompts)
    for model in models:
        assert set(model.calls.values()) <= {1}


@in_house
async def test_while_the_store_is_away_answers_wait_for_it(house: House) -> None:
    model = Model()
    fails = [StoreUnavailable("away")] * 3

    async def away(name: str) -> None:
        if name == "commit" and fails:
            raise fails.pop()

    house.store.before = away
    async with house.worker(model, asks_once=True):
        batch = await house.ended(await submit(house, "ab" * 30))
    await check(house, batch, "ab" * 30)
    assert model.calls == {"a": 1, "b": 1}


@pytest.mark.parametrize("most", [0, 3])
@in_house
async def test_copies_beyond_those_that_may_wait_are_asked(house: House, most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("batchwright.service.worker.copies._MOST_WAITING", most)
        model = Model(slots=4)
        async with house.worker(model, asks_once=True):
            batch = await house.ended(await submit(house, "a" * 20))
    await check(house, batch, "a" * 20)
    assert 1 < model.calls["a"] <= 20


@settings(max_examples=examples(8, long=15))
@given(st.integers(0, 2**32), st.lists(st.integers(0, 4), min_size=1, max_size=40), st.integers(0, 3))
def test_each_line_is_committed_once_whatever_fails(seed: int, asked: list[int], crashes: int) -> None:
    """As in `test_crashes`, with lines most of which ask the same."""
    chaos = Chaos(seed)
    prompts = [f"p{number}{'!' if number == 4 else ''}" for number in asked]

    def worker(place: House) -> Worker:
        model = Model(slots=chaos.draw.randint(1, 5), seconds=chaos.draw.uniform(0.1, 3.0))
        model.faults = chaos.fault
        return place.worker(model, asks_once=True, lease=10.0, max_crashes=1000)

    async def main(place: House) -> None:
        batch = await submit(place, prompts)
        place.store.before, place.store.after = chaos.before, chaos.after
        for _ in range(crashes):
            for _ in range(chaos.draw.randint(1, 2)):
                await worker(place).start()
            await asyncio.sleep(chaos.draw.uniform(0.0, 10.0))
            for each in [*place.workers]:
                await place.die(each)
        chaos.on = False
        async with worker(place) as last:
            batch = await place.ended(batch)
            assert last._claimed.empty
        results = await place.jobs.results(TENANT, batch.id, limit=1000)
        assert Counter(each.number for each in results) == Counter(range(1, len(prompts) + 1))
        answered = texts(await place.content(batch.output_file_id)) if batch.output_file_id else {}
        failed = codes(await place.content(batch.error_file_id)) if batch.error_file_id else {}
        assert {*answered} | {*failed} == {f"{number}-{prompt}" for number, prompt in enumerate(prompts)}
        assert all(text == custom_id.partition("-")[2].upper() for custom_id, text in answered.items())
        assert (batch.counts.completed, batch.counts.failed) == (len(answered), len(failed))

    with in_memory() as folder:
        run(folder, main)


def test_copies_share_one_answer_until_they_are_committed() -> None:
    nothing: Any = None
    finder, ours = RepeatFinder(), Copies(nothing, nothing, longest_line=1000)
    for number in range(1, 3001):
        finder.add(number, bytes(16))
    ours._sharing["batch_0"] = Sharing(finder.repeats())
    claimed = ClaimedLines(nothing, ours)
    lines = [
        ClaimedLine("batch_0", number, 1, f"c{number}", 0, 10, "file-0", "/v1/completions", 1e9)
        for number in range(1, 3001)
    ]
    claimed.take((each, b"") for each in lines[:2500])
    asked = claimed.next()
    assert asked is not None
    body = {"choices": [{"text": "x" * 20_000}], "usage": {"completion_tokens": 9}}
    output = encode_answer("0", 1, "c1", body)
    claimed.end(asked[0], LineResult("batch_0", 1, 1, True, output))
    # Those that come later find the answer, too.
    claimed.take((each, b"") for each in lines[2500:2900])
    # Each of these has read the answer from the store.
    claimed.answer_at_once((each, bytes(bytearray(output))) for each in lines[2900:3000])
    assert claimed._result_bytes == 2 * len(output)
    assert len({id(each[1]) for each in claimed._results if isinstance(each, tuple)}) == 1
    assert not claimed.congested
    committed: list[LineResult] = []
    while results := claimed.gather_results():
        assert sum(len(each.output) for each in results) <= 17 * 2**20
        if not committed:
            claimed.put_back(results)
            results = claimed.gather_results()
        committed += results
        claimed.release(results)
    assert [each.number for each in committed] == [*range(1, 3001)]
    assert [msgspec.json.decode(each.output)["custom_id"] for each in committed] == [f"c{n}" for n in range(1, 3001)]
    assert marks([msgspec.json.decode(each.output) for each in committed]) == [False, *[True] * 2999]
    assert claimed.empty
    assert claimed._result_bytes == 0


@in_house
async def test_why_an_input_cannot_be_read_is_looked_up_in_a_thread(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    file_id = await house.upload(greedy("a", "a"))
    path = house.blobs.path(file_id)
    path.unlink()
    path.mkdir()
    looked: list[int] = []
    scandir = os.scandir

    def noted(folder: Any) -> Any:
        looked.append(threading.get_ident())
        return scandir(folder)

    line = ClaimedLine("batch_0", 1, 1, "a", 0, 10, file_id, "/v1/completions", 1e9)
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", noted)
        assert await Copies(house.store, house.blobs, longest_line=1000).answered_before([(line, b"")]) == [None]
    assert looked
    assert threading.get_ident() not in looked
