"""A model on two processes gives what it gives in one; a rank that is lost is told, and the group started again."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import batchwright
from batchwright import Engine, EngineConfig, InferenceRequest, SamplingParams
from batchwright.engine.bodies import load_body
from batchwright.engine.bodies.llama import LlamaBody
from batchwright.engine.bodies.load import load_shard
from batchwright.engine.bodies.shard import Shard
from batchwright.engine.bodies.weights import Weights
from batchwright.engine.step.batch import StepBatch, build_batch
from batchwright.engine.tensor_parallel import parallel_body, rank_process
from batchwright.engine.tensor_parallel.parallel_body import ParallelBody
from batchwright.errors import EngineClosed, InputError, UnsupportedModel
from batchwright.jobs.job_run import RunProgress
from batchwright.request import Prompt
from batchwright.scheduling import Chunk, Sequence

from .support import TINY, run, tiny_model

CPU = torch.device("cpu")
OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_num_seqs": 32}
TOKENS = 10
GREEDY = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
ASKED = [f"A list of {number} words:" for number in range(16)]
needs_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores")


def a_step(*lengths: int) -> StepBatch:
    """Prompts of these lengths, each with blocks of its own."""
    chunks, first = [], 0
    for length in lengths:
        sequence = Sequence([(7 * place + length) % 190 for place in range(length)], length, length + 1)
        sequence.table.blocks.extend(range(first, first + -(-length // 16)))
        first += -(-length // 16)
        chunks.append(Chunk(sequence, 0, length, False, True))
    return build_batch(chunks, 16, CPU)


@pytest.fixture(scope="module")
def some_prompts(prompts: list[list[int]]) -> list[list[int]]:
    """Prompts of up to 128 tokens, the first two of which begin alike."""
    return sorted((each for each in prompts if len(each) <= 128), key=lambda each: each[:64] != prompts[-6][:64])


def with_preemption(engine: Engine, prompts: list[list[int]]) -> list[Any]:
    """Compute `prompts`, the last ones of which push out others that are being computed."""
    requests = [InferenceRequest.of(each, GREEDY, priority=5) for each in prompts[:-4]]
    urgent = [InferenceRequest.of(each, GREEDY, priority=0) for each in prompts[-4:]]
    for request in requests:
        engine.submit(request)
    done = [response for _ in range(4) for response in engine.step()]
    for request in urgent:
        engine.submit(request)
    done += run(engine)
    answers = {response.request_id: response for response in done}
    return [answers[request.request_id] for request in requests + urgent]


@dataclass(frozen=True)
class Alone:
    """What one process gives."""

    tokens: list[Any]
    """For `some_prompts`."""
    texts: list[str]
    """For `ASKED`."""
    logits: Tensor
    """Of the step `a_step(9, 40, 1)`."""


@pytest.fixture(scope="module")
def alone(shallow_path: Path, some_prompts: list[list[int]]) -> Alone:
    with Engine(shallow_path, kv_memory="100MB", **OPTIONS | {"max_num_seqs": 64}) as engine:
        prompts: list[Prompt] = [*some_prompts, *ASKED]
        answers = engine.generate(prompts, GREEDY)
        body = engine.core.body
        assert isinstance(body, LlamaBody)
        with torch.inference_mode():
            logits = body.forward(a_step(9, 40, 1))
    tokens = [answer.token_ids for answer in answers[: len(some_prompts)]]
    return Alone(tokens, [answer.output for answer in answers[len(some_prompts) :]], logits)


@needs_cores
def test_the_same_tokens_and_logits_from_half_of_the_model_each(
    shallow_path: Path, some_prompts: list[list[int]], alone: Alone
) -> None:
    threads = torch.get_num_threads()
    options = OPTIONS | {"max_num_seqs": len(some_prompts) - 4}
    with Engine(shallow_path, kv_memory="100MB", tensor_parallel=2, **options) as engine:
        answers = with_preemption(engine, some_prompts)
        assert [answer.error for answer in answers] == [None] * len(answers)
        assert [answer.token_ids for answer in answers] == alone.tokens
        assert engine.stats.preemptions > 0
        assert engine.stats.cached_tokens > 0
        assert "tensor parallel on 2 processes" in engine.stats.implementation

        body = engine.core.body
        assert isinstance(body, ParallelBody)
        with torch.inference_mode():
            found = body.forward(a_step(9, 40, 1))
        torch.testing.assert_close(found, alone.logits, rtol=1e-4, atol=1e-4)

        with pytest.raises(ValueError, match=r"tensor_parallel=2: torch.distributed is in use"):
            Engine(shallow_path, tensor_parallel=2, **OPTIONS)

        os.kill(body.pids[0], signal.SIGKILL)
        lost = engine.generate(some_prompts[:2], GREEDY)
        assert [type(answer.error) for answer in lost] == [EngineClosed] * 2
        assert [str(answer.error) for answer in lost] == ["rank 1 of 2 was ended by SIGKILL"] * 2
    assert not dist.is_initialized()
    assert torch.get_num_threads() == threads


@needs_cores
def test_a_run_goes_on_when_a_rank_is_killed(
    shallow_path: Path, alone: Alone, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    killed: list[int] = []

    def kill_a_rank(progress: RunProgress) -> None:
        if progress.phase == "running" and progress.succeeded and not killed:
            below = psutil.Process().children(recursive=True)
            (rank,) = (each for each in below if rank_process._MODULE in each.cmdline())
            killed.append(rank.pid)
            rank.kill()

    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in ASKED))
    with caplog.at_level(logging.WARNING):
        report = batchwright.run(
            source,
            tmp_path / "out.jsonl",
            model=str(shallow_path),
            defaults=GREEDY,
            progress=kill_a_rank,
            engine=EngineConfig(**OPTIONS | {"max_num_seqs": 4}, kv_memory="64MB", tensor_parallel=2),
        )
    assert killed
    assert "replica 1 died: rank 1 of 2 was ended by SIGKILL" in caplog.text
    assert (report.succeeded, report.failed) == (len(ASKED), 0)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert sorted(line["response"]["body"]["choices"][0]["text"] for line in lines) == sorted(alone.texts)


@needs_cores
def test_a_rank_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model(tmp_path, "llama", **TINY)
    body = ParallelBody(tmp_path, EngineConfig(**OPTIONS, tensor_parallel=2))
    try:
        body.allocate(20, 16, "sdpa")
        monkeypatch.setattr(parallel_body, "_GRACE", 0.1)
        monkeypatch.setattr(rank_process, "_GRACE", 0.1)
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.5))
        os.kill(body.pids[0], signal.SIGSTOP)
        with pytest.raises(EngineClosed, match=r"rank 0 of 2 cannot reach the others: .*[Tt]imed out"):
            body.forward(a_step(5))
        with pytest.raises(ProcessLookupError):
            os.kill(body.pids[0], 0)
        with pytest.raises(EngineClosed, match="cannot reach"):
            body.forward(a_step(5))
    finally:
        body.close()


@needs_cores
def test_a_rank_that_ends_while_it_loads_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model(tmp_path, "llama", **TINY)
    monkeypatch.setattr(rank_process, "_MODULE", "this")
    with pytest.raises(EngineClosed, match="rank 1 of 2 ended with status 0"):
        ParallelBody(tmp_path, EngineConfig(**OPTIONS, tensor_parallel=2))


@needs_cores
def test_a_rank_that_ends_while_it_allocates_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model(tmp_path, "llama", **TINY)
    body = ParallelBody(tmp_path, EngineConfig(**OPTIONS, tensor_parallel=2))
    try:
        other, own = body.pids[0], body._own.allocate
        os.kill(other, signal.SIGSTOP)

        def allocate(*given: Any) -> None:
            own(*given)
            os.kill(other, signal.SIGKILL)

        monkeypatch.setattr(body._own, "allocate", allocate)
        with pytest.raises(EngineClosed, match="rank 1 of 2 was ended by SIGKILL"):
            body.allocate(8, 16, "reference")
    finally:
        body.close()


@dataclass(eq=False)
class Meeting:
    """Where threads that stand for ranks add up and join."""

    barrier: threading.Barrier
    given: dict[int, Tensor] = field(default_factory=dict)

    def exchange(self, rank: int, mine: Tensor) -> list[Tensor]:
        self.given[rank] = mine.clone()
        self.barrier.wait()
        found = [self.given[each] for each in sorted(self.given)]
        self.barrier.wait()
        return found


def meeting_shard(meeting: Meeting, rank: int, ranks: int) -> Shard:
    @dataclass(frozen=True)
    class Here(Shard):
        def summed(self, x: Tensor) -> Tensor:
            return x.copy_(torch.stack(meeting.exchange(self.rank, x)).sum(0))

        def joined(self, part: Tensor, columns: int) -> Tensor:
            return torch.cat(meeting.exchange(self.rank, part), 1)

    return Here(rank, ranks)


@pytest.mark.parametrize(
    ("model_type", "ranks", "more"),
    [
        ("llama", 2, {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96, "attention_bias": True}),
        ("llama", 2, {"mlp_bias": True, "tie_word_embeddings": True, "intermediate_size": 90}),
        ("mistral", 2, {"sliding_window": 20}),
        ("qwen2", 2, {"tie_word_embeddings": True}),
        ("qwen3", 3, {"head_dim": 16, "num_attention_heads": 8, "num_key_value_heads": 4}),
    ],
)
def test_shards_of_each_family_add_up(tmp_path: Path, model_type: str, ranks: int, more: dict[str, Any]) -> None:
    tiny_model(tmp_path, model_type, **TINY | more)
    config = EngineConfig(**OPTIONS)
    whole = load_body(tmp_path, config)
    meeting = Meeting(threading.Barrier(ranks, timeout=60))
    shards = [load_shard(tmp_path, config, meeting_shard(meeting, rank, ranks)) for rank in range(ranks)]
    for body in (whole, *shards):
        body.allocate(20, 16, "auto")
    step = a_step(30, 7, 1)

    @torch.inference_mode()
    def logits(body: Any) -> Tensor:
        found: Tensor = body.forward(step if body is whole else a_step(30, 7, 1))
        return found

    with ThreadPoolExecutor(ranks) as pool:
        for found in pool.map(logits, shards):
            torch.testing.assert_close(found, logits(whole), rtol=1e-4, atol=1e-4)


def test_parts_cover_everything_once() -> None:
    for number in (3, 8, 49152):
        for ranks in range(1, 4):
            for part in (Shard.part, Shard.channels):
                parts = [part(Shard(rank, ranks), number) for rank in range(ranks)]
                assert [each.start for each in parts] == [0, *(each.stop for each in parts[:-1])]
                assert parts[-1].stop == number
                assert all(each.size for each in parts)
    assert [Shard(rank, 2).channels(1536).size for rank in range(2)] == [768, 768]
    assert all(Shard(rank, 5).channels(1536).size % 64 == 0 for rank in range(5))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "int8"}, "quantization='int8' with tensor_parallel=2"),
        ({"deterministic": True}, "deterministic=True with tensor_parallel=2"),
        ({"body": "transformers"}, "body='transformers' with tensor_parallel=2"),
        ({"device": "cuda:1"}, "device='cuda:1' with tensor_parallel=2"),
        ({"tensor_parallel": 0}, "tensor_parallel=0: must be at least 1"),
        ({"tensor_parallel": None}, "tensor_parallel=None: must be a whole number"),
    ],
)
def test_what_cannot_be_shared_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**{"tensor_parallel": 2} | options)


def test_a_rank_reads_its_part_and_the_norms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model(tmp_path, "llama", **TINY)
    taken: list[int] = []
    genuine = Weights.take

    def noted(self: Weights, *args: Any, **more: Any) -> Tensor:
        found = genuine(self, *args, **more)
        taken.append(found.numel())
        return found

    monkeypatch.setattr(Weights, "take", noted)
    config, read = EngineConfig(**OPTIONS), []
    shards = (partial(load_shard, tmp_path, config, Shard(rank, 2)) for rank in range(2))
    loads: list[Callable[[], object]] = [partial(load_body, tmp_path, config), *shards]
    for load in loads:
        taken.clear()
        load()
        read.append(sum(taken))
    whole, *parts = read
    assert all(0.45 < part / whole < 0.55 for part in parts)
    norms = (1 + 2 * TINY["num_hidden_layers"]) * TINY["hidden_size"]
    assert sum(parts) == whole + norms


def test_models_that_cannot_be_shared_are_refused(tmp_path: Path) -> None:
    tiny_model(tmp_path / "llama", "llama", **TINY)
    tiny_model(tmp_path / "other", "gpt_neox", **TINY)
    with pytest.raises(UnsupportedModel, match=r"tensor_parallel=3: .*has 2 \(num_key_value_heads\); give 2 or less"):
        load_shard(tmp_path / "llama", EngineConfig(**OPTIONS), Shard(0, 3))
    with pytest.raises(UnsupportedModel, match=r"tensor_parallel=2 needs the fused body.*gpt_neox"):
        load_shard(tmp_path / "other", EngineConfig(**OPTIONS), Shard(1, 2))
    with pytest.raises(ValueError, match="tensor_parallel=1000: each needs a core of its own"):
        ParallelBody(tmp_path / "llama", EngineConfig(**OPTIONS, tensor_parallel=1000))


def test_an_encoder_alone_is_not_shared(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    line = {"custom_id": "1", "method": "POST", "url": "/v1/embeddings", "body": {"model": "minilm", "input": "x"}}
    source.write_text(json.dumps(line) + "\n")
    with pytest.raises(InputError, match="tensor_parallel=2: only models that generate"):
        batchwright.run(source, tmp_path / "out.jsonl", embedding_model="minilm", tensor_parallel=2)
