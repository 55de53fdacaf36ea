"""FlashAttention 3 with fakes for its kernels: what it is told, which steps it is given, what serves in its place."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from batchwright import UnsupportedModel
from batchwright.engine.attention import AttentionShape, KVShape, choice, choose_attention, fa3
from batchwright.engine.attention.fa3 import FlashAttention3, FlashOrTiles, FlashPlan, FlashRule
from batchwright.engine.attention.paged import ReferenceAttention
from batchwright.engine.attention.tiles import TileShape
from batchwright.engine.attention.trial import disagreement

from .flash import FakeFlash, install
from .paged import BLOCK, CPU, Case, Paged, Problem, textbook

KV = KVShape(100, BLOCK, 2, 32, torch.float32, CPU)
LAYER = AttentionShape(4, 32**-0.5)
H100 = TileShape(kv_heads=8, narrow=4, wide=32, block_size=BLOCK, processors=132)


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> FakeFlash:
    install(monkeypatch, fake := FakeFlash())
    return fake


@pytest.fixture
def composite(flash: FakeFlash, monkeypatch: pytest.MonkeyPatch) -> FlashOrTiles:
    """What "auto" chooses on a GPU, with a fake for Triton's kernels too."""
    monkeypatch.setattr(choice, "_triton", lambda shape: Tiles())
    made = choice._on_cuda(KV)
    assert isinstance(made, FlashOrTiles)
    return made


class Tiles(ReferenceAttention):
    name = "triton"


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_to_the_textbook(flash: FakeFlash, window: int | None, dtype: torch.dtype) -> None:
    case = Case(((0, 70), (40, 1), (45, 1), (300, 1), (0, 1), (100, 17)), group=3, window=window, dtype=dtype)
    problem = Problem.of(case)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(
        Paged("fa3", case).run(problem).double(), textbook(problem), rtol=tolerance, atol=tolerance
    )


def test_the_schedule_is_made_once_for_each_kind_of_layer(flash: FakeFlash) -> None:
    paged = Paged("fa3", case := Case(((0, 20), (0, 30))))
    problem = Problem.of(case)
    parts = [(paged.sequence(20), 0, 20), (paged.sequence(30), 0, 30)]
    batch = paged.batch(parts)
    paged.backend.store(torch.cat(problem.keys), torch.cat(problem.values), paged.cache, batch)
    queries = torch.cat(problem.queries).flatten(1)
    for layer in (case.shape, case.shape, replace(case.shape, window=10), case.shape):
        paged.backend.attend(queries, paged.cache, layer, batch)
    assert flash.schedules == 2


