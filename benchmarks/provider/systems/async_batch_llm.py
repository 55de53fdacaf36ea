"""async-batch-llm, with the settings of its guide "Choosing Your Limits".

Given limits: 90% of them, with five seconds of burst, and as many requests under way as they allow. Not given: the ten
that it advises for endpoints with limits. The cooldown after a 429 is the 30 s of its guide to high throughput.
"""

from __future__ import annotations

import asyncio
import importlib
from importlib.metadata import version
from typing import Any

from benchmarks.provider.systems.protocol import MAX_ATTEMPTS, Answers, Task, serve

_DEFAULT_CONCURRENCY = 10
_COOLDOWN = 30.0
_HEADROOM = 0.9
_BURST_SECONDS = 5


def _concurrency(task: Task) -> int:
    return _DEFAULT_CONCURRENCY if task.rpm is None and task.concurrency is None else task.useful_concurrency


async def _run(task: Task, answers: Answers) -> None:
    library: Any = importlib.import_module("async_batch_llm")  # the environment that checks types has none
    bodies = task.bodies()
    limits: dict[str, Any] = {}
    if task.rpm is not None:
        limits |= {"max_requests_per_minute": task.rpm * _HEADROOM, "quota_burst_seconds": _BURST_SECONDS}
    if task.tpm is not None:
        estimator = library.CharacterTokenEstimator(expected_output_tokens=task.max_tokens)
        limits |= {"max_tokens_per_minute": int(task.tpm * _HEADROOM), "token_estimator": estimator}
    config = library.ProcessorConfig(
        concurrency=_concurrency(task),
        attempt_timeout=60.0,
        retry=library.RetryConfig(max_attempts=MAX_ATTEMPTS),
        rate_limit=library.RateLimitConfig(cooldown_seconds=_COOLDOWN, max_cooldown_seconds=300.0),
        **limits,
    )
    system = next((message["content"] for message in bodies[0][1]["messages"] if message["role"] == "system"), None)
    instruction = {"system_instruction": system} if system else {}
    strategy = library.llm(
        f"openai-compatible:{task.model}",
        base_url=task.url,
        api_key="none",
        generation_config={"max_tokens": task.max_tokens},
        **instruction,
    )
    prompts = [(name, body["messages"][-1]["content"]) for name, body in bodies]
    async for result in library.process_stream(strategy, prompts, config=config):
        answers.add(result.item_id, result.output if result.success else None)


def run(task: Task, answers: Answers) -> str:
    asyncio.run(_run(task, answers))
    given = f", {_HEADROOM:.0%} of the limits, burst of {_BURST_SECONDS} s" if task.rpm or task.tpm else ""
    return f"concurrency={_concurrency(task)}, cooldown of {_COOLDOWN:g} s{given}"


if __name__ == "__main__":
    serve(run, f"async-batch-llm {version('async-batch-llm')}")
