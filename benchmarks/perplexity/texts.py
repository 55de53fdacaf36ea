"""Texts as documents of token ids."""

from __future__ import annotations

import json
from pathlib import Path

from batchwright.engine.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]


def own_text() -> str:
    """The pages of this repository's documentation."""
    return "\n\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md")))


def read(path: Path) -> list[str]:
    """The texts of a file: for JSON Lines, each line's strings, one below the other; otherwise the whole file.

    Raises OSError, and ValueError for a line that is not a JSON object with texts.
    """
    content = path.read_text(encoding="utf-8")
    if path.suffix != ".jsonl":
        return [content]
    texts = []
    for number, line in enumerate(content.splitlines(), start=1):
        if line.strip():
            values = json.loads(line)
            strings = [each for each in values.values() if isinstance(each, str)] if isinstance(values, dict) else []
            if not strings:
                raise ValueError(f"{path}, line {number}: must be a JSON object with texts")
            texts.append("\n".join(strings))
    return texts


def documents(texts: list[str], tokenizer: Tokenizer, *, window: int, tokens: int) -> list[list[int]]:
    """`texts` as token ids, cut into pieces of at most `window`, the first `tokens` of them in all."""
    pieces, left = [], tokens
    for text in texts:
        ids = tokenizer.encode(text)[:left]
        left -= len(ids)
        pieces += [ids[start : start + window] for start in range(0, len(ids), window)]
        if not left:
            break
    # Nothing is predicted in a single token.
    return [piece for piece in pieces if len(piece) > 1]
