"""Outputs by their addresses and in folders: parts with a manifest, resumed after kills, each line once."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

fsspec = pytest.importorskip("fsspec")

import stamina  # noqa: E402

from batchwright.clock import ManualClock  # noqa: E402
from batchwright.errors import InputError, ResumeRefused  # noqa: E402
from batchwright.jobs.job_run import RunInterrupted  # noqa: E402
from batchwright.jobs.reading import read_results  # noqa: E402
from batchwright.jobs.remote import results  # noqa: E402
from batchwright.jobs.remote.lease import OutputLease  # noqa: E402
from batchwright.jobs.remote.parts import MANIFEST, Manifest, attempt_of  # noqa: E402
from batchwright.jobs.remote.remote_file import RemotePath  # noqa: E402
from batchwright.jobs.run import run  # noqa: E402

from .fakes import POISON, fake  # noqa: E402
from .stores import FaultyFileSystem  # noqa: E402

LINES = 40
OUT = "faulty://b/out.jsonl"
KILLS = int(os.environ.get("BATCHWRIGHT_REMOTE_KILLS", "0"))


@pytest.fixture(autouse=True)
def _stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty store that fails at every seventh request; retries that wait for nothing; parts of a few lines."""
    fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)
    FaultyFileSystem.store.clear()
    FaultyFileSystem.pseudo_dirs[:] = [""]
    FaultyFileSystem.every = 7
    stamina.set_testing(True, attempts=10, cap=True)
    monkeypatch.setattr(results, "PART_BYTES", 1000)
    monkeypatch.setenv(results.STATE_VARIABLE, str(tmp_path / "state"))
    yield
    stamina.set_testing(False)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"id": f"q{n}", "prompt": f"prompt {n}"}) + "\n" for n in range(LINES)))
    return path


def objects(folder: str = OUT) -> dict[str, bytes]:
    """The objects in a folder by name."""
    prefix = folder.removeprefix("faulty:/").rstrip("/") + "/"
    found = {name: file.getvalue() for name, file in FaultyFileSystem.store.items() if name.startswith(prefix)}
    return {name.removeprefix(prefix): content for name, content in sorted(found.items())}


def lines(folder: str = OUT) -> dict[str, dict[str, Any]]:
    """The result lines in a folder by id, each there once, of all that is named `part-`, as in the manifest."""
    there = objects(folder)
    manifest = Manifest.decode(folder, there.pop(MANIFEST))
    assert list(there) == [part.name for part in manifest.parts]
    assert [len(content) for content in there.values()] == [part.size for part in manifest.parts]
    found: dict[str, dict[str, Any]] = {}
    for line in b"".join(there.values()).splitlines():
        fields = msgspec.json.decode(line)
        assert fields["custom_id"] not in found
        found[fields["custom_id"]] = fields
    return found


def stop_at(step: int) -> Any:
    def stop(number: int) -> None:
        if number == step:
            raise KeyboardInterrupt

    return stop


def work(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "state").rglob("*") if path.is_file())


def test_results_are_written_in_parts_and_read_again(source: Path, tmp_path: Path) -> None:
    report = run(source, OUT, model=fake())
    assert report.succeeded == LINES
    assert lines().keys() == {f"q{n}" for n in range(LINES)}
    assert len(objects()) >= 3
    assert work(tmp_path) == []
    before = objects()
    assert run(source, OUT, model=fake()).resumed == LINES
    assert {name: objects()[name] for name in before if name != MANIFEST} == {
        name: content for name, content in before.items() if name != MANIFEST
    }
    shown = [*read_results(OUT)]
    assert {each.name for each in shown} == set(lines())
    assert {each.prompt for each in shown} == {f"prompt {n}" for n in range(LINES)}
    second = run(OUT, tmp_path / "never.jsonl", model=fake(), dry_run=True)
    assert second.total == LINES


@pytest.mark.parametrize("machine", ["same", "other"])
def test_a_run_that_was_stopped_goes_on(source: Path, tmp_path: Path, machine: str) -> None:
    with pytest.raises(RunInterrupted) as caught:
        run(source, OUT, model=fake(slots=1, on_step=stop_at(40)))
    kept = lines()
    assert len(kept) == caught.value.report.done
    if machine == "other":
        os.environ[results.STATE_VARIABLE] = str(tmp_path / "other")
    before = objects()
    report = run(source, OUT, model=fake())
    assert report.resumed == len(kept)
    assert len(lines()) == LINES
    assert all(objects()[name] == content for name, content in before.items() if name != MANIFEST)
    with source.open("a") as file:
        file.write('{"id": "more", "prompt": "more"}\n')
    engine = fake()
    run(source, OUT, model=engine)
    assert engine.prompts == ["more"]
    assert len(lines()) == LINES + 1


