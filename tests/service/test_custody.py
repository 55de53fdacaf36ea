"""A database and its files: joined at the first opening, recognized afterwards, and parted when they do not match."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import apsw
import msgspec
import pytest
from tests.service.support import TENANT, House, in_house, line, pieces

from batchwright.errors import StoreMismatch, StoreUnavailable
from batchwright.service.batches.batch_service import BatchService
from batchwright.service.files.blobs import Blobs
from batchwright.service.files.custody import Custody, open_with_files
from batchwright.service.files.sweeper import Swept
from batchwright.service.limits import ServiceLimits
from batchwright.service.new_ids import new_id
from batchwright.service.worker.maintenance import Maintenance
from batchwright.store import Store

Use = Callable[[Store, Blobs], Awaitable[None]]


def use(database: Path, data: Path, *uses: Use) -> None:
    """Open both, and do this with them."""

    async def main() -> None:
        store, blobs = await open_with_files(str(database), data)
        async with store:
            for each in uses:
                await each(store, blobs)

    asyncio.run(main())


async def upload(store: Store, blobs: Blobs) -> None:
    await BatchService(store, blobs).upload(TENANT, "x", pieces(line("a")))


async def advance(store: Store, blobs: Blobs) -> None:
    """What every process does at its start, and every ten minutes."""
    assert await Custody(store, blobs).renew()


def forget_identity(database: Path, data: Path) -> None:
    """As an earlier version left them."""
    with apsw.Connection(str(database)) as connection:
        connection.execute("DELETE FROM identity")
    for name in ("store.json", "store.lock"):
        (data / "files" / name).unlink()
    for blob in (data / "files").glob("??/*"):
        blob.chmod(0o600)


def names(data: Path) -> set[str]:
    return {path.name for path in (data / "files").rglob("file-*")}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data folder with a file, and its database."""
    folder = tmp_path / "data"
    use(folder / "batchwright.db", folder, upload)
    return folder


def test_the_wrong_database_is_refused_and_both_are_named(tmp_path: Path, data: Path) -> None:
    other = tmp_path / "other"
    use(other / "batchwright.db", other, upload)
    with pytest.raises(StoreMismatch, match=r"is that of store [0-9a-f]{16}, and the files in .* are those of store"):
        use(other / "batchwright.db", data)
    (data / "files" / "store.json").unlink()
    with pytest.raises(StoreMismatch, match="knows none of the files"):
        use(other / "batchwright.db", data)
    with pytest.raises(StoreMismatch, match="has records of files, and there is none"):
        use(data / "batchwright.db", tmp_path / "nowhere")
    assert len(names(data)) == len(names(other)) == 1


@pytest.mark.parametrize("content", [None, b""], ids=["missing", "empty"])
def test_a_database_that_is_not_there_is_not_made_beside_files(
    tmp_path: Path, data: Path, content: bytes | None
) -> None:
    mistyped = tmp_path / "mistyped.db"
    if content is not None:
        mistyped.write_bytes(content)
    with pytest.raises(StoreMismatch, match=r"no store at .*mistyped.db, or it is empty"):
        use(mistyped, data)
    assert (mistyped.read_bytes() if mistyped.exists() else None) == content


def test_a_database_without_files_is_not_given_another_folder(tmp_path: Path) -> None:
    """A mistyped or missing `--data` would take the pairing away from the service that runs."""
    database, data, other = tmp_path / "store.db", tmp_path / "data", tmp_path / "other"
    use(database, data)
    with pytest.raises(StoreMismatch, match="is used with another data folder than"):
        use(database, other)
    use(database, data, advance, upload)
    assert not [path for path in other.rglob("*") if path.name == "store.json"]


def test_a_folder_that_is_used_is_not_given_to_a_new_database(tmp_path: Path) -> None:
    """Though it has no files yet: the keys without which nobody is let in are in its own database."""
    data, own, mistyped = tmp_path / "data", tmp_path / "data" / "batchwright.db", tmp_path / "data" / "batchwrigth.db"
    use(own, data)
    with pytest.raises(StoreMismatch, match=r"no store at .*batchwrigth.db, or it is empty, and .* that of another"):
        use(mistyped, data)
    assert not mistyped.exists()
    # Nor where it is made first, nor the other way round.
    other = tmp_path / "other"
    use(mistyped, other)
    with pytest.raises(StoreMismatch, match=r"is that of store .* are those of store"):
        use(mistyped, data)
    with apsw.Connection(str(mistyped)) as connection:
        connection.execute("DELETE FROM identity")
    with pytest.raises(StoreMismatch, match="is new or of an earlier version"):
        use(mistyped, data)
    (data / "files" / "store.json").unlink()
    with pytest.raises(StoreMismatch, match=r"has a database of its own, .*batchwright.db"):
        use(tmp_path / "third.db", data)
    (data / "files" / "store.json").write_bytes((other / "files" / "store.json").read_bytes())
    with pytest.raises(StoreMismatch):
        use(own, data)


