"""OpenVINO GenAI with continuous batching, in its own environment, from a GGUF file.

It computes what the file holds. With the precisions int8 and int4 it computes a float16 file's model after OpenVINO's
own compression of the weights: to 8 bits with a scale for each output, or to 4 bits with a scale for each group, which
its kernels are faster with than with the scales for 32 weights each of GGUF.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.throughput.workers.protocol import Answer, Job, Options, Ready, serve, timed

_STEP_TOKENS = 2048
_ACTIVATIONS = {"int8": 192, "int4": 64}
"""Activations that share a scale, for each precision: the most that divide both sizes of the built-in model's rows, and
the fastest; with 4 bits, those of a group of weights."""


def load(options: Options) -> tuple[Ready, Answer]:
    openvino: Any = importlib.import_module("openvino")  # the environment that checks types has none
    genai: Any = importlib.import_module("openvino_genai")

    source = Path(options["model"])
    threads = len(os.sched_getaffinity(0))
    properties = {"INFERENCE_NUM_THREADS": threads}
    precision = options["precision"]
    if precision in _ACTIVATIONS:
        properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = _ACTIVATIONS[precision]
    scheduler = _scheduler(genai, options)
    model = _compressed(openvino, genai, source, precision) if precision in _ACTIVATIONS else source
    tokenizer = genai.Tokenizer(source)
    pipeline = genai.ContinuousBatchingPipeline(model, tokenizer, scheduler, "CPU", **properties)

    def generate(job: Job) -> list[list[int]]:
        configs = [genai.GenerationConfig(max_new_tokens=n, ignore_eos=True, do_sample=False) for n in job["outputs"]]
        prompts = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in job["prompts"]]
        return [list(result.m_generation_ids[0]) for result in pipeline.generate(prompts, configs)]

    return {
        "version": openvino.__version__.partition("-")[0],
        "settings": f"GenAI's continuous batching, {options['precision']} weights, {threads} threads",
    }, timed(generate)


def _scheduler(genai: Any, options: Options) -> Any:
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = options["kv_gib"]
    scheduler.max_num_seqs = options["max_num_seqs"]
    scheduler.max_num_batched_tokens = _STEP_TOKENS
    scheduler.enable_prefix_caching = True
    return scheduler


def _compressed(openvino: Any, genai: Any, source: Path, precision: str) -> Path:
    """A folder beside `source` with its model in OpenVINO's own format, in 8 or 4 bits. Made once."""
    folder = source.with_suffix(f".{precision}")
    if not folder.exists():
        nncf: Any = importlib.import_module("nncf")
        with tempfile.TemporaryDirectory(dir=source.parent) as work:
            copy = Path(work) / source.name
            copy.symlink_to(source.absolute())
            # Saved where the file lies, as it is read.
            genai.ContinuousBatchingPipeline(copy, genai.SchedulerConfig(), "CPU", {"enable_save_ov_model": True})
            model = openvino.Core().read_model(Path(work) / "openvino_model.xml")
            mode, groups = nncf.CompressWeightsMode.INT8_SYM, {}
            if precision == "int4":
                mode, groups = nncf.CompressWeightsMode.INT4_SYM, {"group_size": _ACTIVATIONS["int4"], "ratio": 1.0}
            model = nncf.compress_weights(model, mode=mode, **groups)
            finished = Path(work) / folder.name
            openvino.save_model(model, finished / "openvino_model.xml")
            finished.rename(folder)
    return folder


if __name__ == "__main__":
    serve(load)
