"""Steps that are launched before the tokens of the step before are known: the answers are the same, whatever ends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from batchwright import Engine, InferenceRequest, InferenceResponse, SamplingParams
from batchwright.clock import ManualClock
from batchwright.engine import sampling
from batchwright.engine.step.launched import LaunchedStep
from batchwright.engine.step.pending_tokens import PendingTokens
from batchwright.errors import DeadlineExceeded, GenerationError

from .support import completions, finished, nothing_left, threads

_TEXTS = [
    "The sea was",
    "List three colours:",
    "Once upon a time there was a small boat that",
    "2, 4, 6, 8,",
    "Dear Sir or Madam,",
    "The capital of France is Paris. The capital of Italy is",
    "def add(a, b):",
    "The sea was calm, and the",
]


@pytest.fixture(scope="module")
def engines(narrow_path: Path) -> Iterator[Callable[..., Engine]]:
    """Two engines of one kind: one runs ahead, as on a GPU, and one does not."""
    made: dict[tuple[object, ...], Engine] = {}

    def engine(*, ahead: bool, **options: Any) -> Engine:
        key = (ahead, *sorted(options.items()))
        if key not in made:
            # Attention through torch: no compiled kernel chooses tokens by itself.
            made[key] = Engine(
                narrow_path, **({"dtype": "float32", "attention": "sdpa", "kv_memory": "60MB"} | options)
            )
            made[key].core.launcher.runs_ahead = ahead
        return made[key]

    with threads(2):
        yield engine
    for each in made.values():
        each.close()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of tokens that steps took from the step before on the device."""
    counts: list[int] = []
    genuine = LaunchedStep.fill_in

    def fill_in(self: LaunchedStep, *args: Any) -> None:
        counts.append(len(self.unknown))
        genuine(self, *args)

    monkeypatch.setattr(LaunchedStep, "fill_in", fill_in)
    return counts


def requests(**params: Any) -> list[InferenceRequest]:
    """Requests of unlike lengths, some with several completions."""
    return [
        InferenceRequest.of(text, SamplingParams(**({"max_tokens": 5 + 3 * index, "n": 1 + (index == 2)} | params)))
        for index, text in enumerate(_TEXTS)
    ]


def answers(engine: Engine, wanted: list[InferenceRequest]) -> list[Any]:
    """What the engine answers: tokens, text and reason of each completion, or the error."""
    for request in wanted:
        engine.submit(request)
    return completions(wanted, finished(engine))


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "ignore_eos": True, "max_tokens": 24},
        {"temperature": 0.0, "stop": ["er", "in"], "max_tokens": 30},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 0.8, "top_p": 0.9, "seed": 4},
        {"temperature": 1.2, "top_k": 20, "min_p": 0.01, "seed": 5},
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"temperature": 0.0, "logprobs": 2, "min_tokens": 4},
    ],
    ids=lambda params: "-".join(params),
)
def test_answers_are_the_same(engines: Callable[..., Engine], launched: list[int], params: dict[str, Any]) -> None:
    plain = answers(engines(ahead=False), requests(**params))
    assert not launched
    assert answers(engines(ahead=True), requests(**params)) == plain
    history_counts = "repetition_penalty" in params or "logprobs" in params
    assert (max(launched, default=0) >= len(_TEXTS)) != history_counts


def test_a_draw_from_more_tokens_than_were_looked_at(
    engines: Callable[..., Engine], launched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = {"temperature": 1.5, "top_p": 0.95, "seed": 6, "max_tokens": 20}
    plain = answers(engines(ahead=False), requests(**params))
    monkeypatch.setattr(sampling, "_HEAD", 16)
    assert answers(engines(ahead=True), requests(**params)) == plain
    assert launched


def test_with_all_kinds_of_sampling_together(engines: Callable[..., Engine], launched: list[int]) -> None:
    def mixed() -> list[InferenceRequest]:
        kinds: list[dict[str, Any]] = [
            {"temperature": 0.0},
            {"temperature": 1.0, "seed": 1},
            {"temperature": 0.0, "presence_penalty": 1.0},
        ]
        return [
            InferenceRequest.of(text, SamplingParams(**kinds[index % 3], max_tokens=4 * index + 1))
            for index, text in enumerate(_TEXTS)
        ]

    assert answers(engines(ahead=True), mixed()) == answers(engines(ahead=False), mixed())
    assert launched


def test_preempted_sequences(engines: Callable[..., Engine], launched: list[int]) -> None:
    params = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 30, "n": 2}
    few = {"kv_memory": 2 * 2 * 2 * 16 * 4 * 16 * 12}
    plain = answers(engines(ahead=False), requests(**params))
    ahead = engines(ahead=True, **few)
    assert answers(ahead, requests(**params)) == plain
    assert ahead.stats.preemptions
    assert launched


