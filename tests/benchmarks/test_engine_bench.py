"""The throughput benchmark: its workloads, its workers, its figures, and the whole command on ours alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from benchmarks.throughput import report
from benchmarks.throughput.checkpoints import quantized_checkpoint
from benchmarks.throughput.measure import Result
from benchmarks.throughput.process import ROOT, THIS_PYTHON, Worker, WorkerFailed
from benchmarks.throughput.systems import vllm_systems
from benchmarks.throughput.workers.products import step_shapes
from benchmarks.throughput.workers.protocol import WITHOUT_ZENTORCH, Options
from benchmarks.throughput.workers.transformers import group_by_length
from benchmarks.throughput.workloads import STANDARD, find_workload
from safetensors.torch import load_file, save_file

VOCAB = 4096
OPTIONS: Options = {
    "model": "",
    "precision": "bf16",
    "kv_gib": 1,
    "max_num_seqs": 8,
    "attention": "auto",
    "profile": False,
}

ECHO = """
from benchmarks.throughput.workers.protocol import serve, timed

def generate(job):
    print("what libraries print")
    if job["outputs"] == [13]:
        raise RuntimeError("thirteen")
    return [prompt[:n] for prompt, n in zip(job["prompts"], job["outputs"])]

serve(lambda options: ({"version": "1", "settings": "echo"}, timed(generate)))
"""


@pytest.fixture
def echo(tmp_path: Path) -> Iterator[Worker]:
    (tmp_path / "echo_worker.py").write_text(ECHO)
    with Worker("echo_worker", THIS_PYTHON, OPTIONS, {"PYTHONPATH": str(tmp_path)}) as worker:
        yield worker


@pytest.mark.parametrize("name", STANDARD)
def test_rounds_share_lengths_but_no_prompt(name: str) -> None:
    workload = find_workload(name)
    first, second = workload.job(0, VOCAB), workload.job(1, VOCAB)
    assert first == workload.job(0, VOCAB)
    assert [len(p) for p in first["prompts"]] == [len(p) for p in second["prompts"]] == [p for p, _ in workload.lengths]
    assert first["outputs"] == second["outputs"]
    assert not {tuple(p[:8]) for p in first["prompts"]} & {tuple(p[:8]) for p in second["prompts"]}
    assert all(VOCAB // 40 <= token < VOCAB for prompt in first["prompts"] for token in prompt)


def test_a_shared_prefix_is_the_same_for_all_and_the_rest_is_not() -> None:
    prompts = find_workload("shared-prefix").job(0, VOCAB)["prompts"]
    assert len({tuple(prompt[:800]) for prompt in prompts}) == 1
    assert len({tuple(prompt[800:816]) for prompt in prompts}) == len(prompts) == 200


def test_uniform_workloads_of_any_size() -> None:
    assert find_workload("uniform-64").lengths == ((16, 128),) * 64
    workload = find_workload("uniform-300:5/7")
    assert (workload.rows, workload.prompt_tokens, workload.generated) == (256, 1500, 2100)


@pytest.mark.parametrize("name", ["", "uniform-", "uniform-0", "uniform-4:0/3", "uniform-4:5", "mixed"])
def test_an_unknown_workload_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="workload"):
        find_workload(name)


def test_a_trace_replaces_the_drawn_lengths(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = "".join(f"2023-11-16 18:15:46,{row},{9000 - row}\n" for row in range(400))
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    workload = find_workload("mixed-200", trace)
    assert workload.lengths[0] == (1, 300)
    assert workload.lengths[199] == (398 // 4, 300)
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n1,2,3\n")
    with pytest.raises(ValueError, match="200 rows"):
        find_workload("mixed-200", trace)


def test_a_worker_answers_in_turn_and_is_stopped_in_between(echo: Worker) -> None:
    assert echo.ready == {"version": "1", "settings": "echo"}
    outcome = echo.run({"prompts": [[1, 2, 3], [4, 5]], "outputs": [2, 1]})
    assert outcome["tokens"] == [[1, 2], [4]]
    pid = echo._process.pid
    _, status = os.waitpid(pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    echo.close()
    with pytest.raises(ProcessLookupError):
        os.killpg(pid, 0)


def test_what_a_worker_raises_is_told(echo: Worker) -> None:
    with pytest.raises(WorkerFailed, match="thirteen"):
        echo.run({"prompts": [[1]], "outputs": [13]})


def test_a_worker_that_does_not_start_is_told() -> None:
    with pytest.raises(WorkerFailed, match="No module named"):
        Worker("benchmarks.no_such_worker", THIS_PYTHON, OPTIONS, {})


def test_without_its_environment_there_is_no_vllm(tmp_path: Path) -> None:
    assert vllm_systems(tmp_path, {}) == []


def test_the_settings_given_for_vllm_go_before_ours(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    bindings = [system.environment["VLLM_CPU_OMP_THREADS_BIND"] for system in vllm_systems(tmp_path, {})]
    assert {"auto", "nobind"} < set(bindings)
    (system,) = vllm_systems(tmp_path, {"VLLM_CPU_OMP_THREADS_BIND": "nobind"})
    assert system.environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


def test_zentorch_is_one_more_way_where_it_is_installed(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    (tmp_path / "lib" / "python3.11" / "site-packages" / "zentorch").mkdir(parents=True)
    *without, with_it = vllm_systems(tmp_path, {})
    assert len(without) == 3
    assert all(WITHOUT_ZENTORCH in system.environment for system in without)
    assert WITHOUT_ZENTORCH not in with_it.environment
    assert with_it.environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


@pytest.mark.parametrize("bits", [8, 4])
def test_a_quantized_checkpoint_is_the_model_in_fewer_bits(tmp_path: Path, bits: int) -> None:
    source, name = tmp_path / "model", "model.layers.0.self_attn.q_proj.weight"
    source.mkdir()
    weights = {name: torch.randn(8, 128).bfloat16(), "model.norm.weight": torch.ones(16).bfloat16()}
    save_file(weights, source / "model.safetensors")
    (source / "config.json").write_text('{"hidden_size": 16}')
    made = quantized_checkpoint(source, tmp_path / "made", bits, lambda text: None)
    assert quantized_checkpoint(source, tmp_path / "made", bits, pytest.fail) == made
    found = load_file(made / "model.safetensors")
    if bits == 8:
        assert found[name].dtype is torch.int8
        numbers, scales = found[name].float(), found[f"{name}_scale"].float()
    else:
        assert found[f"{name}_shape"].tolist() == [8, 128]
        words = found[f"{name}_packed"]
        assert words.dtype is torch.int32
        numbers = (words[:, :, None] >> torch.arange(8) * 4 & 15).flatten(1).float() - 8
        scales = found[f"{name}_scale"].float().repeat_interleave(64, 1)
    # Half a scale, and as much again for scales of 8 bits.
    assert (numbers * scales - weights[name].float()).abs().le(scales * 0.55).all()
    assert torch.equal(found["model.norm.weight"], weights["model.norm.weight"])
    config = json.loads((made / "config.json").read_text())
    assert config["hidden_size"] == 16
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    with pytest.raises(ValueError, match=r"has no model\.safetensors"):
        quantized_checkpoint(tmp_path, tmp_path / "made", bits, lambda text: None)


def test_static_batches_hold_every_prompt_once() -> None:
    uniform = group_by_length([[1] * 4] * 70, [5] * 70, 64)
    assert [len(group) for group in uniform] == [64, 6]
    outputs = [(7 * i) % 23 + 1 for i in range(70)]
    mixed = group_by_length([[1] * 4] * 70, outputs, 64)
    assert sorted(i for group in mixed for i in group) == list(range(70))
    longest = [max(outputs[i] for i in group) for group in mixed]
    assert longest == sorted(longest)


def test_the_shapes_of_the_products_are_the_parameters_of_the_model() -> None:
    config = {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "num_hidden_layers": 30,
        "vocab_size": 49152,
    }
    norms = 61 * 576
    assert sum(fan_in * fan_out for fan_in, fan_out in step_shapes(config)) + norms == 134_515_008


def test_ratios_pair_the_rounds() -> None:
    result = Result(find_workload("uniform-2"), {"batchwright": [10.0, 30.0, 20.0], "vllm": [10.0, 10.0, 40.0]})
    ratio = result.ratio("vllm")
    assert ratio is not None
    assert (ratio.median, ratio.low, ratio.high) == (2.0, 0.5, 3.0)
    assert result.ratio("transformers") is None
    assert report.throughput_table([result], {"batchwright": "int8", "vllm": "bf16"}).splitlines() == [
        "| workload  | batchwright int8 | vLLM bf16 |           vs vLLM |",
        "| :-------- | ---------------: | --------: | ----------------: |",
        "| uniform-2 |               20 |        10 | 2.00 (0.50..3.00) |",
    ]


def test_a_single_round_has_no_range() -> None:
    result = Result(find_workload("uniform-2"), {"batchwright": [20.0], "vllm": [16.0]})
    table = report.throughput_table([result], {"batchwright": "int8", "vllm": "bf16"})
    assert table.endswith("| uniform-2 |               20 |        16 |    1.25 |")


def test_the_ways_that_were_tried_are_listed_from_the_fastest() -> None:
    listed = report.trial_list("vllm", {"one process": 812.4, "by default": 90.0, "int8": 1_200.0})
    assert listed.startswith("vLLM ")
    assert listed.endswith(": int8: 1,200; one process: 812; by default: 90.")


def test_the_command_from_end_to_end(shallow_path: Path, tmp_path: Path) -> None:
    figures, page = tmp_path / "figures.json", tmp_path / "page.md"
    command = [sys.executable, str(ROOT / "benchmarks" / "engine.py"), "--model", str(shallow_path), "--peer", "none"]
    command += ["-w", "uniform-2:4/3", "--rounds", "2", "--kv-gib", "1", "--profile", "--quantization", "int8"]
    command += ["--json", str(figures), "--save", str(page)]
    (temporary := tmp_path / "temporary").mkdir()
    environment = os.environ | {"TMPDIR": str(temporary)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert not list(temporary.glob("batchwright-rates-*"))
    assert "vs products" in done.stdout
    assert "| batchwright int8 | products bf16 |" in done.stdout
    assert "uniform-2:4/3" in page.read_text(encoding="utf-8")
    told = json.loads(figures.read_text(encoding="utf-8"))
    (workload,) = told["workloads"]
    assert workload["generated_tokens"] == 6
    assert {system: len(rates) for system, rates in workload["tokens_per_second"].items()} == {
        "batchwright": 2,
        "products": 2,
    }
    profile = told["profiles"]["uniform-2:4/3"]
    assert profile["steps"] == 3
    assert min(profile.values()) >= 0
    assert profile["matrix products"] > 0
    bound = told["bounds"]["uniform-2:4/3"]
    assert 0 < bound["bound"] <= bound["seconds"]
    assert "| uniform-2:4/3 | 0.0" in page.read_text(encoding="utf-8")


def test_bad_usage_exits_with_2() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "engine.py"), "--peer", "none", "-w", "uniform-x"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "uniform-N" in done.stderr
