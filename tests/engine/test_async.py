"""`AsyncEngine`: everybody gets an answer, whatever happens to the engine or to the others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from batchwright import AsyncEngine, Engine, InferenceRequest, InferenceResponse, SamplingParams, StreamEvent
from batchwright.errors import DeadlineExceeded, EngineClosed, GenerationError, InvalidRequest

from .support import TINY, tiny_model

PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
OPTIONS: dict[str, Any] = {"dtype": "float32", "kv_memory": "4MB", "max_batch_tokens": 64, "max_model_len": 128}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model(folder, "llama", **TINY)
    return folder


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, 199, (1 + index % 20,), generator=generator).tolist() for index in range(60)]


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    with Engine(folder, **OPTIONS) as engine:
        return [response.token_ids for response in engine.generate(prompts, PARAMS)]


class Gate:
    """Holds the engine's thread before a step until it is let go."""

    def __init__(self, engine: AsyncEngine, *, failure: BaseException | None = None) -> None:
        self._open = threading.Event()
        self.reached = threading.Event()
        core = engine._engine.core
        own = core.step

        def step(most: int = 1, **options: bool) -> list[StreamEvent]:
            self.reached.set()
            self._open.wait()
            if failure is not None:
                raise failure
            return own(most, **options)

        core.step = step  # type: ignore[method-assign]

    def open(self) -> None:
        self._open.set()


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 120))


@asynccontextmanager
async def made(folder: Path) -> AsyncIterator[AsyncEngine]:
    async with await asyncio.to_thread(AsyncEngine, folder, **OPTIONS) as engine:
        yield engine


async def collect(events: AsyncIterator[StreamEvent]) -> tuple[tuple[int, ...], InferenceResponse]:
    tokens: tuple[int, ...] = ()
    response = None
    async for event in events:
        assert response is None
        tokens += event.token_ids
        response = event.response
    assert response is not None
    return tokens, response


async def idle(engine: AsyncEngine) -> None:
    """Wait until the thread has obeyed all commands given so far, and nothing is being computed."""
    loop = asyncio.get_running_loop()
    while True:
        seen: asyncio.Future[bool] = loop.create_future()

        def look(seen: asyncio.Future[bool] = seen) -> None:
            core = engine._engine.core
            quiet = not core.unfinished and not engine._readers and core.scheduler.blocks.num_used == 0
            loop.call_soon_threadsafe(seen.set_result, quiet)

        engine._command(look)
        if await seen:
            return


def test_many_at_once(folder: Path, prompts: list[list[int]], expected: list[tuple[int, ...]]) -> None:
    async def main() -> None:
        async with made(folder) as engine:
            responses = await asyncio.gather(*(engine.generate(prompt, PARAMS) for prompt in prompts))
            assert [response.token_ids for response in responses] == expected
            streamed = await asyncio.gather(*(collect(engine.stream(prompt, PARAMS)) for prompt in prompts))
            assert [tokens for tokens, _ in streamed] == expected
            assert [response.token_ids for _, response in streamed] == expected
            assert engine.stats.occupancy_peak > 1
            await idle(engine)

    run(main())


def test_cancelled_tasks_leave_the_engine(
    folder: Path, prompts: list[list[int]], expected: list[tuple[int, ...]]
) -> None:
    async def main() -> None:
        async with made(folder) as engine:
            gate = Gate(engine)
            doomed = [asyncio.create_task(engine.generate(prompt, LONG)) for prompt in prompts[:20]]
            kept = [asyncio.create_task(engine.generate(prompt, PARAMS)) for prompt in prompts[20:]]
            await asyncio.to_thread(gate.reached.wait)
            for task in doomed:
                task.cancel()
            outcomes = await asyncio.gather(*doomed, return_exceptions=True)
            assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
            gate.open()
            assert [response.token_ids for response in await asyncio.gather(*kept)] == expected[20:]
            await idle(engine)
            assert engine.stats.generated_tokens < 20 * LONG.max_tokens

    run(main())


