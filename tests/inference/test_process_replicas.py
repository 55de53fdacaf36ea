"""Two replicas of one core each with the real small model: same text as one engine, whatever is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.server.served import serving

import batchwright
from batchwright.cpu_cores import Core
from batchwright.engine_config import EngineConfig
from batchwright.errors import EngineClosed, InputError, InvalidRequest, UnsupportedModel
from batchwright.inference.inference import Call
from batchwright.inference.replicas import process_replica
from batchwright.inference.replicas.cores import Place
from batchwright.inference.replicas.messages import ReplicaSpec
from batchwright.inference.replicas.process_replica import ProcessReplica
from batchwright.inference.replicas.replica import ReplicaDied
from batchwright.inference.replicas.replicated import ReplicatedInference
from batchwright.jobs.job_run import RunProgress
from batchwright.peak_memory import peak_memory_bytes
from batchwright.wire.requests import COMPLETION_URL

LIMIT = 120.0
OPTIONS: dict[str, Any] = {"dtype": "float32", "kv_memory": "64MiB", "max_num_seqs": 8}
PROMPTS = [f"A list of {number} words:" for number in range(24)]
TOKENS = 12


def cores() -> list[Place]:
    """Two places of one processor each, the same one if there is no other."""
    usable = sorted(os.sched_getaffinity(0))
    return [Place((Core(0, (usable[number % len(usable)],)),)) for number in range(2)]


@pytest.fixture(scope="module")
def expected(shallow_path: Path) -> dict[str, str]:
    """The text that one engine gives for each prompt."""
    params = batchwright.SamplingParams(max_tokens=TOKENS, temperature=0)
    with batchwright.Engine(shallow_path, EngineConfig(**OPTIONS)) as engine:
        answers = engine.generate(PROMPTS, params)
    return {prompt: answer.output for prompt, answer in zip(PROMPTS, answers, strict=True)}


def a_call(prompt: str, **body: Any) -> Call:
    given = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, **body}
    return Call(COMPLETION_URL, given, f"req_{prompt}", "batch")


def test_the_text_is_that_of_one_engine_and_stays_so_when_all_are_killed(
    shallow_path: Path, expected: dict[str, str]
) -> None:
    async def main() -> None:
        spec = ReplicaSpec(model=str(shallow_path), embedding_model=None, config={**OPTIONS, "device": "cpu"}, count=2)
        replicas = [ProcessReplica(spec, place) for place in cores()]
        async with asyncio.timeout(LIMIT):
            inference = await ReplicatedInference.opened(replicas)
            assert [os.sched_getaffinity(each.pid or 0) for each in replicas] == [
                set(place.cpus or ()) for place in cores()
            ]
            with pytest.raises(InvalidRequest, match="max_tokens"):
                await inference.answer(a_call("x", max_tokens=-1))
            stream = inference.stream(a_call(PROMPTS[0]))
            assert "".join([body["choices"][0]["text"] async for body in stream]) == expected[PROMPTS[0]]

            tasks = {prompt: asyncio.create_task(inference.answer(a_call(prompt))) for prompt in PROMPTS}
            await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_COMPLETED)
            for each in replicas:
                os.kill(each.pid or 0, signal.SIGKILL)
            texts = {prompt: (await task)["choices"][0]["text"] for prompt, task in tasks.items()}
            assert texts == expected
            stats = inference.engine_stats
            assert stats is not None
            assert stats.generated_tokens > 0
            # One of them may have answered all that was left before the other was up again.
            up = [each for each in replicas if each.is_up]
            await inference.close()
            assert up
            assert all(each.stats is not None for each in up)
            for each in replicas:
                with pytest.raises(ProcessLookupError):
                    os.kill(each.pid or 0, 0)

    asyncio.run(main())


def odd(monkeypatch: pytest.MonkeyPatch, how: str, **options: float) -> ProcessReplica:
    monkeypatch.setattr(process_replica, "_MODULE", "tests.inference.odd_replica")
    return ProcessReplica(ReplicaSpec(model=how, embedding_model=None, config={}), Place(), **options)


@pytest.mark.parametrize(("how", "reason"), [("breaks", "the device failed"), ("ends", "it ended with status 70")])
def test_why_a_replica_died_is_told(monkeypatch: pytest.MonkeyPatch, how: str, reason: str) -> None:
    async def main() -> None:
        async with asyncio.timeout(LIMIT):
            replica = odd(monkeypatch, how)
            await replica.start(lambda text: None)
            with pytest.raises(ReplicaDied, match=reason):
                await replica.answer(a_call("x"))
            assert str(await replica.ended()) == reason
            assert not replica.is_up
            with pytest.raises(ReplicaDied):
                await replica.answer(a_call("x"))
            await replica.start(lambda text: None)
            assert replica.is_up
            await replica.close()

    asyncio.run(main())


def test_a_replica_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with asyncio.timeout(LIMIT):
            replica = odd(monkeypatch, "hangs", patience=0.2)
            await replica.start(lambda text: None)
            with pytest.raises(ReplicaDied, match=r"no sign of life.* for 0\.2 s"):
                await replica.answer(a_call("x"))

    asyncio.run(main())


def test_a_replica_that_cannot_load_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with asyncio.timeout(LIMIT):
            with pytest.raises(UnsupportedModel, match="not this one"):
                await ReplicatedInference.opened([odd(monkeypatch, "refuses")])
            with pytest.raises(EngineClosed, match="status 3"):
                await ReplicatedInference.opened([odd(monkeypatch, "dies while it loads")])

    asyncio.run(main())


def test_a_run_loses_nothing_when_a_replica_is_killed(
    shallow_path: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    killed: list[int] = []

    def kill_one(progress: RunProgress) -> None:
        children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
        if progress.phase == "running" and progress.succeeded > 2 and not killed and children:
            killed.append(int(children[-1]))
            os.kill(killed[0], signal.SIGKILL)

    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    report = batchwright.run(
        source,
        tmp_path / "out.jsonl",
        model=str(shallow_path),
        replicas=min(2, len(os.sched_getaffinity(0))),
        defaults=batchwright.SamplingParams(max_tokens=TOKENS, temperature=0),
        progress=kill_one,
        engine=EngineConfig(**OPTIONS),
    )
    assert killed
    assert (report.succeeded, report.failed) == (len(PROMPTS), 0)
    assert report.steps > 0
    assert report.no_bound == "replicas computed the lines"
    # That of this process alone is no more than the kernel says.
    assert report.peak_memory_bytes > peak_memory_bytes() + 100 * 2**20
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    texts = {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in lines}
    assert len(lines) == len(texts)
    assert sorted(texts.values()) == sorted(expected.values())


def test_the_service_streams_from_replicas_and_goes_on_after_one_is_killed(
    shallow_path: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    flags = ["--model", str(shallow_path), "--embedding-model", "", "--dtype", "float32", "--kv-memory", "64MiB"]
    body = {"prompt": PROMPTS[2], "max_tokens": TOKENS, "temperature": 0, "stream": True}
    with serving(tmp_path, *flags, "--replicas", "1") as (process, url, _):
        for _ in range(2):
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=LIMIT) as response:
                assert response.status_code == 200
                data = [line.removeprefix("data: ") for line in response.iter_lines() if line]
            assert data.pop() == "[DONE]"
            assert "".join(json.loads(each)["choices"][0]["text"] for each in data) == expected[PROMPTS[2]]
            [child] = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(child), signal.SIGKILL)
        process.terminate()


def test_what_contradicts_replicas_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "in.txt"
    source.write_text("a\n")
    with pytest.raises(InputError, match="replicas=0"):
        batchwright.run(source, tmp_path / "out.jsonl", replicas=0)
    with pytest.raises(InputError, match="backend"):
        batchwright.run(source, tmp_path / "out.jsonl", replicas=2, backend="http://127.0.0.1:1/v1")
