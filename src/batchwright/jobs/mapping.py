"""`batchwright.map`: a data frame in, the same kind of frame with answers out."""

from __future__ import annotations

import os
import tempfile
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, cast

import msgspec

from batchwright.errors import InputError, MissingExtra, RowsFailed, shown
from batchwright.jobs.input_names import expanded
from batchwright.jobs.job_run import RunProgress
from batchwright.jobs.output_forms import output_form_of
from batchwright.jobs.remote.remote_file import RemotePath, located
from batchwright.jobs.report import RunReport
from batchwright.jobs.run import run
from batchwright.jobs.sources import LineSource
from batchwright.jobs.templates import Templates
from batchwright.request import SamplingParams

if TYPE_CHECKING:
    from batchwright.engine.engine import Engine

_Frame = TypeVar("_Frame")

_MAX_LINE_BYTES = 2**30
_NULLS = frozenset({"NAType", "NaTType"})
"""Names of the types of pandas' placeholders for missing values."""
_SET_HERE = frozenset(
    {"input_format", "keep", "output_column", "prompt_template", "system_template", "dry_run", "limit", "sample"}
)


def map(  # noqa: A001 - the name that users expect
    frame: _Frame,
    *,
    prompt: str | None = None,
    output: str = "answer",
    model: str | Engine | None = None,
    backend: str | None = None,
    system: str | None = None,
    chat: bool = False,
    defaults: SamplingParams | Mapping[str, Any] | None = None,
    errors: Literal["null", "raise"] = "null",
    checkpoint: str | os.PathLike[str] | None = None,
    progress: bool | Callable[[RunProgress], None] = True,
    **options: Any,
) -> _Frame:
    """Answer each row of a data frame, and return the same kind of frame with the answers as a column.

    Takes frames of pandas, Polars and Arrow (anything eager that `narwhals` takes), and `datasets.Dataset`. Works in a
    notebook too, where an event loop is already running. Needs the extra `frames`.

    - `prompt`: a text with columns of the frame in braces, `"Is this good? {review}"`; `messages_template` may take
      its place. `system`: a system message before it, of the same form, which makes it a chat; `chat` does so without
      one.
    - `output`: name of the column of answers: texts, or lists if several texts or vectors are asked for.
    - `model`, `backend` and `defaults`: what computes, and how: see `run`; `options` are further arguments of it.
    - `errors`: `"null"` makes the answer of a failed row null, says why in a further column, `answer_error` (named
      after `output`), and warns; `"raise"` raises `RowsFailed`, which has the frame, once all rows were tried.
    - `checkpoint`: a file or an address (`s3://…`) in which answers are kept as they finish. A later call with it
      continues, even after a kill, or with a frame that has more rows; any other difference is refused.
    - `progress`: whether a terminal or a notebook shows a bar; or a function that is called with the progress.

    Raises `InputError` for anything that is not a frame or lacks the columns, and whatever `run` raises.
    """
    if errors not in ("null", "raise"):
        raise InputError(f"errors={shown(errors)}: must be 'null' or 'raise'")
    if given := _SET_HERE & options.keys():
        raise TypeError(f"map() has no argument {min(given)!r}")
    templates = Templates.of(prompt, system, options.get("messages_template"))
    table, error_column = _table_of(frame), f"{output}_error"
    templates.check(table.columns)
    for name in (output, error_column) if errors == "null" else (output,):
        if name in table.columns:
            raise InputError(f"output={output!r}: the frame has a column {name!r} already; choose another name")
    report: RunReport | None = None
    answers: list[object] = []
    failures: list[str | None] = []
    if len(table):
        with tempfile.TemporaryDirectory(prefix="batchwright-") as folder, _shown(progress, len(table)) as show:
            rows, kept = Path(folder) / "rows.jsonl", _kept(checkpoint, Path(folder))
            _save(table.rows(templates.columns), rows)
            arguments = {"prompt_template": prompt, "system_template": system, "chat": chat, "defaults": defaults}
            report = run(rows, kept, model=model, backend=backend, keep=(), progress=show, **{**arguments, **options})
            answers, failures = _answers(kept)
    added: dict[str, Sequence[object]] = {output: answers}
    if errors == "null":
        added[error_column] = failures
    made = cast("_Frame", table.with_columns(added))
    if report is not None and report.failed:
        example = next(text for text in failures if text is not None)
        message = f"{report.failed:,} of {report.total:,} rows failed, such as with {example}"
        if errors == "raise":
            raise RowsFailed(
                f"{message}. The frame of this error has the answers of the others", frame=made, report=report
            )
        warnings.warn(f"{message}: see the column {error_column!r}", stacklevel=2)
    return made


class _Table(Protocol):
    """A frame of any library."""

    columns: Sequence[str]

    def __len__(self) -> int: ...

    @abstractmethod
    def rows(self, columns: Sequence[str]) -> Iterable[Mapping[str, object]]:
        """The rows, with these columns."""

    @abstractmethod
    def with_columns(self, added: Mapping[str, Sequence[object]]) -> object:
        """The frame of that library with further columns."""


