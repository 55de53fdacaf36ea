"""The Triton kernels against the textbook: interpreted on the CPU, compiled where there is a CUDA device."""

from __future__ import annotations

import logging
import math
from array import array
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import long_form
from torch import Tensor

from batchwright import UnsupportedModel
from batchwright.engine.attention import AttentionShape, KVShape, LayerCache, choice, choose_attention
from batchwright.engine.attention.paged import ReferenceAttention
from batchwright.engine.attention.sdpa import SdpaAttention
from batchwright.engine.attention.trial import TriedAttention, disagreement
from batchwright.engine.step.batch import StepBatch
from batchwright.scheduling import Sequence

from .paged import BLOCK, CPU, Case, Paged, Problem, textbook

pytest.importorskip("triton", reason="Triton is not installed")
from batchwright.engine.attention.tiled import TritonAttention

DEVICE = torch.device("cuda") if torch.cuda.is_available() else CPU


def step(case: Case, problem: Problem, shared: tuple[int, ...] = ()) -> Tensor:
    """All keys stored at once, then one step; each of `shared` sequences begins with the blocks of the first."""
    paged = Paged("triton", case, device=DEVICE)
    sequences = [paged.sequence(total) for total in case.totals]
    for index in shared:
        _share(sequences[0], sequences[index], min(case.lengths[0][0], case.lengths[index][0]) // BLOCK)
        count = min(case.lengths[0][0], case.lengths[index][0]) // BLOCK * BLOCK
        problem.keys[index][:count] = problem.keys[0][:count]
        problem.values[index][:count] = problem.values[0][:count]
    everything = paged.batch([(sequence, 0, total) for sequence, total in zip(sequences, case.totals, strict=True)])
    keys, values = torch.cat(problem.keys).to(DEVICE), torch.cat(problem.values).to(DEVICE)
    paged.backend.store(keys, values, paged.cache, everything)
    parts = [(sequence, *length) for sequence, length in zip(sequences, case.lengths, strict=True)]
    queries = [q[before:].flatten(1) for q, (before, _) in zip(problem.queries, case.lengths, strict=True)]
    return paged.backend.attend(torch.cat(queries).to(DEVICE), paged.cache, case.shape, paged.batch(parts)).cpu()


def _share(first: Sequence, other: Sequence, blocks: int) -> None:
    other.table.blocks = array("i", [*first.table.blocks[:blocks], *other.table.blocks[blocks:]])


cases = st.builds(
    Case,
    lengths=st.lists(
        st.tuples(st.integers(0, 250), st.one_of(st.just(1), st.integers(1, 40))), min_size=1, max_size=4
    ).map(tuple),
    kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 3, 4, 8, 20]),
    head_dim=st.sampled_from([16, 48, 64, 80]),
    window=st.none() | st.integers(1, 100),
    softcap=st.none() | st.sampled_from([2.0, 30.0]),
    dtype=st.sampled_from([torch.float32, torch.float16]),  # the interpreter does not multiply bfloat16
)