def test_requests_that_come_and_are_cancelled_between_steps(
    engines: Callable[..., Engine], launched: list[int]
) -> None:
    params = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 12}
    plain = answers(engines(ahead=False), requests(**params))
    engine, wanted, found = engines(ahead=True), requests(**params), {}
    for request in wanted:
        engine.submit(request)
        found.update({each.request_id: each for each in engine.step()})
    cancelled = wanted[-1].request_id
    engine.cancel(cancelled)
    assert completions(wanted[:-1], finished(engine, found)) == plain[:-1]
    assert launched


def test_an_interrupt_while_tokens_are_awaited(
    engines: Callable[..., Engine], launched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = {"temperature": 0.9, "seed": 8, "max_tokens": 14}
    plain = answers(engines(ahead=False), requests(**params))
    engine, genuine, calls = engines(ahead=True), PendingTokens.wait, 0

    def wait(self: PendingTokens) -> tuple[list[int | None], set[int]]:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            raise KeyboardInterrupt
        return genuine(self)

    def step() -> list[InferenceResponse]:
        with contextlib.suppress(KeyboardInterrupt):
            return engine.step()
        return []

    monkeypatch.setattr(PendingTokens, "wait", wait)
    wanted = requests(**params)
    for request in wanted:
        engine.submit(request)
    assert completions(wanted, finished(engine, step=step)) == plain
    assert launched


def test_a_deadline_that_passes_meanwhile(narrow_path: Path, launched: list[int]) -> None:
    clock = ManualClock()
    with Engine(narrow_path, dtype="float32", attention="sdpa", kv_memory="60MB", clock=clock) as engine:
        engine.core.launcher.runs_ahead = True
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=10)
        plain = engine.generate("The sea was", params)[0].token_ids
        late = InferenceRequest.of("The sea was", params, deadline=5.0)
        engine.submit(late)
        other = InferenceRequest.of("The sea was", params)
        engine.submit(other)
        found: dict[str, InferenceResponse] = {}
        while engine.unfinished:
            found.update({response.request_id: response for response in engine.step()})
            clock.advance(1.0)
        assert isinstance(found[late.request_id].error, DeadlineExceeded)
        assert found[late.request_id].token_ids == plain[: len(found[late.request_id].token_ids)]
        assert found[other.request_id].token_ids == plain
        assert nothing_left(engine)
    assert launched


def test_masks_for_a_step_some_of_whose_sequences_have_ended(
    engines: Callable[..., Engine], launched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def mixed() -> list[InferenceRequest]:
        free = [SamplingParams(temperature=0.0, max_tokens=30, stop=("er", "in")) for _ in _TEXTS]
        formed = [SamplingParams(temperature=0.0, max_tokens=12, regex="[a-z ]{4,30}") for _ in _TEXTS[:3]]
        return [InferenceRequest.of(*each) for each in zip([*_TEXTS, *_TEXTS[:3]], [*free, *formed], strict=True)]

    def late(engine: Engine, wanted: list[InferenceRequest]) -> list[Any]:
        """The formed ones come while the others are computed."""
        found: dict[str, InferenceResponse] = {}
        for request in wanted[: len(_TEXTS)]:
            engine.submit(request)
        for request in wanted[len(_TEXTS) :]:
            for _ in range(3):
                found.update({each.request_id: each for each in engine.step()})
            engine.submit(request)
        return completions(wanted, finished(engine, found))

    plain = late(engines(ahead=False), mixed())
    engine = engines(ahead=True)
    monkeypatch.setattr(engine.core.launcher, "masks_late", True)
    monkeypatch.setattr(engine.core.scheduler, "isolate", None)  # no step may fail
    assert late(engine, mixed()) == plain
    assert launched


@pytest.mark.parametrize("count", [1, 3])
def test_a_device_that_never_answers_fails_the_requests(
    narrow_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    def wait(self: PendingTokens) -> tuple[list[int | None], set[int]]:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(PendingTokens, "wait", wait)
    with Engine(narrow_path, dtype="float32", attention="sdpa", kv_memory="60MB") as engine:
        engine.core.launcher.runs_ahead = True
        for text in _TEXTS[:count]:
            engine.submit(InferenceRequest.of(text, SamplingParams(max_tokens=5)))
        found = [response for _ in range(3 * count) for response in engine.step()]
        assert [isinstance(each.error, GenerationError) for each in found] == [True] * count
        assert "the device is lost" in str(found[0].error)
        assert nothing_left(engine)
