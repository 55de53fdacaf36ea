"""Tables in, tables out: the rows of the input with their answers, whole, in order, resumable, in their types."""

from __future__ import annotations

import csv
import datetime as dt
import decimal
import gzip
import json
import signal
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchwright.errors import InputError, ResumeRefused
from batchwright.jobs.compression import reading
from batchwright.jobs.job_run import RunInterrupted
from batchwright.jobs.run import run

from .fakes import fake, read

ADDED = ["answer", "finish_reason", "error", "prompt_tokens", "completion_tokens"]
CITIES = {"city": ["Oslo", "Rome, Italy", 'the "Bay"'], "year": ["1950", "1960", ""]}
TEMPLATE = "{city} in {year}?"
PROMPTS = ["Oslo in 1950?", "Rome, Italy in 1960?", 'the "Bay" in ?']


def table(path: Path, columns: dict[str, list[Any]]) -> Path:
    """Write `columns` in the form that the name of `path` says."""
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    name = path.name.removesuffix(".gz").removesuffix(".zst")
    if name.endswith(".parquet"):
        pq.write_table(pa.table(columns), path)
        return path
    if name.endswith(".json"):
        content = json.dumps(rows, indent=1)
    elif name.endswith(".jsonl"):
        content = "".join(json.dumps(row) + "\n" for row in rows)
    else:
        path.touch()
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*columns], delimiter="\t" if name.endswith(".tsv") else ",")
            writer.writeheader()
            writer.writerows(rows)
        content = path.read_text()
    data = content.encode()
    if path.suffix == ".zst":
        with pa.CompressedOutputStream(str(path), "zstd") as packed:
            packed.write(data)
        return path
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def rows_in(path: Path) -> list[dict[str, Any]]:
    """The rows of a table that was written."""
    name = path.name.removesuffix(".gz").removesuffix(".zst")
    if name.endswith(".parquet"):
        return cast("list[dict[str, Any]]", pq.read_table(path).to_pylist())
    with reading(path) as file:
        text = file.read().decode()
    if name.endswith(".jsonl"):
        return [json.loads(line) for line in text.splitlines()]
    return [*csv.DictReader(text.splitlines(keepends=True), delimiter="\t" if name.endswith(".tsv") else ",")]


@pytest.mark.parametrize("output", ["out.jsonl", "out.jsonl.gz", "out.jsonl.zst", "out.csv", "out.tsv", "out.parquet"])
@pytest.mark.parametrize(
    "source", ["in.csv", "in.tsv.gz", "in.csv.zst", "in.jsonl", "in.jsonl.gz", "in.json", "in.parquet"]
)
def test_every_table_becomes_every_table(tmp_path: Path, source: str, output: str) -> None:
    engine = fake()
    report = run(table(tmp_path / source, CITIES), tmp_path / output, model=engine, prompt_template=TEMPLATE)
    assert (report.succeeded, report.failed) == (3, 0)
    assert sorted(engine.prompts) == sorted(PROMPTS)
    rows = rows_in(tmp_path / output)
    assert [[*row] for row in rows] == [["city", "year", *ADDED]] * 3
    for row, city, year, prompt in zip(rows, CITIES["city"], CITIES["year"], PROMPTS, strict=True):
        assert (row["city"], row["year"]) == (city, year)
        assert row["answer"].startswith("answer ")
        assert (row["finish_reason"], row["error"] or None) == ("stop", None)
        assert (int(row["prompt_tokens"]), int(row["completion_tokens"])) == (len(prompt), 3)


