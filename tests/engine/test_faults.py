"""What goes wrong for one request costs that request alone."""

from __future__ import annotations

import contextlib
import gc
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from batchwright import Engine, InferenceRequest, InferenceResponse, SamplingParams
from batchwright.engine.native import NativeKernels
from batchwright.engine.step.batch import StepBatch
from batchwright.errors import GenerationError, NonFiniteLogits, OutOfMemory

from .support import TINY, own_greedy, tiny_model

Forward = Callable[[StepBatch], Tensor]
PARAMS = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
BAD = 198
"""The token id that stands for trouble; no other prompt holds it, and the model never says it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return tiny_model(folder, "llama", **TINY)


@pytest.fixture
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(2, BAD, (n,), generator=generator).tolist() for n in (4, 15, 16, 33, 40)]


@pytest.fixture
def expected(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    return [own_greedy(model, prompt, PARAMS.max_tokens) for prompt in prompts]


def make(folder: Path, **options: Any) -> Engine:
    settings: dict[str, Any] = {"dtype": "float32", "kv_memory": "2MB", "max_batch_tokens": 24, "max_model_len": 128}
    return Engine(folder, **(settings | options))


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_an_interrupt_while_tokens_are_handed_out_loses_none(
    folder: Path, prompts: list[list[int]], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, runs_ahead: bool
) -> None:
    with make(folder, attention="sdpa") as engine:
        engine.core.launcher.runs_ahead = runs_ahead
        requests = [InferenceRequest.of(prompt, PARAMS) for prompt in prompts]
        for request in requests:
            engine.submit(request)
        own, calls = engine.core._delivery._deliver_token, 0

        def deliver(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls % 7 == 0:
                raise KeyboardInterrupt
            return own(*args)

        monkeypatch.setattr(engine.core._delivery, "_deliver_token", deliver)
        found: dict[str, list[int]] = {}
        while engine.unfinished:
            with contextlib.suppress(KeyboardInterrupt):
                found.update({response.request_id: list(response.token_ids) for response in engine.step()})
        found.update({response.request_id: list(response.token_ids) for response in engine.step()})
        wanted = {request.request_id: tokens for request, tokens in zip(requests, expected, strict=True)}
        assert found == wanted


def test_an_interrupt_in_a_callback_loses_no_response(
    engine: Engine, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    called = list[int]()

    def callback(response: InferenceResponse) -> None:
        called.append(int(response.request_id))
        if len(called) == 1:
            raise KeyboardInterrupt

    for number, prompt in enumerate(prompts):
        engine.submit(InferenceRequest.of(prompt, PARAMS, request_id=str(number), callback=callback))
    found: dict[int, list[int]] = {}
    interrupts = 0
    for _ in range(100):
        try:
            found.update({int(response.request_id): list(response.token_ids) for response in engine.step()})
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts == 1
    assert found == dict(enumerate(expected))
    assert sorted(called) == sorted(found)


@pytest.mark.parametrize("body", ["fused", "transformers"])
def test_a_closed_engine_lets_go_of_its_model(folder: Path, model: Any, body: str) -> None:
    engine = make(folder, body=body)
    loaded = weakref.ref(engine.core.body)
    assert engine.generate([[5, 6]], PARAMS)[0].error is None
    engine.close()
    gc.collect()
    assert loaded() is None


@pytest.fixture(params=["native", "sdpa", "reference", "ahead"])
def engine(request: pytest.FixtureRequest, folder: Path, model: Any, native: NativeKernels | str) -> Iterator[Engine]:
    if request.param == "native" and (isinstance(native, str) or torch.cuda.is_available()):
        pytest.skip(native if isinstance(native, str) else "engines run on CUDA here")
    runs_ahead = request.param == "ahead"  # as on a GPU
    with make(folder, attention="sdpa" if runs_ahead else request.param) as engine:
        engine.core.launcher.runs_ahead = runs_ahead
        yield engine
        assert not engine.core.unfinished_sequences
        assert not engine.core.scheduler.has_work
        assert engine.core.scheduler.blocks.num_used == 0


def patch_forward(patch: pytest.MonkeyPatch, engine: Engine, change: Callable[[StepBatch, Forward], Tensor]) -> None:
    own = engine.core.body.forward
    patch.setattr(engine.core.body, "forward", lambda batch: change(batch, own))


def tokens(responses: Sequence[InferenceResponse]) -> list[list[int]]:
    return [list(response.token_ids) for response in responses]


def owners(batch: StepBatch) -> Tensor:
    """The sequence of each row."""
    return torch.repeat_interleave(torch.tensor(batch.query_lens))


def poison(engine: Engine) -> None:
    """Token `BAD` embeds as NaN, so its keys and values in every layer are NaN."""
    engine.core.body._embedding[BAD] = math.nan  # type: ignore[attr-defined]


def test_nan_in_the_hidden_states_fails_its_request_alone(
    engine: Engine, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    poison(engine)
    bad = [[*prompts[3], BAD, 5], [BAD, *prompts[1]], [BAD]]
    responses = engine.generate([bad[0], *prompts, bad[1], bad[2]], PARAMS)
    for response in (responses[0], responses[6], responses[7]):
        assert isinstance(response.error, NonFiniteLogits)
        assert (response.finish_reason, response.token_ids) == ("error", ())
    assert tokens(responses[1:6]) == expected
    for _ in range(3):  # the same blocks, full of NaN, go to those who come later
        assert tokens(engine.generate(prompts, PARAMS)) == expected
    assert isinstance(engine.generate([bad[0]], PARAMS)[0].error, NonFiniteLogits)


def test_blocks_of_one_that_was_cancelled_before_its_nan_was_seen(
    engine: Engine, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    poison(engine)
    for first in range(2, 6):
        engine.submit(InferenceRequest.of([first, *[BAD] * 60], PARAMS, request_id="poisoned"))
        engine.step()
        assert engine.cancel("poisoned") is not None
        assert tokens(engine.generate(prompts, PARAMS)) == expected


def test_nan_beside_a_shared_prefix(engine: Engine, prompts: list[list[int]], model: Any) -> None:
    """Those who share blocks with a request that fails go on with them unharmed."""
    poison(engine)
    head = prompts[4][:32]
    several = [[*head, 7, 8], [*head, BAD], [*head, 9], [*head, 9, BAD, 3]]
    engine.generate([[*head, 1]], PARAMS)
    responses = engine.generate(several, PARAMS)
    assert [type(response.error) for response in responses[1::2]] == [NonFiniteLogits] * 2
    assert tokens(responses[::2]) == [own_greedy(model, prompt, 9) for prompt in several[::2]]
    assert engine.stats.cached_tokens >= 2 * 32


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_go_wrong_later(
    engine: Engine, prompts: list[list[int]], expected: list[list[int]], value: float
) -> None:
    steps = 0

    def change(batch: StepBatch, own: Forward) -> Tensor:
        nonlocal steps
        logits = own(batch)
        steps += 1
        if steps == 9:  # all prompts have been computed by now
            assert batch.num_sequences == len(prompts)
            logits[2, 100] = value
        return logits

    with pytest.MonkeyPatch.context() as patch:
        patch_forward(patch, engine, change)
        responses = engine.generate(prompts, PARAMS)
    failed = [index for index, response in enumerate(responses) if response.error is not None]
    assert len(failed) == 1
    assert isinstance(responses[failed[0]].error, NonFiniteLogits)
    given = list(responses[failed[0]].token_ids)
    assert 0 < len(given) < 9
    expected[failed[0]] = given
    assert tokens(responses) == expected


def test_one_of_several_completions_goes_wrong(
    engine: Engine, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    def change(batch: StepBatch, own: Forward) -> Tensor:
        logits = own(batch)
        if len(logits) == 4:
            logits[1] = math.nan
        return logits

    with pytest.MonkeyPatch.context() as patch:
        patch_forward(patch, engine, change)
        requests = [
            InferenceRequest.of(prompts[0], PARAMS),
            InferenceRequest(prompts[1], max_tokens=9, temperature=1.0, n=3, ignore_eos=True),
        ]
        good, bad = engine.generate(requests)
    assert isinstance(bad.error, NonFiniteLogits)
    assert len(bad.choices) == 3
    assert tokens([good]) == [expected[0]]


def test_an_error_that_one_request_causes(engine: Engine, prompts: list[list[int]], expected: list[list[int]]) -> None:
    def change(batch: StepBatch, own: Forward) -> Tensor:
        if (batch.token_ids == BAD).any():
            raise RuntimeError("the kernel does not like this token")
        return own(batch)

    with pytest.MonkeyPatch.context() as patch:
        patch_forward(patch, engine, change)
        several = [prompts[0], [3, BAD], *prompts[1:], [*prompts[4], BAD, 4], [BAD] * 40]
        responses = engine.generate(several, PARAMS)
    for index in (1, 6, 7):
        error = responses[index].error
        assert isinstance(error, GenerationError)
        assert "RuntimeError: the kernel does not like this token" in str(error)
        assert isinstance(error.__cause__, RuntimeError)
    assert tokens([responses[0], *responses[2:6]]) == expected


def test_a_step_that_fails_once_costs_nobody_anything(
    engine: Engine, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    calls = 0

    def change(batch: StepBatch, own: Forward) -> Tensor:
        nonlocal calls
        calls += 1
        if calls in (2, 6) and batch.num_sequences > 1:
            own(batch)  # the keys have been written: they must be written again, not trusted
            raise RuntimeError("once")
        return own(batch)

    seeded = [SamplingParams(max_tokens=9, temperature=1.0, seed=index, ignore_eos=True) for index in range(5)]
    undisturbed = tokens(engine.generate(prompts, seeded))
    with pytest.MonkeyPatch.context() as patch:
        patch_forward(patch, engine, change)
        assert tokens(engine.generate(prompts, seeded)) == undisturbed
    assert calls > 6
    assert tokens(engine.generate(prompts, PARAMS)) == expected


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("no"), MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 9")],
)
@pytest.mark.parametrize("most", [1, 7])
def test_out_of_memory_shrinks_the_step(
    engine: Engine, prompts: list[list[int]], expected: list[list[int]], error: Exception, most: int
) -> None:
    sizes = []

    def change(batch: StepBatch, own: Forward) -> Tensor:
        sizes.append(batch.num_tokens)
        if batch.num_tokens > most:
            raise error
        return own(batch)

    with pytest.MonkeyPatch.context() as patch:
        patch_forward(patch, engine, change)
        assert tokens(engine.generate(prompts, PARAMS)) == expected
    assert max(sizes) > most
    assert sum(size > most for size in sizes) < 12


def test_out_of_memory_whatever_the_step(engine: Engine, prompts: list[list[int]], expected: list[list[int]]) -> None:
    def change(batch: StepBatch, own: Forward) -> Tensor:
        if (batch.token_ids == BAD).any():
            raise MemoryError
        return own(batch)

    with pytest.MonkeyPatch.context() as patch:
        patch_forward(patch, engine, change)
        responses = engine.generate([[5, BAD, 6], *prompts], PARAMS)
    assert isinstance(responses[0].error, OutOfMemory)
    assert tokens(responses[1:]) == expected


def test_an_interrupt_leaves_the_engine_usable(
    engine: Engine, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    calls = 0

    def change(batch: StepBatch, own: Forward) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return own(batch)

    engine.submit(InferenceRequest.of(prompts[0], PARAMS, request_id="other"))
    with pytest.MonkeyPatch.context() as patch:
        patch_forward(patch, engine, change)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(prompts, PARAMS)
    assert engine.unfinished == 1
    assert tokens(engine.generate(prompts, PARAMS)) == expected
    while engine.unfinished:
        engine.step()
    engine.step()


@pytest.mark.parametrize("stream", [False, True])
def test_a_tokenizer_that_fails_on_an_output(
    folder: Path, model: Any, prompts: list[list[int]], expected: list[list[int]], stream: bool
) -> None:
    with make(folder) as engine:
        doomed = expected[1][4]
        affected = [index for index, ids in enumerate(expected) if doomed in ids]
        assert len(affected) < len(prompts)

        def decode(token_ids: Sequence[int]) -> str:
            if doomed in token_ids:
                raise ValueError("no such token")
            return " ".join(map(str, token_ids))

        engine.core.tokenizer.decode = decode  # type: ignore[method-assign]
        if stream:
            events = [event for event in engine.stream(prompts, PARAMS) if event.response is not None]
            found = {event.response.request_id: event.response for event in events if event.response is not None}
            responses = list(found.values())
            errors = [response.error for response in responses if response.error is not None]
        else:
            responses = engine.generate(prompts, PARAMS)
            errors = [error for index in affected if (error := responses[index].error) is not None]
            assert [responses[i].error for i in range(5) if i not in affected] == [None] * (5 - len(affected))
        assert len(responses) == 5
        assert len(errors) == len(affected)
        assert all(isinstance(error, GenerationError) and "no such token" in str(error) for error in errors)
        assert not engine.core.scheduler.has_work
