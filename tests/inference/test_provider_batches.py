"""`ProviderBatchInference` by itself: the money that it reserves, the lines that it wants, and what it remembers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.inference.batch_provider import BatchServer, provider

from batchwright.backoff import Backoff
from batchwright.errors import BudgetExhausted, EndpointError, EngineClosed
from batchwright.inference.batches.account import BatchAccount, standing_text
from batchwright.inference.batches.deadline import Deadline
from batchwright.inference.batches.held import HeldLine, OpenBatch, line_name
from batchwright.inference.batches.journal import BatchEntry, Journal, may_be_paid
from batchwright.inference.batches.opening import open_provider
from batchwright.inference.batches.outcomes import Outcomes
from batchwright.inference.batches.provider import LineResult, RemoteBatch
from batchwright.inference.batches.provider_batches import BatchJob, ProviderBatchInference
from batchwright.inference.batches.times import BatchTimes
from batchwright.inference.inference import Call
from batchwright.inference.metering import Meter, Reservation
from batchwright.jobs.loading import NoModel
from batchwright.submitting.looking import LookPauses
from batchwright.submitting.moving import Mover

QUICK = BatchTimes(patience=0.05, looks=LookPauses(0.01, 0.02, 0.02), retries=Backoff(0.01, 0.05), settles_in=0.3)


class Kept(Reservation):
    def __init__(self, meter: Counting, request_id: str) -> None:
        self._meter, self._request_id = meter, request_id

    def settle(self, endpoint: str, answer: Mapping[str, Any]) -> None:
        assert answer["usage"]["total_tokens"] == 3
        self._meter.ended[self._request_id].append("settled")

    def release(self) -> None:
        self._meter.ended[self._request_id].append("released")

    def keep(self) -> None:
        raise AssertionError("the provider says what each line cost")


class Counting(Meter):
    def __init__(self, most: int = 10**9) -> None:
        self.ended: dict[str, list[str]] = {}
        self.reserved = Counter[str]()
        self._most = most

    async def reserve(
        self, call: Call, body: Mapping[str, Any], size: int, *, batch: bool = False, is_fetched: bool = False
    ) -> Reservation:
        assert batch
        assert size > len(str(body["prompt"]))
        if len(self.reserved) >= self._most:
            raise BudgetExhausted("no more")
        self.reserved[call.request_id] += 1
        self.ended.setdefault(call.request_id, [])
        return Kept(self, call.request_id)


def call(prompt: str) -> Call:
    return Call("/v1/completions", {"prompt": prompt, "model": "m"}, f"req_k_{prompt.replace(' ', '_')}", "batch")


def inference(server: BatchServer, folder: Path, meter: Meter, **more: Any) -> ProviderBatchInference:
    job = BatchJob(folder=folder)
    return ProviderBatchInference(open_provider(server.url, None), NoModel(), job, meter=meter, times=QUICK, **more)


def test_each_reservation_ends_once(tmp_path: Path) -> None:
    prompts = [*(f"p{number}" for number in range(30)), "fail one"]
    meter = Counting()

    async def main() -> list[Any]:
        with provider() as server:
            # Each batch expires when it is half done.
            server.expires_at = 15
            one = inference(server, tmp_path / "batches", meter)
            try:
                return [*await asyncio.gather(*(one.answer(call(each)) for each in prompts), return_exceptions=True)]
            finally:
                await one.close()

    *answers, failed = asyncio.run(main())
    assert [each["choices"][0]["text"] for each in answers] == [each.upper() for each in prompts[:-1]]
    assert isinstance(failed, EndpointError)
    assert set(meter.reserved.values()) == {1}
    assert meter.ended.pop("req_k_fail_one") == ["released"]
    assert {*map(tuple, meter.ended.values())} == {("settled",)}


def test_what_is_in_no_batch_is_given_back_and_the_rest_stays_reserved(tmp_path: Path) -> None:
    meter = Counting(most=11)

    async def main() -> None:
        with provider() as server:
            server.pace = 0
            one = inference(server, tmp_path / "batches", meter)
            sent = [asyncio.create_task(one.answer(call(f"s{number}"))) for number in range(10)]
            while "create" not in server.asked or not one._desk._batches:  # noqa: ASYNC110 - it happens elsewhere
                await asyncio.sleep(0.01)
            left = asyncio.create_task(one.answer(call("left")))
            await asyncio.sleep(0)
            with pytest.raises(BudgetExhausted):
                await one.answer(call("more"))
            left.cancel()
            await asyncio.gather(left, return_exceptions=True)
            await one.close()
            assert all(isinstance(each, EngineClosed) for each in await asyncio.gather(*sent, return_exceptions=True))
            with pytest.raises(EngineClosed):
                await one.answer(call("late"))

    asyncio.run(main())
    assert meter.ended.pop("req_k_left") == ["released"]
    assert [*meter.ended.values()] == [[]] * 10


@pytest.mark.parametrize("noted", [True, False])
def test_a_line_whose_caller_leaves_as_its_batch_ends_is_counted_once(noted: bool) -> None:
    ends: dict[str, Callable[[Outcomes, HeldLine], None]] = {
        "settled": lambda outcomes, line: outcomes.result(line, LineResult("x", answer={"usage": {"total_tokens": 3}})),
        "released": lambda outcomes, line: outcomes.error(line, EndpointError("x")),
        "moved": lambda outcomes, line: outcomes.live(line),
    }

    async def main() -> dict[str, list[str]]:
        meter, future = Counting(), asyncio.get_running_loop().create_future()
        future.cancel()
        for name, end in ends.items():
            reservation = await meter.reserve(Call("/v1/completions", {}, name), {"prompt": ""}, 9, batch=True)
            end(Outcomes(BatchAccount()), HeldLine(call("x"), "x", {}, 9, future, reservation, is_noted=noted))
        return meter.ended

    # What is in no batch is given back by whoever cancelled it.
    ended = {"settled": ["settled"], "released": ["released"], "moved": ["released"]}
    assert asyncio.run(main()) == (ended if noted else {name: [] for name in ends})


def test_no_more_lines_are_wanted_than_fit_into_memory(tmp_path: Path) -> None:
    async def main() -> None:
        with provider() as server:
            server.pace = 0
            one = inference(server, tmp_path / "batches", Counting(), most_bytes=100_000)
            assert one.wants == 6
            tasks = [asyncio.create_task(one.answer(call(f"p{number}"))) for number in range(12)]
            await asyncio.sleep(0)
            assert one.wants == 0
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert one.wants == 6
            await one.close()

    asyncio.run(main())


def test_who_asks_whether_anything_is_paid_changes_nothing(tmp_path: Path) -> None:
    """The run before was killed when it had made the file of its journal, and not written its beginning."""
    folder = tmp_path / "batches"
    assert not may_be_paid(folder)
    assert not folder.exists()
    folder.mkdir()
    for name, content in {"journal.jsonl": '{"form"', "x.input.jsonl": "x"}.items():
        (folder / name).write_text(content)
    assert not may_be_paid(folder)
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        "journal.jsonl": '{"form"',
        "x.input.jsonl": "x",
    }
    journal = Journal(folder, 7.0)
    journal.close()
    assert journal.begun == Journal(folder, 9.0).begun == 7.0


ENTRY = st.builds(
    BatchEntry,
    uuid=st.sampled_from(["u1", "u2", "u3"]),
    stage=st.sampled_from(["uploading", "uploaded", "creating", "created"]),
    endpoint=st.just("/v1/completions"),
    lines=st.integers(1, 9),
    size=st.integers(1, 9),
    file=st.none() | st.text(),
    attempted_at=st.none() | st.floats(0, 1e9),
)


@given(st.lists(ENTRY, min_size=1, max_size=8), st.data())
def test_a_journal_that_was_cut_off_anywhere_has_what_was_noted_before(
    tmp_path_factory: pytest.TempPathFactory, entries: list[BatchEntry], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("journal") / "batches"
    journal = Journal(folder, 5.0)
    path, sizes = folder / "journal.jsonl", []
    for entry in entries:
        journal.note(entry)
        sizes.append(path.stat().st_size)
    journal.close()
    cut = data.draw(st.integers(0, sizes[-1]))
    content = path.read_bytes()[:cut]
    path.write_bytes(content)
    again = Journal(folder, 9.0)
    kept = [entry for entry, size in zip(entries, sizes, strict=True) if size <= cut]
    assert again.entries == {entry.uuid: entry for entry in kept}
    assert again.begun == (5.0 if b"\n" in content else 9.0)
    again.note(entries[0])
    again.close()
    assert Journal(folder, 9.0).entries == {entry.uuid: entry for entry in [*kept, entries[0]]}


def test_a_journal_that_was_changed_is_not_guessed_at(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "batches", 5.0)
    journal.close()
    path = tmp_path / "batches" / "journal.jsonl"
    path.write_bytes(path.read_bytes() + b"{half}\n")
    with pytest.raises(OSError, match=r"line 2 of .*journal\.jsonl is damaged"):
        Journal(tmp_path / "batches", 5.0)


@given(st.text(max_size=100))
def test_names_of_lines_are_what_every_provider_takes(request_id: str) -> None:
    name = line_name(request_id)
    assert 1 <= len(name) <= 48
    assert name.isascii()
    assert name.replace("_", "a").replace("-", "a").isalnum()
    assert line_name(name) == name


def test_where_lines_are_is_told() -> None:
    def told(counts: list[tuple[int, int]], **more: Any) -> str | None:
        others = {"gathered": 0, "waiting": 0, "live": 0, "next_look": None, "silence": 0.0}
        return standing_text(counts, **(others | more))

    assert told([]) is None
    assert told([(41_000, 100_000), (210, 20_000), (0, 0)], next_look=60.0) == (
        "3 batches at the provider: 41,210 of 120,000 lines done, next look in 60 s"
    )
    assert told([(1, 2)], next_look=0.5, live=3, gathered=1, waiting=2) == (
        "1 batch at the provider: 1 of 2 lines done, next look in 0 s, 2 batches to be submitted, 1 line gathered, "
        "3 lines taken up as live requests"
    )
    assert told([(1, 2)], next_look=5.0, silence=300.0) == (
        "1 batch at the provider: 1 of 2 lines done, the provider has not answered for 5 min, and is tried again"
    )


def test_a_batch_that_is_all_computed_is_waited_for_after_the_deadline() -> None:
    def batch(done: int) -> OpenBatch:
        remote = RemoteBatch("b", "in_progress", succeeded=done, total=9)
        return OpenBatch(cast("BatchEntry", SimpleNamespace(lines=9)), remote=remote)

    deadline = Deadline(
        8.0, cast("Outcomes", None), moves=False, keeps_cancelled=True, mover=cast("Mover", None),
        lines_left=lambda: 0, live_rate=lambda: 1.0,
    )  # fmt: skip
    half, whole = batch(4), batch(9)
    assert deadline.given_up(1.0, [half, whole], lambda _: 0.0, 0) == []
    assert deadline.given_up(-1.0, [half, whole], lambda _: 0.0, 0) == [half]
    assert deadline.given_up(-601.0, [half, whole], lambda _: 0.0, 0) == [half, whole]
