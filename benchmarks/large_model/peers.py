"""How fast llama.cpp and OpenVINO decode the same shape, from a GGUF file with random weights."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.large_model.checkpoint import HIDDEN
from benchmarks.large_model.gguf_checkpoint import KINDS, random_gguf
from benchmarks.throughput.gguf_files import source_file
from benchmarks.throughput.process import Worker
from benchmarks.throughput.systems import BENCH, System, Unavailable, peer_python
from benchmarks.throughput.workers.protocol import Job, Options

_PROMPT = 4
"""Tokens of a prompt: as few as possible, since only what comes after it is timed."""
_SHORT = 2
"""Tokens of the answers whose time is subtracted."""


@dataclass(frozen=True, slots=True)
class PeerDecoded:
    """Steps of several sequences, each of which chose a token for every one."""

    file_bytes: int
    loading: float
    """Seconds."""
    sequences: int
    step: float
    """Mean seconds of a step."""


def peer_decoded(
    name: str, model: str, folder: Path, bits: int, layers: int, steps: int, counts: Sequence[int],
    say: Callable[[str], None],
) -> Iterator[PeerDecoded]:  # fmt: skip
    """Yield how fast the peer `name` decodes each number of sequences in `counts`.

    The time of a step is the extra time of jobs with `steps` more tokens, divided by `steps`. Raises `Unavailable`
    where it is not installed, or `model`, whose tokenizer the file gets, does not come as GGUF.
    """
    python = peer_python(name, BENCH)
    source = source_file(model, BENCH / "gguf", say)
    if source is None:
        raise Unavailable(f"there is no GGUF file of {model}, whose tokenizer is needed")
    path = random_gguf(folder, bits, layers, source)
    system = System(name, python, precision=KINDS[bits], model=path)
    options: Options = {
        "model": str(path),
        "precision": system.precision,
        "kv_gib": 2,
        "max_num_seqs": max(counts),
        "attention": "",
        "profile": False,
    }
    began = time.perf_counter()
    with Worker(system.module, system.python, options, system.environment) as worker:
        loading = time.perf_counter() - began
        for sequences in counts:
            worker.run(_job(sequences, _SHORT))
            short, long = (worker.run(_job(sequences, _SHORT + more))["seconds"] for more in (0, steps))
            yield PeerDecoded(path.stat().st_size, loading, sequences, (long - short) / steps)


def _job(sequences: int, outputs: int) -> Job:
    draw = random.Random(f"{sequences} {outputs} {HIDDEN}")
    prompts = [[draw.randrange(100, 40_000) for _ in range(_PROMPT)] for _ in range(sequences)]
    return {"prompts": prompts, "outputs": [outputs] * sequences}