def test_a_query_of_strided_rows_is_not_copied(flash: FakeFlash, monkeypatch: pytest.MonkeyPatch) -> None:
    paged = Paged("fa3", case := Case(((0, 20),)))
    problem = Problem.of(case)
    batch = paged.batch([(paged.sequence(20), 0, 20)])
    paged.backend.store(problem.keys[0], problem.values[0], paged.cache, batch)
    together = torch.cat((problem.queries[0].flatten(1), torch.full((20, 7), torch.nan)), 1)
    query = together[:, : case.shape.heads * case.head_dim]
    seen: list[int] = []
    attend = flash.flash_attn_with_kvcache

    def watched(q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append(q.data_ptr())
        return attend(q, *args, **kwargs)

    monkeypatch.setattr(flash, "flash_attn_with_kvcache", watched)
    ours = paged.backend.attend(query, paged.cache, case.shape, batch)
    assert seen == [together.data_ptr()]
    torch.testing.assert_close(ours.double(), textbook(problem), rtol=1e-5, atol=1e-5)


def splits(counts: list[int], contexts: list[int], shared: int = 0, shape: TileShape = H100, **rule: bool) -> int:
    """What the rule says of sequences whose first `shared` keys are the same."""
    width = -(-max(contexts) // BLOCK)
    tables = np.arange(len(counts) * width, dtype=np.int32).reshape(len(counts), width)
    tables[:, : shared // BLOCK] = tables[0, : shared // BLOCK]
    return FlashRule(**rule).splits(tables, np.array(counts), np.array(contexts), shape)


def test_steps_go_to_what_is_faster_at_them() -> None:
    # A short decode is over before FlashAttention 3 has started, and of many decodes tiles make better use.
    assert splits([1], [1000]) == 0
    assert splits([1000], [1000]) > 0
    assert splits([1], [16384]) == 32
    assert splits([1] * 32, [1000] * 32) == 0
    assert splits([1] * 4, [16384] * 4) == 0
    # Keys that many have in common are read once by tiles, which is not worth it beside long prompts.
    assert splits([1] * 2, [16384] * 2) == 32
    assert splits([1] * 2, [16384] * 2, shared=16000) == 0
    assert splits([1] * 4 + [4000], [2000] * 4 + [4000], shared=1600) > 0
    assert splits([1] * 32 + [40], [2000] * 33, shared=1600) == 0
    # Tensor parallelism: a rank has fewer heads.
    assert splits([1], [9000]) == 32
    assert splits([1], [9000], shape=replace(H100, kv_heads=1)) == 0
    assert splits([1], [1000], always=True) == 32


def test_long_sequences_are_split_when_they_would_be_the_last_to_end() -> None:
    assert splits([1] * 8, [4000] * 8, always=True) == 4
    assert splits([1] * 64, [200] * 63 + [30000], always=True) == 32
    # Too many partial results: tiles cut only the long one.
    assert splits([1] * 256, [200] * 255 + [60000], always=True) == 1
    assert splits([1] * 999 + [40], [200] * 1000) == 0
    # A prompt's chunk fills the device by itself; a short one after many keys does not.
    assert splits([8192], [8192]) == 1
    assert splits([100], [16000]) > 1


def test_both_parts_compute_the_steps_that_are_theirs(composite: FlashOrTiles, flash: FakeFlash) -> None:
    assert composite.name == "fa3"
    assert composite.note == ""
    case = Case(((0, 20), (150, 3), (160, 1)), kv_heads=2, group=2)
    problem = Problem.of(case)
    paged = Paged("reference", case)
    paged.backend = composite
    before = len(flash.splits)
    torch.testing.assert_close(paged.run(problem).double(), textbook(problem), rtol=1e-5, atol=1e-5)
    assert len(flash.splits) > before
    decodes = Case(((15, 1), (16, 1)), kv_heads=2, group=2)
    paged = Paged("reference", decodes)
    paged.backend = composite
    sequences = [paged.sequence(total) for total in decodes.totals]
    problem = Problem.of(decodes)
    everything = paged.batch([(each, 0, total) for each, total in zip(sequences, decodes.totals, strict=True)])
    composite.store(torch.cat(problem.keys), torch.cat(problem.values), paged.cache, everything)
    batch = paged.batch([(each, total - 1, 1) for each, total in zip(sequences, decodes.totals, strict=True)])
    before = len(flash.splits)
    queries = torch.cat([q[-1:].flatten(1) for q in problem.queries])
    ours = composite.attend(queries, paged.cache, decodes.shape, batch)
    torch.testing.assert_close(ours.double(), textbook(problem), rtol=1e-5, atol=1e-5)
    assert len(flash.splits) == before


def test_the_trial_tries_split_and_whole_sequences(composite: FlashOrTiles, flash: FakeFlash) -> None:
    assert set(flash.splits) == {1, 4}
    assert disagreement(FlashAttention3(flash), KV, LAYER) is None


class WrongWhenSplit(FakeFlash):
    def flash_attn_with_kvcache(self, *args: Any, **kwargs: Any) -> Tensor:
        out = super().flash_attn_with_kvcache(*args, **kwargs)
        return out * 1.5 if kwargs["num_splits"] > 1 else out


def test_wrong_kernels_never_serve(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    install(monkeypatch, fake := WrongWhenSplit())
    monkeypatch.setattr(choice, "_triton", lambda shape: Tiles())
    with caplog.at_level(logging.WARNING):
        chosen = choice._on_cuda(KV)
    assert chosen.name == "triton"
    assert chosen.note.startswith("not fa3: it differs from the reference by")
    assert "fa3 attention is not used on" in caplog.text
    before = len(fake.splits)
    case = Case(((0, 200), (0, 300)), kv_heads=2, group=2)
    paged = Paged("reference", case)
    paged.backend = chosen
    problem = Problem.of(case)
    torch.testing.assert_close(paged.run(problem).double(), textbook(problem), rtol=1e-5, atol=1e-5)
    assert len(fake.splits) == before


def test_layers_with_a_softcap_go_to_tiles(composite: FlashOrTiles) -> None:
    case = Case(((0, 200), (0, 30)), kv_heads=2, group=2, softcap=5.0)
    paged = Paged("reference", case)
    paged.backend = composite
    problem = Problem.of(case)
    torch.testing.assert_close(paged.run(problem).double(), textbook(problem), rtol=1e-5, atol=1e-5)
    assert composite.name == "triton"
    assert "without softcaps" in composite.note


def test_without_triton_all_steps_are_its_own(monkeypatch: pytest.MonkeyPatch, flash: FakeFlash) -> None:
    monkeypatch.setattr(choice, "_triton", lambda shape: "Triton cannot be imported")
    chosen = choice._on_cuda(KV)
    assert isinstance(chosen, FlashOrTiles)
    assert chosen.name == "fa3"
    paged = Paged("reference", Case(((15, 1),), kv_heads=2))
    batch = paged.batch([(paged.sequence(16), 15, 1)])
    assert chosen.plan(batch, BLOCK).rule == FlashRule(always=True)
    assert isinstance(batch.attention_plan, FlashPlan)


def test_what_it_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedModel, match=r"attention='fa3' is not possible: .*capability 9, which cpu is not"):
        choose_attention("fa3", KV)
    monkeypatch.setattr(fa3, "is_hopper", lambda device: True)
    with pytest.raises(UnsupportedModel, match=r"bfloat16 and float16, not in torch\.float32"):
        choose_attention("fa3", KV)
    half = replace(KV, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedModel, match="head size of 64, 96, 128, 192, 256, not 32"):
        choose_attention("fa3", half)
    with pytest.raises(UnsupportedModel, match="no quantized caches"):
        choose_attention("fa3", replace(half, head_dim=64, quantized=True))
    monkeypatch.setattr(fa3, "_MODULE", "no_such_flash_attn_interface")
    with pytest.raises(UnsupportedModel, match=r"cannot be imported: ModuleNotFoundError.*batchwright\[cuda\]"):
        choose_attention("fa3", replace(half, head_dim=64))


def test_a_softcap_is_refused_by_name(flash: FakeFlash) -> None:
    paged = Paged("fa3", case := Case(((0, 20),), softcap=5.0))
    with pytest.raises(UnsupportedModel, match="built without softcaps"):
        paged.run(Problem.of(case))
