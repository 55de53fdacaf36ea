"""Input files as records: numbers, what is skipped, what is an error record, and that long lines are not held."""

from __future__ import annotations

import csv
import gzip
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.errors import InputError, InvalidRequest
from batchwright.jobs.input_names import expanded
from batchwright.jobs.job import state_path
from batchwright.jobs.output_names import INPUT, MAKING, ROWS
from batchwright.jobs.sources import InputFormat, Record, format_of
from batchwright.jobs.spend_journal import journal_path
from batchwright.jobs.table_sources import open_source

LIMIT = 64


def records(path: Path, input_format: InputFormat = "jsonl", limit: int = LIMIT) -> list[tuple[int, object]]:
    """Numbers with contents; errors by their code."""
    source = open_source([path], input_format, max_line_bytes=limit)
    found = [*source.records()]
    assert source.count() == len(found)
    return [(record.number, _shown(record)) for record in found]


def _shown(record: Record) -> object:
    return record.content.code if isinstance(record.content, InvalidRequest) else record.content


def write(folder: Path, content: bytes, name: str = "in.txt") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def test_lines_are_counted_from_one_and_blank_ones_count(tmp_path: Path) -> None:
    path = write(tmp_path, b"\xef\xbb\xbffirst\r\n\r\n  \nfourth\n\nlast")
    assert records(path) == [(1, b"first"), (4, b"fourth"), (6, b"last")]


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b""])
@pytest.mark.parametrize("length", [LIMIT - 1, LIMIT, LIMIT + 1, LIMIT + 2, LIMIT + 4, LIMIT + 5, 2 * LIMIT, 999])
def test_the_longest_line_that_is_read(tmp_path: Path, bom: bytes, end: bytes, length: int) -> None:
    path = write(tmp_path, bom + b"x" * length + end + (b"next" if end else b""))
    first = b"x" * length if length <= LIMIT else "line_too_long"
    assert records(path) == [(1, first), (2, b"next")][: 2 if end else 1]


@given(st.lists(st.binary(max_size=2 * LIMIT).map(lambda line: line.replace(b"\n", b"")), max_size=8), st.booleans())
def test_any_lines_keep_their_numbers(lines: list[bytes], ended: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder), b"\n" + b"\n".join(lines) + (b"\n" if ended else b""))
        for number, content in records(path):
            assert isinstance(number, int)
            line = lines[number - 2].rstrip(b"\r")
            assert content == line or len(line) > LIMIT


def test_gzip(tmp_path: Path) -> None:
    path = write(tmp_path, gzip.compress(b"one\ntwo\n"), "in.txt.gz")
    assert format_of(path, None) == "txt"
    assert records(path) == [(1, b"one"), (2, b"two")]
    cut = write(tmp_path, gzip.compress(b"one\ntwo\n" * 1000)[:-9], "cut.txt.gz")
    with pytest.raises(InputError, match="damaged"):
        records(cut)
    with pytest.raises(InputError, match="damaged"):
        records(write(tmp_path, b"not gzip", "bad.txt.gz"))


def test_formats_by_extension(tmp_path: Path) -> None:
    assert format_of(Path("a.NDJSON"), None) == "jsonl"
    assert format_of(Path("a.tsv"), None) == "tsv"
    assert format_of(Path("a.tsv"), "txt") == "txt"
    for name in ("a", "a.xml", "a.gz"):
        with pytest.raises(InputError, match="--input-format"):
            format_of(Path(name), None)
    with pytest.raises(InputError, match="xlsx"):
        format_of(Path("a.csv"), "xlsx")
    with pytest.raises(InputError, match="UTF-16"):
        open_source([write(tmp_path, "text".encode("utf-16"))], "txt", max_line_bytes=LIMIT)


def test_csv_rows(tmp_path: Path) -> None:
    content = b'\xef\xbb\xbfa,b\r\n1,2\r\n\r\n"x, ""y""","two\r\nlines"\r\n5,6'
    path = write(tmp_path, content)
    assert records(path, "csv") == [
        (2, {"a": "1", "b": "2"}),
        (4, {"a": 'x, "y"', "b": "two\nlines"}),
        (6, {"a": "5", "b": "6"}),
    ]
    tabs = write(tmp_path, b"a\tb\n1\t2,3\n")
    assert records(tabs, "tsv") == [(2, {"a": "1", "b": "2,3"})]


