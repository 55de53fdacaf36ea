"""The benchmark of the encoder: its texts, its figures, and one real worker."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from benchmarks.embedding import report
from benchmarks.embedding.fit import Fit, fitted
from benchmarks.embedding.measure import Result, compare, measure
from benchmarks.embedding.systems import INFINITY, OURS, SENTENCE, System, peer
from benchmarks.embedding.workloads import Workload, find_workload
from benchmarks.throughput.process import Worker


def test_texts_are_the_same_every_time_and_of_the_lengths_that_are_promised() -> None:
    mix = find_workload("mix")
    assert mix == find_workload("mix")
    words = [len(text.split()) for text in mix.texts]
    assert 50 < statistics.median(words) < 70
    assert 0.9 < statistics.stdev(np.log(words).tolist()) < 1.1
    assert len(find_workload("gsm8k").texts) == 660


def test_questions_come_from_a_file(tmp_path: Path) -> None:
    data = tmp_path / "questions.jsonl"
    data.write_text('{"question": "How many?"}\n{"question": "Why?"}\n')
    assert find_workload("gsm8k", data).texts == ["How many?", "Why?"]
    for text in ("", '{"answer": 1}\n', "[1]\n", "nothing\n"):
        data.write_text(text)
        with pytest.raises(ValueError, match=r"questions\.jsonl"):
            find_workload("gsm8k", data)
    with pytest.raises(ValueError, match="workload 'other'"):
        find_workload("other")


def test_a_peer_that_is_not_installed_has_no_ways(tmp_path: Path) -> None:
    assert peer(SENTENCE, tmp_path) == []


def test_vectors_are_compared() -> None:
    one = np.array([[1.0, 0.0], [0.0, 1.0]])
    assert compare(one, one) == (0.0, 1.0)
    assert compare(one, np.array([[1.0, 0.0], [1.0, 0.0]])) == (1.0, 0.0)


def test_the_cost_is_found_again() -> None:
    cells = [8, 64, 512, 8192]
    found = fitted("float32", cells, [2.0 + 0.05 * each for each in cells])
    assert (found.alpha, found.beta) == pytest.approx((2.0, 0.05))
    assert found.error == pytest.approx(0.0, abs=1e-9)
    assert "2.00 ms + 0.05000 ms" in found.line


def test_ratios_and_tables() -> None:
    result = Result(Workload("mix", "texts", ["a"]), "float32", 1000)
    result.seconds = {OURS: [1.0, 2.0, 1.0], "batcher": [2.0, 2.0, 2.0], SENTENCE: [4.0, 4.0, 5.0], INFINITY: [3.0] * 3}
    result.difference = {OURS: (1e-6, 1.0), SENTENCE: (0.0, 1.0)}
    ratio = result.ratio(SENTENCE)
    assert (result.rate(OURS), ratio.median, ratio.low, ratio.high) == (1000, 4.0, 2.0, 5.0)
    ready: Any = {OURS: [{"version": "1", "settings": "packed"}]}
    page = report.page([result], ready, [Fit("float32", 1.0, 0.1, 0.05)], 2, 3)
    assert "4.00 (2.00..5.00)" in page
    assert "| infinity-emb | 3.00 (1.50..3.00) |" in " ".join(page.split())
    assert "- batchwright 1: packed" in page


def test_a_real_worker_encodes_and_is_measured(minilm_path: Path) -> None:
    options = {"model": str(minilm_path), "dtype": "float32", "threads": 1, "max_length": 256, "setting": {}}
    workload = Workload("few", "three texts", ["a sky", "the blue sky", "sky " * 400])
    system = System(OURS)
    with Worker(system.module, system.python, cast(Any, options), {}) as worker:
        result = measure(workload, "float32", 265, {OURS: worker}, 2, lambda _: None)
        assert "packed, float32" in worker.ready["settings"]
    assert len(result.seconds[OURS]) == 2
    assert result.difference[OURS] == pytest.approx((0.0, 1.0))
