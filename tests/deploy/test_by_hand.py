"""The processes of the compose file, and the workers of the manifest, with the small model made shallow.

There are no containers: what stands in the files is run on this machine, with the hosts, folders and programs in their
commands and variables replaced by those of the test. PostgreSQL is a real one, S3 is moto's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests import forked
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
STARTED = "working on batches"


class Machine:
    """Starts what a file says, with the places of a container replaced by those of this machine."""

    def __init__(self, places: Mapping[str, str], folder: Path, cache: Path) -> None:
        self._places, self._folder, self._number = places, folder, count()
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            # The image's own, in its volume.
            "BATCHWRIGHT_DATA": str(folder / "data"),
            "BATCHWRIGHT_STATE": str(folder / "state"),
            "XDG_CONFIG_HOME": str(folder / "config"),
            "BATCHWRIGHT_CACHE": str(cache),
            # As in the manifests; and what no line here needs is not loaded.
            "OMP_NUM_THREADS": "1",
            "BATCHWRIGHT_EMBEDDING_MODEL": "",
        }

    def start(self, arguments: list[str], variables: Mapping[str, str]) -> tuple[forked.Command, Path]:
        """The program with these arguments, and the file of its standard output."""
        name = f"program-{next(self._number)}"
        errors, output = self._folder / f"{name}.errors", self._folder / f"{name}.output"
        return forked.start(
            [self._here(word) for word in arguments], errors, output=output, environment=self._with(variables)
        ), output

    def run(self, arguments: list[str], variables: Mapping[str, str]) -> str:
        """The standard output of the program, once it has ended well."""
        command, output = self.start(arguments, variables)
        assert command.wait() == 0, command.errors()
        return output.read_text(encoding="utf-8")

    def python(self, arguments: list[str], variables: Mapping[str, str]) -> str:
        """The standard output of Python, once it has ended well."""
        command = [sys.executable, *(self._here(word) for word in arguments)]
        done = subprocess.run(command, env=self._with(variables), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def _with(self, variables: Mapping[str, str]) -> dict[str, str]:
        return self._environment | {name: self._here(value) for name, value in variables.items()}

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
    services: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, shallow_cache: Path
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
            found = Machine(here, tmp_path_factory.mktemp("volume"), shallow_cache)
            found.python(["-c", MAKE, made["S3_BUCKET"]], s3)
            yield found
        finally:
            server.stop()


def test_a_run_from_s3_to_s3(machine: Machine, services: dict[str, Any]) -> None:
    upload, run = services["upload"], services["run"]
    assert upload["entrypoint"][0] == "python"
    machine.python([*upload["entrypoint"][1:], *upload["command"]], upload["environment"])
    machine.run(run["command"], run["environment"])
    output = machine.python(["-c", OUTPUT, run["command"][-1]], run["environment"])
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
    batch = machine.run(without_wait, submit["environment"]).strip()
    started = [machine.start(workers["command"], variables)[0] for _ in range(workers["deploy"]["replicas"])]
    try:
        machine.run(container["args"], variables)
        shown = json.loads(machine.run([*submit["command"], "--json"], submit["environment"]))
        for worker in started:
            while STARTED not in worker.errors():
                assert worker.process.is_alive(), worker.errors()
                time.sleep(0.01)
    finally:
        for worker in started:
            worker.process.terminate()
    assert [worker.wait() for worker in started] == [0] * len(started)
    asked = [json.loads(line)["custom_id"] for line in EXAMPLE.read_text(encoding="utf-8").splitlines()]
    assert shown["request_counts"] == {"total": len(asked), "completed": len(asked), "failed": 0}
    output = machine.run(["jobs", "results", batch], variables)
    lines = [json.loads(line) for line in output.splitlines()]
    assert sorted(line["custom_id"] for line in lines) == sorted(asked)
    assert {line["response"]["status_code"] for line in lines} == {200}
