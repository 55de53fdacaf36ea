"""Several steps in one call of the model: the tokens, the reasons and the figures are those of steps one by one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from batchwright import AsyncEngine, Engine, InferenceRequest, InferenceResponse, SamplingParams
from batchwright.engine.bodies.llama import LlamaBody
from batchwright.engine.step.multi_step import MOST_STEPS, DecodedStep, Interruption
from batchwright.engine.work_meter import WorkMeter
from batchwright.errors import NonFiniteLogits

from .support import TINY, completions, finished, needs_decoder, nothing_left, threads, tiny_model
from .test_work_meter import SLOW

pytestmark = needs_decoder

_TEXTS = [
    "The sea was",
    "List three colours:",
    "Once upon a time there was a small boat that",
    "2, 4, 6, 8,",
    "Dear Sir or Madam,",
    "def add(a, b):",
]
_LENGTHS = [31, 14, 23, 9, 27, 18]
_MANY = SamplingParams(max_tokens=40, temperature=1.0, seed=1, ignore_eos=True)


@pytest.fixture(scope="module")
def real(request: pytest.FixtureRequest, narrow_path: Path) -> Iterator[Engine]:
    """A model of many tokens, in bfloat16 unless a test says how it is quantized, for up to 4 sequences at once."""
    options: dict[str, Any] = {"quantization": getattr(request, "param", None), "kv_memory": "60MB", "max_num_seqs": 4}
    with threads(2), Engine(narrow_path, drafting=False, dtype="bfloat16", **options) as engine:
        yield engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model(folder, "llama", **TINY)
    return folder


@pytest.fixture
def tiny(folder: Path) -> Iterator[Engine]:
    options: dict[str, Any] = {"kv_memory": "2MB", "max_model_len": 128, "max_num_seqs": 4, "drafting": False}
    with Engine(folder, dtype="bfloat16", **options) as engine:
        yield engine


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of steps that were computed in one call, appended as they come."""
    counts: list[int] = []
    genuine = LlamaBody.multi_step

    def multi_step(self: LlamaBody, *args: Any) -> list[DecodedStep]:
        steps = genuine(self, *args)
        counts.append(len(steps))
        return steps

    monkeypatch.setattr(LlamaBody, "multi_step", multi_step)
    # However slow the machine is, several steps have the time.
    monkeypatch.setattr("batchwright.engine.step.launcher.MOST_SECONDS", 60.0)
    return counts


def requests(**params: Any) -> list[InferenceRequest]:
    return [
        InferenceRequest.of(text, SamplingParams(**({"max_tokens": length, "n": 1 + (length == 23)} | params)))
        for text, length in zip(_TEXTS, _LENGTHS, strict=True)
    ]


def answers(engine: Engine, wanted: list[InferenceRequest], most: int = 1) -> list[Any]:
    """Tokens, text and reason of each completion, computing up to `most` steps at once."""
    for request in wanted:
        engine.submit(request)
    return completions(wanted, finished(engine, step=lambda: engine.step(most)))


_GREEDY_OR_DRAWN = [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9, "seed": 4}]


@pytest.mark.parametrize(
    ("real", "params"),
    [
        *((None, each) for each in _GREEDY_OR_DRAWN),
        (None, {"temperature": 0.0, "ignore_eos": True}),
        (None, {"temperature": 0.0, "stop_token_ids": [*range(0, 49152, 20)]}),
        (None, {"temperature": 1.0, "seed": 3}),
        (None, {"temperature": 1.2, "top_k": 20, "min_p": 0.01, "seed": 5, "min_tokens": 6}),
        *(("int8", each) for each in _GREEDY_OR_DRAWN),
        *(("int8-group", each) for each in _GREEDY_OR_DRAWN),
    ],
    indirect=["real"],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value),
)
def test_answers_are_the_same(real: Engine, runs: list[int], params: dict[str, Any]) -> None:
    alone = answers(real, requests(**params))
    assert not runs
    assert answers(real, requests(**params), MOST_STEPS) == alone
    assert max(runs) > 1


def test_greedy_and_drawn_sequences_beside_each_other(real: Engine, runs: list[int]) -> None:
    def mixed() -> list[InferenceRequest]:
        drawn, greedy = requests(temperature=0.9, seed=2), requests(temperature=0.0)
        return [pair[index % 2] for index, pair in enumerate(zip(drawn, greedy, strict=True))]

    alone = answers(real, mixed())
    assert answers(real, mixed(), MOST_STEPS) == alone
    assert max(runs) > 1


