"""vLLM as `ray.data.llm` runs it."""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator
from typing import Any

import ray.data

from benchmarks.ray_forms.job import Job, note_start, serve


def answer(job: Job, dataset: ray.data.Dataset) -> ray.data.Dataset:
    """Return the dataset with answers."""
    from ray.data.llm import build_processor, vLLMEngineProcessorConfig

    stages: Any = importlib.import_module("ray.llm._internal.batch.stages.vllm_engine_stage")
    stamp, tokens = job["stamp"], job["tokens"]

    class Timed(stages.vLLMEngineStageUDF):  # type: ignore[misc]
        async def __call__(self, batch: Any) -> AsyncIterator[Any]:
            note_start(stamp)
            async for made in super().__call__(batch):
                yield made

    config = vLLMEngineProcessorConfig(
        model_source=job["model"],
        engine_kwargs={
            "dtype": "bfloat16",
            "max_num_seqs": 256,
            "kv_cache_memory_bytes": 2 * 2**30,
            "enable_prefix_caching": True,
        },
        concurrency=1,
        batch_size=job["batch_size"],
        max_concurrent_batches=job["batches"],
        log_engine_metrics=False,
        placement_group_config={"bundle_per_worker": {"CPU": job["cores"]}},
        chat_template_stage=False,
        tokenize_stage={"num_cpus": 0.5},
        detokenize_stage=False,
    )
    processor = build_processor(
        config,
        preprocess=lambda row: {
            "prompt": row["prompt"],
            "sampling_params": {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True},
        },
        postprocess=lambda row: {"answer": row["generated_text"]},
    )
    stage: Any = processor.get_stage_by_name("vLLMEngineStage")
    stage.__dict__["fn"] = Timed  # an assignment would check the stage again, and then ask for a GPU
    return processor(dataset)


if __name__ == "__main__":
    serve(answer, "answer")