def test_types_of_parquet_are_kept(tmp_path: Path) -> None:
    moments = pa.array([1, None], pa.timestamp("ns", "UTC"))
    columns = {
        "prompt": pa.array(["a", "b"], pa.large_string()),
        "price": pa.array([decimal.Decimal("1.50"), None], pa.decimal128(9, 2)),
        "at": moments,
        "kind": pa.array(["x", "y"]).dictionary_encode(),
        "nested": pa.array([{"a": [1, 2]}, None]),
        "raw": pa.array([b"\xff", b""], pa.binary()),
        "day": pa.array([dt.date(2020, 1, 2)] * 2),
    }
    before = pa.table(columns).replace_schema_metadata({"mine": "kept", "huggingface": "names all columns"})
    pq.write_table(before, tmp_path / "in.parquet")
    run(tmp_path / "in.parquet", tmp_path / "out.parquet", model=fake())
    after = pq.read_table(tmp_path / "out.parquet")
    assert after.select(before.column_names).equals(pq.read_table(tmp_path / "in.parquet"))
    assert [str(after.schema.field(name).type) for name in ADDED] == ["string"] * 3 + ["int64"] * 2
    assert after.schema.metadata == {b"mine": b"kept"}
    run(tmp_path / "in.parquet", tmp_path / "out.jsonl", model=fake(), keep=["day", "price"])
    assert rows_in(tmp_path / "out.jsonl")[0] | dict.fromkeys(ADDED) == {
        "day": "2020-01-02", "price": "1.50", **dict.fromkeys(ADDED),
    }  # fmt: skip


@pytest.mark.parametrize("output", ["out.jsonl", "out.csv"])
def test_nanoseconds_that_only_pandas_knows_are_written_and_read(tmp_path: Path, output: str) -> None:
    moments = pa.array([1_600_000_000_000_000_001, None], pa.timestamp("ns"))
    lists = pa.array([[1_600_000_000_000_000_001], None], pa.list_(pa.timestamp("ns")))
    pq.write_table(pa.table({"prompt": ["a", "b"], "at": moments, "each": lists}), tmp_path / "in.parquet")
    report = run(tmp_path / "in.parquet", tmp_path / output, model=fake(), prompt_template="{prompt} {each}")
    assert report.succeeded == 2
    assert "2020-09-13T12:26:40.000000001" in str(rows_in(tmp_path / output)[0]["each"])
    assert "2020-09-13" in rows_in(tmp_path / output)[0]["at"]


def test_rows_need_not_have_the_same_columns(tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"prompt": "b", "note": "x"}]
    run(rows, tmp_path / "out.jsonl", model=fake(), prompt_template="{prompt}")
    assert [row["note"] for row in rows_in(tmp_path / "out.jsonl")] == [None, "x"]


def test_types_of_json_become_those_of_parquet(tmp_path: Path) -> None:
    lines = [
        {"prompt": "a", "n": 1, "x": 1, "yes": True, "tags": ["t"], "mixed": 1, "big": 2**63},
        {"prompt": "b", "n": None, "x": 2.5, "yes": None, "mixed": "text", "late": {"k": 1}, "big": 1},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + "not JSON\n")
    run(tmp_path / "in.jsonl", tmp_path / "out.parquet", model=fake(), prompt_template="{prompt}")
    after = pq.read_table(tmp_path / "out.parquet")
    types = {field.name: str(field.type) for field in after.schema}
    assert {name: types[name] for name in ("n", "x", "yes", "tags", "mixed", "late", "big")} == {
        "n": "int64", "x": "double", "yes": "bool", "tags": "string", "mixed": "string", "late": "string",
        "big": "string",
    }  # fmt: skip
    first, second, third = after.to_pylist()
    assert (first["tags"], first["late"], first["mixed"], first["big"]) == ('["t"]', None, "1", str(2**63))
    assert (second["n"], second["x"], second["late"]) == (None, 2.5, '{"k":1}')
    assert (third["prompt"], third["answer"], third["error"][:17]) == (None, None, "invalid_json_line")