@in_house
async def test_a_copy_in_quarantine_of_a_file_that_is_in_its_place_is_removed_once(house: House) -> None:
    """As a backup in two passes leaves it when the file moves between them."""
    file_id = await house.upload(line("a"))
    place, copy = house.blobs.path(file_id), house.blobs.quarantine / file_id
    copy.parent.mkdir()
    shutil.copy(place, copy)
    await house.days(1 / 24)
    assert not copy.exists()
    assert place.exists()
    # Another content is nothing to decide about.
    copy.write_bytes(b"other")
    swept = await house.days(1 / 24)
    assert (swept.restored, copy.read_bytes()) == (0, b"other")


def test_another_programs_database_is_left_as_it_is(tmp_path: Path, data: Path) -> None:
    other = tmp_path / "notes.db"
    with apsw.Connection(str(other)) as connection:
        connection.execute("CREATE TABLE notes (text TEXT)")
    before = other.read_bytes()
    for folder in (data, tmp_path / "new"):
        with pytest.raises(StoreUnavailable, match=r"not a store of batchwright: it has other tables \(notes\)"):
            use(other, folder)
    assert other.read_bytes() == before


@pytest.mark.parametrize(
    ("how", "share"),
    [
        *(("truncated", share) for share in (0.02, 0.3, 0.6, 0.97)),
        *(("overwritten", share) for share in (0.02, 0.3, 0.6)),
    ],
)
def test_a_damaged_database_is_refused(tmp_path: Path, data: Path, share: float, how: str) -> None:
    damaged = tmp_path / "damaged.db"
    content = (data / "batchwright.db").read_bytes()
    cut = int(len(content) * share)
    damaged.write_bytes(content[:cut] + (os.urandom(len(content) - cut) if how == "overwritten" else b""))
    with pytest.raises(StoreUnavailable, match=r"damaged|records of files"):
        use(damaged, data)


def test_new_beside_new_starts_and_every_process_agrees_on_one_id(tmp_path: Path) -> None:
    data = tmp_path / "data"
    script = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from batchwright.service.files.custody import open_with_files\n"
        "async def main():\n"
        "    store, _ = await open_with_files(sys.argv[1], Path(sys.argv[2]))\n"
        "    print((await store.identity()).store_id)\n"
        "    await store.close()\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, "-c", script, str(data / "batchwright.db"), str(data)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    told = {process.communicate()[0].strip() for process in started}
    assert [process.returncode for process in started] == [0] * 4
    assert told == {msgspec.json.decode((data / "files" / "store.json").read_bytes())["store_id"]}


def test_an_installation_of_an_earlier_version_is_adopted_when_it_knows_its_files(tmp_path: Path, data: Path) -> None:
    database = data / "batchwright.db"
    forget_identity(database, data)
    other = tmp_path / "other.db"
    use(other, tmp_path / "elsewhere")
    with pytest.raises(StoreMismatch, match="knows none of the files"):
        use(other, data)
    use(database, data, advance)
    [blob] = (data / "files").glob("??/*")
    assert stat.S_IMODE(blob.stat().st_mode) == 0o400


def test_a_backup_from_before_the_upgrade_serves_but_removes_nothing(tmp_path: Path, data: Path) -> None:
    database = data / "batchwright.db"
    old = tmp_path / "old.db"
    shutil.copy(database, old)
    with apsw.Connection(str(old)) as connection:
        connection.execute("DELETE FROM identity")

    async def is_estranged(store: Store, blobs: Blobs) -> None:
        assert not await Custody(store, blobs).is_current()

    use(old, data, is_estranged)
    use(old, data, is_estranged)
    use(database, data, advance)


def test_a_copy_that_lives_on_elsewhere_is_told_from_the_original(tmp_path: Path, data: Path) -> None:
    """The one that was last used with the folder may remove; the other may not, until somebody says so."""
    database, copy = data / "batchwright.db", tmp_path / "copy.db"
    shutil.copy(database, copy)
    use(database, data, advance)

    async def bury(store: Store, blobs: Blobs) -> None:
        for file in await store.files(TENANT, limit=9):
            await store.delete_file(TENANT, file.id)
        await Maintenance(store, blobs, ServiceLimits()).perform(0.0)

    before = names(data)
    use(copy, data, bury)
    assert names(data) == before
    use(database, data, advance)

    async def adopt(store: Store, blobs: Blobs) -> None:
        assert await Custody(store, blobs).adopt() == (1, 1)

    use(copy, data, adopt, bury)
    assert names(data) == set()


