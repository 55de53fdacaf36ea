"""Answers of a given form against free text: `.venv/bin/python benchmarks/structured.py --help`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from batchwright import Engine, InferenceResponse, SamplingParams
from batchwright.engine.grammars import Grammars, MaskMaker

_TYPED: dict[str, Any] = {
    "year": {"type": "integer", "minimum": 1000, "maximum": 2030},
    "rating": {"type": "number", "minimum": 0, "maximum": 5},
    "pages": {"type": "integer", "minimum": 1, "maximum": 3000},
    "in_print": {"type": "boolean"},
    "genre": {"enum": ["novel", "poetry", "drama", "essay", "biography"]},
    "language": {"enum": ["English", "French", "German", "Spanish"]},
}
_NAMES = [
    "title", "author", "year", "genre", "language", "rating", "pages", "publisher", "in_print", "country", "summary",
    "isbn",
]  # fmt: skip
_PARAMS = SamplingParams(max_tokens=300, temperature=0.7, seed=1)


def schema_of_a_book(number: int = 0) -> dict[str, Any]:
    """A schema of a dozen fields, another one for each number."""
    longest = 40 + number
    return {
        "type": "object",
        "properties": {name: _TYPED.get(name, {"type": "string", "maxLength": longest}) for name in _NAMES},
        "required": _NAMES,
        "additionalProperties": False,
    }


@dataclass(frozen=True, slots=True)
class Round:
    """One job: all prompts at once."""

    seconds: float
    tokens: int
    steps: int
    forced: int
    mask_seconds: float

    def row(self, name: str, lines: int) -> str:
        """A row of the table."""
        return (
            f"| {name} | {self.tokens / self.seconds:,.0f} | {lines / self.seconds:.2f} | {self.steps} | "
            f"{self.forced / self.tokens:.0%} | {self.mask_seconds / self.seconds:.1%} |"
        )


def compute(engine: Engine, prompts: Sequence[Any], params: SamplingParams) -> tuple[Round, list[InferenceResponse]]:
    """Compute all prompts."""
    before, began = engine.stats.copy(), time.perf_counter()
    responses = engine.generate(prompts, params)
    seconds, now = time.perf_counter() - began, engine.stats
    assert not any(response.error for response in responses)
    forced, masks = now.forced_tokens - before.forced_tokens, now.mask_seconds - before.mask_seconds
    tokens = sum(response.usage.completion_tokens for response in responses)
    return Round(seconds, tokens, now.steps - before.steps, forced, masks), responses


def mask_microseconds(engine: Engine, answers: Sequence[InferenceResponse]) -> list[float]:
    """Time of a single mask before each token of `answers`."""
    constraint = replace(_PARAMS, schema=schema_of_a_book()).constraint
    assert constraint is not None
    maker, found = MaskMaker(engine.core.body.vocab_size), []
    for answer in answers:
        matcher = engine.core.grammars.matcher(constraint)
        for token in answer.token_ids:
            began = time.perf_counter()
            maker.masks([(matcher, ())])
            found.append((time.perf_counter() - began) * 1e6)
            matcher.advance(token)
    return found


def first_mask_milliseconds(engine: Engine, schemas: int) -> list[float]:
    """Time from a new schema to its first mask."""
    width = engine.core.body.vocab_size
    grammars, maker, found = Grammars(engine.core.tokenizer, width), MaskMaker(width), []
    grammars.matcher(SamplingParams(regex="a").constraint or _none())  # the vocabulary is read once
    for number in range(1, schemas + 1):
        constraint = replace(_PARAMS, schema=schema_of_a_book(number)).constraint or _none()
        began = time.perf_counter()
        maker.masks([(grammars.matcher(constraint), ())])
        found.append((time.perf_counter() - began) * 1e3)
    return found


def _none() -> Any:
    raise ValueError("parameters without a form have no constraint")


def structured(
    model: Annotated[str, typer.Option(help="A built-in name, a folder, a GGUF file or a hub id.")] = "smollm2-135m",
    concurrency: Annotated[int, typer.Option(min=1, help="Prompts, all of them at once.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, each of every form; figures are of the median one.")] = 3,
    save: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the tables here, as Markdown.")] = None,
) -> None:
    """Tokens/s and lines/s of answers with a schema of a dozen fields, and of as many tokens of free text."""
    rows: dict[str, list[Round]] = {}
    with Engine(model, max_num_seqs=concurrency) as engine:
        prompts = [
            [{"role": "user", "content": f"Describe book number {number} of a library as JSON."}]
            for number in range(concurrency)
        ]
        engine.generate(prompts, replace(_PARAMS, max_tokens=4))
        for _ in range(rounds):
            for name, temperature in (("drawn", _PARAMS.temperature), ("greedy", 0.0)):
                asked = replace(_PARAMS, temperature=temperature)
                formed, answers = compute(engine, prompts, replace(asked, schema=schema_of_a_book()))
                length = max(1, formed.tokens // concurrency)
                free, _ = compute(engine, prompts, replace(asked, max_tokens=length, ignore_eos=True))
                rows.setdefault(f"schema, {name}", []).append(formed)
                rows.setdefault(f"free text, {name}", []).append(free)
        masks = np.percentile(mask_microseconds(engine, answers), [50, 99])
        first = np.percentile(first_mask_milliseconds(engine, 100), [50, 99])
        lines = [
            f"{concurrency} prompts at once; {engine.stats.implementation}.",
            "",
            "| answers | tokens/s | lines/s | steps | forced tokens | time for masks |",
            "| :-- | --: | --: | --: | --: | --: |",
            *(_median(found).row(name, concurrency) for name, found in rows.items()),
            "",
            f"A mask takes {masks[0]:.0f} µs (p50), {masks[1]:.0f} µs (p99). From a new schema to its first mask: "
            f"{first[0]:.1f} ms (p50), {first[1]:.1f} ms (p99).",
        ]
    text = "\n".join(lines)
    print(text)
    if save is not None:
        save.write_text(f"# Answers of a given form\n\n{text}\n", encoding="utf-8")


def _median(rounds: Sequence[Round]) -> Round:
    middle = statistics.median_low(each.seconds for each in rounds)
    return next(each for each in rounds if each.seconds == middle)


if __name__ == "__main__":
    typer.run(structured)