@pytest.mark.parametrize(
    "name", ["out.csv", "out.parquet", "out.jsonl.gz", "out.csv/", "out.parquet/", "out.jsonl.gz/"]
)
def test_outputs_that_are_made_at_the_end(source: Path, tmp_path: Path, name: str) -> None:
    address = f"faulty://b/{name}"
    assert run(source, address, model=fake()).succeeded == LINES
    shown = [*read_results(address)]
    assert {each.prompt or "" for each in shown} == {
        f"prompt {n}" if "jsonl" in name else f"id: q{n}\nprompt: prompt {n}" for n in range(LINES)
    }
    assert lines(address.rstrip("/") + ".results.jsonl").keys() == {f"q{n}" for n in range(LINES)}
    with source.open("a") as file:
        file.write('{"id": "more", "prompt": "more"}\n')
    os.environ[results.STATE_VARIABLE] = str(tmp_path / "other")
    engine = fake()
    assert run(source, address, model=engine).resumed == LINES
    assert engine.prompts == ["more"]
    assert len([*read_results(address)]) == LINES + 1
    assert run(source, address, model=fake()).resumed == LINES + 1


@pytest.mark.parametrize("name", ["out.csv/", "out.parquet/", "out.jsonl/", "out.jsonl.gz/"])
def test_folders_on_this_machine(source: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchwright.jobs.remote.parts.FolderTarget.rows_in_file", 16)
    monkeypatch.setattr("batchwright.jobs.answer_tables._ROWS_IN_A_GROUP", 8)
    output = tmp_path / name
    run(source, f"{output}/", model=fake())
    assert len([*output.glob("part-*")]) == 3
    assert len([*read_results(output)]) == LINES
    again = run(source, output, model=fake())
    assert again.resumed == LINES
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "x.txt").touch()
    with pytest.raises(InputError, match="other files"):
        run(source, f"{tmp_path}/foreign/", model=fake())


def poisoned(source: Path, numbers: range | tuple[int, ...]) -> None:
    """Write an input whose lines of these numbers fail."""
    texts = [f"prompt {n}" + f" {POISON}" * (n in numbers) for n in range(LINES)]
    source.write_text("".join(json.dumps({"id": f"q{n}", "prompt": text}) + "\n" for n, text in enumerate(texts)))


