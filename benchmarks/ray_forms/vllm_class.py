"""vLLM's `LLM` in a class for `map_batches`, which computes one batch after the other."""

from __future__ import annotations

import importlib
from typing import Any

import ray.data

from benchmarks.ray_forms.job import Job, note_start, serve


class Answers:
    """Answers batches in the thread that they come in."""

    def __init__(self, job: Job) -> None:
        vllm: Any = importlib.import_module("vllm")  # the environment that checks types has none
        self._stamp = job["stamp"]
        self._llm = vllm.LLM(
            model=job["model"],
            dtype="bfloat16",
            enable_prefix_caching=True,
            max_num_seqs=256,
            kv_cache_memory_bytes=2 * 2**30,
        )
        self._params = vllm.SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=job["tokens"])

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        note_start(self._stamp)
        outputs = self._llm.generate([*batch["prompt"]], self._params, use_tqdm=False)
        return {**batch, "answer": [output.outputs[0].text for output in outputs]}


def answer(job: Job, dataset: ray.data.Dataset) -> ray.data.Dataset:
    """Return the dataset with answers."""
    return dataset.map_batches(
        Answers,
        fn_constructor_kwargs={"job": job},
        batch_size=job["batch_size"] * job["batches"],
        compute=ray.data.ActorPoolStrategy(size=1),
        num_cpus=job["cores"],
    )


if __name__ == "__main__":
    serve(answer, "answer")
