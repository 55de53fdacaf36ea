"""batchwright's own engine."""

from __future__ import annotations

import os

from benchmarks.throughput.workers.protocol import Answer, Job, Options, Ready, serve, timed
from benchmarks.throughput.workers.stopwatch import Stopwatch


def load(options: Options) -> tuple[Ready, Answer]:
    from batchwright import Engine, SamplingParams, __version__

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
    return {
        "version": __version__,
        "settings": f"{body.name} body, {body.attention.name} attention{kernels}, {precision}",
    }, timed(generate, stopwatch.take)


if __name__ == "__main__":
    serve(load)
