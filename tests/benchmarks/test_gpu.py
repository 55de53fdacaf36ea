"""The GPU benchmark: its bounds and verdicts, its worker's end, and the whole command on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from benchmarks.accelerator.bounds import decode_bound, job_bound
from benchmarks.accelerator.report import Findings, Row, page, rows
from benchmarks.accelerator.results import (
    Bandwidth,
    Busy,
    Decode,
    Mixed,
    Prefix,
    Products,
    Suite,
    Unavailable,
)
from benchmarks.accelerator.shapes import LLAMA_8B, TINY, ModelCost
from benchmarks.accelerator.suite import ROOT, read_verdicts
from benchmarks.accelerator.worker import GRACE_S, Failure, SectionFailed, Worker

COST = ModelCost(weight_bytes=1000, kv_bytes=10, layer_flops=900, head_flops=100, attention_flops=3)


def test_the_cost_of_llama_3_1_8b() -> None:
    cost = ModelCost.of(LLAMA_8B.config)
    assert cost.kv_bytes == 128 * 1024
    assert cost.weight_bytes == pytest.approx(15.0e9, rel=0.01)  # 8.03e9 parameters, the embedding left out
    assert cost.layer_flops + cost.head_flops == cost.weight_bytes  # two operations for each value of two bytes


def test_decoding_reads_weights_and_keys_once() -> None:
    assert decode_bound(COST, 100.0, 4, 50.0) == pytest.approx((1000 + 4 * 50 * 10) / 100)


def test_a_job_takes_its_prompts_and_then_a_step_for_every_token() -> None:
    products = [Products(1, 2.0, 1.0), Products(3, 4.0, 3.0), Products(10, 5.0, 9.0)]
    prompts = (7 * 900 + (10 + 6) * 3) / (10 * 900 / 5.0)
    # Two decode twice behind 4 and 3 tokens, then the second once more: products of 2, 2 and 1 rows.
    steps = 5.0 + 5.0 + 3.0
    keys = (4 + 1) + (4 + 2) + (3 + 1) + (3 + 2) + (3 + 3)
    assert job_bound(COST, 100.0, products, [(4, 3), (3, 4)]) == pytest.approx(prompts + steps + keys * 10 / 100)


def test_sequences_decode_through_the_context_that_is_asked_for() -> None:
    ((prompt, output),) = set(LLAMA_8B.decode(32).lengths)
    assert prompt + LLAMA_8B.warm_up + LLAMA_8B.steps / 2 == LLAMA_8B.context
    assert output > LLAMA_8B.warm_up + LLAMA_8B.steps + LLAMA_8B.profiled + 32
    lengths = LLAMA_8B.lengths().lengths
    assert len(lengths) == 256
    assert 100 <= min(map(min, lengths)) <= 110
    assert 1014 <= max(map(max, lengths)) <= 1024
    assert len(LLAMA_8B.short_round()["prompts"]) == 16


@pytest.fixture
def findings() -> Findings:
    """Everything measured, and every bar met but that of the GPU's share of time."""
    bound = decode_bound(ModelCost.of(TINY.config), 1e9, 1, 40.0)
    products = [Products(count, 1e-6, 1e-6) for count in TINY.product_rows]
    decodes = [Decode(count, 40.0, bound / 0.9) for count in TINY.decodes]
    decodes += [Decode(count, 40.0, bound / 1.8, "fp8") for count in TINY.decodes]
    busy = [Busy(count, bound / 0.9 * 0.5) for count in TINY.decodes]
    mixed = [Mixed("batchwright", "fused body", 1e-9, True), Mixed("transformers", "sdpa", 3e-9, True)]
    prefix = [Prefix(0, 0.01), Prefix(TINY.prefix, 0.0119)]
    return Findings(TINY, [Bandwidth(1e9), *products, *decodes, *busy, *mixed, *prefix, Suite(9, (), 1, True)])


def test_every_bar_is_judged(findings: Findings) -> None:
    assert _met(rows(findings)) == [None] * 4 + [True] * 2 + [False] * 2 + [None] * 2 + [True] * 4
    assert [row.ratio for row in rows(findings) if row.what.startswith("decode in fp8")] == ["2.00", "2.00"]
    assert "| decode, 4 of 40" in page(findings)
    findings.results[-2:] = [Prefix(TINY.prefix, 0.0121), Suite(9, ("tests/a.py::b",), 0, True)]
    assert _met(rows(findings))[-2:] == [False, False]
    assert "- `tests/a.py::b`" in page(findings)


