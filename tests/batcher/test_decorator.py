"""`@batched` on functions and methods."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from batchwright.batcher import batched
from batchwright.policies import simple


def test_calls_of_an_async_function_are_computed_together() -> None:
    sizes: list[int] = []

    @batched()
    async def double(items: list[int]) -> list[int]:
        """Twice as much."""
        sizes.append(len(items))
        return [2 * item for item in items]

    async def main() -> None:
        assert await asyncio.gather(*(double(i) for i in range(20))) == [2 * i for i in range(20)]

    asyncio.run(main())
    assert sizes == [20]
    assert (vars(double)["__name__"], double.__doc__) == ("double", "Twice as much.")
    assert double.batcher.stats().succeeded == 20


def test_calls_of_a_function_from_threads_are_computed_together() -> None:
    sizes: list[int] = []

    @batched(policy=lambda: simple(4, 1e6))
    def double(items: list[int]) -> list[int]:
        sizes.append(len(items))
        return [2 * item for item in items]

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(double, range(8))) == [2 * i for i in range(8)]
    assert sizes == [4, 4]
    double.batcher.shutdown()


def test_what_the_function_raises_reaches_the_caller_to_blame() -> None:
    @batched()
    async def invert(items: list[float]) -> list[float]:
        return [1 / item for item in items]

    async def main() -> None:
        half, nothing = await asyncio.gather(invert(2.0), invert(0.0), return_exceptions=True)
        assert half == 0.5
        assert isinstance(nothing, ZeroDivisionError)

    asyncio.run(main())


class Scaler:
    """A model with state."""

    def __init__(self, factor: int) -> None:
        self.factor = factor
        self.sizes: list[int] = []

    @batched()
    async def scale(self, items: list[int]) -> list[int]:
        self.sizes.append(len(items))
        return [self.factor * item for item in items]

    @batched()
    def scale_sync(self, items: list[int]) -> list[int]:
        return [self.factor * item for item in items]


def test_each_instance_has_a_batcher_of_its_own() -> None:
    two, three = Scaler(2), Scaler(3)

    async def main() -> None:
        assert list(await asyncio.gather(two.scale(1), three.scale(1), two.scale(5))) == [2, 3, 10]

    asyncio.run(main())
    assert (two.sizes, three.sizes) == ([2], [1])
    assert two.scale.batcher is not three.scale.batcher
    assert two.scale.batcher is two.scale.batcher


def test_a_batcher_does_not_keep_its_instance_alive() -> None:
    scaler = Scaler(2)

    async def main(scaler: Scaler) -> int:
        return await scaler.scale(1)

    assert asyncio.run(main(scaler)) == 2
    assert scaler.scale_sync(3) == 6
    instance, batcher = weakref.ref(scaler), weakref.ref(scaler.scale.batcher)
    del scaler
    gc.collect()
    assert instance() is None
    assert batcher() is None
    assert not Scaler.scale._of_instances


def test_a_pending_call_keeps_its_instance_alive() -> None:
    async def main() -> int:
        return await Scaler(7).scale(1)

    assert asyncio.run(main()) == 7
    assert Scaler(7).scale_sync(1) == 7
    assert Scaler(7).scale_sync.submit(1).result() == 7


def test_threads_that_call_first_at_once_share_one_batcher() -> None:
    scaler, ready = Scaler(2), threading.Barrier(4)

    def batcher() -> int:
        ready.wait()
        return id(scaler.scale_sync.batcher)

    with ThreadPoolExecutor(4) as threads:
        assert len(set(threads.map(lambda _: batcher(), range(4)))) == 1


def test_what_cannot_be_decorated_is_refused() -> None:
    with pytest.raises(TypeError, match="function that makes one"):
        batched(simple(2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_waiting=0"):
        batched(max_waiting=0)
    with pytest.raises(ValueError, match="max_batch_size=0"):
        batched(policy=lambda: simple(0))
    with pytest.raises(TypeError, match="policy of type int"):
        batched(policy=lambda: 5)  # type: ignore[arg-type, return-value]
    with pytest.raises(TypeError, match="batch_size"):
        batched(batch_size=8)
    with pytest.raises(TypeError, match="must decorate a function"):
        batched()(5)  # type: ignore[call-overload]

    with pytest.raises(TypeError, match=r"write @batched\(\)"):

        @batched  # type: ignore[arg-type]
        def bare(items: list[int]) -> list[int]:
            return items

    class Slotted:
        __slots__ = ()

        @batched()
        async def f(self, items: list[int]) -> list[int]:
            return items

    with pytest.raises(TypeError, match="__weakref__"):
        _ = Slotted().f
