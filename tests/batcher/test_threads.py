"""Without an event loop, with several, and with models that block: real threads, and events instead of waiting."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import subprocess
import sys
import threading
import weakref
from itertools import count
from typing import Any

import pytest

from batchwright.batcher import Batcher, SimpleBatcher
from batchwright.errors import BatcherClosed, GenerationError
from batchwright.policies import BySize, Policy
from batchwright.request import InferenceRequest, InferenceResponse


def upper(prompts: list[str]) -> list[str]:
    return [prompt.upper() for prompt in prompts]


class Gate:
    """A blocking model that says when it has begun, and goes on when it may."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.may_end = threading.Event()
        self.threads: set[str] = set()

    def __call__(self, prompts: list[str]) -> list[str]:
        self.threads.add(threading.current_thread().name)
        self.begun.set()
        self.may_end.wait()
        return upper(prompts)


def test_submit_works_without_an_event_loop() -> None:
    with Batcher(upper) as batcher:
        futures = [batcher.submit(word) for word in ("a", "b", "c")]
        assert [future.result().output for future in futures] == ["A", "B", "C"]
        assert batcher.submit_item("d").result() == "D"
    with pytest.raises(BatcherClosed):
        batcher.submit("e")


def test_shutdown_in_an_event_loop_is_refused() -> None:
    async def main() -> None:
        async with Batcher(upper) as batcher:
            with pytest.raises(RuntimeError, match="await close"):
                batcher.shutdown()

    asyncio.run(main())


def test_what_was_submitted_before_closing_is_computed() -> None:
    with SimpleBatcher(upper, 100, 1e9) as batcher:
        futures = [batcher.submit(word) for word in ("a", "b")]
    assert [future.result().output for future in futures] == ["A", "B"]


def test_shutting_down_without_draining_answers_although_the_model_hangs() -> None:
    gate = Gate()
    batcher = Batcher(gate)
    running = batcher.submit("a")
    gate.begun.wait()
    waiting = batcher.submit("b")
    batcher.shutdown(drain=False)
    assert isinstance(running.result().error, BatcherClosed)
    assert isinstance(waiting.result().error, BatcherClosed)
    gate.may_end.set()


def test_a_blocking_model_runs_in_a_thread_and_the_event_loop_goes_on() -> None:
    gate = Gate()

    async def main() -> None:
        async with Batcher(gate) as batcher:
            first = asyncio.create_task(batcher.add_request("a"))
            await asyncio.to_thread(gate.begun.wait)
            second = asyncio.create_task(batcher.add_request("b"))
            gone = asyncio.create_task(batcher.add_request("c"))
            await asyncio.sleep(0)
            gone.cancel()
            gate.may_end.set()
            assert [(await task).output for task in (first, second)] == ["A", "B"]

    asyncio.run(main())
    assert all(name.startswith("batchwright-model") for name in gate.threads)


def test_a_cancelled_future_takes_its_request_out_of_the_queue() -> None:
    gate, seen = Gate(), list[str]()

    def model(prompts: list[str]) -> list[str]:
        seen.extend(prompts)
        return gate(prompts)

    with Batcher(model) as batcher:
        first = batcher.submit("a")
        gate.begun.wait()
        gone, last = batcher.submit("gone"), batcher.submit("b")
        assert gone.cancel()
        # The loop hears of things in their order: of the cancellation before the end of the batch.
        gate.may_end.set()
        assert (first.result().output, last.result().output) == ("A", "B")
    assert "gone" not in seen


def test_a_blocking_model_may_raise_anything() -> None:
    def stops(prompts: list[str]) -> list[str]:
        raise StopIteration

    with Batcher(stops) as batcher:
        error = batcher.submit("a").result().error
        assert isinstance(error, GenerationError)
        assert "StopIteration" in str(error)
        with pytest.raises(RuntimeError, match="StopIteration"):
            batcher.submit_item("a").result()


def test_it_may_be_used_in_one_event_loop_after_another() -> None:
    batcher = Batcher(upper)

    async def main() -> str:
        return (await batcher.add_request("a")).output

    assert [asyncio.run(main()) for _ in range(3)] == ["A"] * 3
    assert batcher.submit("b").result().output == "B"
    assert asyncio.run(main()) == "A"
    assert batcher.stats().succeeded == 5
    batcher.shutdown()


