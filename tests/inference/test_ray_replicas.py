"""Replicas that are actors of a Ray cluster: same text as one engine, whatever is killed.

`BATCHWRIGHT_RAY_KILLS=20` makes the long campaign too: 2,000 lines, so many kills of actors and nodes, and a quarter as
many of the driver.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tests.inference.ray_cluster import RayCluster, ray_cluster
from tests.jobs.fakes import by_id, text_of

import batchwright
from batchwright.engine_config import EngineConfig
from batchwright.errors import EngineClosed, InputError, MissingExtra, ModelNotFound
from batchwright.inference.replicas import ray_actor, ray_opening
from batchwright.inference.replicas.messages import Broken, ReplicaSpec, decode_from_replica, encoded
from batchwright.inference.replicas.ray_opening import JOINED, open_ray_replicas
from batchwright.inference.replicas.ray_resources import RayResources
from batchwright.jobs.job_run import RunProgress
from batchwright.jobs.loading import NoModel
from batchwright.service import loading
from batchwright.service.settings import Settings

pytest.importorskip("ray")

KILLS = int(os.environ.get("BATCHWRIGHT_RAY_KILLS", "0"))
CAMPAIGN_LINES = 2000
LIMIT = 300.0
OPTIONS: dict[str, Any] = {"dtype": "float32", "kv_memory": "64MiB", "max_num_seqs": 4, "device": "cpu"}
FLAGS = [
    part
    for name, value in {**OPTIONS, "temperature": 0}.items()
    for part in (f"--{name.replace('_', '-')}", str(value))
]


def write_lines(path: Path, number: int) -> Path:
    lines = (
        {"id": f"q{each}", "prompt": f"Fact number {each} about the sea:", "max_tokens": 4 + each % 12}
        for each in range(number)
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def texts_in(path: Path) -> dict[str, str]:
    """By id; `by_id` refuses an id that is there twice."""
    return {name: text_of(line) for name, line in by_id(path).items()}


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster(nodes=2) as cluster:
        yield cluster


def test_a_stopped_driver_a_killed_actor_and_a_killed_node_cost_nothing(
    cluster: RayCluster, shallow_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = write_lines(tmp_path / "in.jsonl", 48), tmp_path / "out.jsonl"
    flags = ["--ray", cluster.address, "--resources", '{"num_cpus": 1}', "--model", str(shallow_path), *FLAGS]
    command = [sys.executable, "-m", "batchwright", "run", str(source), "-o", str(output), "--quiet", *flags]
    stopped = subprocess.Popen(command)
    while not (output.exists() and output.read_bytes().count(b"\n") > 2):
        assert stopped.poll() is None
        time.sleep(0.05)
    stopped.terminate()
    assert stopped.wait() == 128 + signal.SIGTERM

    defaults, engine = batchwright.SamplingParams(temperature=0), EngineConfig(**OPTIONS)
    batchwright.run(source, tmp_path / "whole.jsonl", model=str(shallow_path), defaults=defaults, engine=engine)
    kills: Iterator[Callable[[], object]] = iter([lambda: cluster.kill_actor(0), lambda: cluster.kill_node(0)])
    seen: list[RunProgress] = []

    def kill(progress: RunProgress) -> None:
        seen.append(progress)
        due = progress.resumed + 3 + 8 * sum(each.detail == "killed" for each in seen)
        if progress.phase == "running" and progress.succeeded >= due and cluster.actors():
            seen.append(RunProgress("running", "killed"))
            next(kills, cluster.actors)()

    report = batchwright.run(
        source,
        output,
        model=str(shallow_path),
        ray=cluster.address,
        replicas=2,
        defaults=defaults,
        engine=engine,
        progress=kill,
    )
    assert (report.succeeded, report.failed) == (48, 0)
    assert report.resumed > 2
    assert next(kills, None) is None
    assert texts_in(output) == texts_in(tmp_path / "whole.jsonl")
    assert any((each.detail or "").startswith(f"{JOINED} {cluster.address}, which has ") for each in seen)
    assert any("waiting for a node with 1 CPU" in (each.detail or "") for each in seen)
    assert any("of 2 replicas are not up" in (each.waiting or "") for each in seen)
    assert capsys.readouterr().out == ""  # where results may go


def test_a_model_that_no_node_has_is_an_error_at_once(cluster: RayCluster, tmp_path: Path) -> None:
    async def main() -> None:
        async with asyncio.timeout(LIMIT):
            await open_ray_replicas(
                cluster.address, 1, RayResources(), str(tmp_path), None, EngineConfig(**OPTIONS), stepped=True
            )

    tmp_path.joinpath("config.json").write_text("{}")
    with pytest.raises(ModelNotFound):
        asyncio.run(main())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{", r"resources='\{': no JSON"),
        ("[1]", "must be an object"),
        ('{"num_gpu": 1}', "no 'num_gpu', did you mean 'num_gpus'"),
        ('{"num_gpus": -1}', "num_gpus=-1: must be a number"),
        ('{"num_cpus": true}', "num_cpus=True"),
        ('{"accelerator_type": 3}', "accelerator_type=3"),
        ('{"resources": {"TPU": "x"}}', "TPU"),
    ],
)
def test_bad_resources_are_refused(given: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        RayResources.of(given)


def test_resources_of_a_bundle() -> None:
    assert RayResources.of(None).bundle == {"CPU": 1}
    given = {"num_cpus": 2, "num_gpus": 0.5, "memory": 1e9, "accelerator_type": "A100", "resources": {"disk": 3}}
    bundle = {"CPU": 2, "GPU": 0.5, "memory": 10**9, "accelerator_type:A100": 0.001, "disk": 3}
    assert RayResources.of(json.dumps(given)).bundle == RayResources.of(given).bundle == bundle
    assert RayResources.of('{"num_cpus": 0}').bundle
    assert (RayResources.of('{"num_cpus": 3}').threads, RayResources.of('{"num_gpus": 1}').threads) == (3, None)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"resources": {"num_cpus": 1}}, "name it with ray"),
        ({"ray": "auto", "backend": "http://127.0.0.1:1/v1"}, "leave one of them out"),
        ({"ray": "auto", "replicas": "auto"}, "name a number"),
        ({"ray": " "}, "must be auto, local"),
        ({"ray": "127.0.0.1:1", "device": "cuda"}, "num_gpus"),
        ({"ray": "127.0.0.1:1", "tensor_parallel": 2}, "each rank needs"),
    ],
)
def test_what_contradicts_ray_is_refused(options: Mapping[str, Any], said: str, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", 1)
    with pytest.raises(InputError, match=said):
        batchwright.run(source, tmp_path / "out.jsonl", **options)


def test_a_worker_on_a_store_computes_on_the_cluster_of_its_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened: list[tuple[Any, ...]] = []

    async def open_replicas(*given: Any, classifiers: Sequence[str], most_deaths: int) -> NoModel:
        opened.append(given[:5])
        return NoModel()

    monkeypatch.setattr(loading, "open_ray_replicas", open_replicas)
    on_ray: dict[str, Any] = {"ray": "auto", "replicas": 3, "resources": '{"num_gpus": 1}'}
    settings = Settings(data=tmp_path, model="a", embedding_model="", **on_ray)
    asyncio.run(loading.load_inference(settings))
    assert opened == [("auto", 3, RayResources(num_gpus=1), "a", None)]
    assert loading.model_times(settings) == {}
    wrong: dict[str, Any]
    for wrong in ({"resources": {"num_gpus": 1}}, {"ray": "auto", "backend": "http://127.0.0.1:1/v1"}):
        with pytest.raises(InputError):
            asyncio.run(loading.load_inference(Settings(data=tmp_path, **wrong)))
    with pytest.raises(ValidationError, match="did you mean 'num_gpus'"):
        Settings(data=tmp_path, **{**on_ray, "resources": '{"num_gpu": 1}'})


class RayOf:
    """Ray whose `init` does what a test wants."""

    def __init__(self, init: Callable[[], object]) -> None:
        self._init = init

    def init(self, **options: Any) -> object:
        return self._init()


@pytest.mark.parametrize("address", ["auto", "{}", "ray://{}"])
def test_a_cluster_that_has_ended_is_named_at_once(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        ended = f"127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", ended)
    with pytest.raises(InputError, match=rf"{ended.partition(':')[2]}.*refused.*ray start") as caught:
        ray_opening._join(RayOf(pytest.fail), address.format(ended))
    assert ("by RAY_ADDRESS" in str(caught.value)) == (address == "auto")


def test_a_cluster_that_takes_nobody_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def deny() -> None:
        raise PermissionError(13, "Permission denied", "/tmp/ray/session_1/sockets")

    monkeypatch.setattr(ray_opening, "JOIN_SECONDS", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"ray://127.0.0.1:{silent.getsockname()[1]}"
        never = threading.Event()
        with pytest.raises(InputError, match=r"took no driver within"):
            ray_opening._join(RayOf(never.wait), address)
        never.set()
        monkeypatch.setattr(ray_opening, "JOIN_SECONDS", 60)
        with pytest.raises(InputError, match=r"sockets.*belongs to another user"):
            ray_opening._join(RayOf(deny), address)
        assert ray_opening._join(RayOf(bool), address) == address


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"batchwright\[ray\]"):
        batchwright.run(write_lines(tmp_path / "in.jsonl", 1), tmp_path / "out.jsonl", ray="auto")


def test_an_actor_whose_engine_died_says_why_and_ends_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dead:
        models, routes = ("dead",), ()

        async def answer(self, call: Any) -> Any:
            raise EngineClosed("the engine failed")

    monkeypatch.setattr(ray_actor, "load", lambda spec, progress: (None, Dead()))
    monkeypatch.setattr(ray_actor, "_LAST_WORDS", 0.01)

    async def main() -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        monkeypatch.setattr(os, "_exit", lambda status: loop.call_soon_threadsafe(ended.set))
        from batchwright.inference.inference import Call
        from batchwright.inference.replicas.messages import Ask

        async with asyncio.timeout(LIMIT):
            actor = ray_actor.ReplicaActor()
            await actor._load(ReplicaSpec(model="dead", embedding_model=None, config={}))
            await actor.take([encoded(Ask.of(1, Call("/v1/completions", {"prompt": "x"}, "req_1"), stream=False))])
            told: list[Any] = []
            while messages := await actor.fetch():
                told += map(decode_from_replica, messages)
            assert told[-1] == Broken("the engine failed")
            await ended.wait()

    asyncio.run(main())


@pytest.mark.skipif(not KILLS, reason="set BATCHWRIGHT_RAY_KILLS to a number of kills")
def test_a_campaign_of_kills(shallow_path: Path, tmp_path: Path) -> None:
    chance = random.Random(KILLS)
    source = write_lines(tmp_path / "in.jsonl", CAMPAIGN_LINES)
    output, whole = tmp_path / "out.jsonl", tmp_path / "whole.jsonl"

    def start(target: Path, *more: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "batchwright", "run", str(source), "-o", str(target), "--quiet", *more]
        return subprocess.Popen([*command, "--model", str(shallow_path), *FLAGS])

    def lines() -> int:
        return output.read_bytes().count(b"\n") if output.exists() else 0

    assert start(whole).wait() == 0
    events = ["actor"] * (KILLS - KILLS // 2) + ["node"] * (KILLS // 2) + ["driver"] * (KILLS // 4)
    chance.shuffle(events)
    made: list[tuple[str, int]] = []
    with ray_cluster(nodes=2) as cluster:
        flags = ["--ray", cluster.address, "--replicas", "2"]
        driver = start(output, *flags)
        for number, event in enumerate(events):
            due = (number + chance.random()) * CAMPAIGN_LINES / (len(events) + 1)
            while (lines() < due or not cluster.actors()) and driver.poll() is None:
                time.sleep(0.05)
            assert driver.poll() is None, "the job ended before all was killed"
            if event == "driver":
                driver.kill()
                driver.wait()
                driver = start(output, *flags)
            elif event == "node":
                cluster.kill_node(chance.randrange(2))
                cluster.add_node()
            else:
                assert cluster.kill_actor(chance.randrange(2))
            made.append((event, lines()))
            print(f"{time.strftime('%X')} {made[-1]}", flush=True)
        assert driver.wait() == 0
    assert texts_in(output) == texts_in(whole)
    assert len(texts_in(output)) == CAMPAIGN_LINES
