"""Tables that Arrow reads, as streams of rows: Parquet, and Arrow's own files and streams. Need the extra `parquet`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast

from batchwright.errors import InputError, InvalidRequest
from batchwright.jobs.compression import pyarrow_for
from batchwright.jobs.remote.remote_file import AnyPath, RemotePath
from batchwright.jobs.sources import Record, Source

_ROWS_AT_A_TIME = 256
_FILE_MAGIC = b"ARROW1"


class ColumnarSource(Source):
    """A source with one record for each row of a file of columns with types."""

    path: AnyPath
    columns: tuple[str, ...]
    _read: Sequence[str]
    _count: int

    @abstractmethod
    def batches(self, columns: Sequence[str], rows: int) -> Iterator[Any]:
        """Arrow record batches of up to `rows` rows with these columns, in this order. Raises `InputError`."""

    @abstractmethod
    def schema(self, columns: Sequence[str]) -> Any:
        """The Arrow schema of these columns."""

    def records(self) -> Iterator[Record]:
        number = 0
        for batch in self.batches(self._read, _ROWS_AT_A_TIME):
            for row in _rows_of(batch):
                number += 1
                yield Record(number, row)

    def count(self) -> int:
        return self._count

    def measure(self) -> tuple[int, int]:
        return self._count, self._count

    def _each(self, batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa

        while True:
            try:
                batch = next(batches, None)
            except (pa.ArrowException, OSError) as error:
                raise InputError(f"{self.path} is damaged: {error}") from error
            if batch is None:
                return
            yield batch


class ParquetSource(ColumnarSource):
    """A source with one record for each row of a Parquet file."""

    def __init__(self, path: AnyPath, wanted: Collection[str] | None = None) -> None:
        self.path = path
        with self._file() as file:
            self.columns = tuple(cast("list[str]", file.schema_arrow.names))
            self._count = cast("int", file.metadata.num_rows)
        self._read = [column for column in self.columns if wanted is None or column in wanted]

    def batches(self, columns: Sequence[str], rows: int) -> Iterator[Any]:
        """See `ColumnarSource`."""
        with self._file() as file:
            for batch in self._each(file.iter_batches(batch_size=rows, columns=[*columns])):
                yield batch.select([*columns])

    def schema(self, columns: Sequence[str]) -> Any:
        """See `ColumnarSource`."""
        with self._file() as file:
            return _chosen(file.schema_arrow, columns)

    @contextmanager
    def _file(self) -> Iterator[Any]:
        pa = pyarrow_for(f"{self.path}: Parquet")
        import pyarrow.parquet as pq

        with _source_of(self.path) as source:
            try:
                file = pq.ParquetFile(source)
            except (pa.ArrowException, OSError) as error:
                raise InputError(f"{self.path} cannot be read as Parquet: {error}") from error
            with file:
                yield file


class ArrowSource(ColumnarSource):
    """A source with one record for each row of an Arrow file (Feather), or of a stream, as `datasets` writes them."""

    def __init__(self, path: AnyPath, wanted: Collection[str] | None = None) -> None:
        self.path = path
        with self._reader() as reader:
            self.columns = tuple(cast("list[str]", reader.schema.names))
            if len(set(self.columns)) < len(self.columns):
                raise InputError(f"{path} has a column twice: {', '.join(map(repr, self.columns))}")
            self._count = sum(batch.num_rows for batch in self._each(_batches_of(reader)))
        self._read = [column for column in self.columns if wanted is None or column in wanted]

    def batches(self, columns: Sequence[str], rows: int) -> Iterator[Any]:
        """See `ColumnarSource`."""
        with self._reader() as reader:
            for batch in self._each(_batches_of(reader)):
                chosen = batch.select([*columns])
                for begin in range(0, chosen.num_rows, rows):
                    yield chosen.slice(begin, rows)

    def schema(self, columns: Sequence[str]) -> Any:
        """See `ColumnarSource`."""
        with self._reader() as reader:
            return _chosen(reader.schema, columns)

    @contextmanager
    def _reader(self) -> Iterator[Any]:
        pa = pyarrow_for(f"{self.path}: Arrow")
        import pyarrow.ipc as ipc

        try:
            with self.path.open("rb") as beginning:
                is_file = beginning.read(len(_FILE_MAGIC)) == _FILE_MAGIC
            opened = self.path.open("rb") if isinstance(self.path, RemotePath) else pa.memory_map(str(self.path))
        except OSError as error:
            raise InputError(f"{self.path} cannot be read: {error.strerror or error}") from error
        with opened:
            try:
                reader = ipc.open_file(opened) if is_file else ipc.open_stream(opened)
            except (pa.ArrowException, OSError) as error:
                raise InputError(f"{self.path} cannot be read as Arrow: {error}") from error
            with reader:
                yield reader


def _source_of(path: AnyPath) -> Any:
    return path.open("rb") if isinstance(path, RemotePath) else nullcontext(path)


def _batches_of(reader: Any) -> Iterator[Any]:
    if hasattr(reader, "num_record_batches"):
        return (reader.get_batch(index) for index in range(reader.num_record_batches))
    return iter(reader)


def _chosen(whole: Any, columns: Sequence[str]) -> Any:
    import pyarrow as pa

    # The metadata of datasets on the Hugging Face hub names all columns, and refuses any other.
    metadata = {key: value for key, value in (whole.metadata or {}).items() if key != b"huggingface"}
    return pa.schema([whole.field(name) for name in columns], metadata=metadata)


def _rows_of(batch: Any) -> Iterable[Mapping[str, object] | InvalidRequest]:
    try:
        return cast("list[Mapping[str, object]]", batch.to_pylist())
    except (ValueError, OverflowError):
        # A single value is at fault; all other rows can still be read.
        return (_row(batch, index) for index in range(batch.num_rows))


def _row(batch: Any, index: int) -> Mapping[str, object] | InvalidRequest:
    row: dict[str, object] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            row[name] = column[index].as_py()
        except UnicodeDecodeError:
            return InvalidRequest(f"column {name!r} holds text that is not UTF-8", param=name, code="invalid_encoding")
        except (ValueError, OverflowError) as error:
            return InvalidRequest(f"column {name!r} holds a value that cannot be read: {error}", param=name)
    return row
