"""transformers' continuous batching, the machinery of its `generate_batch`.

`generate_batch` itself takes one number of new tokens for all prompts, so its manager is given each request's own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from benchmarks.accelerator.results import Mixed
from benchmarks.accelerator.shapes import Shape
from benchmarks.throughput.workers.protocol import Job

transformers: Any = importlib.import_module("transformers")  # most of what is used here has no types
_POLL_S = 1.0
_STOP_S = 5.0
_PAGE = 256


def measure_peer(shape: Shape, device: torch.device, ends: float) -> Mixed:
    """Its time for the job of mixed lengths, after a short round; stopped when `time.perf_counter()` passes `ends`.

    Raises RuntimeError if it fails.
    """
    workload = shape.lengths()
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.LlamaConfig(**shape.config), dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    with _manager(model.eval(), workload.lengths) as manager:
        attention = str(model.config._attn_implementation)  # noqa: SLF001 - it has no public name
        settings = f"transformers {transformers.__version__}, {attention} attention"
        if not _run(manager, "short", shape.short_round(), ends):
            raise RuntimeError("the short round that goes before took all the time")
        began = time.perf_counter()
        ended = _run(manager, "measured", workload.job(0, shape.vocab_size), ends)
        return Mixed("transformers", settings, time.perf_counter() - began, ended)


@contextlib.contextmanager
def _manager(model: Any, lengths: tuple[tuple[int, int], ...]) -> Iterator[Any]:
    options = _options(lengths)
    with torch.no_grad():
        try:
            manager = _made(model, options)
        except Exception:  # it prefers kernels that it would fetch, which fails without a network
            manager = _made(model, _known({"auto_switch_to_flash": False}) | options)
        manager.warmup()
    manager.start()
    try:
        yield manager
    finally:
        manager.stop(block=True, timeout=_STOP_S)


def _made(model: Any, options: Mapping[str, Any]) -> Any:
    return model.init_continuous_batching(
        generation_config=transformers.GenerationConfig(do_sample=False, eos_token_id=-1),
        continuous_batching_config=transformers.ContinuousBatchingConfig(**options),
    )


def _options(lengths: tuple[tuple[int, int], ...]) -> dict[str, Any]:
    """A KV cache that holds all requests at once, and what `generate_batch` states of the job; the rest as it comes."""
    pages = [-(-(prompt + output) // _PAGE) + 1 for prompt, output in lengths]
    wanted = {
        "num_blocks": sum(pages),
        "max_blocks_per_request": max(pages) + max(pages) % 2,
        "max_requests_per_batch": len(lengths),
    }
    return _known(wanted)


def _known(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that this release of transformers has."""
    names = {field.name for field in dataclasses.fields(transformers.ContinuousBatchingConfig)}
    return {name: value for name, value in options.items() if name in names}


def _run(manager: Any, name: str, job: Job, ends: float) -> bool:
    """Compute `job`. False, and the rest is cancelled, when `time.perf_counter()` passes `ends` first."""
    waiting = {f"{name}-{index}": output for index, output in enumerate(job["outputs"])}
    for (request_id, output), prompt in zip(waiting.items(), job["prompts"], strict=True):
        manager.add_request(prompt, request_id=request_id, max_new_tokens=output, eos_token_id=-1)
    while waiting:
        if time.perf_counter() > ends:
            for request_id in waiting:
                manager.cancel_request(request_id)
            return False
        result = manager.get_result(timeout=_POLL_S)
        if result is None:
            if not manager.is_running():
                raise RuntimeError("the thread that generates has ended")
        elif result.error is not None:
            raise RuntimeError(f"a request failed: {result.error}")
        elif result.is_finished() and (generated := len(result.generated_tokens)) != waiting.pop(result.request_id):
            raise RuntimeError(
                f"request {result.request_id} has {generated} tokens, another number than it was asked for"
            )
    return True
