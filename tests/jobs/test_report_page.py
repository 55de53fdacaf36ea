"""The page of reports: what it reads of them, and what it says of what they lack."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.jobs.fakes import FakeEngine, fake
from typer.testing import CliRunner

from batchwright.cli.main import app
from batchwright.errors import InputError, MissingExtra
from batchwright.jobs.report import RunReport
from batchwright.jobs.report_page import curves
from batchwright.jobs.report_page.charts import Run, charts_of
from batchwright.jobs.report_page.page import page_of
from batchwright.jobs.report_page.reading import names_of, read_report, report_of
from batchwright.jobs.report_page.table import duration, rows_of, state_of
from batchwright.jobs.run import run
from batchwright.planning.bound import PARTS
from batchwright.pricing.rates import money

EVIL = "</script><script>alert(1)</script>"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{number}"}) + "\n" for number in range(40)))
    return path


def written(path: Path, **values: Any) -> Path:
    path.write_text(json.dumps({"total": 3, "output": "o.jsonl", **values}))
    return path


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is no JSON"),
        (b"{", "is no JSON"),
        (b"\xff\xfe", "is no JSON"),
        (b"[" * 100_000, "is no JSON"),
        (b"[]", "is no report of a run"),
        (b'{"id": "batch_req_1"}', "is no report of a run"),
        (b'{"total": "three", "output": "o"}', r"is no report of a run: .*total"),
        (b'{"total": 3, "output": "o", "series": {"seconds": ["x"]}}', r"is no report of a run: .*series"),
        (b'{"total": 3, "output": "o", "series": {"seconds": [0, 1], "lines": [0]}}', "its series differ in length"),
        (
            b'{"total": 3, "output": "o", "series": {"seconds": [0, null]}}',
            "its series differ in length, or lack times",
        ),
    ],
)
def test_what_is_no_report_is_refused_by_name(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=rf"broken\.json:? ?{said}"):
        read_report(path)


def test_a_plan_is_no_run() -> None:
    with pytest.raises(InputError, match=r"^p\.json is of a plan"):
        report_of({"total": 1, "output": "o", "planned_answers": {"at_most": 5}}, "p.json")


def test_a_report_that_is_missing_or_a_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.json does not exist"):
        read_report(tmp_path / "none.json")
    with pytest.raises(InputError, match="cannot be read: Is a directory"):
        read_report(tmp_path)


def test_names_tell_files_apart() -> None:
    paths = [Path("a/run.json"), Path("b/run.json"), Path("b/run.json"), Path("other.json")]
    assert names_of(paths) == ["a/run", "b/run (1)", "b/run (2)", "other"]


def test_a_name_that_is_no_text_is_shown_as_far_as_it_is() -> None:
    [name] = names_of([Path(os.fsdecode(b"r\xff.json"))])
    assert name == "r\ufffd"
    assert name in page_of([Run(name, report_of({"total": 0, "output": "o"}, name))])


def test_a_report_of_the_least_makes_a_page_that_says_what_is_missing() -> None:
    page = page_of([Run("least", report_of({"total": 3, "output": "o"}, "it"))])
    assert "ended early, 3 of 3 lines left" in page
    assert "<strong>Occupancy, KV cache</strong>: the engine was elsewhere" in page
    assert 'class="chart"' not in page


def test_text_of_reports_stays_text() -> None:
    failures = [{"code": EVIL, "count": 1, "line": 1, "message": EVIL}]
    values = {"total": 3, "output": EVIL, "model": EVIL, "inputs": [EVIL], "steps": 5, "failures": failures}
    values |= {"wall_seconds": 1.0, "loop_seconds": 1.0, "implementation": EVIL}
    runs = [Run(EVIL, report_of(values, "it")), Run("other", report_of(values, "it"))]
    page = page_of(runs, EVIL)
    assert EVIL not in page
    assert page.count("<script") == page.count("</script>") == 3


def test_the_page_loads_nothing() -> None:
    page = page_of([Run("r", report_of({"total": 3, "output": "o"}, "it"))])
    head = page[: page.index("<script")]
    assert "default-src 'none'" in head
    assert "connect-src" not in head
    assert re.findall(r'(?:src|href)="', head) == []
    assert re.findall(r"url\(|@import", head) == []


def points() -> st.SearchStrategy[list[tuple[float, int]]]:
    return st.lists(st.tuples(st.floats(0.01, 100.0), st.integers(0, 1000)), min_size=1, max_size=200)


@given(points())
def test_a_rate_over_its_time_is_the_count(steps: list[tuple[float, int]]) -> None:
    seconds, counts = [0.0], [0]
    for gap, more in steps:
        seconds.append(seconds[-1] + gap)
        counts.append(counts[-1] + more)
    series: curves.Series = {"seconds": seconds, "lines": counts}
    curve = curves.rate(series, "lines")
    assert len(curve) <= 80
    assert all(0.0 <= at <= seconds[-1] for at, _ in curve)
    steepest = max(more / gap for gap, more in steps)
    assert all(-1e-9 <= value <= steepest * (1 + 1e-9) for _, value in curve)
    so_far = curves.count(series, "lines")
    assert so_far[0] == (0.0, 0)
    assert so_far[-1] == (seconds[-1], counts[-1])


def test_unknown_values_make_no_curve() -> None:
    series: curves.Series = {"seconds": [0.0, 1.0, 2.0], "sent": [None, None, None], "cost": [None, 1.0, 3.0]}
    assert curves.rate(series, "sent") == []
    assert curves.rate(series, "refused") == []
    assert curves.rate(series, "cost") == [(1.0, 2.0), (2.0, 2.0)]
    assert curves.rate({"seconds": [0.0], "lines": [0]}, "lines") == []
    assert curves.rate({}, "lines") == []


def test_the_shares_of_the_time_are_those_of_the_bound_where_there_is_one() -> None:
    values: dict[str, Any] = {"total": 3, "output": "o", "steps": 9, "loop_seconds": 10.0, "load_seconds": 2.0}
    values |= {"bound_seconds": 8.0, "share_of_bound": 0.8, "bound": {"time": {"products": 0.9, "tail": 0.1}}}
    run_of = Run("r", report_of(values | {"bound": values["bound"] | {"lost": {"tail": 0.1, "host": 0.001}}}, "it"))
    chart = charts_of([run_of])[0]
    assert chart.spec is not None
    bars, bound = chart.spec["layer"]
    assert {each["part"]: each["time"] for each in bars["data"]["values"]} == {
        "loading the model": 2.0,
        "matrix products": 9.0,
        "waiting for the tail": 1.0,
    }
    assert bound["data"]["values"] == [{"run": "r", "bound": 10.0}]
    rows = dict(rows_of([run_of]))
    assert rows["Speed"] == ["80% of the bound of 8.00 s"]
    assert rows["Beyond the bound"] == ["10% waiting for the tail"]


def test_the_parts_of_the_time_add_up_to_all_of_it() -> None:
    values: dict[str, Any] = {"total": 3, "output": "o", "steps": 9, "loop_seconds": 46.0, "load_seconds": 2.0}
    values |= {"wall_seconds": 125.0, "rates_seconds": 75.0, "bound_seconds": 8.0, "bound": {"time": {"products": 1.0}}}
    run_of = Run("r", report_of(values, "it"))
    chart = charts_of([run_of])[0]
    assert chart.spec is not None
    bars, bound = chart.spec["layer"]
    assert {each["part"]: each["time"] for each in bars["data"]["values"]} == {
        "loading the model": 2.0,
        "measuring the machine": 75.0,
        "matrix products": 46.0,
        "reading the input and closing": 2.0,
    }
    assert bound["data"]["values"] == [{"run": "r", "bound": 85.0}]
    assert dict(rows_of([run_of]))["of which measuring the machine"] == ["75.0 s"]
    looked_up = Run("r", report_of(values | {"rates_seconds": 0.002, "wall_seconds": 48.1}, "it"))
    assert chart_parts(looked_up) == ["loading the model", "matrix products"]
    assert "of which measuring the machine" not in dict(rows_of([looked_up]))


def chart_parts(run_of: Run) -> list[str]:
    return [*charts_of([run_of])[0].legend]


def test_what_has_no_bound_says_why() -> None:
    def with_reason(name: str, **values: Any) -> Run:
        return Run(name, report_of({"total": 3, "output": "o", "steps": 9, **values}, name))

    one, other = with_reason("one", no_bound="replicas computed the lines"), with_reason("other")
    assert "<strong>Share of the bound</strong>: replicas computed the lines." in page_of([one])
    assert "<strong>Share of the bound</strong>: the report has no bound, and does not say why" in page_of([other])
    both = page_of([one, with_reason("first", resumed=1, no_bound="earlier runs had finished a part of the job")])
    assert "<strong>Share of the bound</strong>: one: replicas computed the lines." in both
    assert "<strong>Share of the bound</strong>: first: earlier runs had finished a part of the job." in both


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"succeeded": 3}, ("complete", "good")),
        ({"succeeded": 2, "failed": 1}, ("complete, 1 line failed", "warn")),
        ({"succeeded": 1, "interrupted": True}, ("interrupted, 2 of 3 lines left", "bad")),
        ({"succeeded": 1}, ("ended early, 2 of 3 lines left", "bad")),
    ],
)
def test_how_a_run_ended(values: dict[str, Any], said: tuple[str, str]) -> None:
    assert state_of(report_of({"total": 3, "output": "o", **values}, "it")) == said


def test_small_figures_are_not_rounded_away() -> None:
    def format_of(title: str, seconds: float) -> str:
        series = {"seconds": [0.0, seconds], "cost": [0.0, 0.0003], "seconds_left": [seconds, 0.0]}
        report = report_of({"total": 1, "output": "o", "series": series}, "r")
        [spec] = [chart.spec for chart in charts_of([Run("r", report)]) if chart.title == title]
        assert spec is not None
        return str(re.search(r"'axis': {'format': '([^']+)'", str(spec))[1])  # type: ignore[index]

    assert format_of("Cost", 10.0) == "$,.5~r"
    assert [format_of("Forecast of the end", each) for each in (10.0, 600.0, 12_000.0)] == [",.0f", ",.1~f", ",.1~f"]


def test_whole_numbers_are_on_an_axis_once() -> None:
    def axis_of(title: str, **values: Any) -> tuple[Any, Any]:
        report = report_of({"total": 1, "output": "o", "steps": 1, **values}, "r")
        [spec] = [chart.spec for chart in charts_of([Run("r", report)]) if chart.title == title]
        assert spec is not None
        y = (spec["layer"][0]["encoding"] if title == "Lengths of answers" else spec["encoding"])["y"]
        return y["axis"].get("values"), y.get("scale", {}).get("domainMax")

    def refused(most: int) -> tuple[Any, Any]:
        return axis_of("Refused requests", series={"seconds": [0.0, 1.0], "refused": [0, most]})

    assert [refused(most) for most in (0, 1, 2, 3)] == [([0, 1], 1), ([0, 1], None), ([0, 1, 2], None), (None, None)]
    series = {"seconds": [0.0, 1.0], "sequences": [0, 4], "steps": [0, 10]}
    assert axis_of("Occupancy", series=series) == ([0, 1], 1)
    assert axis_of("Occupancy", series=series, max_num_seqs=8) == (None, None)
    assert axis_of("Lengths of answers", lengths={"ended": [1, 1]})[0] == [0, 1]
    assert axis_of("Lengths of answers", lengths={"ended": [1, 1], "cut": [3, 0]})[0] is None


def test_each_part_of_the_time_has_a_colour_of_its_own() -> None:
    here = {"total": 3, "output": "o", "steps": 9, "loop_seconds": 10.0, "load_seconds": 2.0, "rates_seconds": 5.0}
    here |= {"wall_seconds": 20.0, "bound_seconds": 8.0, "bound": {"time": dict.fromkeys(PARTS, 1.0 / len(PARTS))}}
    there = {"total": 3, "output": "o", "loop_seconds": 10.0, "load_seconds": 2.0}
    runs = [Run("here", report_of(here, "it")), Run("there", report_of(there, "it"))]
    legend, page = charts_of(runs)[0].legend, page_of(runs)
    assert {"loading the model", "at work"} < {*legend}
    colors = re.findall(r'style="--n: var\(--(c\d+)\)"></i>([^<]+)</li>', page)
    assert [name for _, name in colors][: len(legend)] == [*legend]
    assert len({color for color, _ in colors[: len(legend)]}) == len(legend)
    for theme in re.findall(r":root \{[^}]+", page)[:2]:
        shown = dict(re.findall(r"--(c\d+): (#\w+)", theme))
        assert len({shown[color] for color, _ in colors[: len(legend)]}) == len(legend)


def test_numbers_are_readable() -> None:
    told = [duration(seconds) for seconds in (0.0042, 9.5, 75.32, 724.6, 12_000, 400_000)]
    assert told == ["0.00 s", "9.50 s", "75.3 s", "12 min 5 s", "3 h 20 min", "111 h 6 min"]
    assert [money(each) for each in (0.0, 12345.678, 0.25, 0.00012, 3e-7)] == [
        "$0.00",
        "$12,345.68",
        "$0.25",
        "$0.00012",
        "$0.00000030",
    ]


def test_a_run_writes_its_page_and_the_report_has_what_it_shows(tmp_path: Path, source: Path) -> None:
    page, told = tmp_path / "page.html", tmp_path / "r.json"
    engine = FakeEngine()
    report = run(source, tmp_path / "out.jsonl", model=engine, report=told, report_html=page)  # type: ignore[arg-type]
    assert report.series["lines"][0] == 0
    assert report.series["lines"][-1] == report.series["steps"][-1] - engine.stats.steps + 40 == 40  # type: ignore[operator]
    assert report.series["generated_tokens"][-1] == report.generated_tokens
    assert sum(report.lengths["ended"]) == 40
    assert report.inputs == [str(source)]
    text = page.read_text()
    assert "out.jsonl" in text
    assert "40 of 40" in text
    assert read_report(told).series == report.series
    assert json.loads(told.read_bytes()) == json.loads(json.dumps(report.to_dict()))


@pytest.mark.skipif(sys.platform == "darwin", reason="its file systems have no such names")
def test_names_of_files_that_are_no_text_cost_no_report(tmp_path: Path, source: Path) -> None:
    page, told, output = tmp_path / "page.html", tmp_path / "r.json", tmp_path / os.fsdecode(b"caf\xe9.jsonl")
    named = source.rename(tmp_path / os.fsdecode(b"in\xff.jsonl"))
    run(named, output, model=FakeEngine(), report=told, report_html=page)  # type: ignore[arg-type]
    assert read_report(told).output == str(tmp_path / "caf\ufffd.jsonl")
    assert json.loads(told.read_bytes())["inputs"] == [str(tmp_path / "in\ufffd.jsonl")]
    assert "caf\ufffd.jsonl" in page.read_text()


def test_the_json_of_a_report_is_for_people_too() -> None:
    series: dict[str, list[float | None]] = {"seconds": [0.0, 1.0], "lines": [0, 3]}
    text = RunReport(output="o", model="m", total=3, series=series).to_json().decode()
    assert '\n  "total": 3,\n' in text
    assert '\n    "seconds": [0.0,1.0],\n    "lines": [0,3]\n  }' in text
    assert json.loads(text)["series"] == series
    empty = json.loads(RunReport(output="o", model="m", total=3).to_json())
    assert (empty["series"], empty["lengths"]) == ({}, {})


def test_an_interrupted_run_has_a_page(tmp_path: Path, source: Path) -> None:
    def stop(step: int) -> None:
        if step == 5:
            raise KeyboardInterrupt

    page = tmp_path / "page.html"
    with pytest.raises(KeyboardInterrupt):
        run(source, tmp_path / "out.jsonl", model=fake(on_step=stop), report_html=page)
    assert "interrupted, " in page.read_text()


@pytest.mark.parametrize(
    ("page", "options", "said"),
    [
        ("none/page.html", {}, "must be a file in a folder that exists"),
        (".", {}, "must be a file in a folder that exists"),
        ("-", {}, "cannot be standard output"),
        ("s3://b/page.html", {}, "only files on this machine"),
        ("in.jsonl", {}, "is the input or the output"),
        ("out.jsonl", {}, "is the input or the output"),
        ("r.json", {"report": "r.json"}, "report and report_html are both"),
        ("page.html", {"dry_run": True}, "a dry run computes nothing"),
    ],
)
def test_a_bad_name_fails_before_anything_is_computed(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, page: str, options: dict[str, Any], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    engine = FakeEngine()
    with pytest.raises(InputError, match=said):
        run("in.jsonl", "out.jsonl", model=engine, report_html=page, **options)  # type: ignore[arg-type]
    assert engine.stats.steps == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]


def test_the_extra_is_named_before_anything_is_computed(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(MissingExtra, match=r"vl_convert; install it: pip install 'batchwright\[report\]'"):
        run(source, tmp_path / "out.jsonl", model=fake(), report_html=tmp_path / "page.html")
    assert not (tmp_path / "out.jsonl").exists()


def test_the_command_makes_a_page_of_several_reports(tmp_path: Path) -> None:
    one, other = written(tmp_path / "one.json", succeeded=3), written(tmp_path / "other.json", failed=3)
    page = tmp_path / "page.html"
    done = CliRunner().invoke(app, ["report", str(one), str(other), "-o", str(page), "--title", "A & B"])
    assert done.exit_code == 0
    assert "2 runs" in done.stderr
    assert "<h1>A &amp; B</h1>" in page.read_text()
    streamed = CliRunner().invoke(app, ["report", str(one), "-o", "-"])
    assert streamed.stdout.startswith("<!doctype html>")


def test_the_command_refuses_to_write_over_a_report(tmp_path: Path) -> None:
    one = written(tmp_path / "one.json")
    before = one.read_bytes()
    link = tmp_path / "link.html"
    link.hardlink_to(one)
    refused = ((one, "is one of the reports"), (link, "is one of the reports"), (tmp_path / "none/page.html", "exists"))
    for output, said in refused:
        done = CliRunner().invoke(app, ["report", str(one), "-o", str(output)])
        assert isinstance(done.exception, InputError)
        assert said in str(done.exception)
    assert one.read_bytes() == before
