"""Steps that are replayed: on the CPU from a tape that repeats every operation on the same memory, as a graph does."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from batchwright.engine.bodies import load_body
from batchwright.engine.bodies.body import ModelBody
from batchwright.engine.bodies.decode_graphs import DecodeGraphs
from batchwright.engine.step.batch import StepBatch, build_batch
from batchwright.engine_config import EngineConfig
from batchwright.scheduling import Chunk, Sequence

from .flash import FakeFlash, install
from .support import TINY, tiny_model

pytest.importorskip("triton", reason="Triton is not installed")
from batchwright.engine.attention import choice, fa3, tiled, tiles
from batchwright.engine.bodies import triton_ops as fused_kernels

if torch.cuda.is_available():
    pytest.skip("there are graphs of CUDA's own here: test_cuda.py", allow_module_level=True)

CPU = torch.device("cpu")
BLOCKS, BLOCK = 120, 16


class Tape(TorchDispatchMode):
    """All that torch and the kernels did, to be done again on the same memory. `output` is NaN until then."""

    playing: ClassVar[Tape | None] = None

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._again: list[Callable[[], object]] = []
        Tape.playing = self
        try:
            with self:
                self.output = compute()
        finally:
            Tape.playing = None
        with torch.inference_mode():
            self.output.fill_(torch.nan)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        known = {id(each) for each in (*args, *kwargs.values()) if isinstance(each, Tensor)}
        memory = {_memory(each) for each in args if isinstance(each, Tensor) and not each.is_mkldnn}

        def again() -> None:
            for old, new in zip(_tensors(made), _tensors(func(*args, **kwargs)), strict=True):
                # What is an argument was written where it lies; a view of one lies there too.
                if id(old) not in known and _memory(old) not in memory:
                    old.copy_(new)

        self._again.append(again)
        return made

    def launched(self, launch: Callable[[], object]) -> None:
        self._again.append(launch)

    def replay(self) -> None:
        for again in self._again:
            again()


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(made: Any) -> list[Tensor]:
    return [each for each in (made if isinstance(made, (tuple, list)) else [made]) if isinstance(each, Tensor)]


@dataclass
class Taped:
    """A kernel whose launches a tape records, and no operation of its interpreter."""

    kernel: Any

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            if Tape.playing is not None:
                Tape.playing.launched(lambda: self.kernel[grid](*args, **kwargs))
            with _disable_current_modes():
                self.kernel[grid](*args, **kwargs)

        return launch


@pytest.fixture(autouse=True)
def _taped(monkeypatch: pytest.MonkeyPatch) -> None:
    # An interpreter is slow: as few tiles as there can be.
    monkeypatch.setattr(tiles, "_NARROW", replace(tiles._NARROW, programs=2))
    for name in ("attend_tiles", "merge_partials"):
        monkeypatch.setattr(tiled, name, Taped(getattr(tiled, name)))
    for name in ("add_rms_norm", "head_rms_norm", "silu_mul", "rope_and_store"):
        monkeypatch.setattr(fused_kernels, name, Taped(getattr(fused_kernels, name)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    heads = {"head_dim": 16, "num_attention_heads": 3, "num_key_value_heads": 1}
    tiny_model(path, "qwen3", **TINY | heads)
    return path


class Company:
    """Sequences of one model, computed through graphs, and beside it by the reference."""

    def __init__(self, folder: Path, prompts: list[list[int]], record: Any = Tape, attention: str = "triton") -> None:
        self.body, self.plain = _body(folder, attention), _body(folder, "reference")
        self.computed = 0
        self.graphs = DecodeGraphs(self.compute, record, max_sequences=6, max_blocks=16)
        self.sequences: list[Sequence] = []
        blocks = 1
        for prompt in prompts:
            sequence = Sequence(list(prompt), len(prompt), len(prompt) + 40)
            first = self.sequences[0] if self.sequences else sequence
            shared = _alike(first.tokens, prompt) // BLOCK if first is not sequence else 0
            own = -(-(len(prompt) + 40) // BLOCK) - shared
            sequence.table.blocks.extend([*first.table.blocks[:shared], *range(blocks, blocks + own)])
            blocks += own
            self.sequences.append(sequence)
        self._fill()

    def _fill(self) -> None:
        """The keys and values of the prompts, by the reference, whose caches have the same layout."""
        chunks = [Chunk(sequence, 0, sequence.num_prompt, False, True) for sequence in self.sequences]
        with torch.inference_mode():
            self.plain.forward(build_batch(chunks, BLOCK, CPU))
            for ours, theirs in zip(self.body.caches, self.plain.caches, strict=True):
                ours.keys.copy_(theirs.keys)
                ours.values.copy_(theirs.values)

    def compute(self, batch: StepBatch) -> Tensor:
        self.computed += 1
        return self.body.forward(batch)

    def step(self, parts: list[tuple[Sequence, int, int]]) -> None:
        """The logits of every sequence must be those of the reference."""
        chunks = [Chunk(sequence, start, count, False, True) for sequence, start, count in parts]
        with torch.inference_mode():
            ours = self.graphs(build_batch(chunks, BLOCK, CPU))
            expected = self.plain.forward(build_batch(chunks, BLOCK, CPU))
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)

    def decode(self, *which: int) -> int:
        """One token more of each of these. How often the step was computed as ever."""
        before, parts = self.computed, []
        for index in which:
            sequence = self.sequences[index]
            sequence.tokens.append((7 * len(sequence.tokens) + index) % TINY["vocab_size"])
            parts.append((sequence, len(sequence.tokens) - 1, 1))
        self.step(parts)
        return self.computed - before


def _body(folder: Path, attention: str) -> ModelBody:
    body = load_body(folder, EngineConfig(body="fused", dtype="float32", device="cpu"))
    body.allocate(BLOCKS, BLOCK, attention)
    return body


def _alike(one: list[int], other: list[int]) -> int:
    return next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(other))


ALIKE = [[*range(1, 150)], [*range(1, 140), 3, 4], [5, 6], [*range(40, 77)], [9]]
"""The first two have so much in common that tiles read it once."""
PROMPTS = [[*range(1, 90)], [*range(1, 80), 3, 4], [5, 6], [*range(40, 60)], [9]]


def test_replayed_steps_are_the_reference(folder: Path) -> None:
    company = Company(folder, PROMPTS)
    # As ever, to see what the layers are like; to warm up; twice beside a replay; and then only replayed. Three are
    # padded to four.
    assert [company.decode(0, 1, 2) for _ in range(5)] == [1, 1, 2, 1, 0]
    assert [company.decode(3, 0, 1, 2), company.decode(1, 4, 0)] == [0, 0]
    # Another number of sequences: a graph of its own.
    assert [company.decode(0, 1, 2, 3, 4) for _ in range(3)] == [1, 2, 1]
    # No decode of one token each: as ever.
    before = company.computed
    company.step([(company.sequences[0], 60, 12), (company.sequences[2], 0, 1)])
    assert company.computed == before + 1
    assert company.graphs.recorded == [4, 6]
    assert company.graphs.disabled is None


class Stale(Tape):
    """Forgets to read one of its inputs again."""

    def replay(self) -> None:
        if not self.output.isnan().all():
            return
        super().replay()


def test_a_wrong_replay_never_serves(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    company = Company(folder, PROMPTS[:3], Stale)
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            company.decode(0, 1)
    assert company.graphs.disabled is not None
    assert "WrongReplay: a replayed step differs by" in caplog.text


def test_a_failed_recording_is_logged_and_nothing_else(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail(compute: Callable[[], Tensor]) -> Tape:
        raise RuntimeError("operation not permitted when stream is capturing")

    company = Company(folder, PROMPTS[:3], fail)
    with caplog.at_level(logging.WARNING):
        assert [company.decode(0, 1) for _ in range(4)] == [1, 1, 1, 1]
    assert caplog.text.count("not replayed from CUDA graphs: RuntimeError: operation not permitted") == 1


def test_what_cannot_be_recorded_for_lack_of_memory_is_computed(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorded: list[int] = []

    def record(compute: Callable[[], Tensor]) -> Tape:
        recorded.append(1)
        if len(recorded) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return Tape(compute)

    company = Company(folder, PROMPTS, record)
    with caplog.at_level(logging.WARNING):
        assert [company.decode(0, 1) for _ in range(4)] == [1, 1, 1, 1]
        for _ in range(3):
            company.decode(0, 1, 2, 3)
    assert "not replayed from a CUDA graph: CUDA out of memory" in caplog.text
    assert company.graphs.disabled is None
    assert company.graphs.recorded == [4]
    assert len(recorded) == 2


def test_attention_without_tiles_is_not_replayed(folder: Path) -> None:
    company = Company(folder, PROMPTS[:2], attention="sdpa")
    assert [company.decode(0, 1) for _ in range(3)] == [1, 1, 1]
    assert company.graphs.disabled == "the attention that runs cannot be replayed"


def _launch(kernel: Callable[[], object]) -> None:
    """Carry out a kernel, which a tape records as one."""

    def launch() -> None:
        with _disable_current_modes():
            kernel()

    if Tape.playing is not None:
        Tape.playing.launched(launch)
    launch()


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> FakeFlash:
    """Kernels of FlashAttention 3 that "auto" chooses, for steps of any size."""
    install(monkeypatch, fake := FakeFlash(_launch))
    monkeypatch.setattr(choice, "_native", choice._on_cuda)
    monkeypatch.setattr(fa3, "_LEAST_KEYS", 1)
    monkeypatch.setattr(fa3, "_FEW_DECODES", 8)
    return fake


def test_steps_of_either_attention_have_graphs_of_their_own(folder: Path, flash: FakeFlash) -> None:
    company = Company(folder, ALIKE, attention="auto")
    assert company.body.attention.name == "fa3"
    assert [company.decode(2, 3, 4) for _ in range(4)] == [1, 1, 2, 1]
    before = len(flash.splits)
    assert [company.decode(0, 1, 2) for _ in range(4)] == [1, 2, 1, 0]
    assert len(flash.splits) == before
    assert [company.decode(4, 3, 2), company.decode(1, 0, 3), company.decode(2, 3, 0)] == [0, 0, 0]
    assert [kind.splits for kind in company.graphs._graphs] == [(1,), (0,)]
    assert company.graphs.disabled is None


def test_the_schedule_of_a_replay_is_made_in_it(folder: Path, flash: FakeFlash) -> None:
    company = Company(folder, PROMPTS, attention="auto")
    for _ in range(3):
        company.decode(2, 3)
    made = flash.schedules
    assert company.decode(2, 3) == 1  # beside the replay
    assert flash.schedules == made + 1
    assert company.decode(2, 3) == 0


def test_another_number_of_splits_is_another_graph(
    folder: Path, flash: FakeFlash, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "_INTERPRETED_PROCESSORS", 4)
    company = Company(folder, PROMPTS, attention="auto")
    for which in ((0, 3), (3, 3, 2, 4)):
        for _ in range(4):
            company.decode(*dict.fromkeys(which))
    assert {kind.splits for kind in company.graphs._graphs} == {(4,)}


def test_no_room_for_partial_results_where_there_are_none(folder: Path) -> None:
    company = Company(folder, ALIKE)
    for _ in range(3):
        company.decode(2, 3, 4)
        company.decode(0, 1, 2)
    kinds = {kind.merged: graph for kind, graph in company.graphs._graphs.items()}
    assert sorted(kinds) == [False, True]
    assert all(room.tiling.num_partials == 0 for room in kinds[False].rooms.values())
    assert company.graphs.disabled is None


def test_a_recorded_step_is_never_planned_by_the_host(folder: Path) -> None:
    company = Company(folder, PROMPTS)
    for _ in range(2):
        company.decode(0, 1)
    (graph,) = company.graphs._graphs.values()
    assert company.graphs._inputs is not None
    step = company.graphs._inputs.step(graph, company.graphs._shapes, None)
    step.attention_plan = None
    with torch.inference_mode(), pytest.raises((ValueError, IndexError)):
        company.body.forward(step)