def test_an_event_loop_may_run_again_after_another_one() -> None:
    """It hears of what was left in it while the next request is computed."""

    async def slow(items: list[str]) -> list[str]:
        for _ in range(20):
            await asyncio.sleep(0)
        return upper(items)

    batcher = Batcher(slow)
    loops = [asyncio.new_event_loop() for _ in range(2)]
    for loop in loops * 2:
        task = loop.create_task(batcher.compute("a"))
        limit = loop.call_later(20, task.cancel)
        assert loop.run_until_complete(task) == "A"
        limit.cancel()
    batcher.shutdown()
    for loop in loops:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def test_those_whose_event_loop_ended_count_as_cancelled() -> None:
    async def slow(items: list[str]) -> list[str]:
        await asyncio.sleep(1e6 if "x" in items else 0)
        return items

    async def ask(batcher: Batcher) -> None:
        await asyncio.gather(*(batcher.compute("x") for _ in range(3)))

    batcher = Batcher(slow, Policy(BySize(2)))
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)
    task = loop.create_task(ask(batcher))
    while batcher.stats().running < 2:
        loop.run_until_complete(asyncio.sleep(0))
    # Its task begins.
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    assert asyncio.run(batcher.compute("y")) == "y"
    del task, loop
    gc.collect()
    stats = batcher.stats()
    assert (stats.requests, stats.succeeded, stats.cancelled, stats.failed) == (4, 1, 3, 0)
    assert (stats.waiting, stats.running) == (0, 0)


def test_submitting_while_another_thread_closes_hangs_nobody() -> None:
    for _ in range(10):
        batcher = Batcher(lambda items: items)
        futures = [batcher.submit_item(0)]
        closer = threading.Thread(target=batcher.shutdown)
        closer.start()
        with contextlib.suppress(BatcherClosed):
            futures.extend(map(batcher.submit_item, count(1)))
        assert [future.result(timeout=60) for future in futures] == list(range(len(futures)))
        closer.join()


def test_requests_of_several_event_loops_and_threads_meet_in_one_batch() -> None:
    gate, sizes = Gate(), list[int]()

    def model(prompts: list[str]) -> list[str]:
        sizes.append(len(prompts))
        return gate(prompts)

    async def main(batcher: Batcher, ready: threading.Barrier) -> str:
        task = asyncio.create_task(batcher.add_request("b"))
        await asyncio.sleep(0)
        ready.wait()
        return (await task).output

    with Batcher(model) as batcher:
        first = batcher.submit("a")
        gate.begun.wait()
        ready = threading.Barrier(3)
        outputs: list[str] = []
        threads = [threading.Thread(target=lambda: outputs.append(asyncio.run(main(batcher, ready)))) for _ in range(2)]
        for thread in threads:
            thread.start()
        ready.wait()
        gate.may_end.set()
        for thread in threads:
            thread.join()
        assert first.result().output == "A"
    assert outputs == ["B", "B"]
    assert sizes == [1, 2]


def test_submitting_to_the_loop_that_one_is_in_is_refused() -> None:
    async def main() -> None:
        async with Batcher(upper) as batcher:
            await batcher.add_request("a")
            with pytest.raises(RuntimeError, match="await add_request"):
                batcher.submit("b")

    asyncio.run(main())


def test_a_batcher_that_nobody_holds_ends_with_its_thread() -> None:
    batcher = Batcher(upper)
    batcher.submit("a").result()
    background = batcher._background
    assert background is not None
    gone = weakref.ref(batcher)
    del batcher
    gc.collect()
    assert gone() is None
    assert background.loop.is_closed()


def test_a_batcher_in_an_event_loop_is_held_by_nothing_when_it_has_nothing_to_do() -> None:
    async def main() -> weakref.ref[Any]:
        batcher = Batcher(upper)
        await batcher.compute("a", deadline=1e6)
        return weakref.ref(batcher._core)

    async def outer() -> None:
        gone = await main()
        await asyncio.sleep(0)
        gc.collect()
        assert gone() is None

    asyncio.run(outer())


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("is_async", [True, False])
def test_a_model_that_means_to_end_the_program_fails_its_batch(kind: type[BaseException], is_async: bool) -> None:
    def ends(items: list[str]) -> list[str]:
        raise kind

    async def ends_async(items: list[str]) -> list[str]:
        raise kind

    with Batcher(ends_async if is_async else ends) as batcher:
        for _ in range(2):
            error = batcher.submit("x").result().error
            assert isinstance(error, GenerationError)
            assert isinstance(error.__cause__, kind)


def test_ctrl_c_in_the_main_thread_ends_the_program_although_a_model_runs() -> None:
    async def model(items: list[str]) -> list[str]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(Batcher(model).add_request("x"))
    # asyncio logs the task's exception when the task is collected. Not within a later `ast.parse`, which logging calls.
    gc.collect()


