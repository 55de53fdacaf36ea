"""Llama layers in one compiled call per step, on the CPU: in bfloat16, in 8 bits, or with weights in groups.

For greedy tokens of models with tied embeddings, a copy of the head in 8 bits finds the tokens that can be the
likeliest at all (`native/screening.h`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from batchwright.engine.attention import AttentionBackend, LayerCache
from batchwright.engine.attention.native import NativeAttention
from batchwright.engine.bodies.body import StepOutput
from batchwright.engine.bodies.ops import HeadShape
from batchwright.engine.bodies.rotation import hadamard, mixed_channels
from batchwright.engine.bodies.weights import LayerWeights, LlamaWeights, Projection
from batchwright.engine.native.decoder import DecoderLayer, DecoderModel, DecoderScreen, DecoderSeconds, NativeDecoder
from batchwright.engine.native.kernels import BLOCK_SIZE, LANES, NativeKernels, ProductKind, load_kernels
from batchwright.engine.native.large_pages import Arena
from batchwright.engine.native.shared_weights import arena_for
from batchwright.engine.native.weight_groups import GroupedWeight, grouped_bytes, pack_groups, round_to_groups
from batchwright.engine.native.weight_panels import (
    PANEL,
    PackedLinear,
    interleaved,
    pack,
    pack_rounded,
    packed_bytes,
    padded,
    quantize_rows,
)
from batchwright.engine.step.batch import StepBatch
from batchwright.engine.step.multi_step import DecodedStep, DecodeRun, Interruption
from batchwright.engine_config import QuantizationName
from batchwright.planning.bound import ModelCosts

PRODUCT_KINDS: dict[QuantizationName | None, ProductKind] = {
    None: "bf16",
    "int8": "int8",
    "int8-group": "groups",
    "int4": "groups",
}
"""Kinds of products of the compiled layers, which have none in fp8."""
MOST_HEAD_DIM = 512
"""Largest head size for which sums of products of 16 bits with 8 bits fit into 32 bits."""


class CompiledStack:
    """Stack that takes the layers out of `weights`, for which `kernels_for` found the kernels."""

    def __init__(
        self,
        weights: LlamaWeights,
        caches: list[LayerCache],
        kernels: NativeKernels,
        *,
        kind: ProductKind,
        bits: int = 8,
    ) -> None:
        """`bits`: bits of the layers' weights in groups, unless these are given as numbers."""
        self.products = "compiled products"
        self.seconds: DecoderSeconds | None = None
        """Where the times of each step are added, if set."""
        self._kind, self._bits = kind, bits
        products = (each for layer in weights.layers for each in (layer.qkv, layer.output, layer.gate_up, layer.down))
        screened = weights.tied and self._kind == "bf16"
        size = sum(map(self._packed_bytes, products)) + self._packed_bytes(weights.head, bits=8)
        self._arena = arena_for(size + (screen_bytes(weights.head) if screened else 0))
        layers = [self._layer(weights.layers.pop(0), cache) for cache in caches]
        screen = screen_for(weights.head, self._arena) if screened else None
        self.screens = screen is not None
        """Whether `output` finds the likeliest tokens without logits."""
        model = DecoderModel(
            layers=layers,
            # The head stays in 8 bits: its rounding error reaches the logits directly.
            head=self._packed(weights.head, bits=8),
            screen=screen,
            norm=weights.norm,
            cosines=weights.rope.cosines,
            sines=weights.rope.sines,
            hidden=weights.hidden,
            intermediate=weights.intermediate,
            heads=weights.shape.heads,
            kv_heads=weights.shape.kv_heads,
            head_dim=weights.shape.head_dim,
            eps=weights.eps,
            mix=weights.mix,
            products=self._kind,
        )
        self._arena.end()
        self._costs = _costs(model)
        self.weight_bytes = sum(each.panels.nbytes for each in (*_products(model), model.head))
        """Bytes of the weights that a step with logits reads; a screen is not counted."""
        self._decoder = NativeDecoder(kernels.library, model)

    def logits(self, residual: Tensor, batch: StepBatch) -> Tensor:
        """Return the logits [R, vocab] for the embeddings `residual` [T, hidden] of a step, which are overwritten."""
        return self._decoder.forward(residual, batch, self.seconds)[0]

    def output(self, residual: Tensor, batch: StepBatch, greedy: Sequence[bool]) -> StepOutput:
        """Return logits, or for `greedy` rows only the likeliest token; only for a stack that `screens`."""
        return StepOutput(*self._decoder.forward(residual, batch, self.seconds, greedy))

    def multi_step(
        self, embedding: Tensor, batch: StepBatch, run: DecodeRun, interruption: Interruption
    ) -> list[DecodedStep]:
        """Compute steps as `ModelBody.multi_step` does; `embedding` is [vocab, hidden], contiguous."""
        steps = self._decoder.multi_step(embedding, batch, run, interruption, screened=self.screens)
        if self.seconds is not None:
            self.seconds.products += sum(step.products for step in steps)
            self.seconds.attention += sum(step.attention for step in steps)
        return steps

    @property
    def costs(self) -> ModelCosts:
        """The costs of the model. In the last layer, rows without logits need only queries, keys and values."""
        return self._costs

    def watch(self) -> DecoderSeconds:
        """Return the object that adds up the seconds of the steps from now on."""
        if self.seconds is None:
            self.seconds = DecoderSeconds()
        return self.seconds

    def rows_for(self, tokens: int) -> int:
        return tokens

    def _layer(self, weights: LayerWeights, cache: LayerCache) -> DecoderLayer:
        return DecoderLayer(
            qkv=self._packed(weights.qkv),
            output=self._packed(weights.output),
            gate_up=self._packed(_interleaved(weights.gate_up)),
            down=self._packed(weights.down),
            input_norm=weights.input_norm,
            post_norm=weights.post_norm,
            query_norm=weights.query_norm,
            key_norm=weights.key_norm,
            keys=cache.keys,
            values=cache.values,
            window=weights.window,
        )

    def _packed(self, projection: Projection, *, bits: int | None = None) -> PackedLinear:
        """Pack a projection, in groups with `bits` or those of the layers."""
        weight, numbers = projection.weight, projection.grouped
        if numbers is not None:
            return pack_groups(numbers.shape, numbers.bits, lambda: numbers, projection.bias, self._arena)
        if self._kind != "groups":
            return pack(weight, projection.bias, self._arena, quantized=self._kind == "int8")
        bits = bits or self._bits
        return pack_groups(weight.shape, bits, lambda: round_to_groups(weight, bits), projection.bias, self._arena)

    def _packed_bytes(self, projection: Projection, *, bits: int | None = None) -> int:
        if (numbers := projection.grouped) is not None:
            return grouped_bytes(numbers.shape, numbers.bits)
        if self._kind != "groups":
            return packed_bytes(projection.weight, quantized=self._kind == "int8")
        return grouped_bytes(projection.weight.shape, bits or self._bits)


