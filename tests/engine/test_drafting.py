"""Guessed tokens: fewer steps, and not one token changed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchwright import Engine, InferenceRequest, InferenceResponse
from batchwright.request import Flow

from .support import nothing_left

PROMPTS = [
    "One two three four. One two three four. One two three",
    "The cat sat on the mat. The cat sat on the mat. The cat",
    "A list: a, b, a, b, a, b, a, b,",
]
"""They repeat themselves, as their continuations will."""


def _requests(**params: Any) -> list[InferenceRequest]:
    return [InferenceRequest(prompt, **({"max_tokens": 48, "temperature": 0.0} | params)) for prompt in PROMPTS]


def _outcomes(responses: list[InferenceResponse]) -> list[object]:
    assert not any(response.error for response in responses)
    return [(each.output, each.finish_reason, [choice.token_ids for choice in each.choices]) for each in responses]


@pytest.fixture(scope="module", params=[None, "int8"])
def engines(request: pytest.FixtureRequest, smollm2_path: Path) -> Iterator[tuple[Engine, Engine]]:
    """One that drafts, and one that does not."""
    options: dict[str, Any] = {"dtype": "bfloat16", "kv_memory": "60MB", "quantization": request.param}
    with Engine(smollm2_path, **options) as drafting, Engine(smollm2_path, **options, drafting=False) as plain:
        if not drafting.core.body.free_rows:
            pytest.skip("further rows are not free here: no compiled products")
        yield drafting, plain


@pytest.mark.parametrize(
    "params",
    [
        {"ignore_eos": True},
        {"stop": ("three", "mat", " b")},
        {"n": 2},
        {"max_tokens": 2},
        {"min_tokens": 5},
        {"temperature": 0.8, "seed": 3},
        {"logprobs": 2},
    ],
    ids=lambda params: next(iter(params)),
)
def test_tokens_are_those_of_one_at_a_time(engines: tuple[Engine, Engine], params: dict[str, Any]) -> None:
    drafting, plain = engines
    assert _outcomes(drafting.generate(_requests(**params))) == _outcomes(plain.generate(_requests(**params)))
    assert nothing_left(drafting)


def test_drafts_save_steps_and_are_counted(engines: tuple[Engine, Engine]) -> None:
    drafting, plain = engines
    before = [engine.stats.copy() for engine in engines]
    for engine in engines:
        engine.generate(_requests(ignore_eos=True, flow=Flow("alone", "alone")))
    ours, theirs = (engine.stats.steps - stats.steps for engine, stats in zip(engines, before, strict=True))
    accepted = drafting.stats.accepted_tokens - before[0].accepted_tokens
    assert ours < theirs
    assert accepted >= 3 * (theirs - ours) // 2
    assert accepted <= drafting.stats.drafted_tokens - before[0].drafted_tokens
    assert plain.stats.drafted_tokens == 0


def test_an_answer_is_guessed_from_an_earlier_one_of_its_owner(smollm2_path: Path) -> None:
    prompt = "Write one sentence about rivers."
    with Engine(smollm2_path, dtype="bfloat16", kv_memory="60MB") as engine:
        if not engine.core.body.free_rows:
            pytest.skip("further rows are not free here: no compiled products")

        def accepted(owner: str) -> int:
            before = engine.stats.accepted_tokens
            flow = Flow(owner, "request")
            engine.generate([InferenceRequest(prompt, max_tokens=40, temperature=0.0, flow=flow)])
            return engine.stats.accepted_tokens - before

        alone = accepted("a")
        assert accepted("a") > alone
        assert accepted("b") == alone


def test_a_stream_gets_every_token_in_order(engines: tuple[Engine, Engine]) -> None:
    drafting, plain = engines
    [request] = _requests(ignore_eos=True)[:1]
    tokens = [token for event in drafting.stream([request]) for token in event.token_ids]
    [response] = plain.generate(_requests(ignore_eos=True)[:1])
    assert tuple(tokens) == response.token_ids


def test_kept_blocks_of_accepted_drafts_serve_others(engines: tuple[Engine, Engine]) -> None:
    """What was computed as a draft is what the prefix cache would have held."""
    drafting, plain = engines
    [response] = drafting.generate(_requests(ignore_eos=True)[:1])
    prompt = [*drafting.core.tokenizer.encode(PROMPTS[0]), *response.token_ids, 9]
    again = [InferenceRequest(prompt, max_tokens=8, temperature=0.0)]
    [cached] = drafting.generate(again)
    [fresh] = plain.generate([InferenceRequest(prompt, max_tokens=8, temperature=0.0)])
    assert cached.usage.cached_tokens > len(PROMPTS[0]) // 4
    assert cached.token_ids == fresh.token_ids
