"""Ray Data: batches of every format and what becomes of failures, and the classes in the actors of a real Ray."""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pandas")
pytest.importorskip("pyarrow")
pytest.importorskip("narwhals")

import pandas as pd
import pyarrow as pa

import batchwright
from batchwright.encoder.encoder import Encoder
from batchwright.engine.engine import Engine
from batchwright.errors import EngineClosed, InputError, RowsFailed
from batchwright.models import resolve
from batchwright.ray import Embed, Generate

GREEDY = {"temperature": 0.0, "max_tokens": 16}
PROMPT = "Say {text}."
FORMATS: dict[str, Any] = {
    "numpy": lambda texts: {"text": np.asarray(texts, object), "n": np.arange(len(texts))},
    "pandas": lambda texts: pd.DataFrame({"text": texts, "n": range(len(texts))}),
    "pyarrow": lambda texts: pa.table({"text": pa.array(texts, pa.string()), "n": [*range(len(texts))]}),
}


@pytest.fixture(scope="module")
def options(shallow_path: Path) -> dict[str, Any]:
    return {"model": str(shallow_path), "defaults": GREEDY, "dtype": "float32"}


@pytest.fixture(scope="module")
def generate(options: dict[str, Any]) -> Generate:
    return Generate(prompt=PROMPT, **options)


@pytest.fixture(scope="module")
def engine(shallow_path: Path) -> Iterator[Engine]:
    """The engine of `batchwright.map`."""
    with Engine(shallow_path, dtype="float32") as engine:
        yield engine


@pytest.fixture(scope="module")
def said(engine: Engine) -> dict[str, str]:
    """What `batchwright.map` answers."""
    frame = pd.DataFrame({"text": [f"number {n}" for n in range(8)]})
    made = batchwright.map(frame, prompt=PROMPT, model=engine, defaults=GREEDY, progress=False)
    return dict(zip(made["text"], made["answer"], strict=True))


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(resolve("minilm", progress=print))


async def made_of(computes: Any, batch: Any) -> Any:
    [made] = [each async for each in computes(batch)]
    return made


def column(batch: Any, name: str) -> list[Any]:
    values = batch[name]
    values = values.to_pylist() if hasattr(values, "to_pylist") else values.tolist()
    return [None if value is pd.NA else value for value in values]


@pytest.mark.parametrize("batch_format", FORMATS)
def test_a_batch_comes_back_in_its_format(generate: Generate, said: dict[str, str], batch_format: str) -> None:
    batch = FORMATS[batch_format]([*said])
    made = asyncio.run(made_of(generate, batch))
    assert type(made) is type(batch)
    assert column(made, "text") == [*said]
    assert column(made, "n") == [*range(len(said))]
    assert column(made, "answer") == [*said.values()]
    assert column(made, "answer_error") == [None] * len(said)


@pytest.mark.parametrize("batch_format", FORMATS)
def test_a_row_that_fails_leaves_the_others(generate: Generate, said: dict[str, str], batch_format: str) -> None:
    made = asyncio.run(made_of(generate, FORMATS[batch_format](["number 1", None, "number 2"])))
    assert column(made, "answer") == [said["number 1"], None, said["number 2"]]
    [first, error, last] = column(made, "answer_error")
    assert (first, last) == (None, None)
    assert error == "missing_field: the row has nothing in column 'text'"


def test_failures_can_be_raised_and_travel(generate: Generate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "_errors", "raise")
    with pytest.raises(RowsFailed, match=r"1 of 2 rows of a batch failed, such as with missing_field") as caught:
        asyncio.run(made_of(generate, FORMATS["numpy"](["", "number 1"])))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert "answer_error" not in asyncio.run(made_of(generate, FORMATS["numpy"](["number 1"])))


def test_batches_without_rows_pass(generate: Generate) -> None:
    assert asyncio.run(made_of(generate, {})) == {}
    made = asyncio.run(made_of(generate, FORMATS["pyarrow"]([])))
    assert made.column_names == ["text", "n", "answer", "answer_error"]
    assert made.num_rows == 0


def test_a_cancelled_batch_leaves_its_places_to_others(generate: Generate, said: dict[str, str]) -> None:
    async def go() -> Any:
        long = asyncio.create_task(made_of(generate, FORMATS["numpy"]([f"number {n}" for n in range(300)])))
        await asyncio.sleep(0)
        other = asyncio.create_task(made_of(generate, FORMATS["numpy"]([*said])))
        await asyncio.sleep(0)
        long.cancel()
        made = await other
        assert long.cancelled()
        return made

    assert column(asyncio.run(go()), "answer") == [*said.values()]


def test_columns_that_are_missing_or_in_the_way_are_named(generate: Generate) -> None:
    with pytest.raises(InputError, match="no column 'text'"):
        asyncio.run(made_of(generate, {"title": np.asarray(["a"])}))
    with pytest.raises(InputError, match="there is a column 'answer_error' already"):
        asyncio.run(made_of(generate, {"text": np.asarray(["a"]), "answer_error": np.asarray(["b"])}))


