"""The examples of a document: run as they stand, with their output written below them.

A ```text block that follows a ```python block is its output. One under `<!-- stats: name -->` is what the scene of
that name prints. Needs no matplotlib.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pictures.scenes import holding, load, several, shapes, tokens

SCENES: dict[str, Callable[[], Any]] = {
    scene.__name__: scene
    for scene in (
        holding.auto_working,
        holding.auto_misused,
        holding.simple_working,
        holding.simple_misused,
        holding.window_working,
        holding.window_misused,
        load.adaptive,
        load.adaptive_misused,
        load.priority,
        load.priority_misused,
        load.fair,
        shapes.length_aware_working,
        shapes.length_aware_misused,
        shapes.memory,
        shapes.memory_misused,
        tokens.continuous_working,
        tokens.continuous_misused,
        tokens.streaming_working,
        tokens.streaming_misused,
        several.concurrent_working,
        several.concurrent_misused,
        several.parallel,
        several.parallel_misused,
    )
}
"""Those whose stats a document may show."""

_BLOCK = re.compile(r"^(?:<!-- stats: (\w+) -->\n+)?```(\w+)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block. `start` and `end` are where its body stands in the text."""

    language: str
    body: str
    start: int
    end: int
    stats: str | None
    """The scene of which it shows the stats."""
    code: str | None
    """The code of which it is the output."""
    line: int


def blocks(text: str) -> list[Block]:
    """All fenced blocks of a document that name a language."""
    found: list[Block] = []
    code, code_ends = "", -1
    for match in _BLOCK.finditer(text):
        stats, language, body = match.groups()
        follows = code_ends >= 0 and not text[code_ends : match.start()].strip()
        is_output = language == "text" and follows and stats is None
        line = text.count("\n", 0, match.start(3))
        found.append(Block(language, body, match.start(3), match.end(3), stats, code if is_output else None, line))
        code, code_ends = (body, match.end()) if language == "python" else ("", -1)
    return found


def output_of(code: str) -> str:
    """What `code` prints when it is run as a program, and its tests as pytest would. Raises what it raises."""
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "<example>", "exec"), names)
        for name, value in names.items():
            if name.startswith("test_"):
                value()
    return printed.getvalue()


def expected(block: Block) -> str | None:
    """What stands in the block when the document is up to date; None for what is no output."""
    if block.stats is not None:
        return f"{SCENES[block.stats]().stats}\n"
    return None if block.code is None else output_of(block.code)


def renew(path: Path) -> None:
    """Write the output of its examples into a document."""
    text = path.read_text(encoding="utf-8")
    for block in reversed(blocks(text)):
        output = expected(block)
        if output is not None:
            text = text[: block.start] + output + text[block.end :]
    path.write_text(text, encoding="utf-8")
