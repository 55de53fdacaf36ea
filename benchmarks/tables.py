"""What a table costs beside plain result lines: the same tiny prompts, from JSON Lines and from Parquet.

    python benchmarks/tables.py --lines 200000 --rounds 2 --save benchmarks/results/tables.md

Each run is a process of its own, in turns. The peak of its memory must not grow with the lines.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

FORMS = {"lines": ("in.jsonl", "out.jsonl"), "table": ("in.parquet", "out.parquet")}
_RUN = """
import json, sys
import batchwright
source, output, model = sys.argv[1:]
defaults = batchwright.SamplingParams(max_tokens=1, temperature=0)
report = batchwright.run(source, output, model=model, defaults=defaults, overwrite=True)
assert report.failed == 0
print(json.dumps([report.wall_seconds - report.load_seconds, report.peak_memory_bytes]))
"""


def make_inputs(folder: Path, lines: int) -> None:
    """Write the same prompts in both forms."""
    with (folder / "in.jsonl").open("w") as file:
        for number in range(lines):
            file.write(f'{{"prompt": "p{number}"}}\n')
    table = pa.table({
        "prompt": [f"p{number}" for number in range(lines)],
        "number": range(lines),
        "half": [number / 2 for number in range(lines)],
    })  # fmt: skip
    pq.write_table(table, folder / "in.parquet")


def measure(folder: Path, form: str, model: str) -> tuple[float, int]:
    """Seconds of a run without loading the model, and its peak memory in bytes."""
    source, output = FORMS[form]
    command = [sys.executable, "-c", _RUN, str(folder / source), str(folder / output), model]
    seconds, memory = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return seconds, memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--lines", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--save", type=Path, help="a file for the table")
    arguments = parser.parse_args()
    seconds: dict[str, list[float]] = {form: [] for form in FORMS}
    memory = dict.fromkeys(FORMS, 0)
    with tempfile.TemporaryDirectory() as name:
        make_inputs(Path(name), arguments.lines)
        for _ in range(arguments.rounds):
            for form in FORMS:
                took, peak = measure(Path(name), form, arguments.model)
                seconds[form].append(took)
                memory[form] = max(memory[form], peak)
                print(f"{form}: {1e6 * took / arguments.lines:.0f} µs a line, peak {peak / 2**20:.0f} MiB", flush=True)
    ratios = [table / lines for table, lines in zip(seconds["table"], seconds["lines"], strict=True)]
    rows = ["| output | µs a line | peak memory |", "| --- | ---: | ---: |"]
    for form, (_, output) in FORMS.items():
        each = 1e6 * statistics.median(seconds[form]) / arguments.lines
        rows.append(f"| {output} | {each:.0f} | {memory[form] / 2**20:.0f} MiB |")
    ratio = statistics.median(seconds["table"]) / statistics.median(seconds["lines"])
    summary = f"Parquet to Parquet over JSON Lines to JSON Lines: {ratio:.3f} ({min(ratios):.3f}..{max(ratios):.3f})"
    text = "\n".join([*rows, "", summary])
    print(text)
    if arguments.save is not None:
        command = f"python benchmarks/tables.py --lines {arguments.lines} --rounds {arguments.rounds}"
        arguments.save.write_text(f"# What a table costs\n\n`{command}`, on two cores, {arguments.model}.\n\n{text}\n")


if __name__ == "__main__":
    main()
