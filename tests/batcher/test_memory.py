"""Batches that fit in memory, and what happens when they do not."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright import ContextLengthExceeded, InferenceRequest, InferenceResponse, OutOfMemory, Usage
from batchwright.batcher import Batcher, MemoryEfficientBatcher
from batchwright.clock import ManualClock
from batchwright.errors import GenerationError
from batchwright.out_of_memory import ran_out_of_memory
from batchwright.policies import (
    Backlog,
    BySize,
    Dispatch,
    Fifo,
    Goodput,
    Item,
    LikeLengths,
    Memory,
    Order,
    Policy,
    Shape,
    TargetLatency,
    Urgency,
    WithinMemory,
    within_memory,
)

from .virtual import Model, outcome, play

_QUICK = settings(max_examples=150)


class Device(Model):
    """Has room for `cells` of a padded batch, without what is generated."""

    def __init__(self, cells: int, error: Callable[[], Exception] = MemoryError) -> None:
        super().__init__()
        self.cells = cells
        self.error = error

    async def generate_batch(self, prompts: Any) -> list[Any]:
        outputs = await super().generate_batch(prompts)
        if len(prompts) * max(map(len, prompts)) > self.cells:
            raise self.error()
        return outputs


def _ask(batcher: Batcher, lengths: list[int], **options: Any) -> Any:
    return asyncio.gather(*(batcher.compute("x" * length, **options) for length in lengths))


# The formula, and the largest batch by it


def test_the_estimate_is_the_padded_rectangle_with_the_longest_answer() -> None:
    batcher = MemoryEfficientBatcher(Model(), 8000, 1000, length=len)
    requests = [InferenceRequest("x" * 300, max_tokens=50), InferenceRequest("x" * 100, max_tokens=200)]
    assert batcher.estimate_memory(requests) == (300 + 200) * 2 / 1000
    assert batcher.estimate_memory(["x" * 44, [1] * 50]) == 2 * 50 / 1000
    assert batcher.estimate_memory([]) == 0.0
    assert batcher.estimate_memory(4, 250) == batcher.estimate_memory(batch_size=4, sequence_length=250) == 1.0
    with pytest.raises(TypeError, match="sequence_length"):
        batcher.estimate_memory(*[4])
    with pytest.raises(ValueError, match="batch_size=-1"):
        batcher.estimate_memory(-1, 250)


def test_the_best_size_is_how_many_of_the_first_fit() -> None:
    batcher = MemoryEfficientBatcher(Model(), 2, 1000, length=len)
    short, long = InferenceRequest("x" * 100, max_tokens=100), InferenceRequest("x" * 900, max_tokens=100)
    assert batcher.find_optimal_batch_size([short] * 100) == 10
    assert batcher.find_optimal_batch_size([short] * 4) == 4
    assert batcher.find_optimal_batch_size([short, long, short]) == 2
    assert batcher.find_optimal_batch_size([InferenceRequest("x" * 1901, max_tokens=100), short]) == 0
    assert batcher.find_optimal_batch_size([]) == 0
    # Just what is given: 256 tokens of an answer are not added.
    assert batcher.find_optimal_batch_size([[7] * 250] * 20) == batcher.find_optimal_batch_size(["x" * 250] * 20) == 8


def test_the_largest_batch_that_fits_goes_with_the_first() -> None:
    async def main(clock: ManualClock) -> None:
        model = Model()
        async with MemoryEfficientBatcher(model, 1, 1000, clock=clock, length=len) as batcher:
            await _ask(batcher, [100, 900, 100, 450, 90, 500, 100])
        assert [list(map(len, batch)) for batch in model.batches] == [[100, 100, 90, 100], [900], [450, 500]]
        assert batcher.stats().reasons == {"full": 2, "idle": 1}

    play(main)


def test_what_will_be_generated_counts() -> None:
    async def main(clock: ManualClock) -> None:
        model = Model()
        async with MemoryEfficientBatcher(model, 1, 1000, clock=clock, length=len) as batcher:
            requests = [InferenceRequest("x" * 10, max_tokens=n) for n in (90, 490, 90, 490)]
            await asyncio.gather(*map(batcher.add_request, requests))
        assert list(map(len, model.batches)) == [2, 2]

    play(main)


def test_the_more_urgent_go_first_and_are_not_displaced_by_shorter_ones() -> None:
    async def main(clock: ManualClock) -> None:
        model = Model()
        async with MemoryEfficientBatcher(model, 1, 1000, clock=clock, length=len) as batcher:
            await asyncio.gather(
                _ask(batcher, [10] * 4, priority=9), _ask(batcher, [20], priority=1), _ask(batcher, [600], priority=1)
            )
        assert [list(map(len, batch)) for batch in model.batches] == [[20], [600], [10] * 4]

    play(main)


def test_a_request_too_large_alone_is_refused_with_its_estimate_the_limit_and_the_remedy() -> None:
    async def main(clock: ManualClock) -> None:
        async with MemoryEfficientBatcher(Model(), 1, 1000, clock=clock, length=len) as batcher:
            with pytest.raises(ContextLengthExceeded, match=r"900 tokens .* 200 .* 1.1 MB .* is 1: .*max_memory_mb"):
                await batcher.add_request(InferenceRequest("x" * 900, max_tokens=200))
            with pytest.raises(ContextLengthExceeded):
                await batcher.compute("x" * 1001)
            assert len(await batcher.compute("x" * 1000)) == 1000
            stats = batcher.stats()
            assert (stats.too_large, stats.requests, stats.waiting) == (2, 1, 0)

    play(main)


@pytest.mark.parametrize(
    ("options", "name"),
    [({"max_memory_mb": 0}, "max_memory_mb"), ({"tokens_per_mb": float("nan")}, "tokens_per_mb")],
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, float], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        MemoryEfficientBatcher(Model(), **options)


# Many at once


def test_thousands_are_processed_in_order_and_one_that_fails_concerns_no_other() -> None:
    async def main(clock: ManualClock) -> None:
        async with MemoryEfficientBatcher(Model(), 40, 1000, max_waiting=100, clock=clock, length=len) as batcher:
            prompts = [f"{n}." + "x" * (n % 700) for n in range(3000)]
            prompts[1234] = "y" * 50_000
            responses = await batcher.process_with_memory_limit([InferenceRequest(prompt) for prompt in prompts])
        assert [response.output for response in responses if response.error is None] == [
            prompt.upper() for prompt in prompts if prompt[0] != "y"
        ]
        assert isinstance(responses[1234].error, ContextLengthExceeded)
        assert batcher.stats().overloaded == 0

    play(main)


def test_a_queue_that_others_fill_is_waited_for() -> None:
    async def main(clock: ManualClock) -> None:
        async with MemoryEfficientBatcher(Model(), 1, 1000, max_waiting=4, clock=clock, length=len) as batcher:
            others = [asyncio.create_task(outcome(batcher, "o" * 500)) for _ in range(4)]
            await asyncio.sleep(0)
            responses = await batcher.process_with_memory_limit(["a", "b", "c"])
            assert responses == ["A", "B", "C"]
            assert await asyncio.gather(*others) == ["O" * 500] * 4
            assert batcher.stats().overloaded > 0

    play(main)


def test_bare_sequences_give_bare_outputs_and_the_first_error_when_all_are_computed() -> None:
    class Sums:
        batches: ClassVar[list[Any]] = []

        async def generate_batch(self, sequences: list[list[int]]) -> list[Any]:
            self.batches.append(sequences)
            return [ValueError("it is odd") if sum(each) % 2 else sum(each) for each in sequences]

    async def main(clock: ManualClock) -> None:
        async with MemoryEfficientBatcher(Sums(), 0.004, 1000, clock=clock) as batcher:
            assert await batcher.process_with_memory_limit([[1, 1], [2, 2], [3, 3], []]) == [2, 4, 6, 0]
            assert await batcher.process_with_memory_limit([]) == []
            with pytest.raises(ValueError, match="it is odd") as raised:
                await batcher.process_with_memory_limit([[2], [1], [4]])
            assert raised.value.__notes__ == ["of sequences[1]"]
            with pytest.raises(ContextLengthExceeded):
                await batcher.process_with_memory_limit([[2], [1] * 5])
            mixed = await batcher.process_with_memory_limit([InferenceRequest([1, 1], max_tokens=1), [2]])
            assert (mixed[0].output, mixed[1]) == (2, 2)
        assert all(len(batch) * max(map(len, batch)) <= 4 for batch in Sums.batches)

    play(main)


# Running out of memory


class OutOfMemoryError(RuntimeError):
    """Named as torch's is."""