def test_leaving_a_stream_early(folder: Path, prompts: list[list[int]]) -> None:
    async def main() -> None:
        async with made(folder) as engine:
            events = engine.stream(prompts[0], LONG)
            assert (await anext(events)).response is None
            await events.aclose()
            await idle(engine)
            async for _ in engine.stream(prompts[1], LONG):
                break
            await idle(engine)

    run(main())


def test_an_invalid_request_raises(folder: Path, prompts: list[list[int]], expected: list[tuple[int, ...]]) -> None:
    async def main() -> None:
        async with made(folder) as engine:
            good = asyncio.create_task(engine.generate(prompts[0], PARAMS))
            with pytest.raises(InvalidRequest, match="token id 199"):
                await engine.generate([199], PARAMS)
            with pytest.raises(InvalidRequest, match="no tokenizer"):
                await collect(engine.stream("text", PARAMS))
            with pytest.raises(ValueError, match="brings its own"):
                await engine.generate(InferenceRequest(prompts[0]), PARAMS)
            assert (await good).token_ids == expected[0]
            await idle(engine)

    run(main())


def test_a_request_that_cannot_be_taken_harms_nobody(
    folder: Path, prompts: list[list[int]], expected: list[tuple[int, ...]]
) -> None:
    async def main() -> None:
        async with made(folder) as engine:
            core = engine._engine.core
            own = core.add

            def add(request: InferenceRequest, **how: Any) -> None:
                if request.request_id == "odd":
                    raise OverflowError("too large")
                own(request, **how)

            core.add = add  # type: ignore[method-assign]
            odd = InferenceRequest.of(prompts[0], PARAMS, request_id="odd")
            outcomes = await asyncio.gather(
                engine.generate(odd), engine.generate(prompts[1], PARAMS), return_exceptions=True
            )
            assert isinstance(outcomes[0], GenerationError)
            assert isinstance(outcomes[1], InferenceResponse)
            assert outcomes[1].token_ids == expected[1]

    run(main())


def test_one_id_twice(folder: Path, prompts: list[list[int]]) -> None:
    async def main() -> None:
        async with made(folder) as engine:
            gate = Gate(engine)
            request = InferenceRequest.of(prompts[0], PARAMS, request_id="same")
            first = asyncio.create_task(engine.generate(request))
            await asyncio.to_thread(gate.reached.wait)
            second = asyncio.create_task(engine.generate(request))
            await asyncio.to_thread(gate.open)
            with pytest.raises(InvalidRequest, match="'same'"):
                await second
            assert (await first).error is None

    run(main())


def test_a_deadline_is_answered(folder: Path, prompts: list[list[int]]) -> None:
    async def main() -> None:
        async with made(folder) as engine:
            response = await engine.generate(InferenceRequest.of(prompts[0], LONG, deadline=1e-9))
            assert isinstance(response.error, DeadlineExceeded)

    run(main())


def test_a_flood_of_requests_is_taken_little_by_little_between_steps(
    folder: Path, prompts: list[list[int]], expected: list[tuple[int, ...]]
) -> None:
    async def main() -> None:
        async with made(folder) as engine:
            gate, left = Gate(engine), list[int]()
            own = engine._engine.core.step

            def step(most: int = 1, **options: bool) -> list[StreamEvent]:
                left.append(len(engine._commands))
                return own(most, **options)

            engine._engine.core.step = step  # type: ignore[method-assign]
            first = asyncio.create_task(engine.generate(prompts[0], LONG))
            await asyncio.to_thread(gate.reached.wait)
            flood = [asyncio.create_task(engine.generate(prompt, PARAMS)) for prompt in prompts * 5]
            while len(engine._commands) < len(flood):  # noqa: ASYNC110 - each task takes a few turns
                await asyncio.sleep(0)
            gate.open()
            responses = await asyncio.gather(*flood)
            assert [response.token_ids for response in responses] == expected * 5
            assert len((await first).token_ids) == LONG.max_tokens
            assert left[:6] == [0, 236, 172, 108, 44, 0]
            await idle(engine)

    run(main())


