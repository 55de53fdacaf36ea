"""vLLM with prefix caching and a small KV cache, in its own environment."""

from __future__ import annotations

import importlib
from typing import Any, cast

from benchmarks.throughput.workers.protocol import Answer, Job, Options, Ready, serve, timed
from benchmarks.throughput.workers.vllm import settings


class SmallCache(Options):
    kv_bytes: int
    max_model_len: int


def load(options: Options) -> tuple[Ready, Answer]:
    vllm: Any = importlib.import_module("vllm")  # the environment that checks types has none
    given = cast(SmallCache, options)
    llm = vllm.LLM(
        model=given["model"],
        dtype="bfloat16",
        enable_prefix_caching=True,
        max_num_seqs=given["max_num_seqs"],
        max_model_len=given["max_model_len"],
        kv_cache_memory_bytes=given["kv_bytes"],
    )

    def generate(job: Job) -> list[list[int]]:
        params = [vllm.SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=n) for n in job["outputs"]]
        prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
        return [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params, use_tqdm=False)]

    return {"version": vllm.__version__, "settings": settings("bfloat16")}, timed(generate)


if __name__ == "__main__":  # vLLM starts processes that import this module again
    serve(load)
