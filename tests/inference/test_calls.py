"""Several streams as one."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from batchwright.errors import InvalidRequest
from batchwright.inference.calls import merged

from .running import in_real_time


@in_real_time
async def test_merged_streams() -> None:
    closed: list[int] = []

    async def numbers(name: int, count: int, *, fails: bool = False) -> Any:
        try:
            for number in range(count):
                await asyncio.sleep(0)
                yield number
            if fails:
                raise InvalidRequest("no")
        finally:
            closed.append(name)

    several = [item async for item in merged([numbers(0, 2), numbers(1, 3)])]
    assert sorted(several) == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]
    assert [item async for item in merged([numbers(2, 2)])] == [(0, 0), (0, 1)]
    with pytest.raises(InvalidRequest):
        _ = [item async for item in merged([numbers(3, 1, fails=True), numbers(4, 10**9)])]
    async with aclosing(merged([numbers(5, 10**9), numbers(6, 10**9)])) as left:
        await anext(left)
    assert sorted(closed) == [0, 1, 2, 3, 4, 5, 6]
