"""Forms compiled beside the steps of an engine: who waits for one, and who does not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from batchwright import AsyncEngine, Engine, InferenceRequest
from batchwright.engine import grammars
from batchwright.engine.engine_stats import EngineStats
from batchwright.errors import EngineClosed, InvalidRequest
from batchwright.inference.stepped_engine import SteppedEngine

from .structured import byte_tokenizer
from .support import TINY, tiny_model

_Running: TypeAlias = AsyncEngine | SteppedEngine
_ENGINES: list[Callable[[Engine], _Running]] = [AsyncEngine, SteppedEngine]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model(folder, "llama", **TINY | {"vocab_size": 311, "max_position_embeddings": 512})
    byte_tokenizer(folder)
    return folder


class Compilations:
    """What is compiled, by which threads; the form of `held` only once `go_on` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, held: str = "") -> None:
        self.texts: list[str] = []
        self.threads: set[int] = set()
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self._held = held
        self._compile = grammars._compile
        monkeypatch.setattr(grammars, "_compile", self)

    def __call__(self, constraint: Any, vocabulary: Any) -> Any:
        self.texts.append(constraint.text)
        self.threads.add(threading.get_ident())
        if constraint.text == self._held:
            self.begun.set()
            assert self.go_on.wait(60)
        return self._compile(constraint, vocabulary)


@asynccontextmanager
async def running(made: Callable[[Engine], _Running], folder: Path) -> AsyncGenerator[_Running]:
    engine = made(Engine(folder, dtype="float32", kv_memory="8MB", max_num_seqs=8))
    try:
        yield engine
    finally:
        await engine.close()


def asked(regex: str | None, **more: Any) -> InferenceRequest:
    return InferenceRequest("x", **{"max_tokens": 4, "regex": regex, "temperature": 0.0} | more)


@pytest.mark.parametrize("made", _ENGINES)
def test_more_forms_than_are_kept_are_compiled_once_each(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, made: Callable[[Engine], _Running]
) -> None:
    compilations = Compilations(monkeypatch)
    texts = [f"[ab]{number}" for number in range(grammars._KEPT + 40)]

    async def ask() -> None:
        async with running(made, tiny) as engine:
            answers = await asyncio.gather(*(engine.generate(asked(text)) for text in texts))
            assert [answer.output[1:] for answer in answers] == [text[4:] for text in texts]

    asyncio.run(ask())
    assert sorted(compilations.texts) == sorted(texts)
    assert threading.get_ident() not in compilations.threads


@pytest.mark.parametrize("made", _ENGINES)
def test_others_are_computed_while_a_form_is_compiled(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, made: Callable[[Engine], _Running]
) -> None:
    compilations = Compilations(monkeypatch, held="late|later")

    async def ask() -> list[str]:
        async with running(made, tiny) as engine:
            await engine.generate(asked("ready"))
            late = [asyncio.ensure_future(engine.generate(asked("late|later", seed=seed))) for seed in range(3)]
            await asyncio.to_thread(compilations.begun.wait, 60)
            steps = engine.stats.steps
            assert (await engine.generate(asked(None))).error is None
            assert (await engine.generate(asked("ready"))).output == "read"
            assert engine.stats.steps > steps
            assert not any(each.done() for each in late)
            compilations.go_on.set()
            return [answer.output for answer in await asyncio.gather(*late)]

    # The answer is that of an engine which compiles the form when it takes the request.
    compilations.go_on.set()
    with Engine(tiny, dtype="float32", kv_memory="8MB") as engine:
        (alone,) = engine.generate([asked("late|later")])
    compilations.go_on.clear()
    compilations.begun.clear()
    assert asyncio.run(ask()) == [alone.output] * 3
    assert compilations.texts.count("late|later") == 2


@pytest.mark.parametrize("made", _ENGINES)
def test_closing_compiles_nothing_that_is_queued(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, made: Callable[[Engine], _Running]
) -> None:
    compilations = Compilations(monkeypatch, held="first")

    async def ask() -> EngineStats:
        engine = made(Engine(tiny, dtype="float32", kv_memory="8MB"))
        waiting = [asyncio.ensure_future(engine.generate(asked(text))) for text in ("first", "second", "third")]
        await asyncio.to_thread(compilations.begun.wait, 60)
        left = asyncio.ensure_future(engine.generate(asked("left")))
        await asyncio.sleep(0)
        left.cancel()
        await engine.close()  # although the first is still being compiled
        compilations.go_on.set()
        *ended, cancelled = await asyncio.gather(*waiting, left, return_exceptions=True)
        assert [type(each) for each in ended] == [EngineClosed] * 3
        assert isinstance(cancelled, asyncio.CancelledError)
        with pytest.raises(EngineClosed):
            await engine.generate(asked("fourth"))
        return engine.stats

    assert asyncio.run(ask()).steps == 0
    assert compilations.texts == ["first"]


@pytest.mark.parametrize("made", _ENGINES)
def test_a_form_that_is_refused_fails_its_requests_alone(tiny: Path, made: Callable[[Engine], _Running]) -> None:
    async def ask() -> None:
        async with running(made, tiny) as engine:
            *refused, good = await asyncio.gather(
                *(engine.generate(asked(text)) for text in ("(a", "(a", "ja")), return_exceptions=True
            )
            assert [type(each) for each in refused] == [InvalidRequest] * 2
            assert not isinstance(good, BaseException)
            assert good.output == "ja"

    asyncio.run(ask())
