"""Batches through every state, with the real store, in virtual time."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections import Counter

import pytest
from tests.service.support import START, TENANT, House, Model, codes, in_house, line, pieces, refuse, texts

from batchwright.errors import (
    BatchwrightError,
    Conflict,
    EndpointDown,
    EndpointError,
    EndpointUnreachable,
    EngineClosed,
    Overloaded,
    StoreUnavailable,
)
from batchwright.lines.line_retries import RetryPolicy
from batchwright.service.worker.processes import this_process
from batchwright.store.records import LineCounts, TokenUsage


@in_house
async def test_a_batch_is_computed_and_its_output_is_in_the_order_of_its_lines(house: House) -> None:
    model = Model()
    model.delays = {"a": 5.0}
    async with house.worker(model):
        batch = await house.ended(await house.submit("abcdefghij"))
    assert batch.status == "completed"
    assert batch.model == "model"
    assert batch.counts == LineCounts(10, 10, 0)
    assert batch.usage == TokenUsage(10, 10, 20, 0)
    assert batch.error_file_id is None
    assert None not in (batch.in_progress_at, batch.finalizing_at, batch.completed_at)
    output = await house.content(batch.output_file_id)
    assert list(texts(output).items()) == [(f"id-{each}", each.upper()) for each in "abcdefghij"]
    hexes = batch.id.removeprefix("batch_")
    assert output[2]["id"] == f"batch_req_{hexes}_3"
    assert output[2]["response"]["request_id"] == f"req_{hexes}_3"
    assert output[2]["response"]["status_code"] == 200
    assert output[2]["error"] is None
    assert model.peak == 4
    assert set(model.calls.values()) == {1}
    file = await house.jobs.file(TENANT, batch.output_file_id or "")
    assert file.purpose == "batch_output"
    assert file.filename == f"{batch.id}_output.jsonl"


@in_house
async def test_lines_that_are_refused_go_to_the_error_file_with_their_status(house: House) -> None:
    model = Model()
    model.faults = refuse("b", "d")
    async with house.worker(model):
        batch = await house.ended(await house.submit("abcd"))
    assert batch.status == "completed"
    assert batch.counts == LineCounts(4, 2, 2)
    assert texts(await house.content(batch.output_file_id)) == {"id-a": "A", "id-c": "C"}
    errors = await house.content(batch.error_file_id)
    assert [each["custom_id"] for each in errors] == ["id-b", "id-d"]
    assert errors[0]["response"]["status_code"] == 400
    assert errors[0]["response"]["body"]["error"]["param"] == "prompt"
    assert errors[0]["error"] is None


@in_house
async def test_a_batch_all_of_whose_lines_failed_is_completed_with_an_error_file_only(house: House) -> None:
    model = Model()
    model.faults = refuse("a", "b")
    async with house.worker(model):
        batch = await house.ended(await house.submit("ab"))
    assert (batch.status, batch.output_file_id) == ("completed", None)
    assert len(await house.content(batch.error_file_id)) == 2


@in_house
async def test_cancelling_keeps_what_was_done_and_drops_what_is_computed(house: House) -> None:
    model = Model(slots=2)
    async with house.worker(model) as worker:
        batch = await house.submit("abcdef")
        await house.reaches(batch, "in_progress")
        await house.until(lambda: worker.stats.succeeded == 2)
        before = house.clock.now()
        assert (await house.jobs.cancel(TENANT, batch.id)).status == "cancelling"
        batch = await house.ended(batch)
        # It did not wait for the lines that were being computed.
        assert house.clock.now() - before <= 0.5
    assert batch.status == "cancelled"
    assert batch.counts == LineCounts(6, 2, 4)
    assert len(await house.content(batch.output_file_id)) == 2
    assert set(codes(await house.content(batch.error_file_id)).values()) == {"batch_cancelled"}
    assert model.held == 0


@in_house
async def test_lines_of_a_cancelled_batch_are_given_back_before_its_files_are_built(house: House) -> None:
    async def before(name: str) -> None:
        if name == "take_finishing":
            raise StoreUnavailable("away")

    house.store.before = before
    model = Model(slots=2, seconds=1e6)
    async with house.worker(model) as worker:
        batch = await house.submit("abcd")
        await house.until(lambda: worker.in_flight == 2)
        await house.jobs.cancel(TENANT, batch.id)
        await house.until(lambda: worker._claimed.empty)
        assert (await house.batch(batch)).ending == "cancelled"
        assert await house.store.retire_worker(worker.id) == 0


@in_house
async def test_a_batch_whose_time_is_over_expires_with_what_was_done(house: House) -> None:
    model = Model(slots=1, seconds=7.0)
    async with house.worker(model):
        batch = await house.ended(await house.submit("abcdef", completion_window="30s"))
    assert batch.status == "expired"
    assert batch.expires_at == batch.created_at + 30.0
    assert batch.expired_at is not None
    assert batch.expired_at - batch.expires_at < 3.0
    assert batch.counts == LineCounts(6, 4, 2)
    errors = await house.content(batch.error_file_id)
    assert codes(errors) == {"id-e": "batch_expired", "id-f": "batch_expired"}
    assert errors[0]["response"] is None


@in_house
async def test_a_line_that_takes_too_long_fails_alone(house: House) -> None:
    model = Model()
    model.delays = {"b": 1000.0}
    async with house.worker(model, request_timeout=20.0):
        batch = await house.ended(await house.submit("abc"))
    assert batch.counts == LineCounts(3, 2, 1)
    assert codes(await house.content(batch.error_file_id)) == {"id-b": "request_timeout"}
    assert model.held == 0


@in_house
async def test_exactly_the_lines_that_take_too_long_fail(house: House) -> None:
    model = Model(slots=7)
    model.delays = {str(number): 0.5 + number * 5 % 37 for number in range(60)}
    async with house.worker(model, request_timeout=20.0):
        batch = await house.ended(await house.submit(model.delays))
    late = {f"id-{prompt}" for prompt, delay in model.delays.items() if delay > 20.0}
    assert {*codes(await house.content(batch.error_file_id))} == late
    assert batch.counts == LineCounts(60, 60 - len(late), len(late))
    assert model.held == 0


@in_house
async def test_a_paused_batch_is_not_begun_until_it_is_resumed(house: House) -> None:
    model = Model(slots=1)
    async with house.worker(model):
        batch = await house.submit("abcd")
        await house.reaches(batch, "in_progress")
        assert (await house.jobs.pause(TENANT, batch.id)).paused
        await asyncio.sleep(100.0)
        done = (await house.batch(batch)).counts.completed
        assert done < 4
        await asyncio.sleep(100.0)
        assert (await house.batch(batch)).counts.completed == done
        before = house.clock.now()
        assert not (await house.jobs.resume(TENANT, batch.id)).paused
        await house.ended(batch)
        assert house.clock.now() - before < 6.0


@in_house
async def test_retry_makes_a_batch_of_the_lines_that_did_not_succeed(house: House) -> None:
    model = Model()
    model.faults = refuse("b", "d")
    async with house.worker(model):
        batch = await house.submit("abcd", metadata={"kind": "test"})
        with pytest.raises(Conflict):
            await house.jobs.retry(TENANT, batch.id)
        batch = await house.ended(batch)
        model.faults = lambda prompt: None
        again = await house.ended(await house.jobs.retry(TENANT, batch.id))
        with pytest.raises(Conflict):
            await house.jobs.retry(TENANT, again.id)
    assert again.parent_id == batch.id
    assert again.metadata == {"kind": "test"}
    assert again.counts == LineCounts(2, 2, 0)
    assert texts(await house.content(again.output_file_id)) == {"id-b": "B", "id-d": "D"}
    assert model.calls == Counter({"a": 1, "b": 2, "c": 1, "d": 2})


@in_house
async def test_results_can_be_read_while_it_runs_and_no_line_is_missed(house: House) -> None:
    prompts = [str(number) for number in range(50)]
    model = Model(slots=3)
    model.delays = {prompt: 1.0 + int(prompt) % 7 for prompt in prompts}
    seen: list[str] = []
    async with house.worker(model):
        batch = await house.submit(prompts)
        after = 0
        while len(seen) < 50:
            await asyncio.sleep(1.0)
            for each in await house.jobs.results(TENANT, batch.id, after=after, limit=7):
                assert each.sequence == after + 1
                after = each.sequence
                seen.append(each.custom_id)
    assert sorted(seen) == sorted(f"id-{prompt}" for prompt in prompts)


@in_house
async def test_passing_failures_are_tried_again(house: House) -> None:
    model = Model()
    errors = iter([
        Overloaded("full", retry_after=3.0),
        EndpointUnreachable("no connection"),
        StoreUnavailable("down"),
        EndpointError("busy", status=503),
    ])  # fmt: skip
    model.faults = lambda prompt: next(errors, None)
    async with house.worker(model):
        batch = await house.ended(await house.submit("abcd"))
    assert batch.counts == LineCounts(4, 4, 0)
    assert model.calls.total() == 8


@in_house
async def test_a_line_that_always_fails_while_others_succeed_is_given_up(house: House) -> None:
    model = Model(slots=2)
    model.faults = lambda prompt: EndpointError("reset", status=503) if prompt == "poison" else None
    async with house.worker(model, retries=RetryPolicy(max_tries=3)):
        batch = await house.ended(await house.submit(["poison", *map(str, range(40))]))
    assert batch.counts == LineCounts(41, 40, 1)
    assert model.calls["poison"] == 3
    [error] = await house.content(batch.error_file_id)
    assert error["response"]["status_code"] == 502


@in_house
async def test_an_outage_of_the_model_is_no_fault_of_the_lines(house: House) -> None:
    model = Model(slots=3)
    end = 1200.0
    model.faults = lambda prompt: EndpointUnreachable("down") if house.clock.now() < end else None
    async with house.worker(model, retries=RetryPolicy(max_tries=3)):
        batch = await house.ended(await house.submit("abcdefgh"))
    assert batch.counts == LineCounts(8, 8, 0)
    assert house.clock.now() > end


@pytest.mark.parametrize("error", [EngineClosed("gone"), EndpointDown("away", retry_after=30.0)])
@in_house
async def test_a_model_that_is_away_fails_no_line(house: House, error: BatchwrightError) -> None:
    model = Model()
    model.faults = lambda prompt: error if house.clock.now() < 60.0 else None
    async with house.worker(model):
        batch = await house.ended(await house.submit("abcdef"))
    assert batch.counts == LineCounts(6, 6, 0)


@in_house
async def test_a_defect_in_the_model_fails_its_line_alone_and_tells_nothing(house: House) -> None:
    model = Model()
    model.faults = lambda prompt: KeyError("secret") if prompt == "b" else None
    async with house.worker(model):
        batch = await house.ended(await house.submit("abc"))
    assert batch.counts == LineCounts(3, 2, 1)
    [error] = await house.content(batch.error_file_id)
    assert error["response"]["status_code"] == 500
    assert "secret" not in str(error)


@in_house
async def test_batches_go_by_the_earliest_end_of_their_window(house: House) -> None:
    model = Model(slots=1)
    late = await house.submit(["late-1", "late-2"])
    soon = await house.submit(["soon-1", "soon-2"], completion_window="1h")
    async with house.worker(model, concurrency=1):
        for batch in (soon, late):
            await house.ended(batch)
    assert list(model.calls)[-1].startswith("late")


@in_house
async def test_two_workers_share_a_batch(house: House) -> None:
    models = [Model(slots=2), Model(slots=2)]
    async with house.worker(models[0]), house.worker(models[1]):
        batch = await house.ended(await house.submit(map(str, range(100))))
    assert batch.counts == LineCounts(100, 100, 0)
    assert (models[0].calls + models[1].calls).total() == 100
    assert min(model.calls.total() for model in models) > 30


@in_house
async def test_a_worker_that_stops_finishes_what_it_computes_and_gives_back_the_rest(house: House) -> None:
    first, second = Model(slots=2, seconds=10.0), Model(slots=4)
    worker = house.worker(first)
    await worker.start()
    batch = await house.submit("abcdefgh")
    await house.until(lambda: first.held == 2)
    await worker.stop(grace=60.0)
    assert (await house.batch(batch)).counts.completed == 2
    before = house.clock.now()
    async with house.worker(second):
        batch = await house.ended(batch)
    # No lease had to run out first.
    assert house.clock.now() - before < 10.0
    assert batch.counts == LineCounts(8, 8, 0)
    assert (first.calls + second.calls).total() == 8


@in_house
async def test_a_worker_that_stops_without_grace_gives_everything_back(house: House) -> None:
    first, second = Model(slots=2, seconds=1000.0), Model(slots=4)
    worker = house.worker(first)
    await worker.start()
    batch = await house.submit("abcd")
    await house.until(lambda: first.held == 2)
    await worker.stop(grace=0.0)
    assert first.held == 0
    before = house.clock.now()
    async with house.worker(second):
        batch = await house.ended(batch)
    assert house.clock.now() - before < 10.0
    assert batch.counts == LineCounts(4, 4, 0)


@in_house
async def test_a_worker_that_stops_does_not_wait_for_the_next_try_of_a_line(house: House) -> None:
    model = Model(slots=2)
    model.faults = lambda prompt: EndpointError("busy", status=503)
    model.delays = {"b": 10.0}
    worker = house.worker(model, retries=RetryPolicy(first_delay=50.0))
    await worker.start()
    batch = await house.submit("ab")
    await house.until(lambda: model.calls.total() == 2 and model.held == 1)
    before = house.clock.now()
    await worker.stop(grace=60.0)
    # Line a waited when it stopped; b was computed then, and failed in its turn.
    assert house.clock.now() - before < 10.0
    assert model.calls.total() == 2
    assert await house.store.count_lines() == {"pending": 2, "claimed": 0, "suspect": 0}
    assert (await house.batch(batch)).status == "in_progress"


@pytest.mark.skipif(this_process() is None, reason="this system does not tell when a process began")
@in_house
async def test_the_lines_of_a_process_that_has_ended_are_taken_before_its_lease_is_over(house: House) -> None:
    async with house.worker(Model(slots=0)):
        batch = await house.reaches(await house.submit("abcd"), "in_progress")
    ended = (this_process() or "").rpartition("/")[0] + "/0"
    killed = await house.store.register_worker("killed", 1e6, ended)
    elsewhere = await house.store.register_worker("elsewhere", 100.0, f"elsewhere/{ended}")
    before = house.clock.now()
    for worker in (killed, elsewhere):
        assert len(await house.store.claim(worker, 2)) == 2
    async with house.worker(Model()) as working:
        await house.until(lambda: working.stats.succeeded == 2)
        assert house.clock.now() - before < 10.0
        batch = await house.ended(batch)
    assert house.clock.now() - before > 90.0
    assert batch.counts == LineCounts(4, 4, 0)


@in_house
async def test_a_worker_whose_lease_ran_out_begins_anew(house: House) -> None:
    """It stood still for longer than its lease, as after SIGSTOP, and another took its lines."""
    slow, other = Model(slots=4, seconds=5.0), Model(slots=4, seconds=0.1)
    stopped = house.worker(slow, lease=10.0)
    await stopped.start()
    batch = await house.submit("abcdefgh")
    await house.until(lambda: slow.held == 4)
    house.clock.advance(60.0)
    async with house.worker(other):
        batch = await house.ended(batch)
        assert batch.counts == LineCounts(8, 8, 0)
        again = await house.ended(await house.submit("xyz"))
        assert again.counts == LineCounts(3, 3, 0)
    assert stopped.stats.leases_lost == 1
    assert stopped.stats.succeeded <= 8
    await stopped.stop()


@in_house
async def test_lines_that_a_broken_connection_may_have_claimed_are_given_back(house: House) -> None:
    model = Model(slots=4)
    claims = 0

    async def after(name: str) -> None:
        nonlocal claims
        claims += name == "claim"
        if name == "claim" and claims in (1, 3):
            raise StoreUnavailable("the connection was lost in COMMIT")

    house.store.after = after
    async with house.worker(model, lease=1e6):
        batch = await house.ended(await house.submit("abcdefghijkl"))
    assert batch.counts == LineCounts(12, 12, 0)
    assert set(model.calls.values()) == {1}


@in_house
async def test_while_the_store_is_away_results_wait_for_it(house: House) -> None:
    model = Model(slots=4)
    away = False

    async def before(name: str) -> None:
        if away:
            raise StoreUnavailable("disk full")

    house.store.before = before
    async with house.worker(model, lease=600.0):
        batch = await house.submit("abcdefgh")
        await house.until(lambda: model.held == 4)
        away = True
        await asyncio.sleep(60.0)
        away = False
        batch = await house.ended(batch)
    assert batch.counts == LineCounts(8, 8, 0)
    assert set(model.calls.values()) == {1}


@in_house
async def test_until_idle_waits_for_everything_but_paused_batches(house: House) -> None:
    paused = await house.submit("ab")
    await house.jobs.pause(TENANT, paused.id)
    batches = [await house.submit("abc"), await house.submit("defgh")]
    async with house.worker(Model(slots=2)) as worker:
        await worker.until_idle()
        for batch in batches:
            assert (await house.batch(batch)).status == "completed"
        assert (await house.batch(paused)).status == "in_progress"


@in_house
async def test_an_input_that_was_lost_fails_its_lines(house: House) -> None:
    model = Model(slots=1, seconds=10.0)
    async with house.worker(model):
        batch = await house.submit("abc")
        await house.until(lambda: model.held == 1)
        await house.blobs.remove([batch.input_file_id])
        batch = await house.ended(batch)
    assert batch.counts == LineCounts(3, 1, 2)
    assert set(codes(await house.content(batch.error_file_id)).values()) == {"input_broken"}


@pytest.mark.parametrize("asks_once", [False, True])
@in_house
async def test_an_input_that_cannot_be_read_fails_its_own_lines_alone(house: House, asks_once: bool) -> None:
    async with house.worker(Model(slots=0)):
        broken = await house.reaches(await house.submit("ab", tenant="a"), "in_progress")
        sound = await house.reaches(await house.submit("cd", tenant="b"), "in_progress")
    path = house.blobs.path(broken.input_file_id)
    path.unlink()
    path.mkdir()
    async with house.worker(Model(), asks_once=asks_once):
        await asyncio.sleep(60.0)
    broken, sound = await house.batch(broken), await house.batch(sound)
    assert (broken.counts, sound.counts) == (LineCounts(2, 0, 2), LineCounts(2, 2, 0))
    assert set(codes(await house.content(broken.error_file_id, tenant="a")).values()) == {"input_broken"}


@in_house
async def test_a_bad_place_of_an_input_fails_the_line_in_it_alone(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with house.worker(Model(slots=0)):
        batch = await house.reaches(await house.submit("abc"), "in_progress")
    bad, pread = len(line("a")) + 5, os.pread

    def fails(descriptor: int, count: int, offset: int) -> bytes:
        if offset <= bad < offset + count:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(descriptor, count, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", fails)
        async with house.worker(Model()):
            batch = await house.ended(batch)
    assert batch.counts == LineCounts(3, 2, 1)
    assert codes(await house.content(batch.error_file_id)) == {"id-b": "input_broken"}


@pytest.mark.parametrize("is_mount_point", [False, True])
@in_house
async def test_nothing_fails_while_the_folder_of_all_files_is_away(house: House, is_mount_point: bool) -> None:
    async with house.worker(Model(slots=0)):
        validated = await house.reaches(await house.submit("ab"), "in_progress")
    fresh = await house.submit("cd")
    files, away = house.blobs.folder, house.folder / "away"
    files.rename(away)
    if is_mount_point:
        files.mkdir()
    async with house.worker(Model()):
        await asyncio.sleep(60.0)
        assert (await house.batch(validated)).counts == LineCounts(2, 0, 0)
        assert (await house.batch(fresh)).status == "validating"
        shutil.rmtree(files, ignore_errors=True)
        away.rename(files)
        for batch in (validated, fresh):
            assert (await house.ended(batch)).counts == LineCounts(2, 2, 0)


@in_house
async def test_a_batch_whose_input_cannot_be_read_is_rejected(house: House) -> None:
    batch = await house.submit("ab")
    path = house.blobs.path(batch.input_file_id)
    path.unlink()
    path.mkdir()
    async with house.worker(Model()):
        batch = await house.ended(batch)
    assert [problem.message for problem in batch.errors] == ["The input file cannot be read: IsADirectoryError."]


@in_house
async def test_files_whose_time_is_over_lose_their_bytes_but_not_while_a_batch_reads_them(house: House) -> None:
    model = Model(slots=1, seconds=1300.0)
    async with house.worker(model, poll=20.0):
        file = await house.jobs.upload(TENANT, "in", pieces(*map(line, "abc")), expires_after=3600.0)
        batch = await house.jobs.create_batch(TENANT, input_file_id=file.id, endpoint="/v1/completions")
        batch = await house.ended(batch)
        assert house.now() > START + 3600.0
        assert batch.counts == LineCounts(3, 3, 0)
        await asyncio.sleep(60.0)
        assert house.files() == [batch.output_file_id]
        await house.jobs.delete_file(TENANT, batch.output_file_id or "")
        await asyncio.sleep(2.0)
        assert house.files() == []
