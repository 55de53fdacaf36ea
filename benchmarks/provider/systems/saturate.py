"""saturate's `pump` with its adaptive window. It takes no limits but a number of requests under way, as `Fixed`."""

from __future__ import annotations

import importlib
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.provider.systems.protocol import Answers, Task, serve


def run(task: Task, answers: Answers) -> str:
    library: Any = importlib.import_module("saturate")  # the environment that checks types has none
    rows = [(name, {"body": body}) for name, body in task.bodies()]

    def parse(_: dict[str, Any], response: dict[str, Any]) -> dict[str, str]:
        return {"content": response["choices"][0]["message"]["content"]}

    window = library.Auto() if task.concurrency is None else library.Fixed(task.concurrency)
    folder = Path(task.output).with_suffix(".parts")
    library.pump(
        rows, to_request=lambda row: row["body"], parse=parse, endpoint=task.url, output=str(folder), window=window
    )
    for name, row in library.read_output(str(folder)):
        answers.add(name, row.get("content"))
    return "Auto()" if task.concurrency is None else f"Fixed({task.concurrency})"


if __name__ == "__main__":
    serve(run, f"saturate {version('saturate')}")
