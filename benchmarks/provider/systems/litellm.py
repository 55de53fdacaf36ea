"""litellm's router with one deployment, whose `rpm` and `tpm` it is given, and enforces, where they are known.

<https://docs.litellm.ai/docs/routing>: retries by the router, which honours `retry-after`; no cooldown, since there is
no other deployment to go to; a semaphore around it, since it queues nothing itself.
"""

from __future__ import annotations

import asyncio
import importlib
from importlib.metadata import version
from typing import Any

from benchmarks.provider.systems.protocol import MAX_ATTEMPTS, Answers, Task, serve


async def _run(task: Task, answers: Answers) -> None:
    litellm: Any = importlib.import_module("litellm")  # the environment that checks types has none
    litellm.suppress_debug_info = True
    limits = {name: value for name, value in (("rpm", task.rpm), ("tpm", task.tpm)) if value is not None}
    deployment = {
        "model_name": task.model,
        "litellm_params": {"model": f"openai/{task.model}", "api_base": task.url, "api_key": "none", **limits},
    }
    router = litellm.Router(
        model_list=[deployment],
        num_retries=MAX_ATTEMPTS - 1,
        timeout=60.0,
        disable_cooldowns=True,
        optional_pre_call_checks=["enforce_model_rate_limits"] if limits else None,
    )
    places = asyncio.Semaphore(task.useful_concurrency)

    async def answer(name: str, body: dict[str, Any]) -> None:
        async with places:
            try:
                done = await router.acompletion(**body)
            except Exception:
                answers.add(name, None)
            else:
                answers.add(name, done.choices[0].message.content)

    await asyncio.gather(*(answer(name, body) for name, body in task.bodies()))


def run(task: Task, answers: Answers) -> str:
    asyncio.run(_run(task, answers))
    enforced = ", limits enforced" if task.rpm or task.tpm else ""
    return f"router, semaphore of {task.useful_concurrency}, {MAX_ATTEMPTS - 1} retries{enforced}"


if __name__ == "__main__":
    serve(run, f"litellm {version('litellm')}")