class _NarwhalsTable(_Table):
    def __init__(self, narwhals: Any, frame: Any) -> None:
        self._narwhals = narwhals
        self._frame = frame
        self.columns = frame.columns

    def __len__(self) -> int:
        return len(self._frame)

    def rows(self, columns: Sequence[str]) -> Iterable[Mapping[str, object]]:
        return cast("Iterable[Mapping[str, object]]", self._frame.select([*columns]).iter_rows(named=True))

    def with_columns(self, added: Mapping[str, Sequence[object]]) -> object:
        narwhals, backend = self._narwhals, self._frame.implementation
        series = [
            narwhals.new_series(name, values, narwhals.String() if _are_texts(values) else None, backend=backend)
            for name, values in added.items()
        ]
        return self._frame.with_columns(*series).to_native()


class _DatasetTable(_Table):
    """A `datasets.Dataset`."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.columns = dataset.column_names

    def __len__(self) -> int:
        return len(self._dataset)

    def rows(self, columns: Sequence[str]) -> Iterable[Mapping[str, object]]:
        rows: Iterable[Mapping[str, object]] = self._dataset.select_columns([*columns]).with_format(None)
        return rows

    def with_columns(self, added: Mapping[str, Sequence[object]]) -> object:
        import datasets

        made = self._dataset
        for name, values in added.items():
            feature = datasets.Value("string") if _are_texts(values) else None
            made = made.add_column(name, [*values], feature=feature)
        return made


def _table_of(frame: object) -> _Table:
    module = type(frame).__module__.partition(".")[0]
    if module == "datasets":
        if type(frame).__name__ != "Dataset":
            raise InputError(
                f"frame of type {type(frame).__name__}: give one split, as a Dataset, or save it and give its folder "
                "to batchwright.run"
            )
        return _DatasetTable(frame)
    try:
        import narwhals
    except ImportError as error:
        raise MissingExtra("map needs narwhals; install it: pip install 'batchwright[frames]'") from error
    try:
        return _NarwhalsTable(narwhals, narwhals.from_native(cast("Any", frame), eager_only=True))
    except (TypeError, ValueError) as error:
        raise InputError(
            f"frame of type {type(frame).__name__}: give a frame in memory of pandas, Polars, Arrow or datasets "
            f"(collect a lazy one first); {error}"
        ) from error


def _save(rows: Iterable[Mapping[str, object]], path: Path) -> None:
    encode = msgspec.json.Encoder().encode
    with path.open("wb") as file:
        for row in rows:
            file.write(encode({name: plain(value) for name, value in row.items()}) + b"\n")


def plain(value: object) -> object:
    """A value in a form that JSON has, which a template renders as the same text; text if JSON has no such form."""
    if value is None or type(value).__name__ in _NULLS or (isinstance(value, float) and value != value):
        return None
    if isinstance(value, bool | str | float):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**63 else str(value)
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    # Arrays and scalars of numpy, and series.
    for name in ("item", "to_list", "tolist"):
        if hasattr(value, name):
            try:
                return plain(getattr(value, name)())
            except ValueError:  # an array has no single item
                continue
    return str(value)


def _kept(checkpoint: str | os.PathLike[str] | None, folder: Path) -> str:
    if checkpoint is None:
        return str(folder / "answers.jsonl")
    name = os.fspath(checkpoint)
    if name == "-" or output_form_of(Path(Path(name.rstrip("/")).name)).is_table:
        raise InputError(f"checkpoint {name}: must be a file or an address that ends in .jsonl")
    return name


def _answers(name: str) -> tuple[list[object], list[str | None]]:
    """The answers and the errors in a table of answers."""
    answers, failures = list[object](), list[str | None]()
    decode = msgspec.json.Decoder(dict[str, Any]).decode
    for path in _files_of(name):
        for record in LineSource(path, max_line_bytes=_MAX_LINE_BYTES).records():
            row = decode(cast("bytes", record.content))
            answers.append(row["answer"])
            failures.append(row["error"])
    return answers, failures


def _files_of(name: str) -> list[Path | RemotePath]:
    """The files of an output, in order."""
    return [located(each) for each in expanded([name])]


def _are_texts(values: Sequence[object]) -> bool:
    return all(value is None or isinstance(value, str) for value in values)


def _shown(
    progress: bool | Callable[[RunProgress], None], rows: int
) -> AbstractContextManager[Callable[[RunProgress], None] | None]:
    if callable(progress):
        return nullcontext(progress)
    return _bar(rows) if progress else nullcontext(None)


@contextmanager
def _bar(rows: int) -> Iterator[Callable[[RunProgress], None] | None]:
    """A bar on standard error, or in a notebook; nothing if nobody would see it."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import MofNCompleteColumn, Progress

    console = Console(stderr=True)
    if not (console.is_terminal or console.is_jupyter):
        yield None
        return
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=console) as bar:
        task = bar.add_task("rows", total=rows)

        def show(now: RunProgress) -> None:
            failed = f", {now.failed:,} failed" if now.failed else ""
            bar.update(task, completed=now.done, description=escape(f"{now.waiting or now.phase}{failed}"))

        yield show
