"""Print the answers of a results file: python examples/show.py results.jsonl"""

import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

SHOWN = 8


def main(path: str) -> None:
    table = Table(title=path, show_lines=True)
    table.add_column("custom_id", no_wrap=True)
    table.add_column("answer")
    table.add_column("tokens", justify="right")
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    for line in lines[:SHOWN]:
        result = json.loads(line)
        if result["error"] is not None:
            table.add_row(result["custom_id"], Text(result["error"]["message"], style="red"), "")
            continue
        body = result["response"]["body"]
        answers = [c["message"]["content"] if "message" in c else c["text"] for c in body["choices"]]
        table.add_row(result["custom_id"], Text("\n".join(answers).strip()), str(body["usage"]["completion_tokens"]))
    console = Console()
    console.print(table)
    if len(lines) > SHOWN:
        console.print(f"and {len(lines) - SHOWN} more in {path}", highlight=False)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/show.py RESULTS.jsonl")
    main(sys.argv[1])
