"""The compiled kernels: what stands between the products, and how they are built or done without."""

from __future__ import annotations

import ctypes
import fcntl
import multiprocessing
import os
import platform
import shutil
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.engine.attention import KVShape, LayerCache, choose_attention
from batchwright.engine.attention.native import NativeAttention
from batchwright.engine.attention.paged import ReferenceAttention
from batchwright.engine.bodies.ops import HeadShape, LayerOps, NativeOps, RopeTable, TorchOps
from batchwright.engine.native import NativeKernels, load_kernels
from batchwright.engine.native.build import BuildError, library_path, load_library
from batchwright.engine.step.batch import StepBatch, build_batch
from batchwright.engine_config import QuantizationName
from batchwright.errors import UnsupportedModel
from batchwright.scheduling import Chunk, Sequence

from .heads import assert_same_tokens, scaled_rows
from .paged import Case, Paged, Problem, textbook
from .quick_build import QUICKEST, build
from .support import TINY
from .test_decoder import any_number_of_rows_gives_the_same_bits, saved_model
from .test_groups import assert_logits_of_rounded_weights, loaded

CPU = torch.device("cpu")
KERNELS = load_kernels(torch.float32)
pytestmark = pytest.mark.usefixtures("two_threads")
needs_native = pytest.mark.skipif(isinstance(KERNELS, str), reason=f"no compiled kernels: {KERNELS}")
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def ops(dtype: torch.dtype) -> tuple[LayerOps, LayerOps]:
    kernels = load_kernels(dtype)
    assert isinstance(kernels, NativeKernels)
    return NativeOps(kernels), TorchOps(ReferenceAttention())


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    tolerance = 2e-6 if ours.dtype is torch.float32 else 1.6e-2
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def random(*size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


@needs_native
@both_dtypes
@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 40), vectors=st.integers(1, 40), delta=st.booleans())
def test_add_rms_norm(dtype: torch.dtype, rows: int, vectors: int, delta: bool) -> None:
    native, torch_ops = ops(dtype)
    dim = 16 * vectors
    weight, added = random(dim, dtype=dtype, seed=1), random(rows, dim, dtype=dtype, seed=2) if delta else None
    ours, theirs = (random(rows, dim, dtype=dtype) for _ in range(2))
    assert_close(native.add_rms_norm(added, ours, weight, 1e-5), torch_ops.add_rms_norm(added, theirs, weight, 1e-5))
    assert torch.equal(ours, theirs)


@needs_native
@both_dtypes
@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 40), vectors=st.integers(1, 60))
def test_silu_mul(dtype: torch.dtype, rows: int, vectors: int) -> None:
    native, torch_ops = ops(dtype)
    gate_up = random(rows, 32 * vectors, dtype=dtype) * 4
    assert_close(native.silu_mul(gate_up), torch_ops.silu_mul(gate_up))


@needs_native
@both_dtypes
@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 20), heads=st.integers(1, 6), others=st.integers(0, 4), vectors=st.integers(1, 8))
def test_head_rms_norm(dtype: torch.dtype, rows: int, heads: int, others: int, vectors: int) -> None:
    native, torch_ops = ops(dtype)
    head_dim = 16 * vectors
    weight = random(head_dim, dtype=dtype, seed=1)
    ours, theirs = (random(rows, (others + heads) * head_dim, dtype=dtype) for _ in range(2))
    for each, x in ((native, ours), (torch_ops, theirs)):
        each.head_rms_norm(x[:, others * head_dim :], weight, heads, 1e-6)
    assert_close(ours, theirs)


