"""batchwright's own engine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from benchmarks.throughput.workers.protocol import Answer, Job, Options, Outcome, Ready, serve, timed
from benchmarks.throughput.workers.stopwatch import Stopwatch

if TYPE_CHECKING:
    from batchwright import Engine


def load(options: Options) -> tuple[Ready, Answer]:
    from batchwright import Engine, SamplingParams, __version__
    from batchwright.service.process_memory import exempt_loaded_objects

    stopwatch = Stopwatch()
    if options["profile"]:
        stopwatch.watch_products()
    engine = Engine(
        options["model"],
        dtype="bfloat16",
        device="cpu",
        max_num_seqs=options["max_num_seqs"],
        kv_memory=f"{options['kv_gib']}GiB",
        attention=options["attention"],
        quantization=None if options["precision"] == "bf16" else options["precision"],
    )
    for cache in engine.core.body.caches:  # as vLLM does when it starts: pages are given out on the first write
        cache.keys.zero_()
        cache.values.zero_()
    if options["profile"]:
        stopwatch.watch_engine(engine.core)
    exempt_loaded_objects()  # as the service does when it starts, and vLLM

    def generate(job: Job) -> list[list[int]]:
        params = [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=n) for n in job["outputs"]]
        responses = engine.generate(job["prompts"], params)
        for response in responses:
            if response.error is not None:
                raise response.error
        return [list(response.token_ids) for response in responses]

    body = engine.core.body
    kernels = ", compiled kernels off" if os.environ.get("BATCHWRIGHT_NATIVE") == "0" else ""
    precision = "bfloat16" if options["precision"] == "bf16" else f"{options['precision']}, the rest bfloat16"
    ready: Ready = {
        "version": __version__,
        "settings": f"{body.name} body, {body.attention.name} attention{kernels}, {precision}",
    }
    folder = options.get("rates_folder")
    return ready, timed(generate, stopwatch.take) if folder is None else _bounded(engine, generate, folder)


def _bounded(engine: Engine, generate: Callable[[Job], list[list[int]]], folder: str) -> Answer:
    """Time `generate` beside what the job needs at least, by rates of this machine that are measured first.

    They are stored in `folder`. Raises `NoBound` if they cannot be measured.
    """
    from batchwright.engine.machine_rates import machine_rates
    from batchwright.engine.work_meter import WorkMeter
    from batchwright.jobs.run_bound import RunBound
    from batchwright.models.cache import CACHE_VARIABLE
    from batchwright.planning.bound import NoBound

    core = engine.core
    model, watched = core.body.costs, core.body.watch()
    if model is None or watched is None:
        raise NoBound(f"the bound needs compiled layers, this model runs on the {core.body.name} body")

    # The machine's memory may have been faster an hour ago: only rates of this process count. Nothing else is read from
    # the cache any more.
    os.environ[CACHE_VARIABLE] = folder
    blocks = core.scheduler.blocks
    rates = machine_rates(core.body, blocks.block_size, blocks.num_blocks, again=True)

    def answer(job: Job) -> Outcome:
        core.meter = meter = WorkMeter(model, watched, rates, blocks.block_size)
        began = time.perf_counter()
        tokens = generate(job)
        seconds = time.perf_counter() - began
        core.meter = None
        found = RunBound(engine, meter, None).figures(seconds)
        figures = {"bound": found["bound_seconds"], "seconds": seconds}
        bound = found["bound"]
        figures |= {"operations/s": bound["rates"]["products"], "bytes/s": bound["rates"]["bandwidth"]}
        return {"seconds": seconds, "tokens": tokens, "profile": figures | bound["lost"]}

    return answer


if __name__ == "__main__":
    serve(load)