def test_an_older_database_does_not_remove_what_a_newer_batch_reads(tmp_path: Path) -> None:
    """In the older one the file has expired, and the batch that still reads it is unknown."""
    data, older = tmp_path / "data", tmp_path / "older.db"
    database = data / "batchwright.db"
    use(database, data, upload)
    shutil.copy(database, older)

    async def submit(store: Store, blobs: Blobs) -> None:
        await advance(store, blobs)
        [file] = await store.files(TENANT, limit=9)
        await BatchService(store, blobs).create_batch(
            TENANT, input_file_id=file.id, endpoint="/v1/completions", completion_window="30d"
        )

    use(database, data, submit)

    async def a_month_later() -> None:
        [(expires_at,)] = apsw.Connection(str(older)).execute("SELECT expires_at FROM files")
        store, blobs = await open_with_files(str(older), data, now=lambda: float(expires_at) + 60.0)
        async with store:
            assert await store.take_dead_files(9)
            await Maintenance(store, blobs, ServiceLimits()).perform(0.0)

    before = names(data)
    asyncio.run(a_month_later())
    assert names(data) == before


def test_a_mark_that_cannot_be_read_is_refused_until_it_is_adopted(data: Path) -> None:
    (data / "files" / "store.json").write_bytes(b'{"store_id": ')
    with pytest.raises(StoreMismatch, match=r"store.json cannot be read .*jobs adopt"):
        use(data / "batchwright.db", data)


def _left_over(blobs: Blobs, content: bytes = b"left over") -> Path:
    path = blobs.path(new_id("file-"))
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return path


@in_house
async def test_what_crashes_left_goes_after_two_days_and_nothing_else_does(house: House) -> None:
    kept = await house.upload(line("a"))
    folder = house.blobs.path(kept).parent
    left, temporary = _left_over(house.blobs), folder / f"{kept}.0123.tmp"
    temporary.write_bytes(b"left over")
    (folder / "notes.txt").write_bytes(b"somebody's")
    written = new_id("file-")
    async with house.blobs.create(written) as writer:
        writer.write(b"half")
        assert await house.days(0.1) == Swept(temporary=1)
        writer.keep()
        # It has its name, and no record yet.
        assert await house.days(0.9) == Swept()
        assert await house.days(0.2) == Swept(quarantined=1)
        assert house.files() == sorted([kept, written, "notes.txt"])
        assert (house.blobs.quarantine / left.name).exists()
        assert await house.days(0.9) == Swept()
        assert await house.days(0.2) == Swept(removed=1)
    assert house.files() == sorted([kept, written, "notes.txt"])


@in_house
async def test_what_gets_a_record_again_comes_back_at_once(house: House) -> None:
    file_id = await house.upload(line("a"))
    [record] = await house.jobs.files(TENANT)
    await house.store.forget_files([file_id])
    assert await house.days(1.2) == Swept(quarantined=1)
    assert house.files() == []
    # Not removed with the left-overs of crashes: it had a record, which may come back.
    assert await house.days(5) == Swept()
    await house.store.add_file(record)
    assert [each["custom_id"] for each in await house.content(file_id)] == ["id-a"]
    await house.store.forget_files([file_id])
    assert await house.days(1.2) == Swept(quarantined=1)
    await house.store.add_file(record)
    assert await house.days(0.05) == Swept(restored=1)
    assert house.files() == [file_id]


@in_house
async def test_a_file_that_is_deleted_goes_from_the_quarantine_too(house: House) -> None:
    file_id = await house.upload(line("a"))
    [record] = await house.jobs.files(TENANT)
    await house.store.forget_files([file_id])
    await house.days(1.2)
    await house.store.add_file(record)
    await house.jobs.delete_file(TENANT, file_id)
    await Maintenance(house.store, house.blobs, ServiceLimits()).perform(0.0)
    assert names(house.folder) == set()


@in_house
async def test_only_one_process_watches_and_another_goes_on_where_it_ended(house: House) -> None:
    left = _left_over(house.blobs)
    first, second = (Maintenance(house.store, house.blobs, ServiceLimits()) for _ in range(2))
    for hour in range(20):
        for duties in (first, second):
            await duties.perform(hour * 3600.0)
    assert left.exists()
    first.close()
    for hour in range(20, 26):
        await second.perform(hour * 3600.0)
    # 19 hours of the first; of the second those after its own first sweep.
    assert not left.exists()
    assert (house.blobs.quarantine / left.name).exists()
    second.close()


@in_house
async def test_nothing_is_removed_while_the_records_are_damaged(house: House) -> None:
    await house.upload(line("a"))
    left = _left_over(house.blobs)

    async def before(name: str) -> None:
        if name == "verify":
            raise StoreUnavailable("damaged")

    house.store.before = before
    for _ in range(3):
        with pytest.raises(StoreUnavailable):
            await house.days(1)
    assert left.exists()
