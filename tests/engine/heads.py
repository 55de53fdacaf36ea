"""Models that are a head and nothing else, and what to try it with."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchwright.engine.attention import KVShape, choose_attention
from batchwright.engine.bodies.compiled import CompiledStack, kernels_for
from batchwright.engine.bodies.ops import HeadShape, RopeTable
from batchwright.engine.bodies.weights import LayerWeights, LlamaWeights, Projection
from batchwright.engine.sampling import row_maxima
from batchwright.engine.step.batch import RowMasks, StepBatch, build_batch
from batchwright.scheduling import Chunk
from batchwright.scheduling import Sequence as Tokens

BF16 = torch.bfloat16
CPU = torch.device("cpu")
_HEAD_DIM = 32


def head_alone(head: Tensor, norm: Tensor) -> CompiledStack:
    """A model that consists of a norm with the weight `norm`, and `head`: its one layer adds nothing."""
    hidden = head.shape[1]
    shape = HeadShape(1, 1, _HEAD_DIM)
    backend = choose_attention("native", KVShape(400, 16, 1, _HEAD_DIM, BF16, CPU))

    def nothing(outputs: int, inputs: int) -> Projection:
        return Projection(torch.zeros(outputs, inputs, dtype=BF16))

    ones = torch.ones(hidden, dtype=BF16)
    layer = LayerWeights(
        input_norm=ones,
        qkv=nothing(3 * _HEAD_DIM, hidden),
        query_norm=None,
        key_norm=None,
        output=nothing(hidden, _HEAD_DIM),
        post_norm=ones,
        gate_up=nothing(64, hidden),
        down=nothing(hidden, 32),
        window=None,
    )
    weights = LlamaWeights(
        layers=[layer],
        norm=norm,
        head=Projection(head),
        rope=RopeTable(torch.ones(16, _HEAD_DIM // 2), torch.zeros(16, _HEAD_DIM // 2)),
        shape=shape,
        hidden=hidden,
        intermediate=32,
        eps=0.0,
        tied=True,
    )
    kernels = kernels_for(weights, backend)
    assert kernels is not None
    cache = backend.allocate(KVShape(400, 16, 1, _HEAD_DIM, BF16, CPU))
    return CompiledStack(weights, [cache], kernels, kind="bf16")


def step(rows: int) -> StepBatch:
    """So many sequences of one token, the logits of all wanted."""
    chunks = []
    for row in range(rows):
        sequence = Tokens([0], 1, 1)
        sequence.table.blocks.append(row)
        chunks.append(Chunk(sequence, 0, 1, True, True))
    return build_batch(chunks, 16, CPU)


def assert_same_tokens(
    head: Tensor, norm: Tensor, x: Tensor, greedy: Sequence[bool], allowed: Sequence[Tensor | None] = ()
) -> Tensor:
    """The screen finds for the greedy rows of `x` [rows, hidden] what all logits say, and gives the others' logits.

    `allowed` [rows]: the tokens that each row may have, [vocab] bool, or None for any. Returns the logits of all rows.
    """
    stack = head_alone(head, norm)
    assert stack.screens
    with torch.inference_mode():
        expected = stack.logits(x.clone(), step(len(x)))
        batch = step(len(x))
        if having := [each for each in allowed if each is not None]:
            batch.masks = RowMasks.of([each is not None for each in allowed], bits_of(torch.stack(having)))
        output = stack.output(x.clone(), batch, greedy)
    masked = expected.clone()
    for row, each in enumerate(allowed):
        if each is not None:
            masked[row, ~each] = -torch.inf
    best, likeliest = row_maxima(masked)
    assert list(output.likeliest) == [row for row, wanted in enumerate(greedy) if wanted]
    for row, token in output.likeliest.items():
        assert token == (int(likeliest[row]) if math.isfinite(best[row]) else None)
    others = [row for row, wanted in enumerate(greedy) if not wanted]
    assert torch.equal(output.logits, expected[others])
    return expected


def bits_of(allowed: Tensor) -> npt.NDArray[np.int32]:
    """Return masks [rows, words] of `allowed` [rows, vocab] bool."""
    padded = np.pad(allowed.numpy(), ((0, 0), (0, -allowed.shape[1] % 32)))
    return np.packbits(padded, axis=1, bitorder="little").view(np.int32)


def scaled_rows(kind: str, rows: int, hidden: int, generator: torch.Generator) -> Tensor:
    x = torch.randn(rows, hidden, generator=generator)
    if kind == "outliers":
        x[:, :: max(1, hidden // 3)] *= 300
    elif kind == "sparse":
        x *= torch.rand(rows, hidden, generator=generator) < 0.1
    elif kind == "few":  # many equal ones: ties, exact and after rounding
        x = x[torch.randint(0, max(1, rows // 8), (rows,), generator=generator)]
    elif kind == "near":  # all but equal to one another
        x = x[:1] + x * 2.0**-9
    elif kind == "uneven":
        x *= torch.exp(4 * torch.randn(rows, 1, generator=generator))
    elif kind == "one direction":  # every logit has the same sign, behind the last column is 0
        x = x.abs()
    elif kind == "other direction":
        x = -x.abs()
    elif kind == "half":
        x[:, : hidden // 2] = 0
    elif kind == "beside":  # and all but orthogonal to any of those
        x[:, : hidden // 2] *= 1000
    elif kind == "single":  # which 8 bits hold exactly, so products of many are one only in bfloat16
        x = torch.zeros(rows, hidden)
        x[:, 0] = 1 + torch.rand(rows, generator=generator) / 8
    return x.to(BF16)
