"""The processes of the compose file, and the workers of the manifest, started by hand with the real small model.

There are no containers: what stands in the files is run on this machine, with the hosts, folders and programs in their
commands and variables replaced by those of the test. PostgreSQL is a real one, S3 is moto's.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.postgres import PostgresServer

from .files import DEPLOY, ROOT, compose, manifest

pytest.importorskip("s3fs")
moto = pytest.importorskip("moto.server")

MAKE = """
import fsspec, sys
fsspec.filesystem("s3").makedirs(sys.argv[1], exist_ok=True)
"""
OUTPUT = """
import fsspec, sys
for part in fsspec.open_files(sys.argv[1] + "/part-*"):
    with part as file:
        sys.stdout.buffer.write(file.read())
"""
EXAMPLE = ROOT / "examples" / "batch.jsonl"
VARIABLES = {"POSTGRES_PASSWORD": "secret", "S3_SECRET_KEY": "testing"}
PROGRAM = [sys.executable, "-m", "batchwright"]
STARTED = "working on batches"


class Machine:
    """Starts what a file says, with the places of a container replaced by those of this machine."""

    def __init__(self, places: Mapping[str, str], folder: Path) -> None:
        self._places = places
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            # The image's own, in its volume.
            "BATCHWRIGHT_DATA": str(folder / "data"),
            "BATCHWRIGHT_STATE": str(folder / "state"),
            "XDG_CONFIG_HOME": str(folder / "config"),
            # As in the manifests; and what no line here needs is not loaded.
            "OMP_NUM_THREADS": "1",
            "BATCHWRIGHT_EMBEDDING_MODEL": "",
        }

    def start(self, command: list[str], variables: Mapping[str, str], **options: Any) -> subprocess.Popen[str]:
        environment = {name: self._here(value) for name, value in variables.items()}
        return subprocess.Popen(
            [self._here(word) for word in command],
            env={**self._environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )

    def run(self, command: list[str], variables: Mapping[str, str]) -> str:
        """Its standard output, once it has ended well."""
        with self.start(command, variables) as process:
            output, errors = process.communicate()
        assert process.returncode == 0, errors
        return output

    def _here(self, word: str) -> str:
        for place, here in self._places.items():
            word = word.replace(place, here)
        return word


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    found: dict[str, Any] = compose(DEPLOY / "compose.cluster.yaml", VARIABLES)["services"]
    return found


@pytest.fixture(scope="module")
def machine(
    services: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path
) -> Iterator[Machine]:
    """This machine, with the PostgreSQL and the S3 that the compose file has."""
    made, used = services["postgres"]["environment"], services["workers"]["environment"]["BATCHWRIGHT_DATABASE"]
    database = urlsplit(used)
    assert (database.hostname, database.username, database.password, database.path) == (
        "postgres", made["POSTGRES_USER"], made["POSTGRES_PASSWORD"], "/" + made["POSTGRES_DB"],
    )  # fmt: skip
    made, s3 = services["s3"]["environment"], services["run"]["environment"]
    assert urlsplit(s3["AWS_ENDPOINT_URL"]).hostname == "s3"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        assert made[name] == s3[name]
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    with PostgresServer() as postgres:
        server.start()
        host, port = server.get_host_and_port()
        try:
            here = {
                used: postgres.new_database(),
                s3["AWS_ENDPOINT_URL"]: f"http://{host}:{port}",
                "/input/": f"{ROOT / 'examples'}/",
            }
            found = Machine(here, tmp_path_factory.mktemp("volume"))
            found.run([sys.executable, "-c", MAKE, made["S3_BUCKET"]], s3)
            yield found
        finally:
            server.stop()


def test_a_run_from_s3_to_s3(machine: Machine, services: dict[str, Any]) -> None:
    upload, run = services["upload"], services["run"]
    assert upload["entrypoint"][0] == "python"
    machine.run([sys.executable, *upload["entrypoint"][1:], *upload["command"]], upload["environment"])
    machine.run([*PROGRAM, *run["command"]], run["environment"])
    output = machine.run([sys.executable, "-c", OUTPUT, run["command"][-1]], run["environment"])
    lines = [json.loads(line) for line in output.splitlines()]
    prompts = (ROOT / "examples" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    assert len({line["custom_id"] for line in lines}) == len(lines) == len(prompts)
    assert {line["response"]["status_code"] for line in lines} == {200}


def test_workers_on_one_store(machine: Machine, services: dict[str, Any]) -> None:
    """Those of the compose file and one of the Job together: that one ends by itself, the others when they are told."""
    workers, submit = services["workers"], services["submit"]
    [container] = manifest("workers.yaml", "Job")["spec"]["template"]["spec"]["containers"]
    variables = workers["environment"]
    without_wait = [word for word in submit["command"] if word != "--wait"]
    batch = machine.run([*PROGRAM, *without_wait], submit["environment"]).strip()
    with ExitStack() as stack:
        command, count = [*PROGRAM, *workers["command"]], workers["deploy"]["replicas"]
        started = [stack.enter_context(machine.start(command, variables)) for _ in range(count)]
        try:
            machine.run([*PROGRAM, *container["args"]], variables)
            shown = json.loads(machine.run([*PROGRAM, *submit["command"], "--json"], submit["environment"]))
            for worker in started:
                assert worker.stderr is not None
                assert any(STARTED in line for line in worker.stderr)
        finally:
            for worker in started:
                worker.send_signal(signal.SIGTERM)
        assert [worker.wait() for worker in started] == [0] * count
    asked = [json.loads(line)["custom_id"] for line in EXAMPLE.read_text(encoding="utf-8").splitlines()]
    assert shown["request_counts"] == {"total": len(asked), "completed": len(asked), "failed": 0}
    output = machine.run([*PROGRAM, "jobs", "results", batch], variables)
    lines = [json.loads(line) for line in output.splitlines()]
    assert sorted(line["custom_id"] for line in lines) == sorted(asked)
    assert {line["response"]["status_code"] for line in lines} == {200}