def test_parts_of_failed_lines_alone_are_replaced(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    poisoned(source, range(12))
    for _ in range(3):
        report = run(source, OUT, model=fake(slots=1), retry_failed="all")
        assert report.failed == 12
        assert len(lines()) == LINES


def test_failed_lines_are_tried_again_in_their_parts(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    poisoned(source, (3, 30))
    assert run(source, OUT, model=fake(), planned=False).failed == 2
    before = objects()
    engine = fake()
    assert run(source, OUT, model=engine, retry_failed="all").failed == 2
    assert len(engine.submitted) == 2
    assert len(lines()) == LINES
    assert 2 <= len(before.keys() - objects().keys()) <= 3


def test_other_jobs_and_other_data_are_left_alone(source: Path, tmp_path: Path) -> None:
    FaultyFileSystem.every = 10**9
    fsspec.filesystem("faulty").pipe_file("faulty://b/foreign.csv", b"1")
    with pytest.raises(ResumeRefused, match="does not belong"):
        run(source, "faulty://b/foreign.csv", model=fake())
    run(source, OUT, model=fake())
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "x"}\n')
    with pytest.raises(ResumeRefused, match="content of the input"):
        run(other, OUT, model=fake())
    assert len(lines()) == LINES
    run(other, OUT, model=fake(), overwrite=True)
    assert lines().keys() == {"line-1"}
    with pytest.raises(InputError, match="web cannot be written"):
        run(source, "https://host/out.jsonl", model=fake())


def leases(monkeypatch: pytest.MonkeyPatch, pause: Callable[[list[OutputLease]], object]) -> ManualClock:
    """The clock of the runs from here on, whose `pause` is given the leases of all of them. It stands still."""
    made: list[OutputLease] = []
    clock = ManualClock(1e9)

    def make(folder: RemotePath, note: Path) -> OutputLease:
        made.append(OutputLease(folder, note, clock=clock, wall=clock.now, pause=lambda seconds: pause(made)))
        return made[-1]

    monkeypatch.setattr(results, "OutputLease", make)
    return clock


def test_a_second_machine_is_refused(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def live(made: list[OutputLease]) -> None:
        clock.advance(1)
        made[0].renew()

    def begin_another(number: int) -> None:
        if number == 20:
            with monkeypatch.context() as other:
                other.setenv(results.STATE_VARIABLE, str(tmp_path / "other"))
                with pytest.raises(ResumeRefused, match=r"another run is writing .*process \d+ on .*, since "):
                    run(source, OUT, model=fake(), overwrite=True)
            refused.append(number)

    clock, refused = leases(monkeypatch, live), list[int]()
    assert run(source, OUT, model=fake(slots=1, on_step=begin_another)).succeeded == LINES
    assert refused == [20]
    assert len(lines()) == LINES
    assert work(tmp_path) == []


def test_a_run_that_lost_its_output_ends(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renew, renewals = OutputLease.renew, list[OutputLease]()

    def sleep_before_the_third(lease: OutputLease) -> None:
        renewals.append(lease)
        if len(renewals) == 3:
            monkeypatch.setenv(results.STATE_VARIABLE, str(tmp_path / "other"))
            run(source, OUT, model=fake())
        renew(lease)

    clock = leases(monkeypatch, lambda made: clock.advance(5))
    monkeypatch.setattr(OutputLease, "renew", sleep_before_the_third)
    with pytest.raises(ResumeRefused, match="taken over"):
        run(source, OUT, model=fake(slots=1))
    assert renewals[0] is renewals[2] is not renewals[3]
    assert len(lines()) == LINES
    manifest = Manifest.decode(OUT, objects()[MANIFEST])
    assert (manifest.attempt, {attempt_of(part.name) for part in manifest.parts}) == (2, {1, 2})


def test_a_manifest_of_a_run_that_lost_is_replaced(tmp_path: Path) -> None:
    """Where a store has no conditional writes, one that slept between its look and its write may still write."""
    files = [tmp_path / name / "out.jsonl" for name in "ab"]
    first, second = (results.RemoteResults(RemotePath(OUT), file, ()) for file in files)
    for each, file in zip((first, second), files, strict=True):
        file.parent.mkdir()
        each.restore(copies=True)
        file.write_bytes(b"1\n2\n3\n4\n")
        each.begin({})
        each.commit(4)
        if each is first:
            stale = objects()[MANIFEST]
            each.close()
    fsspec.filesystem("faulty").pipe_file(f"{OUT}/{MANIFEST}", stale)
    second.commit(8)
    manifest = Manifest.decode(OUT, objects()[MANIFEST])
    assert [part.size for part in manifest.parts] == [4, 4]
    assert {attempt_of(part.name) for part in manifest.parts} == {1, 2}
    second.close()
    assert sorted(objects()) == sorted([MANIFEST, *(part.name for part in manifest.parts)])


def test_an_output_of_another_machine_is_not_paid_twice(source: Path, tmp_path: Path) -> None:
    with pytest.raises(RunInterrupted):
        run(source, OUT, model=fake(slots=1, on_step=stop_at(40)))
    folder = next((tmp_path / "state" / "outputs").iterdir())
    (folder / "out.jsonl.batches").mkdir()
    (folder / "out.jsonl.batches" / "x").touch()
    remote = results.RemoteResults(
        RemotePath(OUT), folder / "out.jsonl", [folder / "out.jsonl.batches", folder / "out.jsonl.spend"]
    )
    state = remote.restore(copies=True)
    assert state is not None
    remote.begin(state)
    remote.close()
    os.environ[results.STATE_VARIABLE] = str(tmp_path / "other")
    with pytest.raises(ResumeRefused, match="are noted on"):
        run(source, OUT, model=fake())


CHILD = """
import sys, zlib
import batchwright.jobs.remote.lease as lease
import batchwright.jobs.remote.results as results
from batchwright.jobs.run import run
from tests.jobs.fakes import FakeEngine
results.PART_BYTES = int(sys.argv[3])
results.PART_SECONDS = float(sys.argv[4])
lease.LEASE_SECONDS = 1.0
run(sys.argv[1], sys.argv[2], model=FakeEngine(slots=256, keep_requests=False))
# Unlike `ru_maxrss`, it is not that of the process that started this one.
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """The address of a bucket in an S3 of moto."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patched.setenv(name, "testing")
        patched.setenv("AWS_DEFAULT_REGION", "us-east-1")
        store = fsspec.filesystem("s3", use_listings_cache=False)
        store.mkdir("bucket")
        yield "s3://bucket"
    server.stop()


def test_an_s3_replaces_what_was_read_and_nothing_else(bucket: str, tmp_path: Path) -> None:
    place = RemotePath(f"{bucket}/conditions/x")
    assert place.create(b"1")
    assert not place.create(b"2")
    version = place.version()
    assert place.replace(b"3", version)
    assert not place.replace(b"4", version)
    assert not place.replace(b"4", None)
    assert place.read_bytes() == b"3"
    version = place.version()
    place.remove()
    assert not place.replace(b"5", version)
    lease = OutputLease(RemotePath(f"{bucket}/conditions"), tmp_path / "note")
    lease.take(0)
    lease.renew()
    assert RemotePath(f"{bucket}/conditions").listed() == ["_lease-000001.json"]
    second = OutputLease(RemotePath(f"{bucket}/conditions"), tmp_path / "other", pause=lambda seconds: lease.renew())
    with pytest.raises(ResumeRefused, match=r"another run is writing s3://.*process \d+ on "):
        second.take(0)
    lease.release()
    assert RemotePath(f"{bucket}/conditions").listed() == []
    second.take(0)
    assert second.attempt == 1
    second.release()


@pytest.mark.parametrize(("count", "kills"), [(10_000, 2), (100_000, KILLS)] if KILLS else [(1500, 1)])
def test_an_s3_and_kills(bucket: str, tmp_path: Path, count: int, kills: int) -> None:
    """Killed at random moments, now on this machine and now on a new one: each line once, in the parts alone."""
    store = fsspec.filesystem("s3", use_listings_cache=False)
    source = f"{bucket}/in-{count}"
    with store.open(f"{source}/a.jsonl", "wb") as file:
        for n in range(count):
            file.write(json.dumps({"id": f"q{n}", "prompt": f"prompt {n}" + "x" * 100}).encode() + b"\n")
    address, chance = f"{bucket}/out-{count}.jsonl", random.Random(1)
    # Parts of a few lines are many on a slow machine: those of the campaign are made by size.
    part_bytes, seconds = count * 10, "60" if KILLS else "0.2"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parents[2])])}
    peaks: list[int] = []
    """The most memory of each process, in KiB, as it was last seen."""

    def start(machine: int, **more: str) -> subprocess.Popen[bytes]:
        state = {results.STATE_VARIABLE: str(tmp_path / f"machine-{machine}"), **more}
        arguments = [sys.executable, "-c", CHILD, f"{source}/*.jsonl", address, str(part_bytes), seconds]
        return subprocess.Popen(arguments, env={**environment, **state}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def parts() -> int:
        with suppress(FileNotFoundError):
            return len(store.glob(f"{address}/part-*"))
        return 0

    def tell(machine: int) -> None:
        if KILLS:
            manifest = Manifest.decode(address, store.cat_file(f"{address}/{MANIFEST}"))
            done = sum(part.lines or 0 for part in manifest.parts)
            print(f"{count} lines, machine {machine}: {done} in parts, peak {peaks[-1] / 1024:.0f} MiB", flush=True)

    done, machine = 2, 0
    for place in ("results.after_part", "results.after_commit"):
        process = start(machine, BATCHWRIGHT_CRASH_AT=place)
        _, errors = process.communicate()
        assert process.returncode == -signal.SIGKILL, errors.decode()
        machine += 1
    for _ in range(kills):
        process, before, until = start(machine), parts(), time.monotonic() + (300 if KILLS else 60)
        wanted = before + chance.randrange(1, 3)
        while process.poll() is None and parts() < wanted and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(chance.random() / 10)
        peaks.append(peak_of(process))
        process.kill()
        _, errors = process.communicate()
        assert process.returncode in (-signal.SIGKILL, 0), errors.decode()
        done += process.returncode == -signal.SIGKILL
        tell(machine)
        machine += chance.random() < 0.5

    process = start(machine)
    told, errors = process.communicate()
    assert process.returncode == 0, errors.decode()
    peaks.append(int(told))
    manifest = Manifest.decode(address, store.cat_file(f"{address}/{MANIFEST}"))
    names = [name.rpartition("/")[2] for name in store.glob(f"{address}/part-*")]
    assert sorted(names) == sorted(part.name for part in manifest.parts)
    assert store.glob(f"{address}/_lease-*") == []
    seen: set[str] = set()
    for name in names:
        for line in store.cat_file(f"{address}/{name}").splitlines():
            seen.add(msgspec.json.decode(line)["custom_id"])
    assert len(seen) == count
    assert sum(part.lines or 0 for part in manifest.parts) == count
    tell(machine)
    if KILLS:
        print(f"killed {done} times, peak memory {max(peaks) / 1024:.0f} MiB, {len(names)} parts", flush=True)
    assert max(peaks) < 400 * 1024


def peak_of(process: subprocess.Popen[bytes]) -> int:
    """The most memory that a process had so far, in KiB; 0 if it has ended."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")), 0)
