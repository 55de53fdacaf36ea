"""Records of files, on both databases."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.store.support import World, played

from batchwright.errors import Conflict, InvalidRequest, NotFound
from batchwright.store.records import StoreIdentity


@played
async def test_a_file_comes_back_as_it_was_added(world: World) -> None:
    file = replace(world.new_file(), filename="é\n.jsonl", status="error", status_details="why", expires_at=2e9)
    await world.store.add_file(file)
    assert await world.store.file("t", file.id) == file
    assert await world.store.file("t", "file-0") is None
    with pytest.raises(Conflict):
        await world.store.add_file(file)


@played
async def test_a_name_that_is_no_unicode(world: World) -> None:
    with pytest.raises(InvalidRequest, match="surrogates"):
        await world.store.add_file(replace(world.new_file(), filename="\ud800"))


@played
async def test_pages(world: World) -> None:
    made = []
    for number in range(5):
        world.later(number % 2)  # some at the same time
        made.append(await world.upload())
    ids = [file.id for file in sorted(made, key=lambda file: (file.created_at, file.id))]
    store = world.store
    for order, wanted in (("asc", ids), ("desc", ids[::-1])):
        seen: list[str] = []
        while page := await store.files("t", limit=2, order=order, after=seen[-1] if seen else None):  # type: ignore[arg-type]
            assert len(page) <= 2
            seen += [file.id for file in page]
        assert seen == wanted
    with pytest.raises(NotFound, match="after='file-0'"):
        await store.files("t", limit=9, after="file-0")
    assert [file.id for file in await store.files("t", limit=9)] == ids[::-1]


@played
async def test_purposes(world: World) -> None:
    await world.upload()
    output = world.new_file(purpose="batch_output")
    await world.store.add_file(output)
    assert await world.store.files("t", limit=9, purpose="batch_output") == [output]


@played
async def test_a_deleted_file_is_gone_and_its_bytes_stay_on_the_list_until_they_are_forgotten(world: World) -> None:
    store = world.store
    first, second = await world.upload(), await world.upload()
    assert await store.delete_file("t", first.id)
    assert not await store.delete_file("t", first.id)
    assert await store.file("t", first.id) is None
    assert await store.files("t", limit=9) == [second]
    assert await store.files("t", limit=9, order="asc", after=first.id) == [second]
    assert await store.known_files([first.id, second.id, "file-0"]) == {first.id, second.id}
    assert await store.take_dead_files(9) == [first.id]
    assert await store.take_dead_files(9) == [first.id]
    await store.forget_files([first.id])
    assert await store.take_dead_files(9) == []
    assert await store.known_files([first.id, second.id]) == {second.id}
    assert await store.known_files([]) == set()


@played
async def test_an_expired_file_is_gone_but_not_its_bytes_while_a_batch_reads_them(world: World) -> None:
    store = world.store
    file, lone = await world.upload(expires_at=world.now + 10), await world.upload(expires_at=world.now + 10)
    batch = await store.create_batch(world.new_batch(file))
    world.later(9.5)
    assert len(await store.files("t", limit=9)) == 2
    world.later(0.5)
    assert await store.file("t", file.id) is None
    assert await store.files("t", limit=9) == []
    assert not await store.delete_file("t", file.id)
    assert await store.take_dead_files(9) == [lone.id]
    await store.request_cancel("t", batch.id)
    assert await store.take_dead_files(9) == [lone.id]
    worker = await world.worker()
    await store.take_finishing(worker)
    await store.finish(worker, batch.id, output=None, errors=None, unfinished=0)
    assert set(await store.take_dead_files(9)) == {file.id, lone.id}
    assert len(await store.take_dead_files(1)) == 1


@played
async def test_the_input_of_a_batch_that_has_not_ended_is_not_deleted(world: World) -> None:
    store = world.store
    batch = await world.create()
    with pytest.raises(Conflict, match=batch.id):
        await store.delete_file("t", batch.input_file_id)
    worker = await world.worker()
    await store.take_validation(worker)
    assert await store.reject(worker, batch.id, [])
    assert await store.delete_file("t", batch.input_file_id)


@played
async def test_an_identity_is_given_once_and_changed_only_by_whoever_knows_it(world: World) -> None:
    store = world.store
    assert await store.identity() is None
    first, second = StoreIdentity("a", "", "1"), StoreIdentity("a", "1")
    assert await store.set_identity(None, first)
    assert not await store.set_identity(None, StoreIdentity("b", "2"))
    assert await store.identity() == first
    assert await store.set_identity(first, second)
    assert not await store.set_identity(first, StoreIdentity("a", "3"))
    assert not await store.set_identity(StoreIdentity("a", "1", "1"), first)
    assert await store.identity() == second


@played
async def test_whether_a_file_is_live(world: World) -> None:
    store = world.store
    assert await store.a_live_file() is None
    expiring = await world.upload(expires_at=world.now + 5)
    assert await store.a_live_file() == expiring.id
    world.later(6)
    assert await store.a_live_file() is None
    file = await world.upload()
    assert await store.a_live_file() == file.id
    await store.delete_file("t", file.id)
    assert await store.a_live_file() is None
    await store.verify()
