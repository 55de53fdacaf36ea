"""Model servers as endpoints: batchwright's, vLLM's and llama.cpp's, each in a separate process."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.attacks.service import NotStarted, serving
from benchmarks.batching.http.run import free_port
from benchmarks.provider.clients import ROOT
from benchmarks.throughput.systems import vllm_systems

_START_SECONDS = 600.0
"""Seconds that a start may take: vLLM compiles at every start."""
_STOP_SECONDS = 20.0
_CONTEXT = 1024
"""Tokens of a sequence of llama.cpp's server."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A running server."""

    url: str
    """With `/v1`."""
    model: str
    """The name that it answers to."""


Opened = Callable[[Path], AbstractContextManager[Endpoint]]
"""Starts a server, which may write to the folder."""


@dataclass(frozen=True, slots=True)
class EndpointKind:
    """A server that can be started here."""

    title: str
    open: Opened


def found(model: str, folder: Path, gguf: Path | None, most: int) -> dict[str, EndpointKind]:
    """The servers that are installed, by their names on the command line.

    `model` is a name that batchwright knows, `folder` the same model on disk; `gguf` a file of it for llama.cpp's
    server, which is searched for on the PATH. `most`: requests under way that each must be able to take.
    """
    kinds = {"batchwright": EndpointKind("batchwright", lambda place: _ours(place, model, most))}
    ways = vllm_systems(ROOT / ".bench" / "vllm", {})
    if ways:
        module = ("-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--dtype", "bfloat16")
        environment = {"HF_HUB_OFFLINE": "1", **ways[0].environment}
        vllm = (str(ways[0].python), *module, "--max-num-seqs", str(most))
        kinds["vllm"] = EndpointKind("vLLM", lambda place: _other(place, vllm, environment))
    server = shutil.which("llama-server")
    if server is not None and gguf is not None:
        size = ("--ctx-size", str(most * _CONTEXT), "--parallel", str(most))
        llama = (server, "--model", str(gguf), *size, "--cont-batching")
        kinds["llama_cpp"] = EndpointKind("llama.cpp", lambda place: _other(place, llama, {}))
    return kinds


@contextmanager
def _ours(folder: Path, model: str, most: int) -> Iterator[Endpoint]:
    flags = ["--model", model, "--max-online-sequences", str(2 * most)]
    with serving(ROOT, folder, flags, None) as service:
        url = f"{service.url}/v1"
        yield Endpoint(url, _first_model(url))


@contextmanager
def _other(folder: Path, command: Sequence[str], environment: dict[str, str]) -> Iterator[Endpoint]:
    port = free_port()
    with (folder / "log").open("wb") as log:
        arguments = [*command, "--host", "127.0.0.1", "--port", str(port)]
        process = subprocess.Popen(arguments, env=os.environ | environment, stdout=log, stderr=log)
        try:
            url = f"http://127.0.0.1:{port}/v1"
            until = time.monotonic() + _START_SECONDS
            while not (name := _first_model(url)):
                if process.poll() is not None or time.monotonic() > until:
                    tail = (folder / "log").read_text(errors="replace")[-2000:]
                    raise NotStarted(f"{command[0]} did not start: {tail}")
                time.sleep(0.5)
            yield Endpoint(url, name)
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_SECONDS)
            process.kill()
            process.wait()


def _first_model(url: str) -> str:
    """The first model that an endpoint lists; empty if it does not answer yet."""
    try:
        with urllib.request.urlopen(f"{url}/models", timeout=5) as response:
            listed = json.loads(response.read())
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return ""
    return str(listed["data"][0]["id"])