class OnnxError(Exception):
    """Derived from Exception, as those of ONNX Runtime are."""


OnnxError.__module__ = "onnxruntime.capi.onnxruntime_pybind11_state"


class XlaRuntimeError(Exception):
    """In the place of JAX's, which is not installed here."""


XlaRuntimeError.__module__ = "jaxlib._jax"


@pytest.mark.parametrize(
    ("output", "is_one"),
    [
        (MemoryError(), True),
        (OutOfMemory("no"), True),
        (OutOfMemoryError("HIP"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 bytes"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (
            OnnxError("[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : bfc_arena.cc Failed to allocate memory for 512"),
            True,
        ),
        (OnnxError("bfc_arena.cc:376 Available memory of 0 is smaller than requested bytes of 16384"), True),
        (OnnxError("[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : Unexpected input data type"), False),
        (XlaRuntimeError("RESOURCE_EXHAUSTED: Failed to allocate request for 4.0GiB on device ordinal 0"), True),
        (XlaRuntimeError("INTERNAL: something else"), False),
        (InferenceResponse("", "", 0, 0.0, 0.0, "error", Usage(0, 0), error=OutOfMemory("no")), True),
        (InferenceResponse("", "out of memory", 0, 0.0, 0.0, "stop", Usage(0, 0)), False),
        (RuntimeError("shapes do not match"), False),
        (ValueError("out of memory"), False),
        ("out of memory", False),
    ],
)
def test_a_lack_of_memory_is_recognized(output: object, is_one: bool) -> None:
    assert ran_out_of_memory(output) is is_one


@pytest.mark.parametrize("error", [MemoryError, lambda: RuntimeError("CUDA out of memory")])
@pytest.mark.parametrize("isolate", [True, False])
def test_a_batch_that_ran_out_of_memory_is_halved_and_nobody_fails(
    error: Callable[[], Exception], isolate: bool
) -> None:
    async def main(clock: ManualClock) -> None:
        model = Device(300, error)
        async with MemoryEfficientBatcher(model, 1, 1000, isolate_failures=isolate, clock=clock, length=len) as batcher:
            assert await _ask(batcher, [100] * 10) == ["X" * 100] * 10
            stats = batcher.stats()
        assert list(map(len, model.batches)) == [10, 5, 2, 3, 5, 2, 3]
        assert (stats.out_of_memory, stats.failed, stats.batches) == (3, 0, 1)
        # Five were too many.
        assert stats.memory_limit_mb == 0.375

    play(main)


def test_the_limit_falls_below_what_failed_and_grows_back_slowly_and_no_further() -> None:
    async def main(clock: ManualClock) -> None:
        model = Device(500)
        async with MemoryEfficientBatcher(model, 1, 1000, clock=clock, length=len) as batcher:
            await _ask(batcher, [100] * 10)
            assert batcher.stats().memory_limit_mb == 0.75
            model.cells = 10_000
            limits = []
            for _ in range(60):
                await _ask(batcher, [100] * 10)
                limits.append(batcher.stats().memory_limit_mb or 0.0)
        assert limits == sorted(limits)
        assert max(later - sooner for sooner, later in pairwise(limits)) < 0.02
        assert limits[-1] == 1.0
        assert len(model.batches[-1]) == 10

    play(main)


def test_small_batches_prove_nothing_of_large_ones() -> None:
    memory = Memory(10, 1)
    memory.learn([], [[Item(0.0, 1)] * 10])
    fallen = memory.limit_mb
    for _ in range(100):
        memory.learn([[Item(0.0, 1)]], [])
    assert memory.limit_mb == fallen == 7.5


def test_a_request_to_blame_for_it_does_not_make_later_batches_small() -> None:
    class Allergic(Model):
        async def generate_batch(self, prompts: Any) -> list[Any]:
            outputs = await super().generate_batch(prompts)
            if "b" * 10 in prompts:
                raise MemoryError
            return outputs

    async def main(clock: ManualClock) -> None:
        words = ["a" * 10] * 7 + ["b" * 10]
        async with MemoryEfficientBatcher(Allergic(), 1, 80, clock=clock, length=len) as batcher:
            outputs = await asyncio.gather(*map(batcher.compute, words), return_exceptions=True)
            assert outputs[:-1] == ["A" * 10] * 7
            assert isinstance(outputs[-1], OutOfMemory)
            assert isinstance(outputs[-1].__cause__, MemoryError)
            # Half of the batch fitted: the halves that failed say nothing of the size.
            assert batcher.stats().memory_limit_mb == 0.75

    play(main)


def test_one_request_alone_fails_with_out_of_memory() -> None:
    async def main(clock: ManualClock) -> None:
        async with MemoryEfficientBatcher(Device(5), 1, 1000, clock=clock, length=len) as batcher:
            response = await batcher.add_request("x" * 6)
            assert isinstance(response.error, OutOfMemory)
            assert "alone (MemoryError" in str(response.error)
            assert await outcome(batcher, "x" * 5) == "XXXXX"
            assert batcher.stats().memory_limit_mb == 1.0

    play(main)


def test_outputs_that_say_so_are_tried_again_and_the_others_are_answered_at_once() -> None:
    class Partial(Model):
        """Computes the first two, and returns an error for each of the others."""

        async def generate_batch(self, prompts: Any) -> list[Any]:
            outputs = await super().generate_batch(prompts)
            return outputs[:2] + [OutOfMemory("full")] * (len(prompts) - 2)

    async def main(clock: ManualClock) -> None:
        model = Partial()
        async with MemoryEfficientBatcher(model, 1, 1000, clock=clock, length=len) as batcher:
            responses = await asyncio.gather(*(batcher.add_request(word) for word in "abc"))
            assert [response.output for response in responses] == ["A", "B", "C"]
            assert [response.latency_ms for response in responses] == [1000.0, 1000.0, 2000.0]
        assert model.batches == [["a", "b", "c"], ["c"]]
        assert batcher.stats().out_of_memory == 1

    play(main)


def test_any_batcher_halves_what_runs_out_of_memory_unless_it_is_told_to_compute_once() -> None:
    async def main(clock: ManualClock) -> None:
        async with Batcher(Device(2), clock=clock) as batcher:
            assert await _ask(batcher, [1] * 4) == ["X"] * 4
            assert batcher.stats().memory_limit_mb is None
        async with Batcher(Device(2), isolate_failures=False, clock=clock) as batcher:
            assert await asyncio.gather(*(outcome(batcher, "x") for _ in range(4))) == ["GenerationError"] * 4

    play(main)


def test_what_the_failed_batch_held_is_let_go_before_it_is_tried_again() -> None:
    class Tensor:
        pass

    held: list[weakref.ref[Tensor]] = []
    still_there: list[bool] = []

    async def model(prompts: list[str]) -> list[str]:
        still_there.extend(tensor() is not None for tensor in held)
        tensor = Tensor()
        held.append(weakref.ref(tensor))
        if len(prompts) > 1:
            raise MemoryError
        return prompts

    async def main(clock: ManualClock) -> None:
        async with MemoryEfficientBatcher(model, clock=clock, length=len) as batcher:
            await _ask(batcher, [1] * 4)

    gc.disable()
    try:
        play(main)
    finally:
        gc.enable()
    assert still_there
    assert not any(still_there)


def test_cancelled_requests_are_not_tried_again() -> None:
    async def main(clock: ManualClock) -> None:
        model = Device(2)
        async with MemoryEfficientBatcher(model, 1, 1000, clock=clock, length=len) as batcher:
            tasks = [asyncio.create_task(batcher.compute(letter)) for letter in "abcd"]
            await asyncio.sleep(0.5)
            tasks[0].cancel()
            tasks[3].cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert model.batches == [["a", "b", "c", "d"], ["b"], ["c"]]

    play(main)


# With other shapes and orders

ORDERS: list[Callable[[], Order]] = [Fifo, Urgency]
INNER: list[Callable[[], Shape | None]] = [
    lambda: None,
    lambda: BySize(5),
    lambda: LikeLengths(8),
    lambda: Goodput(8),
    lambda: TargetLatency(1.0, inner=LikeLengths(8)),
]


@_QUICK
@given(
    lengths=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 40), st.integers(0, 9)), min_size=1, max_size=60),
    inner=st.sampled_from(INNER),
    order=st.sampled_from(ORDERS),
    outside=st.booleans(),
    fallen=st.booleans(),
)
def test_every_batch_fits_and_all_are_served(
    lengths: list[tuple[int, int, int]],
    inner: Callable[[], Shape | None],
    order: Callable[[], Order],
    outside: bool,
    fallen: bool,
) -> None:
    memory = Memory(0.1, 1000)
    if fallen:
        memory.learn([], [[Item(0.0, 10)] * 4])
        assert memory.limit_mb == pytest.approx(0.03)
    shape: Shape = WithinMemory(memory, inner())
    policy = Backlog(Policy(TargetLatency(9.0, inner=shape) if outside else shape, order=order()))
    assert policy.memory_limit_mb == memory.limit_mb
    items = [Item(0.0, length, max_tokens=generated, priority=p) for length, generated, p in lengths]
    for item in items:
        policy.add((item,))
    served: list[Item] = []
    while isinstance(decision := policy.decide(0.0), Dispatch):
        assert len(decision.items) == 1 or memory.estimate(decision.items) <= memory.limit_mb
        served += decision.items
        cells = max(item.length for item in decision.items) * len(decision.items)
        policy.observe(cells, sum(item.length for item in decision.items), len(decision.items), 0.01)
    assert sorted(map(id, served)) == sorted(map(id, items))