@pytest.mark.parametrize(
    "params",
    [
        {"stop": ["er", "in"]},
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.5},
        {"logit_bias": {30: 2.0}},
        {"logprobs": 2},
        {"min_tokens": 31},
        {"schema": {"type": "integer"}},
    ],
    ids=lambda params: "-".join(params),
)
def test_what_the_host_has_a_say_in_goes_step_by_step(real: Engine, runs: list[int], params: dict[str, Any]) -> None:
    wanted = {"temperature": 0.0, "max_tokens": 31} | params
    alone = answers(real, requests(**wanted))
    assert answers(real, requests(**wanted), MOST_STEPS) == alone
    assert not runs


def test_streams_get_their_tokens_one_by_one(tiny: Engine, runs: list[int]) -> None:
    assert len(list(tiny.stream([5, 6, 7], _MANY))) >= 40
    assert not runs
    tiny.generate([[5, 6, 7]], _MANY)
    assert max(runs) > 1


def test_only_callers_that_step_the_engine_themselves_are_waited_for(tiny: Engine, runs: list[int]) -> None:
    """After a request has ended, its caller may submit the next one between two calls of `step`."""
    lengths = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in (4, 40)]
    tiny.generate([[5, 6, 7], [8, 9]], lengths)
    assert runs[:2] == [3, MOST_STEPS]
    runs.clear()
    for params in lengths:
        tiny.submit(InferenceRequest.of([5, 6, 7], params))
    ended = 0
    while not ended:
        ended = len(tiny.step(MOST_STEPS))
    runs.clear()
    tiny.step(MOST_STEPS), tiny.step(MOST_STEPS)
    assert not runs
    tiny.step(MOST_STEPS)
    assert runs == [MOST_STEPS]
    while tiny.unfinished:
        tiny.step(MOST_STEPS)


def test_an_interruption_ends_a_run_after_the_present_step(tiny: Engine, runs: list[int]) -> None:
    tiny.submit(InferenceRequest.of([5, 6, 7], _MANY))
    tiny.step(MOST_STEPS)
    interruption = tiny.core.interruption
    interruption.set()
    assert tiny.step(MOST_STEPS) == []
    interruption.clear()
    assert tiny.step(MOST_STEPS) == []
    assert runs == [1, MOST_STEPS]
    while tiny.unfinished:
        tiny.step(MOST_STEPS)


