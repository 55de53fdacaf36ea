"""Numbers of GGUF files: those of the formats, as gguf reads them."""

from __future__ import annotations

import numpy as np
import pytest

from batchwright.models.gguf_numbers import Numbers, Stored, bytes_needed, numbers_of, rounded

gguf = pytest.importorskip("gguf")

ROWS, INPUTS = 24, 512
EXACT = ["Q8_0", "Q4_0", "Q4_1", "Q4_K"]
ROUNDED = ["Q5_0", "Q5_K", "Q6_K", "Q3_K"]


def blocks(kind: str, draw: np.random.Generator) -> np.ndarray:
    """Random bytes of a weight [ROWS, INPUTS], with scales of a usual size."""
    size, width = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    data = draw.integers(0, 256, (ROWS, INPUTS // size, width), dtype=np.uint8)
    for at in {"Q4_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q3_K": (108,)}.get(kind, (0,)):
        scales = draw.uniform(0.001, 0.01, data.shape[:2]).astype(np.float16)
        data[:, :, at : at + 2] = scales[..., None].view(np.uint8)
    return data.reshape(ROWS, -1)


def values(data: np.ndarray, kind: str) -> np.ndarray:
    found: np.ndarray = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
    return found


@pytest.mark.parametrize("kind", EXACT)
def test_the_numbers_are_those_of_the_file(kind: str) -> None:
    data = blocks(kind, np.random.default_rng(0))
    expected = values(data, kind)
    found = numbers_of(data, kind, expected, None)
    assert found is not None
    assert found.bits == (8 if kind == "Q8_0" else 4)
    error = np.abs(found.values() - expected).max() / np.abs(expected).max()
    # Scales of Q4_K are products, which are rounded.
    assert error <= (2**-11 if kind == "Q4_K" else 1e-7)


@pytest.mark.parametrize("kind", ROUNDED)
def test_other_numbers_are_rounded_to_8_bits(kind: str) -> None:
    data = blocks(kind, np.random.default_rng(1))
    expected = values(data, kind)
    found = numbers_of(data, kind, expected, None)
    assert found is not None
    assert found.bits == 8
    groups = np.abs(expected).reshape(ROWS, -1, 32).max(axis=2).repeat(32, axis=1)
    assert (np.abs(found.values() - expected) <= groups * (0.5 / 127 + 2**-10)).all()


@pytest.mark.parametrize("kind", EXACT)
def test_rows_of_heads_that_llama_cpp_puts_in_pairs_become_halves(kind: str) -> None:
    data = blocks(kind, np.random.default_rng(2))
    heads, half = 3, ROWS // 3 // 2
    halves = values(data, kind).reshape(heads, half, 2, INPUTS).swapaxes(1, 2).reshape(ROWS, INPUTS)
    found = numbers_of(data, kind, halves, heads)
    assert found is not None
    assert np.abs(found.values() - halves).max() <= 2**-11 * np.abs(halves).max()


def test_what_cannot_be_kept_as_numbers() -> None:
    data = blocks("Q8_0", np.random.default_rng(3))
    expected = values(data, "Q8_0")
    assert numbers_of(data, "Q8_0", expected[::-1].copy(), 3) is None
    assert numbers_of(expected.view(np.uint8), "F32", expected, None) is None
    assert numbers_of(data, "Q6_K", expected[:, :40], None) is None


def test_two_numbers_of_4_bits_are_a_byte() -> None:
    data = blocks("Q4_0", np.random.default_rng(4))
    found = numbers_of(data, "Q4_0", values(data, "Q4_0"), None)
    assert found is not None
    stored = found.tensors()
    assert stored["numbers"].shape == (ROWS, INPUTS // 2)
    assert (stored["numbers"] & 15 == found.numbers[:, ::2]).all()
    assert (stored["numbers"] >> 4 == found.numbers[:, 1::2]).all()


@pytest.mark.parametrize("kind", [*EXACT, *ROUNDED])
def test_a_conversion_needs_room_for_values_and_for_numbers_beside_them(kind: str) -> None:
    data = blocks(kind, np.random.default_rng(5))
    found = numbers_of(data, kind, values(data, kind), None)
    assert found is not None
    number = ROWS * INPUTS
    weight, other = Stored("blk.11.ffn_up.weight", kind, number), Stored("token_embd.weight", kind, 1000)
    assert bytes_needed([weight, other], 2, as_numbers=False) == 2 * (number + 1000)
    numbers = sum(each.nbytes for each in found.tensors().values())
    assert bytes_needed([weight, other], 2, as_numbers=True) == 2 * (number + 1000) + numbers + 2 * 1000
    plain = Stored("blk.0.attn_q.weight", "F32", number)
    assert bytes_needed([plain], 4, as_numbers=True) == 2 * 4 * number


def test_a_group_of_zeros() -> None:
    weight = np.zeros((2, 64), np.float32)
    weight[1, 40] = -0.5
    found: Numbers = rounded(weight)
    assert np.abs(found.values() - weight).max() < 1e-3
    assert found.scales[0, 0] == 0
