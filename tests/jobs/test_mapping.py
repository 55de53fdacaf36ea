"""`batchwright.map`: frames of every library in, the same kind out."""

from __future__ import annotations

import asyncio
import importlib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("narwhals")

import batchwright
from batchwright.errors import InputError, ResumeRefused, RowsFailed
from batchwright.jobs.job_run import RunInterrupted

from .fakes import POISON, fake

ROWS = 1000
LIBRARIES = ["pandas", "polars", "pyarrow", "datasets"]


def frame_of(library: str, columns: dict[str, list[Any]]) -> Any:
    module = pytest.importorskip(library)
    if library == "pandas":
        size = len(next(iter(columns.values())))
        return module.DataFrame(columns, index=range(7, 7 + size))
    if library == "polars":
        return module.DataFrame(columns)
    table = pytest.importorskip("pyarrow").table(columns)
    if library == "pyarrow":
        return table
    module.disable_caching()
    return module.Dataset(module.table.InMemoryTable(table), fingerprint="test")


def column(frame: Any, name: str) -> list[Any]:
    values = frame[name]
    for method in ("to_pylist", "to_list"):
        if hasattr(values, method):
            values = getattr(values, method)()
    return [None if value != value else value for value in values]


def mapped(frame: Any, **options: Any) -> Any:
    return batchwright.map(frame, **{"prompt": "Say {text}.", "model": fake(slots=256), "progress": False, **options})


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_same_kind_of_frame_comes_back(library: str) -> None:
    frame = frame_of(library, {"text": [f"t{n}" for n in range(ROWS)], "n": [*range(ROWS)]})
    engine = fake(slots=256)
    made = mapped(frame, model=engine)
    assert type(made) is type(frame)
    assert column(made, "n") == [*range(ROWS)]
    said = column(made, "answer")
    assert len(said) == len(set(said)) == ROWS
    assert all(text.startswith("answer ") for text in said)
    assert column(made, "answer_error") == [None] * ROWS
    assert set(engine.prompts) == {f"Say t{n}." for n in range(ROWS)}
    if library == "pandas":
        assert list(made.index) == list(frame.index)


@pytest.mark.parametrize("library", LIBRARIES)
def test_rows_that_fail(library: str) -> None:
    frame = frame_of(library, {"text": ["a", POISON, None, "d"]})
    with pytest.warns(UserWarning, match="2 of 4 rows failed, such as with non_finite_logits"):
        made = mapped(frame, output="said")
    assert [answer is None for answer in column(made, "said")] == [False, True, True, False]
    codes = [error and error.partition(":")[0] for error in column(made, "said_error")]
    assert codes == [None, "non_finite_logits", "missing_field", None]
    with pytest.raises(RowsFailed, match="rows failed") as caught:
        mapped(frame, errors="raise")
    assert type(caught.value.frame) is type(frame)
    assert column(caught.value.frame, "answer")[1] is None


@pytest.mark.parametrize("library", LIBRARIES)
def test_an_empty_frame(library: str) -> None:
    frame = frame_of(library, {"text": ["a"], "n": [1]})
    empty = frame.select([]) if library == "datasets" else frame[:0]
    made = mapped(empty)
    assert type(made) is type(frame)
    assert len(made) == 0


def test_several_answers_and_values_of_all_kinds() -> None:
    polars = pytest.importorskip("polars")
    from datetime import date

    frame = polars.DataFrame({"text": ["a", "b"], "day": [date(2026, 1, 2), None], "list": [[1, 2], []], "x": [0.5, 2]})
    engine = fake()
    made = mapped(frame, prompt="{text} {day} {list} {x}", model=engine, defaults={"n": 2})
    assert sorted(engine.prompts) == ["a 2026-01-02 [1,2] 0.5", "b  [] 2.0"]
    assert [len(answers) for answers in column(made, "answer")] == [2, 2]


def test_a_checkpoint_goes_on(tmp_path: Path) -> None:
    frame = frame_of("pandas", {"text": [f"t{n}" for n in range(30)]})

    def stop(number: int) -> None:
        if number == 40:
            raise KeyboardInterrupt

    with pytest.raises(RunInterrupted) as caught:
        mapped(frame, model=fake(slots=1, on_step=stop), checkpoint=tmp_path / "kept.jsonl")
    engine = fake()
    made = mapped(frame, model=engine, checkpoint=tmp_path / "kept.jsonl")
    assert len(engine.submitted) == 30 - caught.value.report.done
    assert column(made, "answer") == column(mapped(frame), "answer")
    more, engine = frame_of("pandas", {"text": [f"t{n}" for n in range(31)]}), fake()
    assert len(mapped(more, model=engine, checkpoint=tmp_path / "kept.jsonl")) == 31
    assert engine.prompts == ["Say t30."]
    with pytest.raises(ResumeRefused):
        mapped(frame_of("pandas", {"text": ["other"]}), checkpoint=tmp_path / "kept.jsonl")
    with pytest.raises(InputError, match=r"ends in \.jsonl"):
        mapped(frame, checkpoint=tmp_path / "kept.parquet")


def test_in_a_running_event_loop() -> None:
    async def notebook() -> Any:
        return mapped(frame_of("pandas", {"text": ["a", "b"]}))

    assert len(asyncio.run(notebook())) == 2


def test_what_is_no_frame_or_lacks_columns_is_refused() -> None:
    frame = frame_of("pandas", {"text": ["a"], "answer": ["b"]})
    with pytest.raises(InputError, match="already"):
        mapped(frame)
    with pytest.raises(InputError, match="no column 'other'"):
        mapped(frame, prompt="{other}")
    with pytest.raises(InputError, match="frame of type list"):
        mapped([{"text": "a"}])
    with pytest.raises(InputError, match="collect"):
        mapped(importlib.import_module("polars").LazyFrame({"text": ["a"]}))
    with pytest.raises(InputError, match="errors='ignore'"):
        mapped(frame, errors="ignore")
    for name in ("limit", "sample"):
        with pytest.raises(TypeError, match=f"map\\(\\) has no argument '{name}'"):
            mapped(frame, **{name: 1})


def test_a_user_s_script() -> None:
    pytest.importorskip("pandas")
    pytest.importorskip("polars")
    typed_frames = importlib.import_module("tests.jobs.typed_frames")
    table, frame = typed_frames.answered()
    assert column(table, "answer") == column(frame, "answer")