def test_closing_while_busy_answers_everybody(folder: Path, prompts: list[list[int]]) -> None:
    async def main() -> None:
        async with made(folder) as engine:
            gate = Gate(engine)
            tasks = [asyncio.create_task(engine.generate(prompt, LONG)) for prompt in prompts]
            streams = [asyncio.create_task(collect(engine.stream(prompt, LONG))) for prompt in prompts]
            await asyncio.to_thread(gate.reached.wait)
            closing = [asyncio.create_task(engine.close()) for _ in range(2)]
            gate.open()
            await asyncio.gather(*closing)
            responses = await asyncio.gather(*tasks)
            responses += [response for _, response in await asyncio.gather(*streams)]
            assert all(isinstance(response.error, EngineClosed) for response in responses)
            with pytest.raises(EngineClosed):
                await engine.generate(prompts[0], PARAMS)
            with pytest.raises(EngineClosed):
                await anext(engine.stream(prompts[0], PARAMS))

    run(main())


def test_a_command_that_comes_while_the_thread_ends(folder: Path, prompts: list[list[int]]) -> None:
    """The thread ends between the caller's look at it and the command: there is an answer all the same."""

    async def main() -> None:
        async with made(folder) as engine:

            class Late(type(engine._commands)):  # type: ignore[misc]
                def append(self, command: Any) -> None:
                    engine._closing = True
                    engine._wake.set()
                    engine._thread.join()
                    super().append(command)

            engine._commands = Late()
            with pytest.raises(EngineClosed):
                await engine.generate(prompts[0], PARAMS)

    run(main())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("failure", [RuntimeError("broken"), SystemExit(3)])
def test_a_failing_engine_answers_everybody(folder: Path, prompts: list[list[int]], failure: BaseException) -> None:
    async def main() -> None:
        async with made(folder) as engine:
            gate = Gate(engine, failure=failure)
            tasks = [asyncio.create_task(engine.generate(prompt, LONG)) for prompt in prompts]
            await asyncio.to_thread(gate.reached.wait)
            gate.open()
            responses = await asyncio.gather(*tasks)
            assert all(isinstance(response.error, EngineClosed) for response in responses)
            await asyncio.to_thread(engine._thread.join)
            with pytest.raises(EngineClosed) as raised:
                await engine.generate(prompts[0], PARAMS)
            assert raised.value.__cause__ is failure

    run(main())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_core_that_cannot_even_be_closed(folder: Path, prompts: list[list[int]]) -> None:
    async def main() -> None:
        async with made(folder) as engine:
            gate = Gate(engine, failure=RuntimeError("broken"))

            def close() -> list[StreamEvent]:
                raise RuntimeError("broken too")

            engine._engine.core.close = close  # type: ignore[method-assign]
            task = asyncio.create_task(engine.generate(prompts[0], LONG))
            await asyncio.to_thread(gate.reached.wait)
            gate.open()
            with pytest.raises(EngineClosed):
                await task

    run(main())


def test_two_event_loops(folder: Path, prompts: list[list[int]], expected: list[tuple[int, ...]]) -> None:
    engine = AsyncEngine(folder, **OPTIONS)
    found: dict[int, list[tuple[int, ...]]] = {}

    def loop(half: int) -> None:
        async def main() -> None:
            mine = prompts[half::2]
            responses = await asyncio.gather(*(engine.generate(prompt, PARAMS) for prompt in mine))
            found[half] = [response.token_ids for response in responses]

        run(main())

    threads = [threading.Thread(target=loop, args=(half,)) for half in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    asyncio.run(engine.close())
    assert [found[half] for half in range(2)] == [expected[0::2], expected[1::2]]


def test_a_loop_that_was_closed_harms_nobody(
    folder: Path, prompts: list[list[int]], expected: list[tuple[int, ...]]
) -> None:
    engine = AsyncEngine(folder, **OPTIONS)
    gate = Gate(engine)

    async def leave() -> None:
        engine._command(lambda: None)
        task = asyncio.create_task(engine.generate(prompts[0], PARAMS))
        await asyncio.to_thread(gate.reached.wait)
        task.cancel()

    async def stay() -> None:
        gate.open()
        assert (await engine.generate(prompts[1], PARAMS)).token_ids == expected[1]
        await engine.close()

    run(leave())
    run(stay())
