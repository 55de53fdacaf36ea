"""Any sequence of claims, results, deaths, expiries, retries, removals and whatever else, against a plain model."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)
from tests import long_form
from tests.store.life_model import Batch, Line, Model, give_back, position
from tests.store.support import START, World, result

from batchwright.errors import Conflict, LeaseLost, NotFound
from batchwright.store import open_store
from batchwright.store.records import BatchRecord, ClaimedLine

T = TypeVar("T")
MOST = 3
"""Deaths after which a line fails."""


class Life(RuleBasedStateMachine):
    """One store. Results of any age are committed by anyone, in any order."""

    url: Callable[[], str]
    workers = Bundle("workers")
    batches = Bundle("batches")
    claims = Bundle("claims")

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        clock = [START]
        self.world = World(open_store(type(self).url(), now=lambda: clock[0]), clock)
        self.store = self.world.store
        self.model = Model()

    def teardown(self) -> None:
        self.do(self.store.close())
        self.loop.close()

    def do(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(coroutine)

    def holds(self, worker: str) -> bool:
        return self.model.leases.get(worker, 0) > self.world.now

    @initialize(target=workers)
    def first_workers(self) -> Any:
        return multiple(self.registered(500), self.registered(500))

    @initialize(target=batches)
    def first_batch(self) -> str:
        return self.submitted(8, 500)

    @rule(target=workers, lease=st.sampled_from([5, 500]))
    def register(self, lease: float) -> str:
        return self.registered(lease)

    def registered(self, lease: float) -> str:
        worker = self.do(self.world.worker(lease))
        self.model.leases[worker] = self.world.now + lease
        return worker

    @rule(
        target=batches, lines=st.integers(1, 8), window=st.sampled_from([10, 500]), tenant=st.sampled_from(["t", "u"])
    )
    def submit(self, lines: int, window: float, tenant: str) -> str:
        return self.submitted(lines, window, tenant)

    def submitted(self, lines: int, window: float, tenant: str = "t") -> str:
        async def made() -> BatchRecord:
            maker = await self.world.worker()
            batch = await self.world.running(
                maker, lines, tenant, window=window, callback_url="https://example.com", position=position
            )
            await self.store.retire_worker(maker)
            return batch

        record = self.do(made())
        self.model.batches[record.id] = Batch(record, {number: Line() for number in range(1, lines + 1)})
        return record.id

    @rule(target=claims, worker=workers, limit=st.integers(1, 6), committed=st.integers(0, 3))
    def work(self, worker: str, limit: int, committed: int) -> Any:
        """Claim, and commit some of it at once."""
        found = self.claimed(worker, limit)
        if found and committed:
            self.commit(worker, found[:committed], True)
        return multiple(*found)

    def claimed(self, worker: str, limit: int) -> list[ClaimedLine]:
        if not self.holds(worker):
            with pytest.raises(LeaseLost):
                self.do(self.store.claim(worker, limit))
            return []
        found = self.do(self.store.claim(worker, limit))
        places = self.model.claim(worker, limit, self.world.now)
        lines = [(batch.record.id, number, batch.lines[number]) for batch, number in places]
        assert [(line.batch_id, line.number, line.attempt, line.crashes, line.given_up) for line in found] == [
            (batch_id, number, line.attempt, line.crashes if line.crash is not None else 0, self.model.given_up(line))
            for batch_id, number, line in lines
        ]
        return found

    @rule(worker=workers, lines=st.lists(claims, min_size=1, max_size=6), succeeded=st.booleans())
    def commit(self, worker: str, lines: list[ClaimedLine], succeeded: bool) -> None:
        results = [result(line, succeeded) for line in lines]
        if not self.holds(worker):
            with pytest.raises(LeaseLost):
                self.do(self.store.commit(worker, results))
            return
        taken = self.do(self.store.commit(worker, results))
        # Batch by batch, in each in the order given.
        expected = [False] * len(results)
        before = self.finished()
        for batch in self.model.batches.values():
            for number, line in enumerate(lines):
                if line.batch_id == batch.record.id:
                    expected[number] = self.taken(batch, line, succeeded)
            if batch.finished == len(batch.lines) and batch.status == "in_progress" and not batch.ending:
                batch.status, batch.ending = "finalizing", "completed"
        assert taken == expected
        for tenant, lines_finished in self.finished().items():
            self.model.charge(tenant, lines_finished - before[tenant])

    def finished(self) -> dict[str, int]:
        batches = self.model.batches.values()
        return {name: sum(b.finished for b in batches if b.record.tenant == name) for name in self.model.tenants}

    @rule(worker=workers, limit=st.integers(1, 6), expire=st.booleans())
    def commit_too_late(self, worker: str, limit: int, expire: bool) -> None:
        """Claim, and commit when the batch has an ending."""
        found = self.claimed(worker, limit)
        if not found:
            return
        if expire:
            self.wait(200, False)
            self.expire()
        else:
            self.cancel(found[0].batch_id)
        self.commit(worker, found, True)

    def taken(self, batch: Batch, given: ClaimedLine, succeeded: bool) -> bool:
        line = batch.lines[given.number]
        if line.attempt != given.attempt or line.state in ("pending", "suspect"):
            return False
        if line.state == "claimed":
            if batch.ending or batch.status != "in_progress":
                return False
            batch.finished += 1
            line.state, line.worker, line.sequence = "succeeded" if succeeded else "failed", None, batch.finished
            line.crash = None
        return True

    @rule(worker=workers, lines=st.lists(claims, min_size=1, max_size=4))
    def release(self, worker: str, lines: list[ClaimedLine]) -> None:
        self.do(self.store.release(worker, lines))
        for given in lines:
            line = self.model.batches[given.batch_id].lines[given.number]
            if (line.state, line.worker, line.attempt) == ("claimed", worker, given.attempt):
                give_back(line)

    @rule(seconds=st.sampled_from([1, 5, 200]), reap=st.booleans())
    def wait(self, seconds: float, reap: bool) -> None:
        self.world.later(seconds)
        if reap:
            self.reap()

    @rule(worker=workers)
    def renew(self, worker: str) -> None:
        assert self.do(self.store.renew_lease(worker, 500)) == self.holds(worker)
        if self.holds(worker):
            self.model.leases[worker] = self.world.now + 500

    @rule(worker=consumes(workers))
    def retire(self, worker: str) -> None:
        self.do(self.store.retire_worker(worker))
        if worker in self.model.leases:
            self.model.free(worker)

    @rule(target=workers, worker=consumes(workers), reap=st.booleans())
    def come_back(self, worker: str, reap: bool) -> str:
        """A worker whose lease ran out, or that was taken for dead, registers again."""
        if reap and worker in self.model.leases:
            self.killed(worker)
        again = self.do(self.store.register_worker("again", 500, former=worker))
        if worker in self.model.leases:
            self.model.free(worker)
        self.model.clear(worker)
        self.model.leases[again] = self.world.now + 500
        return again

    @rule(target=workers, worker=consumes(workers))
    def crash(self, worker: str) -> str:
        """Another one begins in its place."""
        self.killed(worker)
        return self.registered(500)

    def killed(self, worker: str) -> None:
        found = self.do(self.store.worker_died(worker, max_crashes=MOST))
        assert found == (self.model.die(worker, self.world.now, MOST) if worker in self.model.leases else 0)

    def reap(self) -> None:
        dead = sorted(worker for worker, until in self.model.leases.items() if until <= self.world.now)
        found = self.do(self.store.reap(max_crashes=MOST))
        assert found == sum(self.model.die(worker, self.world.now, MOST) for worker in dead)
        self.model.forget_crashes()

    @rule(batch_id=batches, what=st.sampled_from(["finish", "resume", "pause", "expire", "cancel"]))
    def decide(self, batch_id: str, what: str) -> None:
        match what:
            case "cancel":
                self.cancel(batch_id)
            case "pause" | "resume":
                self.pause(batch_id, what == "pause")
            case "expire":
                self.expire()
            case _:
                self.finish()

    def cancel(self, batch_id: str) -> None:
        batch = self.model.batches[batch_id]
        self.do(self.store.request_cancel(batch.record.tenant, batch_id))
        if batch.status == "in_progress" and not batch.ending:
            batch.status, batch.ending = "cancelling", "cancelled"

    def pause(self, batch_id: str, paused: bool) -> None:
        batch = self.model.batches[batch_id]
        self.do(self.store.set_paused(batch.record.tenant, batch_id, paused))
        if batch.status == "in_progress" and not batch.ending:
            batch.paused = paused

    def expire(self) -> None:
        due = {
            batch.record.id
            for batch in self.model.batches.values()
            if batch.status == "in_progress" and not batch.ending and batch.record.expires_at <= self.world.now
        }
        assert set(self.do(self.store.expire_batches())) == due
        for batch_id in due:
            self.model.batches[batch_id].ending = "expired"

    def finish(self) -> None:
        async def finished() -> BatchRecord | None:
            worker = await self.world.worker()
            taken = await self.store.take_finishing(worker)
            if taken is not None:
                counts = taken.counts
                left = counts.total - counts.completed - counts.failed
                file = self.world.new_file(taken.tenant, purpose="batch_output")
                assert await self.store.finish(worker, taken.id, output=file, errors=None, unfinished=left)
                self.model.batches[taken.id].file = file.id
            await self.store.retire_worker(worker)
            return taken

        taken = self.do(finished())
        waiting = [batch for batch in self.model.batches.values() if batch.ending]
        if taken is None:
            assert not waiting
            return
        # Stable: then by age.
        waiting.sort(key=lambda batch: self.model.tenants[batch.record.tenant].finished_at)
        batch = waiting[0]
        self.model.tenants[batch.record.tenant].finished_at = self.world.now
        assert taken.id == batch.record.id
        assert batch.ending is not None
        batch.status, batch.ending = batch.ending, None
        batch.unfinished = len(batch.lines) - batch.finished
        self.model.events += 1
        for line in batch.lines.values():
            if line.state in ("claimed", "suspect"):
                line.state, line.worker, line.crash = "pending", None, None

    @rule(target=batches, batch_id=batches)
    def retry(self, batch_id: str) -> Any:
        parent = self.model.batches[batch_id]
        left = [number for number, line in sorted(parent.lines.items()) if line.state != "succeeded"]
        tenant = parent.record.tenant
        file = self.world.new_file(tenant)
        new = self.world.new_batch(file, window=500, callback_url="https://example.com")
        if parent.removed or not left or parent.status not in ("completed", "expired", "cancelled"):
            with pytest.raises(Conflict):
                self.do(self.store.retry_batch(tenant, batch_id, new))
            return multiple()
        made = self.do(self.store.retry_batch(tenant, batch_id, new))
        self.model.batches[made.id] = Batch(made, {number: Line() for number in left})
        return made.id

    @rule(batch_id=batches)
    def forget(self, batch_id: str) -> None:
        batch = self.model.batches[batch_id]
        if batch.file is not None and not batch.removed:
            assert self.do(self.store.delete_file(batch.record.tenant, batch.file))
            self.do(self.store.forget_files([batch.file]))
            batch.removed = True

    @rule(limit=st.integers(1, 6))
    def remove(self, limit: int) -> None:
        """Rows that no batch has any more: nothing is seen of it."""
        self.do(self.store.remove_lines(limit, age=1e9))

    @invariant()
    def same(self) -> None:
        self.do(self.compare_all())

    async def compare_all(self) -> None:
        await asyncio.gather(*(self.compare(batch_id, batch) for batch_id, batch in self.model.batches.items()))
        running = [b for b in self.model.batches.values() if b.status == "in_progress" and not b.ending]
        counted = {state: sum(len(batch.of(state)) for batch in running) for state in ("pending", "claimed", "suspect")}
        assert await self.store.count_lines() == counted
        assert (await self.store.count_deliveries())["pending"] == self.model.events

    async def compare(self, batch_id: str, batch: Batch) -> None:
        tenant = batch.record.tenant
        found = await self.store.batch(tenant, batch_id)
        assert found is not None
        assert (found.status, found.ending, found.paused) == (batch.status, batch.ending, batch.paused)
        succeeded, failed = len(batch.of("succeeded")), len(batch.of("failed"))
        assert (found.counts.total, found.counts.completed) == (len(batch.lines), succeeded)
        assert found.counts.failed == failed + batch.unfinished
        assert found.usage.input_tokens == 3 * (succeeded + failed)
        assert (found.lines_removed_at is not None) == batch.removed
        lines = await self.store.lines(batch_id, after=0, limit=99)
        if batch.removed:
            assert lines == []
            with pytest.raises(NotFound, match="removed"):
                await self.store.results(tenant, batch_id, after=0, limit=99)
            return
        assert {line.number: (line.state, line.sequence) for line in lines} == {
            number: (line.state, line.sequence) for number, line in batch.lines.items()
        }
        assert all((line.output is None) == (line.sequence is None) for line in lines)
        done = await self.store.results(tenant, batch_id, after=0, limit=99)
        assert done is not None
        assert [line.sequence for line in done] == [*range(1, batch.finished + 1)]


def _assert_lives_by_the_model(url: Callable[[], str], examples: int, steps: int) -> None:
    machine = type("LifeHere", (Life,), {"url": staticmethod(url)})
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=examples, stateful_step_count=steps, suppress_health_check=checks),
    )


def test_on_sqlite(folder: Path) -> None:
    names = itertools.count()
    _assert_lives_by_the_model(lambda: str(folder / f"{next(names)}.db"), long_form.examples(30, long=80), 40)


def test_on_postgresql(request: pytest.FixtureRequest) -> None:
    empty: Callable[[], str] = request.getfixturevalue("empty")
    _assert_lives_by_the_model(empty, 6, 30)
