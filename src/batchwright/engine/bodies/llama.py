"""The Llama family with fused products: q, k and v in one, gate and up in one.

Llama, Mistral, Qwen2, Qwen3 and models that share their config (SmolLM and SmolLM2 are Llamas) differ only in three
points, each read from the config or the weights: biases on q, k and v (Qwen2), RMS norms on the heads of q and k
(Qwen3), and layers that see a sliding window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from batchwright.engine.attention import KVShape, choose_attention
from batchwright.engine.attention.choice import PLANNED
from batchwright.engine.attention.native import NativeAttention
from batchwright.engine.bodies.body import LEAST_POSITIONS, KernelSeconds, ModelBody, StepOutput
from batchwright.engine.bodies.compiled import (
    MOST_HEAD_DIM,
    PRODUCT_KINDS,
    CompiledStack,
    compiles,
    fits_kernels,
    kernels_for,
)
from batchwright.engine.bodies.composed import ComposedStack
from batchwright.engine.bodies.decode_graphs import CudaRecorder, DecodeGraphs
from batchwright.engine.bodies.ops import HeadShape, RopeTable
from batchwright.engine.bodies.packed_checkpoints import PackedFormat
from batchwright.engine.bodies.rotation import rotate
from batchwright.engine.bodies.shard import WHOLE, Shard, SplitEmbedding
from batchwright.engine.bodies.weights import LayerWeights, LlamaWeights, Part, Projection, Shape, Weights
from batchwright.engine.native.kernels import LANES, load_kernels
from batchwright.engine.native.weight_groups import GROUP, joined, round_to_groups
from batchwright.engine.step.batch import StepBatch
from batchwright.engine.step.multi_step import DecodedStep, DecodeRun, Interruption
from batchwright.engine_config import QuantizationName
from batchwright.errors import UnsupportedModel
from batchwright.planning.bound import ModelCosts

FAMILY = frozenset({"llama", "mistral", "qwen2", "qwen3"})
GROUPED: frozenset[QuantizationName | None] = frozenset({"int8-group", "int4"})
"""Quantizations with a scale for each group of inputs."""
_DESCRIPTIONS: dict[QuantizationName, str] = {
    "int8": "int8 weights and activations",
    "fp8": "fp8 weights and activations",
    "int8-group": f"int8 weights and activations in groups of {GROUP}",
    "int4": f"int4 weights and int8 activations in groups of {GROUP}",
}
_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Rope types whose frequencies do not depend on the length of the sequence."""