def test_a_run_that_has_no_time_left_is_one_step(
    tiny: Engine, runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchwright.engine.step.launcher.MOST_SECONDS", 0.0)
    assert len(tiny.generate([[5, 6, 7]], _MANY)[0].token_ids) == 40
    assert set(runs) == {1}


def test_an_interrupt_while_tokens_are_handed_out_loses_none(
    tiny: Engine, runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[5, 6, 7], [8] * 20, [9, 10], [11] * 7, [12] * 33]
    wanted = {str(place): list(each.token_ids) for place, each in enumerate(tiny.generate(prompts, _MANY))}
    runs.clear()
    for place, prompt in enumerate(prompts):
        tiny.submit(InferenceRequest.of(prompt, _MANY, request_id=str(place)))
    own, calls = tiny.core._delivery._deliver_token, 0

    def deliver(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 13 == 0:
            raise KeyboardInterrupt
        return own(*args)

    monkeypatch.setattr(tiny.core._delivery, "_deliver_token", deliver)
    found: dict[str, list[int]] = {}
    while tiny.unfinished:
        with contextlib.suppress(KeyboardInterrupt):
            found.update({each.request_id: list(each.token_ids) for each in tiny.step(MOST_STEPS)})
    found.update({each.request_id: list(each.token_ids) for each in tiny.step(MOST_STEPS)})
    assert max(runs) > 1
    assert found == wanted
    assert nothing_left(tiny)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_go_wrong_in_the_middle_fail_their_request_alone(
    tiny: Engine, runs: list[int], temperature: float
) -> None:
    prompts = [[5, 6, 7], [8] * 20, [9, 10]]
    params = SamplingParams(max_tokens=30, temperature=temperature, seed=1, ignore_eos=True)
    expected = [list(each.token_ids) for each in tiny.generate(prompts, params)]
    embedding = tiny.core.body._embedding  # type: ignore[attr-defined]
    # A token that one answer alone has, so that the step after it has no finite logits for that one alone.
    of_prompts = {token for prompt in prompts for token in prompt}
    own = [
        (place, token)
        for place, answer in enumerate(expected)
        for token in answer[4:-4]
        if token not in of_prompts.union(*expected[:place], *expected[place + 1 :])
    ]
    if not own and not temperature:
        pytest.skip("with this processor's rounding, no greedy answer has a token of its own")
    spoilt, bad = own[0]
    kept = embedding[bad].clone()
    runs.clear()
    try:
        embedding[bad] = float("nan")
        responses = tiny.generate(prompts, params)
    finally:
        embedding[bad] = kept
    failed = responses.pop(spoilt)
    answer = expected.pop(spoilt)
    assert isinstance(failed.error, NonFiniteLogits)
    assert list(failed.token_ids) == answer[: answer.index(bad) + 1]
    assert [list(each.token_ids) for each in responses] == expected
    assert max(runs) > 1


def test_figures_are_those_of_steps_one_by_one(tiny: Engine, runs: list[int]) -> None:
    def figures(most: int) -> Any:
        before, body = tiny.stats.copy(), tiny.core.body
        costs, seconds = body.costs, body.watch()
        assert costs is not None
        assert seconds is not None
        meter = tiny.core.meter = WorkMeter(costs, seconds, SLOW, tiny.stats.block_size)
        for prompt in ([5, 6, 7], [8] * 20, [9, 10]):
            tiny.submit(InferenceRequest.of(prompt, _MANY))
        while tiny.unfinished:
            tiny.step(most)
        tiny.core.meter = None
        after, spent = tiny.stats, meter.spent
        assert 0.0 < spent.products + spent.attention <= spent.forward
        assert after.model_seconds - before.model_seconds <= after.step_seconds - before.step_seconds
        names = ("steps", "decode_tokens", "generated_tokens", "rows_computed", "occupancy_sum")
        counted = {name: getattr(after, name) - getattr(before, name) for name in names}
        return counted, meter.steps, meter.computed_work, meter.needed.work, meter.needed.steps

    tiny.core.scheduler.blocks.prefix_caching = False
    alone = figures(1)
    assert not runs
    assert repr(figures(MOST_STEPS)) == repr(alone)
    assert max(runs) > 1


def test_a_request_that_comes_in_the_middle_is_taken_after_the_present_step(
    folder: Path, runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = InferenceRequest([5, 6, 7], max_tokens=80, temperature=1.0, ignore_eos=True, traffic="batch")

    async def main() -> None:
        engine = AsyncEngine(folder, dtype="bfloat16", kv_memory="2MB", max_model_len=128, drafting=False)
        loop = asyncio.get_running_loop()
        online: list[asyncio.Task[InferenceResponse]] = []
        own: Callable[..., list[DecodedStep]] = LlamaBody.multi_step

        def multi_step(self: LlamaBody, step: Any, run: Any, interruption: Interruption) -> list[DecodedStep]:
            if len(runs) == 1:  # while the second run begins
                answer = engine.generate([9, 10], SamplingParams(max_tokens=1))
                asyncio.run_coroutine_threadsafe(start(answer), loop).result()
            return own(self, step, run, interruption)

        async def start(answer: Any) -> None:
            noticed.clear()
            online.append(asyncio.ensure_future(answer))
            await noticed.wait()

        def notify() -> None:
            own_notify()
            noticed.set()

        noticed, own_notify = asyncio.Event(), engine._notify
        monkeypatch.setattr(engine, "_notify", notify)
        monkeypatch.setattr(LlamaBody, "multi_step", multi_step)
        async with engine:
            response = await engine.generate(batch)
            assert len(response.token_ids) == 80
            assert (await online[0]).error is None

    asyncio.run(asyncio.wait_for(main(), 60))
    assert runs[0] > 1
    assert runs[1] == 1


def test_other_bodies_compute_one_step_at_a_time(folder: Path) -> None:
    with Engine(folder, dtype="float32", kv_memory="2MB", max_model_len=128) as engine:
        body = engine.core.body
        assert not body.has_multi_step
        with pytest.raises(NotImplementedError, match="one step at a time"):
            body.multi_step(None, None, Interruption())  # type: ignore[arg-type]
        assert len(engine.generate([[5, 6, 7]], _MANY)[0].token_ids) == 40