def test_a_column_may_hold_whole_chats(generate: Generate, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    # As with messages="chat", without loading another model.
    monkeypatch.setattr(generate, "_templates", None)
    monkeypatch.setattr(generate, "_messages", "chat")
    chats = [
        [{"role": "user", "content": "Say number 1."}],
        [{"role": "system", "content": "Be short.", "name": "s"}, {"role": "user", "content": "Say number 2."}],
        None,
    ]
    made = asyncio.run(made_of(generate, pa.table({"chat": chats})))
    frame = pd.DataFrame({"text": ["number 1", "number 2"]})
    common: Any = {"prompt": PROMPT, "model": engine, "defaults": GREEDY, "progress": False}
    first = batchwright.map(frame[:1], chat=True, **common)
    second = batchwright.map(frame[1:], system="Be short.", **common)
    assert column(made, "answer") == [first["answer"].iloc[0], second["answer"].iloc[0], None]
    assert column(made, "answer_error") == [None, None, "missing_field: the row has no messages"]


def test_vectors_are_those_of_the_encoder(encoder: Encoder) -> None:
    texts = ["A river.", "A river and a stone, and a river."]
    made = asyncio.run(made_of(Embed(model=encoder.model_name), FORMATS["numpy"]([*texts, ""])))
    np.testing.assert_allclose(made["embedding"][:-1], encoder.encode(texts), atol=1e-5)
    assert np.isnan(made["embedding"][-1]).all()
    [*fine, error] = column(made, "embedding_error")
    assert fine == [None, None]
    assert error.startswith("missing_field: ")


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"messages": "chat", "prompt": PROMPT}, "messages='chat'"),
        ({"errors": "ignore"}, "errors='ignore'"),
        ({"prompt": "no column"}, "names no column"),
        ({"dtype": "float7"}, "float7"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(given: Any, match: str) -> None:
    with pytest.raises(InputError, match=match):
        Generate(**given)


def test_a_closed_engine_is_no_failure_of_rows(options: dict[str, Any]) -> None:
    async def go() -> None:
        computes = Generate(prompt=PROMPT, **options)
        await computes._running.close()
        await made_of(computes, FORMATS["numpy"](["number 1", "number 2"]))

    with pytest.raises(EngineClosed):
        asyncio.run(go())


# In Ray.


@pytest.fixture(scope="module")
def ray_data() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "disabled")
        ray = pytest.importorskip("ray")
        data = pytest.importorskip("ray.data")
        ray.init("local", num_cpus=2, object_store_memory=100 * 2**20, include_dashboard=False, log_to_driver=False)
        context = data.DataContext.get_current()
        context.enable_progress_bars = False
        context.execution_options.preserve_order = True
        yield data
        ray.shutdown()


def test_blocks_are_computed_side_by_side_in_one_engine(
    ray_data: Any, options: dict[str, Any], said: dict[str, str], encoder: Encoder
) -> None:
    class Meeting(Generate):
        """Goes on when two batches have come."""

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.both, self.come = asyncio.Event(), 0

        async def __call__(self, batch: Any) -> AsyncIterator[Any]:
            self.come += 1
            if self.come == 2:
                self.both.set()
            await asyncio.wait_for(self.both.wait(), 60)
            async for made in super().__call__(batch):
                yield {**made, "peak": np.full(len(batch["text"]), self.stats.occupancy_peak)}

    two_calls = ray_data.ActorPoolStrategy(size=1, max_concurrent_calls_per_actor=2)
    rows = (
        ray_data.from_items([{"text": text} for text in said], override_num_blocks=2)
        .map_batches(Meeting, fn_constructor_kwargs={"prompt": PROMPT, **options}, batch_size=4, compute=two_calls)
        .map_batches(
            Embed,
            fn_constructor_kwargs={"model": encoder.model_name, "text": "{answer}"},
            batch_size=4,
            batch_format="pyarrow",
            compute=ray_data.ActorPoolStrategy(size=1),
        )
        .take_all()
    )
    assert [(row["text"], row["answer"]) for row in rows] == [*said.items()]
    assert max(row["peak"] for row in rows) > 4
    vectors = np.asarray([row["embedding"] for row in rows])
    np.testing.assert_allclose(vectors, encoder.encode([*said.values()]), atol=1e-5)


def test_an_actor_whose_engine_dies_is_replaced(
    ray_data: Any, options: dict[str, Any], said: dict[str, str], tmp_path: Path
) -> None:
    died = tmp_path / "died"

    class Mortal(Generate):
        """Its first engine dies in its third step."""

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            assert self._engine is not None
            core, steps = self._engine.core, [None] * 2
            step = core.step

            def mortal(most: int = 1, **options: bool) -> Any:
                if not died.exists() and not steps:
                    died.write_text(str(os.getpid()))
                    raise MemoryError("the engine dies")
                del steps[:1]
                return step(**options)

            core.step = mortal  # type: ignore[method-assign]

        async def __call__(self, batch: Any) -> AsyncIterator[Any]:
            async for made in super().__call__(batch):
                yield {**made, "pid": np.full(len(batch["text"]), os.getpid())}

    rows = (
        ray_data.from_items([{"text": text} for text in said], override_num_blocks=2)
        .map_batches(
            Mortal,
            fn_constructor_kwargs={"prompt": PROMPT, **options},
            batch_size=4,
            compute=ray_data.ActorPoolStrategy(size=1),
        )
        .take_all()
    )
    assert [(row["text"], row["answer"], row["answer_error"]) for row in rows] == [
        (text, answer, None) for text, answer in said.items()
    ]
    [pid] = {row["pid"] for row in rows}
    assert pid != int(died.read_text())
