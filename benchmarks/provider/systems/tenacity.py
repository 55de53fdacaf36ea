"""A semaphore around the official client, with tenacity's retries as OpenAI's guide to rate limits shows them.

<https://developers.openai.com/cookbook/examples/how_to_handle_rate_limits>: `wait_random_exponential(min=1, max=60)`.
The client's own retries are off, so that there is one layer of them.
"""

from __future__ import annotations

import asyncio
import importlib
from importlib.metadata import version
from typing import Any

from benchmarks.provider.systems.protocol import MAX_ATTEMPTS, Answers, Task, serve


async def _run(task: Task, answers: Answers) -> None:
    openai: Any = importlib.import_module("openai")  # the environment that checks types has another version
    tenacity: Any = importlib.import_module("tenacity")
    client = openai.AsyncOpenAI(base_url=task.url, api_key="none", max_retries=0, timeout=60.0)
    places = asyncio.Semaphore(task.useful_concurrency)

    @tenacity.retry(  # type: ignore[untyped-decorator]
        wait=tenacity.wait_random_exponential(min=1, max=60), stop=tenacity.stop_after_attempt(MAX_ATTEMPTS)
    )
    async def ask(body: dict[str, Any]) -> str:
        done = await client.chat.completions.create(**body)
        content: str = done.choices[0].message.content
        return content

    async def answer(name: str, body: dict[str, Any]) -> None:
        async with places:
            try:
                content = await ask(body)
            except tenacity.RetryError:
                answers.add(name, None)
            else:
                answers.add(name, content)

    await asyncio.gather(*(answer(name, body) for name, body in task.bodies()))


def run(task: Task, answers: Answers) -> str:
    asyncio.run(_run(task, answers))
    return f"semaphore of {task.useful_concurrency}, {MAX_ATTEMPTS} attempts"


if __name__ == "__main__":
    serve(run, f"openai {version('openai')}, tenacity {version('tenacity')}")
