"""What can be asked of files and batches, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.service.support import ENDPOINT, START, TENANT, House, Model, in_house, line, pieces, refuse, run

from batchwright.errors import Conflict, InvalidRequest, NotFound, QuotaExceeded, StoreUnavailable
from batchwright.limiting.quotas import Quotas
from batchwright.service.batches.simple_batches import Prompts, SimpleOutput, status_of
from batchwright.service.limits import ServiceLimits


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"endpoint": "/v1/images"}, "endpoint"),
        ({"completion_window": "1 day"}, "completion_window"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"completion_window": "-1h"}, "completion_window"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"completion_window": "٣h"}, "completion_window"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"metadata": {"": "v"}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"metadata": {"k": 1}}, "metadata"),
        ({"output_expires_after": 3599.0}, "output_expires_after"),
        ({"output_expires_after": 2_592_001.0}, "output_expires_after"),
        ({"idempotency_key": ""}, "Idempotency-Key"),
    ],
)
@in_house
async def test_what_no_batch_can_have_is_refused_by_name(house: House, options: dict[str, Any], param: str) -> None:
    file_id = await house.upload(line("a"))
    with pytest.raises(InvalidRequest) as raised:
        await house.jobs.create_batch(TENANT, **{"input_file_id": file_id, "endpoint": ENDPOINT} | options)
    assert raised.value.param == param


@pytest.mark.parametrize(("window", "seconds"), [("24h", 86_400), ("30m", 1800), ("90s", 90), ("7d", 604_800)])
@in_house
async def test_windows_are_honoured(house: House, window: str, seconds: int) -> None:
    batch = await house.submit("a", completion_window=window)
    assert (batch.completion_window, batch.expires_at - batch.created_at) == (window, seconds)


@in_house
async def test_the_same_key_gives_the_same_batch_even_after_its_input_is_gone(house: House) -> None:
    async with house.worker(Model()):
        batch = await house.ended(await house.submit("ab", idempotency_key="k"))
        await house.jobs.delete_file(TENANT, batch.input_file_id)
    request: dict[str, Any] = {"input_file_id": batch.input_file_id, "endpoint": ENDPOINT}
    again = await house.jobs.create_batch(TENANT, **request, idempotency_key="k")
    assert (again.id, again.status) == (batch.id, "completed")
    with pytest.raises(NotFound):
        await house.jobs.create_batch(TENANT, **request, idempotency_key="other")


@in_house
async def test_only_uploads_can_be_inputs(house: House) -> None:
    async with house.worker(Model()):
        batch = await house.ended(await house.submit("ab"))
    with pytest.raises(InvalidRequest, match="purpose"):
        await house.jobs.create_batch(TENANT, input_file_id=batch.output_file_id or "", endpoint=ENDPOINT)


@in_house
async def test_files_expire_when_they_were_told_to(house: House) -> None:
    default = await house.jobs.upload(TENANT, "a", pieces(line("a")))
    assert default.expires_at == START + 30 * 86_400
    soon = await house.jobs.upload(TENANT, "a", pieces(line("a")), expires_after=3600.0)
    assert soon.expires_at == START + 3600
    async with house.worker(Model()):
        batch = await house.ended(await house.submit("a", output_expires_after=7200.0))
    output = await house.jobs.file(TENANT, batch.output_file_id or "")
    assert output.expires_at == output.created_at + 7200
    wrong: list[dict[str, Any]] = [{"expires_after": 10.0}, {"purpose": "fine-tune"}, {"filename": "x" * 2000}]
    for options in wrong:
        given: dict[str, Any] = {"filename": "a", "chunks": pieces(line("a"))} | options
        with pytest.raises(InvalidRequest):
            await house.jobs.upload(TENANT, **given)
    house.clock.advance(3600.0)
    with pytest.raises(NotFound):
        await house.jobs.file(TENANT, soon.id)


@in_house
async def test_the_input_of_a_batch_that_has_not_ended_cannot_be_deleted(house: House) -> None:
    batch = await house.submit("ab")
    with pytest.raises(Conflict):
        await house.jobs.delete_file(TENANT, batch.input_file_id)
    await house.jobs.cancel(TENANT, batch.id)
    async with house.worker(Model()):
        await house.ended(batch)
        await house.jobs.delete_file(TENANT, batch.input_file_id)
    with pytest.raises(NotFound):
        await house.jobs.content(TENANT, batch.input_file_id)


@in_house
async def test_another_tenant_finds_nothing(house: House) -> None:
    async with house.worker(Model()):
        batch = await house.ended(await house.submit("ab"))
    jobs, other = house.jobs, "other"
    asked: list[Callable[[], Awaitable[object]]] = [
        lambda: jobs.file(other, batch.input_file_id),
        lambda: jobs.content(other, batch.output_file_id or ""),
        lambda: jobs.delete_file(other, batch.input_file_id),
        lambda: jobs.create_batch(other, input_file_id=batch.input_file_id, endpoint=ENDPOINT),
        lambda: jobs.batch(other, batch.id),
        lambda: jobs.cancel(other, batch.id),
        lambda: jobs.pause(other, batch.id),
        lambda: jobs.resume(other, batch.id),
        lambda: jobs.retry(other, batch.id),
        lambda: jobs.results(other, batch.id),
        lambda: jobs.outputs(other, batch.id),
    ]
    for ask in asked:
        with pytest.raises(NotFound):
            await ask()
    assert await jobs.files(other) == []
    assert await jobs.batches(other) == []
    assert await jobs.count_batches(other) == {}


@in_house
async def test_a_simple_batch_gives_a_text_or_an_error_for_each_prompt(house: House) -> None:
    model = Model()
    model.faults = refuse("no")
    async with house.worker(model):
        batch = await house.jobs.create_simple(TENANT, Prompts(prompts=["yes", "no", "yes"]), callback_url="http://x")
        assert (batch.simple, batch.callback_url, status_of(batch)) == (True, "http://x", "pending")
        batch = await house.ended(batch)
    assert status_of(batch) == "completed"
    outputs = await house.jobs.outputs(TENANT, batch.id)
    assert outputs == [SimpleOutput("YES"), SimpleOutput(None, "invalid_request", "cannot"), SimpleOutput("YES")]
    assert await house.jobs.batches(TENANT) == []
    assert await house.jobs.batches(TENANT, simple=True) == [batch]
    assert await house.jobs.count_batches(TENANT, simple=True) == {"completed": 1}


@in_house
async def test_a_simple_batch_that_was_cancelled_says_which_prompts_were_not_computed(house: House) -> None:
    batch = await house.jobs.create_simple(TENANT, Prompts(prompts=["a"]), idempotency_key="k")
    again = await house.jobs.create_simple(TENANT, Prompts(prompts=["a"]), idempotency_key="k")
    assert again.id == batch.id
    assert [file.id for file in await house.jobs.files(TENANT)] == [batch.input_file_id]
    async with house.worker(Model(seconds=1e6)):
        await house.reaches(batch, "in_progress")
        await house.jobs.cancel(TENANT, batch.id)
        batch = await house.ended(batch)
    assert status_of(batch) == "cancelled"
    [output] = await house.jobs.outputs(TENANT, batch.id) or []
    assert (output.text, output.code) == (None, "batch_cancelled")


@in_house
async def test_prompts_that_are_sent_again_with_their_key_are_not_stored_again(house: House) -> None:
    batch = await house.jobs.create_simple(TENANT, Prompts(prompts=["a"]), idempotency_key="k")
    files = house.files()
    # There is no room for another file.
    await house.store.set_tenant_quotas(TENANT, Quotas(storage_bytes=1))
    assert await house.jobs.create_simple(TENANT, Prompts(prompts=["a"]), idempotency_key="k") == batch
    for other in (Prompts(prompts=["b"]), Prompts(prompts=["a", "a"]), Prompts(prompts=["a"], max_tokens=9)):
        with pytest.raises(InvalidRequest, match="was used for another request"):
            await house.jobs.create_simple(TENANT, other, idempotency_key="k")
    with pytest.raises(QuotaExceeded):
        await house.jobs.create_simple(TENANT, Prompts(prompts=["a"]), idempotency_key="l")
    assert house.files() == files
    assert [file.id for file in await house.jobs.files(TENANT)] == [batch.input_file_id]


@in_house
async def test_prompts_of_a_batch_that_could_not_be_made_are_not_stored(house: House) -> None:
    reached = asyncio.Event()

    async def away(name: str) -> None:
        if name == "create_batch" and not reached.is_set():
            reached.set()
            raise StoreUnavailable("away")
        if name == "create_batch":
            await asyncio.Event().wait()

    house.store.before = away
    with pytest.raises(StoreUnavailable):
        await house.jobs.create_simple(TENANT, Prompts(prompts=["a"]))
    assert house.files() == []
    making = asyncio.create_task(house.jobs.create_simple(TENANT, Prompts(prompts=["a"])))
    await asyncio.sleep(1.0)
    making.cancel()
    await asyncio.wait([making])
    assert await house.jobs.files(TENANT) == []


@pytest.mark.parametrize(
    "prompts",
    [
        Prompts(prompts=[]),
        Prompts(prompts=["x"] * 4),
        Prompts(prompts=["x"], temperature=11.0),
        Prompts(prompts=["x"], max_tokens=0),
    ],
)
def test_prompts_that_could_never_be_computed_are_refused(tmp_path: Path, prompts: Prompts) -> None:
    async def main(house: House) -> None:
        with pytest.raises(InvalidRequest):
            await house.jobs.create_simple(TENANT, prompts)
        assert house.files() == []

    run(tmp_path, main, ServiceLimits(max_prompts=3))