def test_several_answers_and_vectors_have_types_of_their_own(tmp_path: Path) -> None:
    lines = [{"prompt": f"p{index}", "n": 2} for index in range(3)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run(tmp_path / "in.jsonl", tmp_path / "out.parquet", model=fake())
    after = pq.read_table(tmp_path / "out.parquet")
    assert after.schema.field("answer").type == pa.list_(pa.string())
    assert all(len(row["answer"]) == 2 for row in after.to_pylist())
    run(tmp_path / "in.jsonl", tmp_path / "out.csv", model=fake())
    assert all(len(json.loads(row["answer"])) == 2 for row in rows_in(tmp_path / "out.csv"))


def test_lines_that_are_no_table_become_one_too(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("one\n\ntwo\n")
    run(tmp_path / "in.txt", tmp_path / "out.csv", model=fake())
    assert [row["prompt"] for row in rows_in(tmp_path / "out.csv")] == ["one", "two"]
    batch = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    (tmp_path / "in.jsonl").write_text(json.dumps(batch) + "\n")
    run(tmp_path / "in.jsonl", tmp_path / "out.parquet", model=fake(), keep=["custom_id"])
    (row,) = rows_in(tmp_path / "out.parquet")
    assert [*row] == ["custom_id", *ADDED]


def test_errors_are_in_a_column(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text('prompt,n\nfine,1\n,2\n"x"y,3\npoison,4\n')
    report = run(tmp_path / "in.csv", tmp_path / "out.csv", model=fake())
    rows = rows_in(tmp_path / "out.csv")
    assert [row["n"] for row in rows] == ["1", "2", "", "4"]
    assert [row["error"].partition(":")[0] for row in rows] == ["", "missing_field", "invalid_row", "non_finite_logits"]
    assert [row["answer"] != "" for row in rows] == [True, False, False, False]
    assert [(each.code, each.count, each.line) for each in report.failures] == [
        ("missing_field", 1, 3), ("invalid_row", 1, 4), ("non_finite_logits", 1, 5),
    ]  # fmt: skip


def test_columns_are_chosen_and_none_is_in_the_way(tmp_path: Path) -> None:
    source = table(tmp_path / "in.csv", {"question": ["a", "b"], "answer": ["1", "2"], "error": ["", ""]})
    options: dict[str, Any] = {"model": fake(), "prompt_template": "{question}"}
    with pytest.raises(InputError, match=r"column 'answer'.*--output-column"):
        run(source, tmp_path / "out.csv", **options)
    with pytest.raises(InputError, match="'error'"):
        run(source, tmp_path / "out.csv", **options, output_column="said")
    with pytest.raises(InputError, match="no column 'x'"):
        run(source, tmp_path / "out.csv", **options, keep=["x"])
    run(source, tmp_path / "out.csv", **options, output_column="said", keep=["answer", "question"])
    assert [*rows_in(tmp_path / "out.csv")[0]] == ["answer", "question", "said", *ADDED[1:]]
    assert [*tmp_path.glob("*.tmp")] == []


def test_another_choice_of_columns_computes_nothing_again(tmp_path: Path) -> None:
    source = table(tmp_path / "in.csv", CITIES)
    run(source, tmp_path / "out.csv", model=fake(), prompt_template=TEMPLATE)
    made = (tmp_path / "out.csv").stat()
    engine = fake()
    run(source, tmp_path / "out.csv", model=engine, prompt_template=TEMPLATE)
    assert (tmp_path / "out.csv").stat().st_mtime_ns == made.st_mtime_ns
    run(source, tmp_path / "out.csv", model=engine, prompt_template=TEMPLATE, keep=["year"])
    assert [*rows_in(tmp_path / "out.csv")[0]] == ["year", *ADDED]
    (tmp_path / "out.csv").unlink()
    run(source, tmp_path / "out.csv", model=engine, prompt_template=TEMPLATE)
    assert [*rows_in(tmp_path / "out.csv")[0]] == ["city", "year", *ADDED]
    assert engine.submitted == []
    (tmp_path / "out.csv.results.jsonl").unlink()
    with pytest.raises(ResumeRefused, match="is missing"):
        run(source, tmp_path / "out.csv", model=engine, prompt_template=TEMPLATE)


@pytest.mark.parametrize("output", ["out.parquet", "out.jsonl", "out.jsonl.gz"])
def test_an_interrupted_table_goes_on(tmp_path: Path, output: str) -> None:
    source = table(tmp_path / "in.csv", {"prompt": [f"p{index}" for index in range(40)]})

    def interrupt(step: int) -> None:
        if step == 9:
            signal.raise_signal(signal.SIGINT)

    first, second = fake(on_step=interrupt), fake()
    with pytest.raises(RunInterrupted) as interrupted:
        run(source, tmp_path / output, model=first)
    assert not (tmp_path / output).exists()
    done = interrupted.value.report.succeeded
    assert 0 < done < 40
    assert run(source, tmp_path / output, model=second).resumed == done
    assert [row["prompt"] for row in rows_in(tmp_path / output)] == [f"p{index}" for index in range(40)]
    assert len(second.submitted) == 40 - done


def test_compressed_lines_go_on_and_may_be_ordered(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"prompt": f"p{index}"}) + "\n" for index in range(20)))
    run(source, tmp_path / "out.jsonl.zst", model=fake(), ordered=True)
    with source.open("a") as file:
        file.write('{"prompt": "more"}\n')
    engine = fake()
    run(source, tmp_path / "out.jsonl.zst", model=engine, ordered=True)
    assert engine.prompts == ["more"]
    assert [row["custom_id"] for row in rows_in(tmp_path / "out.jsonl.zst")] == [f"line-{n}" for n in range(1, 22)]
    assert not (tmp_path / "out.jsonl.zst.partial").exists()


