"""Packed weights that several processes hold once: the same tensors, packed by one of them, whatever happens to it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from batchwright.engine.native.large_pages import Arena
from batchwright.engine.native.shared_weights import SharedArena, arena_for, share_weights
from batchwright.engine.native.weight_panels import PackedLinear, pack, packed_bytes
from batchwright.errors import UnsupportedModel

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memory files are Linux's")

WEIGHT = torch.randn(100, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
BIAS = torch.randn(100, generator=torch.Generator().manual_seed(4)).bfloat16()
SIZE = packed_bytes(WEIGHT, quantized=False) + packed_bytes(WEIGHT, quantized=True)


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = os.memfd_create("weights")
    yield descriptor
    os.close(descriptor)


def packed(arena: Arena) -> list[PackedLinear]:
    made = [pack(WEIGHT, BIAS, arena, quantized=quantized) for quantized in (False, True)]
    arena.end()
    return made


def same(one: list[PackedLinear], other: list[PackedLinear]) -> bool:
    names = ("panels", "bias", "scales", "sums")
    pairs = [(getattr(a, name), getattr(b, name)) for a, b in zip(one, other, strict=True) for name in names]
    return all((a is None and b is None) or bool(torch.equal(a, b)) for a, b in pairs)


def test_what_one_has_packed_others_hold(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = packed(Arena(SIZE))
    first = packed(SharedArena(SIZE, memory, "model"))
    monkeypatch.setattr("batchwright.engine.native.weight_panels.padded", None)  # nothing is packed again
    monkeypatch.setattr("batchwright.engine.native.weight_panels.quantize_rows", None)
    second = [
        pack(WEIGHT, None, arena, quantized=quantized)
        for arena in [SharedArena(SIZE, memory, "model")]
        for quantized in (False, True)
    ]
    assert same(first, plain)
    for mine, theirs in zip(second, plain, strict=True):
        assert torch.equal(mine.panels, theirs.panels)
        assert mine.panels.data_ptr() % 64 == 0


def test_a_process_that_dies_meanwhile_leaves_the_work_to_others(memory: int) -> None:
    program = (
        "import os, torch\n"
        "from batchwright.engine.native.shared_weights import SharedArena\n"
        f"arena = SharedArena({SIZE}, {memory}, 'model')\n"
        "arena.hold((1000,), torch.uint8, lambda: torch.full((1000,), 7, dtype=torch.uint8))\n"
        "os._exit(9)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], pass_fds=[memory], check=False)
    assert ended.returncode == 9
    assert same(packed(SharedArena(SIZE, memory, "model")), packed(Arena(SIZE)))


def test_one_waits_for_another_and_takes_what_it_has(memory: int) -> None:
    arena = SharedArena(SIZE, memory, "model")
    program = (
        "import sys, torch\n"
        "from batchwright.engine.native.shared_weights import SharedArena\n"
        "print('waits', flush=True)\n"
        f"arena = SharedArena({SIZE}, {memory}, 'model')\n"
        "held = arena.hold((5,), torch.uint8, lambda: 1 / 0)\n"
        "arena.end()\n"
        "print(held.tolist())\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], pass_fds=[memory], stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "waits\n"
        arena.hold((5,), torch.uint8, lambda: torch.arange(5, dtype=torch.uint8))
        arena.end()
        assert other.stdout.read() == "[0, 1, 2, 3, 4]\n"
    assert other.returncode == 0


def test_other_weights_than_those_that_are_there_are_refused(memory: int) -> None:
    packed(SharedArena(SIZE, memory, "model"))
    for size, model in ((SIZE, "another"), (4 * SIZE + 2**22, "model")):
        with pytest.raises(UnsupportedModel, match="files were changed"):
            SharedArena(size, memory, model)
    arena = SharedArena(SIZE, memory, "model")
    pack(WEIGHT, None, arena, quantized=True)
    with pytest.raises(RuntimeError, match="in another way"):
        arena.end()


def test_the_memory_is_for_the_next_model_only(memory: int) -> None:
    share_weights(memory, "model")
    assert isinstance(arena_for(SIZE), SharedArena)
    assert not isinstance(arena_for(SIZE), SharedArena)


def test_nobody_writes_to_it_later(memory: int) -> None:
    program = (
        "import torch\n"
        "from batchwright.engine.native.shared_weights import SharedArena\n"
        f"arena = SharedArena({SIZE}, {memory}, 'model')\n"
        "held = arena.hold((5,), torch.uint8, lambda: torch.zeros(5, dtype=torch.uint8))\n"
        "arena.end()\n"
        "print(held.sum().item(), flush=True)\n"
        "held.fill_(1)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], pass_fds=[memory], check=False, capture_output=True, text=True
    )
    assert ended.stdout == "0\n"
    assert ended.returncode == -11