@needs_native
@both_dtypes
@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 30)), min_size=1, max_size=4),
    heads=st.sampled_from([(4, 2), (3, 1), (2, 2)]),
    head_dim=st.sampled_from([16, 32, 64, 80]),
)
def test_rope_and_store(
    dtype: torch.dtype, lengths: list[tuple[int, int]], heads: tuple[int, int], head_dim: int
) -> None:
    """Queries are rotated alike; what was stored is compared by attending to it with one query."""
    shape = HeadShape(*heads, head_dim)
    angles = torch.arange(100)[:, None] * torch.rand(1, head_dim // 2, generator=torch.Generator().manual_seed(3))
    rope = RopeTable(angles.cos(), angles.sin())
    batch, blocks = step(lengths)
    qkv = random(batch.num_tokens, (heads[0] + 2 * heads[1]) * head_dim, dtype=dtype)
    outcomes = []
    for backend in (NativeAttention(kernels(dtype)), ReferenceAttention()):
        cache = zeroed(backend.allocate(KVShape(blocks, 16, heads[1], head_dim, dtype, CPU)))
        each: LayerOps = NativeOps(backend.kernels) if isinstance(backend, NativeAttention) else TorchOps(backend)
        rows = qkv.clone()
        each.rope_and_store(rows, cache, rope, shape, batch)
        outcomes.append((rows[:, : heads[0] * head_dim], *token_major(cache, backend.name)))
    for ours, theirs in zip(*outcomes, strict=True):
        assert_close(ours, theirs)


def zeroed(cache: LayerCache) -> LayerCache:
    cache.keys.zero_()
    cache.values.zero_()
    return cache


def kernels(dtype: torch.dtype) -> NativeKernels:
    found = load_kernels(dtype)
    assert isinstance(found, NativeKernels)
    return found


def step(lengths: list[tuple[int, int]]) -> tuple[StepBatch, int]:
    chunks, blocks = [], 1
    for before, count in lengths:
        sequence = Sequence([0] * (before + count), before + count, before + count)
        needed = -(-(before + count) // 16)
        sequence.table.blocks.extend(range(blocks, blocks + needed))
        blocks += needed
        chunks.append(Chunk(sequence, before, count, False, True))
    return build_batch(chunks, 16, CPU), blocks


def token_major(cache: LayerCache, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values as [blocks, 16, kv heads, head size], from either layout."""
    if name != "native":
        return cache.keys.transpose(1, 2), cache.values.transpose(1, 2)
    per = 4 // cache.keys.element_size()
    keys = cache.keys.unflatten(-1, (16, per)).permute(0, 3, 1, 2, 4).flatten(-2)
    values = cache.values.unflatten(-1, (-1, per)).permute(0, 2, 4, 1, 3).flatten(1, 2)
    return keys, values


@needs_native
@both_dtypes
def test_storing_alone_fills_the_same_layout(dtype: torch.dtype) -> None:
    batch, blocks = step([(5, 20), (0, 16), (31, 1)])
    key, value = random(37, 2, 48, dtype=dtype), random(2, 37, 48, dtype=dtype, seed=1).transpose(0, 1)
    stored = []
    for backend in (NativeAttention(kernels(dtype)), ReferenceAttention()):
        cache = zeroed(backend.allocate(KVShape(blocks, 16, 2, 48, dtype, CPU)))
        backend.store(key, value, cache, batch)
        stored.append(token_major(cache, backend.name))
    for ours, theirs in zip(*stored, strict=True):
        assert torch.equal(ours, theirs)


@needs_native
@both_dtypes
def test_nan_passes_through_every_kernel(dtype: torch.dtype) -> None:
    native, _ = ops(dtype)
    x, weight = random(3, 64, dtype=dtype), random(64, dtype=dtype, seed=1)
    x[1, 5] = torch.nan
    assert native.add_rms_norm(None, x.clone(), weight, 1e-5).isnan().any(-1).tolist() == [False, True, False]
    assert native.silu_mul(x.clone()).isnan().any(-1).tolist() == [False, True, False]
    heads = x.clone()
    native.head_rms_norm(heads, weight[:32], 2, 1e-5)
    assert heads.isnan().any(-1).tolist() == [False, True, False]


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Nothing compiled yet, nothing remembered."""
    monkeypatch.setenv("BATCHWRIGHT_CACHE", str(tmp_path / "cache"))
    load_kernels.cache_clear()
    yield tmp_path
    load_kernels.cache_clear()


def reason() -> str:
    found = load_kernels(torch.float32)
    assert isinstance(found, str)
    shape = KVShape(4, 16, 1, 16, torch.float32, CPU)
    assert choose_attention("auto", shape).name == "sdpa"
    with pytest.raises(UnsupportedModel, match="attention='native' is not possible"):
        choose_attention("native", shape)
    return found


def test_turned_off(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHWRIGHT_NATIVE", "0")
    assert "BATCHWRIGHT_NATIVE=0" in reason()


def test_no_compiler(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(fresh_cache))
    assert "no C++ compiler found (looked for g++, clang++, c++)" in reason()


def test_a_compiler_that_does_not_exist(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "looked for no-such-compiler" in reason()


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("exit 1", id="fails at once"),
        pytest.param("exit 0", id="says nothing about its version"),
        pytest.param('[ "$1" = --version ] && echo broken 1.0 && exit 0; echo no such flag >&2; exit 1', id="fails"),
        pytest.param('[ "$1" = --version ] && echo broken 1.0; exit 0', id="writes nothing"),
        pytest.param(
            '[ "$1" = --version ] && echo broken 1.0 && exit 0; for o; do :; done; echo x > "$o"', id="writes rubbish"
        ),
    ],
)
def test_a_broken_compiler(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    compiler = fresh_cache / "broken"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert reason()


def test_a_cache_folder_that_cannot_be_made(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if isinstance(KERNELS, str):
        pytest.skip(KERNELS)
    (fresh_cache / "file").write_text("")
    monkeypatch.setenv("BATCHWRIGHT_CACHE", str(fresh_cache / "file"))
    assert "cannot compile into" in reason()
    assert "set BATCHWRIGHT_CACHE" in reason()


@needs_native
def test_a_damaged_library_is_compiled_once_more(fresh_cache: Path, tmp_path: Path) -> None:
    source = one_source(tmp_path)
    library_path("one", (source,)).write_bytes(b"")
    library = load_library("one", (source,))
    assert not isinstance(library, str)
    assert library.one() == 1


def test_two_processes_build_at_once(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = noting_compiler(fresh_cache, monkeypatch)
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        paths = {future.result() for future in [pool.submit(build) for _ in range(2)]}
    assert compiled.read_text().split() == [QUICKEST.name]
    assert paths == {str(path) for path in (fresh_cache / "cache" / "native").iterdir()}
    assert isinstance(load_library("quickest", (QUICKEST,)), ctypes.CDLL)
    assert {str(path) for path in (fresh_cache / "cache" / "native").iterdir()} == paths


def noting_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let a compiler be used that appends the name of each source that it compiles to the file that is returned."""
    notes, compiler = folder / "compiled", folder / "noting"
    real = shutil.which("g++") or shutil.which("clang++") or pytest.skip("no C++ compiler")
    compiler.write_text(
        f'#!/bin/sh\nfor o; do case "$o" in *.cpp) basename "$o" >> {notes};; esac; done\nexec {real} "$@"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    return notes


def one_source(folder: Path) -> Path:
    source = folder / "one.cpp"
    source.write_text('extern "C" int one() { return 1; }\n')
    return source


@needs_native
def test_what_another_process_compiles_is_waited_for(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, compiled = one_source(fresh_cache), noting_compiler(fresh_cache, monkeypatch)
    path = library_path("one", (source,))
    content = path.read_bytes()
    path.unlink()
    lock = os.open(fresh_cache / "cache" / "locks" / f"{path.stem}.lock", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    lines = []

    def finish(line: str) -> None:
        lines.append(line)
        path.write_bytes(content)
        os.close(lock)

    assert library_path("one", (source,), finish) == path
    assert lines == ["another process is compiling the kernels; waiting for it"]
    assert compiled.read_text().split() == ["one.cpp"]


@needs_native
def test_what_fails_in_another_process_is_not_tried_again_by_those_that_waited(
    fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, compiled = one_source(fresh_cache), noting_compiler(fresh_cache, monkeypatch)
    path = library_path("one", (source,))
    path.unlink()
    locks = fresh_cache / "cache" / "locks"
    lock = os.open(locks / f"{path.stem}.lock", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)

    def fail(_: str) -> None:
        (locks / f"{path.stem}.failed").write_text("no room for objects")
        os.close(lock)

    with pytest.raises(BuildError, match="no room for objects"):
        library_path("one", (source,), fail)
    assert compiled.read_text().split() == ["one.cpp"]
    assert library_path("one", (source,)) == path, "who begins anew tries it"
    assert not (locks / f"{path.stem}.failed").exists()


@needs_native
def test_what_killed_compilations_left_is_removed(fresh_cache: Path) -> None:
    folder, source = fresh_cache / "cache" / "native", one_source(fresh_cache)
    path = library_path("one", (source,))
    path.unlink()
    for left in (f"{path.stem}-a", "kernels-0-b", "kernels-1-c"):
        (folder / left).mkdir()
        (folder / left / "decoder.o").write_bytes(b"")
    with (fresh_cache / "cache" / "locks" / "kernels-1.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert library_path("one", (source,)) == path
    assert {each.name for each in folder.iterdir()} == {path.name, "kernels-1-c"}


@needs_native
def test_a_build_that_fails_leaves_nothing_behind(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = fresh_cache / "broken"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && echo broken 1.0 && exit 0; exit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(BuildError):
        library_path()
    assert not list((fresh_cache / "cache" / "native").iterdir())


@needs_native
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flag is for x86-64")
def test_kernels_for_a_processor_without_avx512(
    fresh_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Optimized less, which compiles in half of the time.
    compiler = fresh_cache / "older"
    compiler.write_text(f'#!/bin/sh\nexec {shutil.which("g++") or shutil.which("clang++")} "$@" -O1 -mno-avx512f\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    for dtype in (torch.float32, torch.bfloat16):
        native, torch_ops = ops(dtype)
        x, weight = random(5, 96, dtype=dtype), random(96, dtype=dtype, seed=1)
        assert_close(native.add_rms_norm(None, x, weight, 1e-5), torch_ops.add_rms_norm(None, x, weight, 1e-5))
        assert_close(native.silu_mul(x), torch_ops.silu_mul(x))
        case = Case(((40, 1), (50, 1), (0, 30), (200, 5)), head_dim=80, dtype=dtype)
        tolerance = 1e-5 if dtype is torch.float32 else 2e-2
        problem = Problem.of(case)
        torch.testing.assert_close(
            Paged("native", case).run(problem).double(), textbook(problem), rtol=tolerance, atol=tolerance
        )
    kernels = load_kernels(torch.bfloat16)
    assert isinstance(kernels, NativeKernels)
    assert kernels.product_rows("bf16") in (0, 6)  # rows of a tile with AVX2
    if not kernels.has_decoder or torch.cpu._is_amx_tile_supported():
        return
    generator = torch.Generator().manual_seed(2)
    head, rows = (scaled_rows("plain", count, 96, generator) for count in (300, 40))
    logits = assert_same_tokens(
        head, torch.ones(96, dtype=torch.bfloat16), rows, [index % 3 > 0 for index in range(40)]
    )
    normed = rows.double() * rows.double().pow(2).mean(1, keepdim=True).rsqrt()
    torch.testing.assert_close(
        logits.double(), normed.to(torch.bfloat16).double() @ head.double().T, rtol=0.02, atol=0.2
    )
    assert_logits_of_rounded_weights(tmp_path / "int8-group", "llama", TINY, "int8-group")
    assert_logits_of_rounded_weights(tmp_path / "int4", "llama", TINY, "int4")
    saved_model(tmp_path / "qwen3", "qwen3", TINY | {"head_dim": 32})
    precisions: tuple[QuantizationName | None, ...] = (None, "int8", "int8-group", "int4")
    for quantization in precisions:
        any_number_of_rows_gives_the_same_bits(loaded(tmp_path / "qwen3", quantization))