@settings(max_examples=long_form.examples(10, long=20))
@given(case=cases, shared=st.booleans())
def test_equal_to_the_textbook(case: Case, shared: bool) -> None:
    problem = Problem.of(case)
    ours = step(case, problem, tuple(range(1, len(case.lengths))) if shared else ())
    assert ours.dtype == case.dtype
    assert ours.is_contiguous()
    tolerance = 1e-5 if case.dtype is torch.float32 else 5e-3
    torch.testing.assert_close(ours.double(), textbook(problem), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("window", [None, 30, 300])
def test_prompts_decodes_and_a_shared_prefix_in_one_step(window: int | None) -> None:
    lengths = ((400, 1), (420, 1), (130, 1), (0, 1), (300, 9), (500, 1), (20, 40))
    case = Case(lengths, kv_heads=1, group=4, head_dim=32, window=window)
    problem = Problem.of(case)
    ours = step(case, problem, shared=(1, 2, 4, 5))
    torch.testing.assert_close(ours.double(), textbook(problem), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:All-NaN slice")
@pytest.mark.parametrize("where", ["queries", "keys", "values"])
def test_nan_reaches_the_output_of_its_own_sequence_alone(where: str) -> None:
    case = Case(((140, 1), (150, 1), (0, 30), (160, 5)), kv_heads=1)
    clean = step(case, Problem.of(case), shared=(1,))
    starts = [0, 1, 2, 32, 37]
    for poisoned, (before, _) in enumerate(case.lengths):
        problem = Problem.of(case)
        getattr(problem, where)[poisoned][before, 0, 3] = math.nan
        ours = step(case, problem, shared=(1,))
        rows = slice(starts[poisoned], starts[poisoned + 1])
        assert ours[rows].isnan().any()
        ours[rows] = clean[rows]
        assert torch.equal(ours, clean)


def test_large_scores_do_not_overflow() -> None:
    case = Case(((300, 1), (0, 40)), kv_heads=1)
    problem = Problem.of(case)
    problem.queries = [q * 200 for q in problem.queries]
    torch.testing.assert_close(step(case, problem).double(), textbook(problem), rtol=2e-3, atol=2e-3)


def test_what_triton_cannot_do_is_refused() -> None:
    shape = KVShape(4, BLOCK, 1, 64, torch.float64, DEVICE)
    with pytest.raises(UnsupportedModel, match=r"attention='triton' is not possible: .*torch.float64"):
        choose_attention("triton", shape)
    with pytest.raises(UnsupportedModel, match="at most 256, not 512"):
        choose_attention("triton", replace(shape, head_dim=512, dtype=torch.float32))


KV = KVShape(40, BLOCK, 2, 32, torch.float32, DEVICE)
LAYER = AttentionShape(6, 32**-0.5)


@pytest.mark.parametrize("layer", [LAYER, replace(LAYER, window=50, softcap=20.0)])
def test_the_kernels_pass_their_trial(layer: AttentionShape) -> None:
    assert disagreement(TritonAttention(), KV, layer) is None


class WrongAttention(ReferenceAttention):
    """Forgets the newest of many keys, as a kernel with a wrong mask might."""

    name = "wrong"

    def attend(self, query: Tensor, cache: LayerCache, shape: AttentionShape, batch: StepBatch) -> Tensor:
        shorter = replace(batch, contexts=[max(1, context - context // 100) for context in batch.contexts])
        return super().attend(query, cache, shape, shorter)


class FailingAttention(ReferenceAttention):
    """Cannot be compiled for some layers."""

    name = "failing"

    def attend(self, query: Tensor, cache: LayerCache, shape: AttentionShape, batch: StepBatch) -> Tensor:
        if shape.window is not None:
            raise RuntimeError("out of resource: shared memory")
        return super().attend(query, cache, shape, batch)


def test_a_wrong_kernel_never_serves(caplog: pytest.LogCaptureFixture) -> None:
    tried = TriedAttention(WrongAttention(), SdpaAttention())
    with caplog.at_level(logging.WARNING):
        tried.try_out(KV, LAYER)
    assert isinstance(tried.current, SdpaAttention)
    assert tried.name == "sdpa"
    assert "not wrong: it differs from the reference by" in tried.note
    assert "wrong attention is not used on" in caplog.text


def test_layers_of_another_kind_are_tried_when_they_come() -> None:
    tried = TriedAttention(FailingAttention(), SdpaAttention())
    tried.try_out(KV, LAYER)
    assert tried.name == "failing"
    windowed = Case(((40, 1), (0, 20)), group=3, window=10)
    paged = Paged("reference", windowed, device=DEVICE)
    paged.backend = tried
    problem = Problem.of(windowed)
    tolerance = 1e-5
    torch.testing.assert_close(paged.run(problem).double(), textbook(problem), rtol=tolerance, atol=tolerance)
    assert tried.name == "sdpa"
    assert "it fails: RuntimeError: out of resource" in tried.note


def test_without_triton_sdpa_serves_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_triton", lambda shape: "Triton cannot be imported")
    shape = replace(KV, device=torch.device("cuda"))
    chosen = choose_attention("auto", shape)
    assert isinstance(chosen, SdpaAttention)
    assert chosen.note == "not triton: Triton cannot be imported"
