"""vLLM with its guidance backend, in its own environment: answers of a given form, or free text."""

from __future__ import annotations

import importlib
import time
from typing import Any, cast

from benchmarks.throughput.workers.protocol import Answer, Job, Options, Outcome, Ready, serve
from benchmarks.throughput.workers.vllm import settings


class FormJob(Job):
    schema: str | None
    """JSON schema of the answers; None: free text that does not end early."""
    temperature: float


class FormOutcome(Outcome):
    texts: list[str]


def load(options: Options) -> tuple[Ready, Answer]:
    vllm: Any = importlib.import_module("vllm")  # the environment that checks types has none
    sampling: Any = importlib.import_module("vllm.sampling_params")
    dtype = "bfloat16" if options["precision"] == "bf16" else "float32"
    llm = vllm.LLM(
        model=options["model"],
        dtype=dtype,
        enable_prefix_caching=True,
        max_num_seqs=options["max_num_seqs"],
        kv_cache_memory_bytes=options["kv_gib"] * 2**30,
        # Compact JSON, as batchwright's.
        structured_outputs_config={"backend": "guidance", "disable_any_whitespace": True},
    )

    def answer(job: Job) -> Outcome:
        asked = cast(FormJob, job)
        form = None if asked["schema"] is None else sampling.StructuredOutputsParams(json=asked["schema"])
        # No seed: with one, vLLM draws for each sequence by itself, which is slower.
        params = [
            vllm.SamplingParams(
                temperature=asked["temperature"], max_tokens=most, ignore_eos=form is None, structured_outputs=form
            )
            for most in asked["outputs"]
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
        began = time.perf_counter()
        outputs = [each.outputs[0] for each in llm.generate(prompts, params, use_tqdm=False)]
        found: FormOutcome = {
            "seconds": time.perf_counter() - began,
            "tokens": [list(output.token_ids) for output in outputs],
            "texts": [output.text for output in outputs],
            "profile": {},
        }
        return found

    return {"version": vllm.__version__, "settings": settings(dtype)}, answer


if __name__ == "__main__":  # vLLM starts processes that import this module again
    serve(load)
