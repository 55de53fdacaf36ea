"""The command: answers with a schema and free text, ours and vLLM's in turns, and masks."""

from __future__ import annotations

import itertools
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from batchwright import Engine, InferenceRequest, InferenceResponse, SamplingParams
from batchwright.engine.grammars import Grammars, MaskMaker
from batchwright.models import resolve
from batchwright.request import Flow
from benchmarks.forms.mask_times import Figures
from benchmarks.forms.peers import Vllm, count_valid, mask_rows
from benchmarks.forms.rounds import Round, median, ratio, schema_of_a_book
from benchmarks.throughput.process import WorkerFailed
from benchmarks.throughput.systems import DEFAULT_VLLM

_CALLS = itertools.count()
_PARAMS = SamplingParams(max_tokens=300, temperature=0.7, seed=1)
_SCHEMAS = 100
_OURS, _VLLM = "batchwright", "vLLM"


def compute(engine: Engine, prompts: Sequence[Any], params: SamplingParams) -> tuple[Round, list[InferenceResponse]]:
    """Compute all prompts."""
    flow = Flow(f"call {next(_CALLS)}", "prompts")  # an owner of its own, who guesses from no answers of earlier rounds
    requests = [InferenceRequest.of(prompt, params, flow=flow) for prompt in prompts]
    before, began = engine.stats.copy(), time.perf_counter()
    responses = engine.generate(requests)
    seconds, now = time.perf_counter() - began, engine.stats
    assert not any(response.error for response in responses)
    forced, masks = now.forced_tokens - before.forced_tokens, now.mask_seconds - before.mask_seconds
    tokens = sum(response.usage.completion_tokens for response in responses)
    valid = None if params.schema is None else count_valid([response.output for response in responses])
    return Round(seconds, len(prompts), tokens, valid, now.steps - before.steps, forced, masks), responses


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
    model: Annotated[str, typer.Option(help="A built-in name, a folder or a hub id.")] = "smollm2-135m",
    concurrency: Annotated[int, typer.Option(min=1, help="Prompts, all of them at once.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, each of every form; figures are of the median one.")] = 3,
    peer: Annotated[bool, typer.Option(help="Measure vLLM too, and libraries for grammars, where it is.")] = True,
    vllm: Annotated[Path, typer.Option(help="vLLM's virtual environment.")] = DEFAULT_VLLM,
    save: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the tables here, as Markdown.")] = None,
) -> None:
    """Tokens/s and lines/s of answers with a schema of a dozen fields, and of as many tokens of free text."""
    # vLLM's process is stopped when it is not its turn: whatever ends this one has to end it too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    is_there = peer and (vllm / "bin" / "python").exists()
    if peer and not is_there:
        _say(
            f"vLLM and the libraries for grammars are skipped: no vLLM in {vllm}: make it with benchmarks/setup_vllm.sh"
        )
    try:
        text = _measure(model, concurrency, rounds, vllm if is_there else None)
    except WorkerFailed as error:
        _say(str(error))
        raise typer.Exit(1) from None
    print(text)
    if save is not None:
        save.write_text(f"# Answers of a given form\n\n{text}\n", encoding="utf-8")