@pytest.mark.parametrize(
    ("ours_ended", "theirs_ended", "theirs", "met"),
    [(True, False, 3.0, True), (True, False, 1.5, None), (False, True, 1.5, False), (False, False, 3.0, None)],
)
def test_a_system_that_was_stopped_bounds_the_ratio(
    findings: Findings, ours_ended: bool, theirs_ended: bool, theirs: float, met: bool | None
) -> None:
    findings.results = [each for each in findings.results if not isinstance(each, Mixed)]
    findings.results += [Mixed("batchwright", "", 1.0, ours_ended), Mixed("transformers", "", theirs, theirs_ended)]
    assert _met(rows(findings))[-3] is met


def test_what_is_missing_says_why() -> None:
    findings = Findings(TINY, [Unavailable("GPU busy, 1", "needs CUDA")], {"mixed": "OutOfMemoryError: a lot"})
    reasons = {row.what: row.reason for row in rows(findings)}
    assert all(reasons.values())
    assert reasons["GPU busy, 1"] == "needs CUDA"
    assert reasons["6 mixed, of the bound"] == "OutOfMemoryError: a lot"
    assert reasons["tests/engine"] == "its turn did not come"


def test_what_pytest_says_of_each_test() -> None:
    said = """
tests/engine/test_a.py::test_one PASSED                [ 20%]
tests/engine/test_a.py::test_two[a b] PASSED           [ 40%]
tests/engine/test_a.py::test_two[a b] ERROR            [ 40%]
tests/engine/test_a.py::test_three SKIPPED (no device) [ 60%]
tests/engine/test_a.py::test_four FAILED               [ 80%]
FAILED tests/engine/test_a.py::test_four - assert False
"""
    failed = ("tests/engine/test_a.py::test_two[a b]", "tests/engine/test_a.py::test_four")
    assert read_verdicts(said, ended=True) == Suite(1, failed, 1, True)


def _one_result_then_failure(pipe: Connection, *_: object) -> None:
    while True:
        pipe.recv()
        pipe.send(Bandwidth(1.0))
        pipe.send(Failure("a reason"))


def _one_result_then_death(pipe: Connection, *_: object) -> None:
    pipe.recv()
    pipe.send(Bandwidth(1.0))
    os._exit(3)


def _silence(pipe: Connection, *_: object) -> None:
    threading.Event().wait()


def test_what_a_section_measured_before_it_failed_stands(tmp_path: Path) -> None:
    with Worker("tiny", "cpu", tmp_path, _one_result_then_failure) as worker:
        for _ in range(2):  # a process of its own each time
            results = worker.measure("decode", 60)
            assert next(results) == Bandwidth(1.0)
            with pytest.raises(SectionFailed, match="a reason"):
                next(results)


def test_a_worker_that_dies_or_is_silent_is_a_failed_section(tmp_path: Path) -> None:
    with Worker("tiny", "cpu", tmp_path, _one_result_then_death) as worker:
        results = worker.measure("decode", 60)
        assert next(results) == Bandwidth(1.0)
        with pytest.raises(SectionFailed, match="died"):
            next(results)
    with (
        Worker("tiny", "cpu", tmp_path, _silence) as worker,
        pytest.raises(SectionFailed, match="not ended after 0 s"),
    ):
        next(worker.measure("decode", -GRACE_S))


def test_the_command_from_end_to_end(tmp_path: Path) -> None:
    saved = tmp_path / "results" / "gpu.md"
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--shape", "tiny", "--device", "cpu"]
    done = subprocess.run([*command, "--save", str(saved)], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    written = saved.read_text(encoding="utf-8")
    told = {line.split("|")[1].strip(): line for line in written.splitlines() if line.startswith("| ")}
    missing = {what: line for what, line in told.items() if "?" in line}
    assert set(missing) == {
        "GPU busy, 1",
        "GPU busy, 4",
        "decode in fp8, 1 of 40",
        "decode in fp8, 4 of 40",
        "tests/engine",
    }
    assert all("needs CUDA" in line for line in missing.values())
    assert "transformers" in written
    assert all(line in done.stdout for line in told.values())


def _met(table: list[Row]) -> list[bool | None]:
    return [row.met for row in table]