def test_bad_csv_rows_fail_alone(tmp_path: Path) -> None:
    lines = [b"a,b", b"1", b'"x"y,2', b"\xff,2", b"z" * (LIMIT + 1) + b",2", b"1,2,3", b"3,4"]
    assert records(write(tmp_path, b"\n".join(lines)), "csv") == [
        (2, "invalid_row"),
        (3, "invalid_row"),
        (4, "invalid_encoding"),
        (5, "line_too_long"),
        (6, "invalid_row"),
        (7, {"a": "3", "b": "4"}),
    ]


def test_a_quote_that_is_never_closed_ends_at_the_limit(tmp_path: Path) -> None:
    before = csv.field_size_limit()
    path = write(tmp_path, b'a,b\n"open,2\n' + b"0123456789,1\n" * 6 + b"3,4\n")
    found = records(path, "csv")
    assert found[0] == (2, "invalid_row")
    assert found[-1] == (9, {"a": "3", "b": "4"})
    assert records(write(tmp_path, b'a,b\n1,"2\n'), "csv") == [(2, "invalid_row")]
    assert csv.field_size_limit() == before


def test_csv_headers_that_cannot_be_used(tmp_path: Path) -> None:
    for content, says in ((b"", "is empty"), (b"a,a\n1,2\n", "twice"), (b'"a"b,c\n', "header")):
        with pytest.raises(InputError, match=says):
            open_source([write(tmp_path, content)], "csv", max_line_bytes=LIMIT)


def test_parquet_reads_only_what_is_wanted(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"a": ["x", None], "b": [1, 2], "c": [[1.0], []]}), path)
    source = open_source([path], "parquet", max_line_bytes=LIMIT, wanted={"a", "b"})
    assert source.columns == ("a", "b", "c")
    assert source.count() == 2
    assert [*source.records()] == [Record(1, {"a": "x", "b": 1}), Record(2, {"a": None, "b": 2})]
    with pytest.raises(InputError, match="Parquet"):
        open_source([write(tmp_path, b"PAR1 not really")], "parquet", max_line_bytes=LIMIT)


def test_bad_parquet_values_fail_alone(tmp_path: Path) -> None:
    texts = pa.array([b"one", b"\xff\xfe", b"three"], pa.binary()).view(pa.string())
    days = pa.array([0, 0, 2**62], pa.int64()).view(pa.timestamp("ms"))
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"a": texts, "b": [1, 2, 3]}), path)
    assert records(path, "parquet") == [(1, {"a": "one", "b": 1}), (2, "invalid_encoding"), (3, {"a": "three", "b": 3})]
    pq.write_table(pa.table({"a": ["x", "y", "z"], "day": days}), path)
    assert [number for number, content in records(path, "parquet") if content == "invalid_request"] == [3]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"prompt": "a"}] [{"prompt": "b"}]', "goes on after its JSON array"),
        ('[{"prompt": "a"}],', "goes on after its JSON array"),
        ('[{"prompt": "a"}, oops' + " " * 2**22 + "]", "is not valid JSON"),
        ('[{"prompt": "a', "is not valid JSON"),
    ],
)
def test_a_damaged_array_is_no_shorter_one(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "in.json"
    path.write_text(text)
    source = open_source([path], "json", max_line_bytes=2**20)
    with pytest.raises(InputError, match=message):
        list(source.records())


def test_an_array_may_end_with_much_space(tmp_path: Path) -> None:
    path = tmp_path / "in.json"
    path.write_text('\ufeff[{"prompt": "a"}, -Infinity, "b" \n]' + " \n" * 2**21)
    source = open_source([path], "json", max_line_bytes=2**20)
    assert [record.number for record in source.records()] == [1, 2, 3]


def test_files_beside_an_output_are_none_of_its_inputs(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    own = (state_path(output), journal_path(output), *(tmp_path / f"out.jsonl{each}" for each in (INPUT, MAKING, ROWS)))
    for path in (output, *own, tmp_path / "out.jsonl.old"):
        path.write_text("")
    assert expanded([f"{output}*"], str(output)) == (f"{output}.old",)


def test_what_a_run_writes_is_none_of_its_inputs(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl", "out.jsonl", "out.jsonl.results.jsonl", "output.jsonl"):
        (tmp_path / name).write_text("")
    output = str(tmp_path / "out.jsonl")
    inputs = tuple(str(tmp_path / name) for name in ("a.jsonl", "b.jsonl", "output.jsonl"))
    assert expanded([f"{tmp_path}/*.jsonl"], output) == inputs
    assert expanded([str(tmp_path)], output) == inputs
    assert expanded([output], output) == (output,), "named, so that it is refused"
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "out.jsonl").write_text("")
    assert expanded([f"{tmp_path}/*/*.jsonl"], output) == (str(tmp_path / "sub" / "out.jsonl"),)
