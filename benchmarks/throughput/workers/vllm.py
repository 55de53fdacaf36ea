"""vLLM, compiled, in its own environment."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import Any

from benchmarks.throughput.workers.protocol import WITHOUT_ZENTORCH, Answer, Job, Options, Ready, serve, timed

if WITHOUT_ZENTORCH in os.environ:
    # vLLM has no setting for that. Its processes import this module again.
    sys.modules["zentorch"] = None  # type: ignore[assignment]

_WEIGHTS = {
    "W8A8": "8-bit weights and activations (compressed-tensors), ",
    "int4": "4-bit weights in groups of 64 (compressed-tensors), ",
}


def load(options: Options) -> tuple[Ready, Answer]:
    vllm: Any = importlib.import_module("vllm")  # the environment that checks types has none
    dtype = "float32" if options["precision"] == "f32" else "bfloat16"
    llm = vllm.LLM(
        model=options["model"],
        dtype=dtype,
        enable_prefix_caching=True,
        max_num_seqs=options["max_num_seqs"],
        kv_cache_memory_bytes=options["kv_gib"] * 2**30,
    )

    def generate(job: Job) -> list[list[int]]:
        # With ignore_eos nothing else ends a sequence early; min_tokens would only cost vLLM a pass over the logits.
        params = [vllm.SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=n) for n in job["outputs"]]
        prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
        return [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params, use_tqdm=False)]

    weights = _WEIGHTS.get(options["precision"], "")
    return {"version": vllm.__version__, "settings": weights + settings(dtype)}, timed(generate)


def settings(dtype: str) -> str:
    """What a reader must know about how it runs."""
    binding = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto")
    openmp = "Intel OpenMP" if "iomp" in os.environ.get("LD_PRELOAD", "") else "GNU OpenMP"
    zentorch = "zentorch" if _has_zentorch() else "without zentorch"
    place = "one process" if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0" else "own scheduler process"
    return f"compiled, {dtype}, {place}, threads {binding}, {openmp}, {zentorch}"


def _has_zentorch() -> bool:
    return WITHOUT_ZENTORCH not in os.environ and importlib.util.find_spec("zentorch") is not None


if __name__ == "__main__":  # vLLM starts processes that import this module again
    serve(load)