def test_names_that_say_nothing_known_are_refused(tmp_path: Path) -> None:
    source = table(tmp_path / "in.csv", {"prompt": ["a"]})
    for name in ("out.xlsx", "out.json", "out.parquet.gz", "out.gz"):
        with pytest.raises(InputError, match=r"extension stands for no form.*\.parquet"):
            run(source, tmp_path / name, model=fake())
    assert [path.name for path in tmp_path.iterdir()] == ["in.csv"]


def test_several_files_are_one_input(tmp_path: Path) -> None:
    for name, cities in (("b", ["2", "3"]), ("a", ["1"])):
        table(tmp_path / f"{name}.csv", {"prompt": cities})
    run(tmp_path / "*.csv", tmp_path / "out.jsonl", model=fake())
    assert [row["prompt"] for row in rows_in(tmp_path / "out.jsonl")] == ["1", "2", "3"]
    table(tmp_path / "c.csv", {"prompt": ["4"]})
    engine = fake()
    run(tmp_path / "[abc].csv", tmp_path / "out.jsonl", model=engine)
    assert engine.prompts == ["4"]
    table(tmp_path / "d.csv", {"other": ["5"]})
    with pytest.raises(InputError, match=r"d\.csv has the columns 'other'"):
        run([tmp_path / "a.csv", tmp_path / "d.csv"], tmp_path / "new.csv", model=fake())
    with pytest.raises(InputError, match="no file matches"):
        run(tmp_path / "*.tsv", tmp_path / "new.csv", model=fake())
    with pytest.raises(InputError, match="one format"):
        run([tmp_path / "a.csv", table(tmp_path / "a.tsv", {"prompt": ["x"]})], tmp_path / "new.csv", model=fake())
    with pytest.raises(InputError, match="nosuch://"):
        run("nosuch://bucket/in.csv", tmp_path / "new.csv", model=fake())


def test_frames(tmp_path: Path) -> None:
    frame = pa.table({"prompt": ["a", "b"], "n": [1, 2]})
    run(frame, tmp_path / "out.parquet", model=fake())
    assert [row["n"] for row in rows_in(tmp_path / "out.parquet")] == [1, 2]
    engine = fake()
    run(frame.slice(0).combine_chunks(), tmp_path / "out.parquet", model=engine)
    assert engine.submitted == []
    run([{"prompt": "x"}], tmp_path / "rows.csv", model=fake())
    assert [row["prompt"] for row in rows_in(tmp_path / "rows.csv")] == ["x"]
    with pytest.raises(InputError, match="of type int"):
        run(5, tmp_path / "no.csv", model=fake())


