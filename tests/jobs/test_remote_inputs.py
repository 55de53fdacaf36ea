"""Inputs by their addresses, and folders of data."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

fsspec = pytest.importorskip("fsspec")

import stamina  # noqa: E402

from batchwright.errors import InputError, MissingExtra  # noqa: E402
from batchwright.jobs.input_names import expanded  # noqa: E402
from batchwright.jobs.remote.addresses import explained, filesystem_of, is_pattern, scheme_of, shown_address  # noqa: E402
from batchwright.jobs.remote.remote_file import RemotePath  # noqa: E402
from batchwright.jobs.run import run  # noqa: E402

from .fakes import by_id, fake  # noqa: E402
from .stores import FaultyFileSystem, http_server  # noqa: E402

PROMPTS = [{"custom_id": f"q{number}", "prompt": f"prompt {number}"} for number in range(20)]
LINES = b"".join(json.dumps(each).encode() + b"\n" for each in PROMPTS)


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    """Have retries wait for nothing, and stores in memory be empty."""
    fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)
    FaultyFileSystem.store.clear()
    stamina.set_testing(True, attempts=20, cap=True)
    yield
    stamina.set_testing(False)
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]


def put(address: str, content: bytes) -> None:
    file = fsspec.filesystem(address.partition(":")[0])
    file.pipe_file(address, content)


def large(size: int) -> bytes:
    return random.Random(0).randbytes(size)


def test_addresses_are_told_from_paths() -> None:
    assert scheme_of("S3://b/k") == "s3"
    assert scheme_of("data/in.csv") is scheme_of("file:///data/in.csv") is scheme_of("c:/x") is None
    assert shown_address("https://me:secret@host/a.csv?X-Amz-Signature=secret") == "https://host/a.csv"
    assert not is_pattern("https://host/a.csv?b=1")
    assert is_pattern("s3://b/part-?.csv")


def test_what_a_memory_store_has_is_read(tmp_path: Path) -> None:
    put("memory://b/in.jsonl", LINES)
    report = run("memory://b/in.jsonl", tmp_path / "out.jsonl", model=fake())
    assert report.succeeded == len(PROMPTS)
    again = run("memory://b/in.jsonl", tmp_path / "out.jsonl", model=fake())
    assert again.resumed == len(PROMPTS)


def test_compressed_text_and_patterns(tmp_path: Path) -> None:
    put("memory://b/p/1.jsonl.gz", gzip.compress(LINES[: LINES.index(b"\n") + 1]))
    put("memory://b/p/2.jsonl.gz", gzip.compress(LINES[LINES.index(b"\n") + 1 :]))
    assert expanded(["memory://b/p/*.gz"]) == ("memory:///b/p/1.jsonl.gz", "memory:///b/p/2.jsonl.gz")
    assert expanded(["memory://b/p/*.gz"], "memory://b/p/1.jsonl.gz") == ("memory:///b/p/2.jsonl.gz",)
    assert expanded(["memory://b/p"], "memory://b/p/2.jsonl.gz") == ("memory://b/p/1.jsonl.gz",)
    with pytest.raises(InputError, match="no file matches"):
        expanded(["memory://b/p/1*"], "memory://b/p/1.jsonl.gz")
    run("memory://b/p/*.jsonl.gz", tmp_path / "out.jsonl", model=fake())
    assert len(by_id(tmp_path / "out.jsonl")) == len(PROMPTS)
    with pytest.raises(InputError, match="no file matches"):
        run("memory://b/p/*.csv", tmp_path / "out.jsonl", model=fake())


@pytest.mark.parametrize("size", [0, 1, 2**16, 2**16 + 1, 14_000_000])
def test_a_store_with_faults_is_read_whole(size: int) -> None:
    content = large(size)
    FaultyFileSystem.every = 10**9
    put("faulty://b/x.bin", content)
    FaultyFileSystem.every = 2
    with RemotePath("faulty://b/x.bin").open() as file:
        assert file.read() == content
        file.seek(max(0, size - 5))
        assert file.read() == content[-5:]


@pytest.mark.parametrize("ranges", [True, False])
def test_a_web_server_with_faults(tmp_path: Path, ranges: bool) -> None:
    content = large(9_000_000)
    (tmp_path / "x.bin").write_bytes(content)
    with (
        http_server(tmp_path, ranges=ranges, faults=0.2) as address,
        RemotePath(f"{address}/x.bin?token=secret").open() as file,
    ):
        assert file.read() == content


def test_a_parquet_file_on_a_web_server(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"prompt": [f"p{n}" for n in range(1000)]}), tmp_path / "in.parquet", row_group_size=100)
    with http_server(tmp_path, faults=0.2) as address:
        report = run(f"{address}/in.parquet", tmp_path / "out.parquet", model=fake(slots=64))
    assert report.succeeded == 1000
    assert pq.read_table(tmp_path / "out.parquet").column("prompt").to_pylist() == [f"p{n}" for n in range(1000)]


def test_an_input_that_changes_is_noticed(tmp_path: Path) -> None:
    put("memory://b/in.jsonl", LINES)
    run("memory://b/in.jsonl", tmp_path / "out.jsonl", model=fake())
    put("memory://b/in.jsonl", LINES.replace(b"prompt 1", b"prompt 0"))
    with pytest.raises(Exception, match="content of the input"):
        run("memory://b/in.jsonl", tmp_path / "out.jsonl", model=fake())


def test_errors_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="does not exist"):
        run("memory://b/none.jsonl", tmp_path / "out.jsonl", model=fake())
    with pytest.raises(InputError, match="no driver for nosuch://"):
        filesystem_of("nosuch://b/x")
    with http_server(tmp_path) as address, pytest.raises(InputError, match="does not exist"):
        run(f"{address}/none.jsonl", tmp_path / "out.jsonl", model=fake())
    with monkeypatch.context() as patched:
        patched.setitem(__import__("sys").modules, "gcsfs", None)
        with pytest.raises(MissingExtra, match="pip install gcsfs"):
            filesystem_of("gs://b/x")

    class NoCredentialsError(Exception):
        pass

    assert "AWS_ACCESS_KEY_ID" in explained("s3://b/x", NoCredentialsError("Unable to locate credentials"))
    assert "HF_TOKEN" in explained("hf://datasets/a/b", PermissionError("Forbidden"))


def folder_of(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    return folder


def test_a_folder_of_parquet_files(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    folder = folder_of(tmp_path)
    for part in range(3):
        pq.write_table(pa.table({"prompt": [f"{part}.{row}" for row in range(5)]}), folder / f"part-{part}.parquet")
    (folder / "_SUCCESS").touch()
    run(folder, tmp_path / "out.parquet", model=fake())
    expected = [f"{part}.{row}" for part in range(3) for row in range(5)]
    assert pq.read_table(tmp_path / "out.parquet").column("prompt").to_pylist() == expected
    (folder / "more.csv").write_text("prompt\nx\n")
    with pytest.raises(InputError, match="formats csv, parquet"):
        run(folder, tmp_path / "other.parquet", model=fake())


@pytest.mark.parametrize("kind", ["file", "stream", "feather"])
def test_arrow_files(tmp_path: Path, kind: str) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.feather as feather
    import pyarrow.ipc as ipc
    import pyarrow.parquet as pq

    table = pa.table({"prompt": [f"p{row}" for row in range(1000)], "n": [*range(1000)]})
    path = tmp_path / ("in.feather" if kind == "feather" else "in.arrow")
    if kind == "feather":
        feather.write_feather(table, str(path), compression="zstd")
    else:
        with (ipc.new_file if kind == "file" else ipc.new_stream)(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=300)
    run(path, tmp_path / "out.parquet", model=fake(slots=64))
    made = pq.read_table(tmp_path / "out.parquet")
    assert made.select(["prompt", "n"]).equals(table)
    put("memory://b/" + path.name, path.read_bytes())
    assert run(f"memory://b/{path.name}", tmp_path / "2.csv", model=fake(slots=64)).succeeded == 1000


def test_a_folder_of_a_dataset(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    # Otherwise it hashes what it has, in which some versions of it fail for some of pyarrow.
    datasets.disable_caching()
    table = pytest.importorskip("pyarrow").table({"prompt": [f"p{row}" for row in range(30)]})
    data = datasets.Dataset(datasets.table.InMemoryTable(table), fingerprint="test")
    data.save_to_disk(tmp_path / "saved", num_shards=3)
    assert run(tmp_path / "saved", tmp_path / "out.jsonl", model=fake()).succeeded == 30
    datasets.DatasetDict({"test": data}).save_to_disk(tmp_path / "splits")
    with pytest.raises(InputError, match="splits/test"):
        run(tmp_path / "splits", tmp_path / "out2.jsonl", model=fake())
