"""Random histories of a job whose output is a table: killed at any write or rename, gone on with, retried, grown."""

from __future__ import annotations

import csv
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.long_form import examples

from batchwright.inference.inference import Call
from batchwright.jobs.report import RunReport
from batchwright.jobs.run import run

from .fakes import read
from .test_run_results import Answering

OUTPUTS = ["out.csv", "out.parquet", "out.jsonl", "out.jsonl.gz"]


class Killed(BaseException):
    """In place of the death of the process: nothing that runs after it may write."""


class Model(Answering):
    """Repeats prompts; those in `bad` time out."""

    def __init__(self, bad: frozenset[int]) -> None:
        super().__init__()
        self._bad = bad

    async def answer(self, call: Call) -> dict[str, Any]:
        prompt: str = call.body["prompt"]
        if int(prompt.removeprefix("p")) in self._bad:
            raise TimeoutError("too slow")
        return {"choices": [{"index": 0, "text": prompt.upper(), "finish_reason": "stop"}]}


@contextmanager
def dying(after: int | None) -> Iterator[None]:
    """Let the process die before its `after`-th write, truncation or rename; None: not at all."""
    left = after

    def step() -> None:
        nonlocal left
        if left is not None:
            if left <= 0:
                raise Killed
            left -= 1

    def watched(name: str) -> Any:
        real = getattr(os, name)

        def act(*given: Any, **options: Any) -> Any:
            step()
            return real(*given, **options)

        return mock.patch.object(os, name, act)

    with watched("write"), watched("ftruncate"), watched("replace"), watched("rename"), watched("fsync"):
        yield


class History:
    """One input and its output in a folder, and what is expected of them."""

    def __init__(self, folder: Path, name: str) -> None:
        self.source = folder / "in.csv"
        self.output = folder / name
        self.rows = 0
        self.source.write_text("id,number\n")
        self.grow(3)

    def grow(self, rows: int) -> None:
        with self.source.open("a") as file:
            for number in range(self.rows, self.rows + rows):
                file.write(f"r{number},{number}\n")
        self.rows += rows

    def run(self, bad: frozenset[int], *, dies: int | None, retry: bool) -> RunReport | None:
        with dying(dies), suppress(Killed):
            return run(
                self.source,
                self.output,
                inference=Model(bad),
                prompt_template="p{number}",
                id_column="id",
                retry_failed=retry,
            )
        return None

    def check(self, bad: frozenset[int]) -> None:
        """The table has each row once, in order, with its answer or, for some of `bad`, the error."""
        table = self._table()
        assert [row["id"] for row in table] == [f"r{number}" for number in range(self.rows)]
        for number, row in enumerate(table):
            assert str(row["number"]) == str(number)
            if row["answer"]:
                assert row["answer"] == f"P{number}"
            else:
                assert number in bad
                assert row["error"].startswith("request_timeout")

    def _table(self) -> list[dict[str, Any]]:
        if self.output.suffix == ".csv":
            with self.output.open(newline="") as file:
                return [*csv.DictReader(file)]
        if self.output.suffix == ".parquet":
            return pq.read_table(self.output).to_pylist()  # type: ignore[no-any-return]
        if self.output.suffix == ".gz":
            import gzip
            import json

            return [json.loads(line) for line in gzip.decompress(self.output.read_bytes()).splitlines()]
        return read(self.output)


STEPS = st.lists(
    st.tuples(
        st.integers(0, 3),  # rows that are appended
        st.frozensets(st.integers(0, 12), max_size=4),  # prompts that time out
        st.one_of(st.none(), st.integers(0, 25)),  # writes until the process dies
        st.booleans(),  # whether failed lines are tried again
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=examples(25, long=60))
@given(st.sampled_from(OUTPUTS), STEPS)
def test_whatever_happens_each_row_has_its_answer_once(name: str, steps: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        history = History(Path(folder), name)
        ever: frozenset[int] = frozenset()
        for rows, bad, dies, retry in steps:
            history.grow(rows)
            ever |= bad
            if history.run(bad, dies=dies, retry=retry) is not None:
                history.check(ever)
        report = history.run(frozenset(), dies=None, retry=True)
        assert report is not None
        assert (report.failed, report.succeeded) == (0, history.rows)
        history.check(frozenset())