def _interleaved(gate_up: Projection) -> Projection:
    """Return gate and up with their outputs interleaved, as the decoder reads them."""
    numbers = gate_up.grouped
    if numbers is None:
        return Projection(interleaved(*gate_up.weight.chunk(2)))
    offsets = None if numbers.offsets is None else interleaved(*numbers.offsets.chunk(2))
    scales = interleaved(*numbers.scales.chunk(2))
    return Projection.of_numbers(GroupedWeight(interleaved(*numbers.numbers.chunk(2)), scales, offsets), None)


def _costs(model: DecoderModel) -> ModelCosts:
    last = model.layers[-1]
    head, screen, seen = model.head, model.screen, Counter(layer.window for layer in model.layers)
    # Products with 8 bits are at most twice as fast.
    likeliest = _operations(head) / (2 if model.products == "bf16" else 1)
    blocks, block_size = last.keys.shape[0], BLOCK_SIZE
    return ModelCosts(
        layer_operations=sum(map(_operations, _products(model))),
        last_operations=sum(map(_operations, (last.output, last.gate_up, last.down))),
        head_operations=_operations(head),
        likeliest_operations=_operations(head) if screen is None else likeliest,
        pair_operations=4 * model.heads * model.head_dim,
        windows=tuple(seen.items()),
        key_bytes=(last.keys.nbytes + last.values.nbytes) / (blocks * block_size),
    )


def _products(model: DecoderModel) -> list[PackedLinear]:
    """Return the products of all layers."""
    return [each for layer in model.layers for each in (layer.qkv, layer.output, layer.gate_up, layer.down)]


def _operations(product: PackedLinear) -> int:
    return 2 * product.inputs * product.outputs


def kernels_for(weights: LlamaWeights, attention: AttentionBackend, *, in_groups: bool = False) -> NativeKernels | None:
    """Return the kernels with which a `CompiledStack` can run `weights`, or None."""
    if not isinstance(attention, NativeAttention):
        return None
    kernels, biased = attention.kernels, weights.biased_mlp
    if not in_groups and _torch_multiplies_faster():
        return None
    return kernels if _runs(kernels, weights.shape, weights.hidden, weights.intermediate, biased_mlp=biased) else None