def test_limit_and_sample(tmp_path: Path) -> None:
    source = table(tmp_path / "in.csv", {"prompt": [f"p{index}" for index in range(50)]})
    run(source, tmp_path / "out.csv", model=fake(), limit=5)
    assert [row["prompt"] for row in rows_in(tmp_path / "out.csv")] == [f"p{index}" for index in range(5)]
    with pytest.raises(ResumeRefused, match=r"limit \(then 5, now 3\)"):
        run(source, tmp_path / "out.csv", model=fake(), limit=3)
    engine = fake()
    assert run(source, tmp_path / "out.csv", model=engine).resumed == 5
    assert (len(engine.submitted), len(rows_in(tmp_path / "out.csv"))) == (45, 50)
    run(source, tmp_path / "some.csv", model=fake(), sample=10, sample_seed=3)
    drawn = [int(row["prompt"][1:]) for row in rows_in(tmp_path / "some.csv")]
    assert len(drawn) == 10
    assert drawn == sorted(drawn) != [*range(10)]
    run(source, tmp_path / "same.csv", model=fake(), sample=10, sample_seed=3)
    assert (tmp_path / "same.csv").read_bytes() == (tmp_path / "some.csv").read_bytes()
    run(source, tmp_path / "few.csv", model=fake(), sample=10, limit=20)
    with pytest.raises(ResumeRefused, match=r"limit \(then 20, now null\)"):
        run(source, tmp_path / "few.csv", model=fake(), sample=10)


def test_chats_of_templates(tmp_path: Path) -> None:
    source = table(tmp_path / "in.json", {"q": ['say "hi"', "b"], "role": ["poet", None]})
    engine = fake()
    run(source, tmp_path / "a.csv", model=engine, prompt_template="{q}!", system_template="You are a {role}.")
    assert engine.prompts[0] == [
        {"role": "system", "content": "You are a poet."},
        {"role": "user", "content": 'say "hi"!'},
    ]
    shots = (
        '[{% if role %}{"role": "system", "content": "{{ role }}"},{% endif %}{"role":"user","content":{{ q|tojson }}}]'
    )
    engine = fake()
    run(source, tmp_path / "b.csv", model=engine, messages_template=shots)
    assert engine.prompts[1] == [{"role": "user", "content": "b"}]
    for text, says in (("{% if %}", "line 1"), ("[]", "names no column"), ("{{ nope }}", "no column 'nope'")):
        with pytest.raises(InputError, match=says):
            run(source, tmp_path / "c.csv", model=fake(), messages_template=text)
    report = run(source, tmp_path / "d.csv", model=fake(), messages_template="{{ q }}")
    assert [failure.code for failure in report.failures] == ["invalid_template"]
    assert "tojson" in report.failures[0].message


def test_a_json_array_is_read_in_pieces(tmp_path: Path) -> None:
    long = {"prompt": "x" * 3_000_000}
    values: list[Any] = [{"prompt": "ä"}, 5, long, {"prompt": "last", "seed": 12}]
    (tmp_path / "in.json").write_text("\ufeff \n" + json.dumps(values, ensure_ascii=False), encoding="utf-8")
    engine = fake()
    report = run(tmp_path / "in.json", tmp_path / "out.jsonl", model=engine)
    assert engine.prompts == ["ä", "last"]
    assert sorted((failure.code, failure.line) for failure in report.failures) == [
        ("invalid_json_line", 2), ("line_too_long", 3),
    ]  # fmt: skip
    for content, says in (("{}", "not a JSON array"), ('[{"a": 1}', "no end"), ('[{"a" 1}]', "not valid JSON")):
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(InputError, match=says):
            run(tmp_path / "bad.json", tmp_path / "no.jsonl", model=fake())


def test_a_stream_of_rows_gives_result_lines(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    run(table(tmp_path / "in.csv", {"id": ["k"], "prompt": ["a"]}), "-", model=fake(), id_column="id")
    (tmp_path / "out").write_bytes(capfdbinary.readouterr().out)
    assert [line["custom_id"] for line in read(tmp_path / "out")] == ["k"]


def test_answers_of_several_kinds_are_json(tmp_path: Path) -> None:
    lines = [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c", "n": 2}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run(tmp_path / "in.jsonl", tmp_path / "out.parquet", model=fake(slots=1))
    answers = [row["answer"] for row in rows_in(tmp_path / "out.parquet")]
    assert answers[0].startswith("answer ")
    assert len(json.loads(answers[2])) == 2


def test_whole_numbers_beside_fractions_become_floats_of_any_size(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(f'{{"city": "a", "year": {2**60 + 1}}}\n{{"city": "b", "year": 1.5}}\n')
    run(source, tmp_path / "out.parquet", model=fake(), prompt_template="{city}")
    assert pq.read_table(tmp_path / "out.parquet")["year"].to_pylist() == [float(2**60), 1.5]