def test_ctrl_c_in_the_event_loop_of_another_leaves_nobody_without_an_answer() -> None:
    ready = threading.Event()
    answers: list[BaseException | None] = []

    async def model(items: list[str]) -> list[str]:
        raise KeyboardInterrupt

    batcher = Batcher(model)

    def ask() -> None:
        ready.wait()
        answers.append(batcher.submit_item("x").exception())

    async def home() -> None:
        await batcher.settle()
        ready.set()
        await asyncio.Event().wait()

    other = threading.Thread(target=ask)
    other.start()
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(home())
    other.join()
    assert isinstance(answers[0], GenerationError)
    batcher.shutdown()
    gc.collect()


@pytest.mark.parametrize(
    "consume", [lambda items: [items.pop(0) for _ in range(len(items))], lambda items: [*items, items.append("")]]
)
def test_a_model_may_do_with_its_list_what_it_likes(consume: Any) -> None:
    def model(items: list[str]) -> list[str]:
        outputs = list(items)
        consume(items)
        return outputs

    with Batcher(model) as batcher:
        assert batcher.submit("x").result().output == "x"


@pytest.mark.parametrize("began", [False, True])
@pytest.mark.parametrize("kind", ["submit", "loop"])
def test_a_request_survives_the_event_loop_of_another_caller(began: bool, kind: str) -> None:
    told: list[InferenceResponse] = []
    entered, homeless = threading.Event(), threading.Event()
    may_end = threading.Event()

    async def model(items: list[str]) -> list[str]:
        if not homeless.is_set():
            entered.set()
            await asyncio.Event().wait()
        return upper(items)

    batcher = Batcher(model, concurrency=2 if began else 1)
    request = InferenceRequest("b", callback=told.append)

    async def home() -> None:
        if not began:
            asyncio.get_running_loop().create_task(batcher.add_request("a"))
            await asyncio.sleep(0)
        await batcher.settle()
        ready.set()
        await asyncio.to_thread(may_end.wait)
        homeless.set()

    ready = threading.Event()
    first = threading.Thread(target=lambda: asyncio.run(home()))
    first.start()
    ready.wait()
    answers: list[InferenceResponse] = []
    if kind == "submit":
        second = threading.Thread(target=lambda: answers.append(batcher.submit(request).result()))
    else:
        second = threading.Thread(target=lambda: answers.append(asyncio.run(batcher.add_request(request))))
    second.start()
    entered.wait()
    while batcher.stats().requests < (1 if began else 2):
        os.sched_yield()
    may_end.set()
    first.join()
    second.join()
    assert [answer.output for answer in answers] == ["B"]
    assert told == answers
    stats = batcher.stats()
    assert (stats.requests, stats.succeeded, stats.waiting, stats.running) == (1 if began else 2, 1, 0, 0)
    batcher.shutdown()


def test_what_has_begun_and_may_not_be_computed_again_is_told_so() -> None:
    ready, may_end = threading.Event(), threading.Event()

    async def model(items: list[str]) -> list[str]:
        may_end.set()
        await asyncio.Event().wait()
        return items

    batcher = Batcher(model, isolate_failures=False)

    async def home() -> None:
        await batcher.settle()
        ready.set()
        await asyncio.to_thread(may_end.wait)

    first = threading.Thread(target=lambda: asyncio.run(home()))
    first.start()
    ready.wait()
    with pytest.raises(GenerationError, match="event loop that computed"):
        batcher.submit("x").result()
    first.join()
    batcher.shutdown()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_starts_afresh() -> None:
    code = """if True:
        import asyncio, os, signal, sys
        from batchwright.batcher import Batcher, SimpleBatcher
        used, queued, inside = Batcher(list), SimpleBatcher(list, 2, 1e9), Batcher(list)
        assert used.submit("a").result().output == "a"
        assert asyncio.run(inside.add_request("a")).output == "a"
        waits = queued.submit("b")
        while not queued.stats().waiting:
            os.sched_yield()
        child = os.fork()
        if not child:
            signal.alarm(30)
            assert used.submit("c").result().output == "c"
            assert asyncio.run(inside.add_request("c")).output == "c"
            two = [queued.submit("d"), queued.submit("e")]
            assert [each.result().output for each in two] == ["d", "e"]
            for each in (used, queued, inside):
                each.shutdown()
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert queued.submit("f").result().output == "f" and waits.result().output == "b"
        queued.shutdown()
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)


def test_an_error_in_the_block_leaves_what_waits() -> None:
    gate = Gate()
    batcher = Batcher(gate)
    futures = [batcher.submit("a")]
    gate.begun.wait()
    futures.append(batcher.submit("b"))
    with pytest.raises(KeyboardInterrupt), batcher:
        raise KeyboardInterrupt
    assert all(isinstance(future.result().error, BatcherClosed) for future in futures)
    gate.may_end.set()


def test_torch_is_not_needed() -> None:
    code = "import sys, batchwright.batcher, batchwright.policies; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