class LlamaBody(ModelBody):
    """Body of a model for whose transformers config, `config`, `unsuitable` returned None.

    With int8 and fp8, products multiply 8 bits by 8 bits: each row of a weight and each row of activations has a scale.
    With fp8 the output layer is not converted, nor are activations where products of few rows are streamed. With
    int8-group and int4, each 32 inputs have a scale, both of weights and of activations, which have 8 bits; with int4
    the weights have 4 bits, except for 8 in the output layer and in what a quantized checkpoint left unquantized. A
    `shard` that is not the whole model is not quantized; its ranks compute each step together, and rank 0 gets the
    logits.
    """

    name = "fused"

    def __init__(
        self,
        config: Any,
        weights: Weights,
        dtype: torch.dtype,
        device: torch.device,
        *,
        quantization: QuantizationName | None = None,
        shard: Shard = WHOLE,
        longest: int | None = None,
    ) -> None:
        """`longest`: the most tokens of a sequence that will be computed, if fewer than the model's maximum."""
        super().__init__()
        quantized = quantization == "int8"
        self.dtype, self.device, self.quantized, self.fp8 = dtype, device, quantized, quantization == "fp8"
        self.quantization = quantization
        # What a quantized checkpoint left unquantized is not rounded to as few bits as the rest.
        self._group_bits = 4 if quantization == "int4" and not weights.packed else 8
        self.vocab_size = config.vocab_size
        self.max_model_len = config.max_position_embeddings
        self._positions = min(self.max_model_len, max(longest or self.max_model_len, LEAST_POSITIONS))
        """Positions that steps may have."""
        shard.require_heads(_head_shape(config))
        self.shard = shard
        self._shape = shard.heads(_head_shape(config))
        tokens = None if shard.is_whole else shard.part(self.vocab_size)
        hidden, vocabulary = config.hidden_size, (config.vocab_size, config.hidden_size)
        embedding = weights.take("model.embed_tokens.weight", vocabulary, rows=tokens)
        in_groups = quantization in GROUPED
        tied = config.tie_word_embeddings or not weights.has("lm_head.weight")
        self._weights = LlamaWeights(
            layers=[
                _layer(config, weights, index, shard, in_groups=in_groups) for index in range(config.num_hidden_layers)
            ],
            norm=weights.take("model.norm.weight", (hidden,)),
            head=Projection(embedding if tied else weights.take("lm_head.weight", vocabulary, rows=tokens)),
            rope=_rope_table(config, self._positions, device),
            shape=self._shape,
            hidden=hidden,
            intermediate=shard.channels(config.intermediate_size).size,
            eps=config.rms_norm_eps,
            tied=tied,
        )
        if quantized:
            embedding = rotate(self._weights, embedding)
        self._embedding = embedding if tokens is None else SplitEmbedding(embedding, tokens.start, shard)
        self.most_kv_heads = max(shard.heads(_head_shape(config), rank).kv_heads for rank in range(shard.ranks))
        """KV heads of the rank that has the most."""
        self._num_layers = config.num_hidden_layers
        self.stack: CompiledStack | ComposedStack
        self._graphs: DecodeGraphs | None = None

    @property
    def description(self) -> str:
        quantized = "" if self.quantization is None else f", {_DESCRIPTIONS[self.quantization]}"
        if self.quantized and isinstance(self.stack, CompiledStack):
            quantized += ", 8-bit keys and values"
        return f"{super().description}, {self.stack.products}{quantized}"

    def kv_shapes(self, num_blocks: int, block_size: int, attention: str) -> list[KVShape]:
        shape = self._shape
        layer = KVShape(num_blocks, block_size, shape.kv_heads, shape.head_dim, self.dtype, self.device)
        on_cpu = self.device.type == "cpu"
        if self.quantized and on_cpu and kernels_for(self._weights, choose_attention(attention, layer)) is not None:
            layer = replace(layer, quantized=True)
        return [layer] * self._num_layers

    def allocate(self, num_blocks: int, block_size: int, attention: str) -> None:
        super().allocate(num_blocks, block_size, attention)
        kernels = None
        if self.shard.is_whole and not self.fp8:
            kernels = kernels_for(self._weights, self.attention, in_groups=self.quantization in GROUPED)
        if kernels is None and self.quantization in GROUPED:
            raise UnsupportedModel(
                f"quantization={self.quantization!r} needs native attention, not {self.attention.name}: leave one of "
                "them out"
            )
        if kernels is None:
            self.stack = ComposedStack(
                self._weights, self.caches, self.attention, quantized=self.quantized, fp8=self.fp8, shard=self.shard
            )
        else:
            kind = PRODUCT_KINDS[self.quantization]
            self.stack = CompiledStack(self._weights, self.caches, kernels, kind=kind, bits=self._group_bits)
            self.free_rows = kernels.product_rows(kind)
        self._weights.head = Projection(torch.empty(0, 0))  # the stack keeps its own packed copy
        if self.device.type == "cuda" and self.attention.name in PLANNED and self.shard.is_whole:
            stack, embedding = self.stack, self._embedding  # not `self`, which would then be freed too late
            self._graphs = DecodeGraphs(
                lambda batch: stack.logits(embedding[batch.token_ids], batch),
                CudaRecorder(self.device),
                max_sequences=num_blocks,
                max_blocks=min(num_blocks, -(-self._positions // block_size)),
            )

    def prepare(self, max_num_seqs: int) -> None:
        if self._graphs is not None:
            self._graphs.prepare(self.caches, max_num_seqs)

    def forward(self, batch: StepBatch) -> Tensor:
        if self._graphs is not None:
            return self._graphs(batch)
        logits = self.stack.logits(self._embedded(batch), batch)
        return logits if self.shard.is_whole else self.shard.joined(logits, self.vocab_size)

    def output(self, batch: StepBatch, greedy: Sequence[bool]) -> StepOutput:
        if isinstance(self.stack, CompiledStack) and self.stack.screens and any(greedy):
            return self.stack.output(self._embedded(batch), batch, greedy)
        return super().output(batch, greedy)

    @property
    def has_multi_step(self) -> bool:
        return isinstance(self.stack, CompiledStack) and isinstance(self._embedding, Tensor)

    def multi_step(self, batch: StepBatch, run: DecodeRun, interruption: Interruption) -> list[DecodedStep]:
        if not isinstance(self.stack, CompiledStack) or not isinstance(self._embedding, Tensor):
            return super().multi_step(batch, run, interruption)
        return self.stack.multi_step(self._embedding, batch, run, interruption)

    def _embedded(self, batch: StepBatch) -> Tensor:
        if isinstance(self._embedding, Tensor):
            return self._embedding.index_select(0, batch.token_ids)  # which takes less time to start than indexing
        return self._embedding[batch.token_ids]

    def rows_for(self, tokens: int) -> int:
        return self.stack.rows_for(tokens)

    @property
    def costs(self) -> ModelCosts | None:
        return self.stack.costs if isinstance(self.stack, CompiledStack) else None

    def watch(self) -> KernelSeconds | None:
        return self.stack.watch() if isinstance(self.stack, CompiledStack) else None

    def why_not_deterministic(self, rows: int, logit_rows: int) -> str | None:
        if self.device.type != "cpu":
            return f"products and attention on {self.device} may round a row differently in other company; use the CPU"
        if not isinstance(self.attention, NativeAttention):
            note = f" ({self.attention.note})" if self.attention.note else ""
            return (
                f"{self.attention.name} attention may round a row differently in other company{note}; native attention "
                f"does not, and needs a C++ compiler, float32 or bfloat16, and a head size divisible by {LANES}"
            )
        # Compiled products sum each output in one order.
        return self.stack.why_not_deterministic(rows, logit_rows) if isinstance(self.stack, ComposedStack) else None


def compiles_here(config: Any) -> bool:
    """Return whether compiled bfloat16 layers run a model with this config, which is not `unsuitable`, here."""
    biased = bool(getattr(config, "mlp_bias", False))
    return compiles(_head_shape(config), config.hidden_size, config.intermediate_size, biased_mlp=biased)


def why_not_in_groups(config: Any, dtype: torch.dtype, device: torch.device, attention: str) -> str | None:
    """Return why products of a model with this config, which is not `unsuitable`, are not in groups here, or None."""
    if device.type != "cpu":
        return f"it is computed on {device}, not on a CPU"
    if dtype is not torch.bfloat16:
        return f"dtype is {str(dtype).removeprefix('torch.')}, not bfloat16"
    if attention not in ("auto", "native"):
        return f"attention is {attention!r}, not native"
    kernels = load_kernels(torch.bfloat16)
    if isinstance(kernels, str):
        return f"there are no compiled kernels: {kernels}"
    if not kernels.product_rows("groups"):
        return "the processor has no AVX2"
    if getattr(config, "mlp_bias", False):
        return "its MLP has biases"
    if not fits_kernels(_head_shape(config)):
        return f"its heads have {_head_shape(config).head_dim} values, not a multiple of {LANES} up to {MOST_HEAD_DIM}"
    uneven_size = uneven(config, GROUP)
    return None if uneven_size is None else f"{uneven_size}, not divisible by {GROUP}"


def unsuitable(config: Any) -> str | None:
    """Return why the fused body cannot run a model with this transformers config, or None if it can."""
    if config.model_type not in FAMILY:
        return f"model_type {config.model_type!r} is not of the Llama family"
    rope_type = (config.rope_parameters or {}).get("rope_type", "default")
    if rope_type not in _ROPE_TYPES:
        return f"rope_type {rope_type!r} depends on the length of the sequence"
    if (config.rope_parameters or {}).get("partial_rotary_factor", 1.0) != 1.0:
        return "only a part of each head is rotated"
    if config.hidden_act != "silu":
        return f"hidden_act {config.hidden_act!r} is not silu"
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if not kv_heads or heads % kv_heads:
        return f"num_attention_heads is {heads}, not divisible by num_key_value_heads {kv_heads}"
    fields = getattr(config, "quantization_config", None)
    if fields is not None and isinstance(reason := PackedFormat.of(fields), str):
        return f"the weights are quantized: {reason}"
    return None


def uneven(config: Any, multiple: int) -> str | None:
    """Return which size of a weight of a model's layers is not divisible by `multiple`, or None if all are."""
    shape = _head_shape(config)
    sizes = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "the size of all queries": shape.heads * shape.head_dim,
        "the size of all keys": shape.kv_heads * shape.head_dim,
    }
    return next((f"{name} is {size}" for name, size in sizes.items() if size % multiple), None)


def _head_shape(config: Any) -> HeadShape:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return HeadShape(config.num_attention_heads, config.num_key_value_heads, head_dim)


def _layer(config: Any, weights: Weights, index: int, shard: Shard, *, in_groups: bool) -> LayerWeights:
    """Return the weights of a layer; `in_groups`: as numbers, where the checkpoint has them."""
    at = f"model.layers.{index}."
    attention, mlp = at + "self_attn.", at + "mlp."
    queries, keys, channels = _rows_of(config, shard)
    heads, hidden, inner = _head_shape(config), config.hidden_size, config.intermediate_size
    num_queries, num_keys = heads.heads * heads.head_dim, heads.kv_heads * heads.head_dim
    return LayerWeights(
        input_norm=weights.take(at + "input_layernorm.weight", (hidden,)),
        qkv=_side_by_side(
            weights,
            {
                attention + "q_proj": (num_queries, queries),
                attention + "k_proj": (num_keys, keys),
                attention + "v_proj": (num_keys, keys),
            },
            hidden,
            in_groups=in_groups,
        ),
        query_norm=weights.maybe(attention + "q_norm.weight", (heads.head_dim,)),
        key_norm=weights.maybe(attention + "k_norm.weight", (heads.head_dim,)),
        output=_summed(weights, attention + "o_proj", (hidden, num_queries), queries, shard, in_groups=in_groups),
        post_norm=weights.take(at + "post_attention_layernorm.weight", (hidden,)),
        gate_up=_side_by_side(
            weights,
            {mlp + "gate_proj": (inner, channels), mlp + "up_proj": (inner, channels)},
            hidden,
            in_groups=in_groups,
        ),
        down=_summed(weights, mlp + "down_proj", (hidden, inner), channels, shard, in_groups=in_groups),
        window=_window(config, index),
    )


def _rows_of(config: Any, shard: Shard) -> tuple[Part | None, Part | None, Part | None]:
    """Return the shard's rows of q, of k and v, and of gate and up; None stands for all."""
    if shard.is_whole:
        return None, None, None
    whole = _head_shape(config)
    heads = shard.part(whole.kv_heads)
    keys = heads.scaled(whole.head_dim)
    return keys.scaled(whole.heads // whole.kv_heads), keys, shard.channels(config.intermediate_size)


def _summed(
    weights: Weights, name: str, shape: Shape, columns: Part | None, shard: Shard, *, in_groups: bool
) -> Projection:
    """Return the shard's columns of a projection whose outputs are summed over all ranks: one rank adds the bias."""
    bias = weights.maybe(name + ".bias", shape[:1]) if shard.rank == 0 else None
    if in_groups and (numbers := weights.numbers(name + ".weight", shape)) is not None:
        return Projection.of_numbers(numbers, bias)
    return Projection(weights.take(name + ".weight", shape, columns=columns), bias)


def _side_by_side(
    weights: Weights, parts: Mapping[str, tuple[int, Part | None]], inputs: int, *, in_groups: bool
) -> Projection:
    """Return projections of the same `inputs` joined into one. `parts`: the outputs of each, and the rows to take."""
    shapes = {name: (outputs, inputs) for name, (outputs, _) in parts.items()}
    numbers = [weights.numbers(name + ".weight", shape) for name, shape in shapes.items()] if in_groups else []
    biases = [weights.maybe(name + ".bias", (outputs,), rows=rows) for name, (outputs, rows) in parts.items()]
    present = [bias for bias in biases if bias is not None]
    if present and len(present) != len(biases):
        raise UnsupportedModel(f"some of {', '.join(parts)} have a bias and some have none")
    bias = torch.cat(present) if present else None
    if any(each is not None for each in numbers):
        return Projection.of_numbers(
            joined(
                [
                    round_to_groups(weights.take(name + ".weight", shape), 8) if each is None else each
                    for (name, shape), each in zip(shapes.items(), numbers, strict=True)
                ]
            ),
            bias,
        )
    taken = [weights.take(name + ".weight", shapes[name], rows=rows) for name, (_, rows) in parts.items()]
    return Projection(torch.cat(taken), bias)


def _window(config: Any, layer: int) -> int | None:
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and kinds[layer] != "sliding_attention":
        return None
    if kinds is None and not getattr(config, "use_sliding_window", True):
        return None
    return window


def _rope_table(config: Any, number: int, device: torch.device) -> RopeTable:
    # Importing transformers' own Llama, which also has this, takes longer than loading a small model.
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        head_dim = _head_shape(config).head_dim
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        frequencies, scaling = 1.0 / config.rope_parameters["rope_theta"] ** exponents, 1.0
    else:
        frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config)
    positions = torch.arange(number, dtype=torch.float32)
    angles = positions[:, None] * frequencies.float()[None, :]
    return RopeTable((angles.cos() * float(scaling)).to(device), (angles.sin() * float(scaling)).to(device))