def compiles(shape: HeadShape, hidden: int, intermediate: int, *, biased_mlp: bool) -> bool:
    """Return whether a `CompiledStack` with native attention runs a bfloat16 model of these sizes on this machine."""
    kernels = load_kernels(torch.bfloat16)
    if _torch_multiplies_faster():
        return False
    return shape.head_dim % LANES == 0 and _runs(kernels, shape, hidden, intermediate, biased_mlp=biased_mlp)


def _torch_multiplies_faster() -> bool:
    """Return whether torch has AMX tiles, which our products do not use; it has no products of weights in groups."""
    return torch.cpu._is_amx_tile_supported()  # noqa: SLF001


def fits_kernels(shape: HeadShape) -> bool:
    """Return whether compiled layers can have heads of this size."""
    return shape.head_dim % LANES == 0 and shape.head_dim <= MOST_HEAD_DIM


def _runs(kernels: NativeKernels | str, shape: HeadShape, hidden: int, intermediate: int, *, biased_mlp: bool) -> bool:
    if isinstance(kernels, str) or not kernels.has_decoder:
        return False
    widths = (hidden, intermediate, (shape.heads + 2 * shape.kv_heads) * shape.head_dim)
    return all(width % PANEL == 0 for width in widths) and shape.head_dim <= MOST_HEAD_DIM and not biased_mlp


_MOST_MIXED = 8
"""Most vectors that are rotated together: more would spread outliers no better, and take longer."""
_ROUNDED_UP = 1 + 1e-4
_MOST_LENGTH = 1e15
"""Greatest length of a column whose bounds cannot overflow."""
_AT_A_TIME = 512
"""Columns that are rounded at a time."""


def screen_for(head: Projection, arena: Arena) -> DecoderScreen | None:
    """Return the screen of `head`, which is kept as it is; None if it has a bias or weights that are not finite."""
    columns = head.weight
    if head.bias is not None or columns.dtype != torch.bfloat16 or not columns.is_contiguous():
        return None

    @cache
    def rounded() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        # Allocating memory for each piece would cost more in page faults than all of the computation.
        exact, rounded = torch.empty((2, _AT_A_TIME, columns.shape[1]), dtype=torch.float64)
        pieces = [_rounded(piece, exact[: len(piece)], rounded[: len(piece)]) for piece in columns.split(_AT_A_TIME)]
        whole, scales, lengths, errors = (torch.cat(each) for each in zip(*pieces, strict=True))
        return whole, scales, lengths, errors

    outputs = columns.shape[0]
    bias = padded(torch.zeros(outputs))
    bias[outputs:] = -torch.inf
    lengths = arena.hold(bias.shape, torch.float32, lambda: padded(rounded()[2]))
    errors = arena.hold(bias.shape, torch.float32, lambda: padded(rounded()[3]))
    if not bool((lengths < _MOST_LENGTH).all()):  # NaN fails this, too
        return None
    rough = pack_rounded(columns.shape, lambda: rounded()[:2], bias if len(bias) > outputs else None, arena)
    mixed = min(mixed_channels(columns.shape[1]), _MOST_MIXED)
    return DecoderScreen(rough, lengths, errors, columns, mixed)


def screen_bytes(head: Projection) -> int:
    """Return the bytes that `screen_for` takes from the arena."""
    lengths_and_errors = 2 * torch.float32.itemsize * (head.weight.shape[0] + PANEL)
    return packed_bytes(head.weight, quantized=True) + lengths_and_errors


def turn(x: Tensor, out: Tensor) -> None:
    """Rotate groups of vectors of `x` [rows, dim] float64 by a Hadamard matrix, which keeps products, into `out`."""
    size = min(mixed_channels(x.shape[1]), _MOST_MIXED) * LANES
    torch.matmul(x.view(-1, size), hadamard(size).double(), out=out.view(-1, size))


def _rounded(columns: Tensor, exact: Tensor, rounded: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Round `columns` [n, dim] to 8 bits -> [n, dim] int8, and [n] float32 each: scales, lengths and greatest errors.

    An error is how far a product with a row of length 1 can be from the exact one. `exact` and `rounded` [n, dim]
    float64 are overwritten.
    """
    turn(rounded.copy_(columns), exact)
    whole, scales = quantize_rows(exact)
    torch.mul(whole, scales.double()[:, None], out=rounded)
    lengths, own = rounded.norm(dim=1), exact.norm(dim=1)
    lost = exact.sub_(rounded).norm(dim=1)
    in_sums = (columns.shape[1] + 64) * 2.0**-22  # rounding of sums of so many values in float32, in the rotation too
    errors = (lost + own * in_sums) * _ROUNDED_UP
    return whole, scales, (lengths * _ROUNDED_UP).float(), errors.float()