@_QUICK
@given(st.lists(st.integers(0, 99), min_size=1, max_size=20))
def test_no_batch_with_the_first_has_more_requests(lengths: list[int]) -> None:
    memory = Memory(0.4, 1000)
    items = [Item(0.0, length, max_tokens=10) for length in lengths]
    policy = Backlog(Policy(WithinMemory(memory)))
    for item in items:
        policy.add((item,))
    decision = policy.decide(0.0)
    assert isinstance(decision, Dispatch)
    assert items[0] in decision.items
    others = sorted(items[1:], key=lambda item: item.length)
    most = max(size for size in range(len(items)) if memory.estimate([items[0], *others[:size]]) <= memory.limit_mb)
    assert len(decision.items) == 1 + most


def test_like_lengths_priorities_and_memory_in_one_batcher() -> None:
    async def main(clock: ManualClock) -> None:
        model = Model(base=0.01, each=0.001)
        policy = within_memory(1, 1000, inner=LikeLengths(8), order=Urgency())
        async with Batcher(model, policy, clock=clock, length=len) as batcher:
            for size in (1, 2, 3):
                await _ask(batcher, [5 * size] * size)
            await asyncio.gather(_ask(batcher, [300, 10] * 4), _ask(batcher, [250, 240], priority=0))
            with pytest.raises(ContextLengthExceeded):
                await batcher.compute("x" * 1001)
        assert [list(map(len, batch)) for batch in model.batches[3:]] == [[250, 240], [300] * 3, [10] * 4, [300]]

    play(main)


def test_an_error_of_another_kind_is_not_learned_from() -> None:
    class Broken(Model):
        async def generate_batch(self, prompts: Any) -> list[Any]:
            raise ValueError("no")

    async def main(clock: ManualClock) -> None:
        async with MemoryEfficientBatcher(Broken(), 1, 1000, clock=clock, length=len) as batcher:
            with pytest.raises(ValueError, match="no"):
                await batcher.compute("x")
            assert isinstance((await batcher.add_request("x")).error, GenerationError)
            assert (batcher.stats().memory_limit_mb, batcher.stats().out_of_memory) == (1.0, 0)

    play(main)