def _measure(model: str, concurrency: int, rounds: int, folder: Path | None) -> str:
    rows: dict[tuple[str, str], list[Round]] = {}
    with ExitStack() as stack:
        engine = stack.enter_context(Engine(model, max_num_seqs=concurrency))
        prompts = [
            engine.core.tokenizer.encode(
                [{"role": "user", "content": f"Describe book number {number} of a library as JSON."}]
            )
            for number in range(concurrency)
        ]
        engine.generate(prompts, replace(_PARAMS, max_tokens=4))
        other = None
        if folder is not None:
            other = Vllm.fastest(folder, resolve(model), prompts, _PARAMS.max_tokens, _say)
        if other is not None:
            stack.callback(other.close)
        for number in range(rounds):
            for name, temperature in (("drawn", _PARAMS.temperature), ("greedy", 0.0)):
                answers = _round(engine, other, prompts, name, temperature, rows)
            _say(f"round {number + 1} of {rounds} is done")
        ours, first = mask_microseconds(engine, answers), first_mask_milliseconds(engine, _SCHEMAS)
        lines = [
            f"{concurrency} prompts at once, at most {_PARAMS.max_tokens} tokens, {rounds} rounds; "
            f"{engine.stats.implementation}.",
            *([] if other is None else [f"{other.settings}."]),
            "",
            "| answers | tokens/s | lines/s | tokens each | valid | steps | forced tokens | time for masks |",
            "| :-- | --: | --: | --: | --: | --: | --: | --: |",
            *(median(found).row(f"{system}, {name}") for (system, name), found in rows.items()),
            "",
            "valid: answers that ended and that `jsonschema_rs` accepts; the others were cut off by the most tokens.",
            *_ratios(rows),
            "",
        ]
        ends = engine.core.tokenizer.eos_token_ids
        width = engine.core.body.vocab_size
    texts = [[token for token in answer.token_ids if token not in ends] for answer in answers]
    schemas = [schema_of_a_book(number) for number in range(1, _SCHEMAS + 1)]
    measured = [] if folder is None else mask_rows(folder, resolve(model), width, texts, schemas)
    return "\n".join([*lines, *_mask_table(ours, first, measured, len(texts))])


def _round(
    engine: Engine,
    other: Vllm | None,
    prompts: Sequence[list[int]],
    name: str,
    temperature: float,
    rows: dict[tuple[str, str], list[Round]],
) -> list[InferenceResponse]:
    """Compute answers with a schema and free text by each system. Returns ours with a schema."""
    asked = replace(_PARAMS, temperature=temperature)
    formed, answers = compute(engine, prompts, replace(asked, schema=schema_of_a_book()))
    length = max(1, formed.tokens // len(prompts))
    found = {(_OURS, f"schema, {name}"): formed}
    if other is not None:
        found[_VLLM, f"schema, {name}"] = other.answer(_PARAMS.max_tokens, temperature, schema=True)
    found[_OURS, f"free text, {name}"], _ = compute(engine, prompts, replace(asked, max_tokens=length, ignore_eos=True))
    if other is not None:
        found[_VLLM, f"free text, {name}"] = other.answer(length, temperature, schema=False)
    for key, each in found.items():
        rows.setdefault(key, []).append(each)
        _say(each.row(", ".join(key)))
    return answers


def _ratios(rows: dict[tuple[str, str], list[Round]]) -> list[str]:
    if not any(system == _VLLM for system, _ in rows):
        return []
    lines = ["", "| batchwright over vLLM | lines/s | tokens/s |", "| :-- | --: | --: |"]
    for system, name in rows:
        if system == _OURS:
            ours, theirs = rows[_OURS, name], rows[_VLLM, name]
            lines.append(f"| {name} | {ratio(ours, theirs)} | {ratio(ours, theirs, of_tokens=True)} |")
    return lines


def _mask_table(
    masks: Sequence[float], first: Sequence[float], others: Sequence[tuple[str, Figures]], answers: int
) -> list[str]:
    """Rows of ours, and of libraries by themselves."""
    lines = [
        "| a single mask | µs, p50 | µs, p99 | first of a new schema: ms, p50 | ms, p99 | schemas | answers refused |",
        "| :-- | --: | --: | --: | --: | --: | --: |",
    ]
    found: list[tuple[str, Sequence[float], Sequence[float], int]] = [("batchwright (llguidance)", masks, first, 0)]
    for name, each in others:
        found.append((f"{name} {each['version']}", each["mask_us"], each["first_ms"], each["refused"]))
    for name, single, new, refused in found:
        half, most = np.percentile(single, [50, 99])
        new_half, new_most = np.percentile(new, [50, 99])
        figures = f"{half:.1f} | {most:.1f} | {new_half:.1f} | {new_most:.1f} | {len(new)}"
        lines.append(f"| {name} | {figures} | {refused} of {answers} |")
    return lines


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
