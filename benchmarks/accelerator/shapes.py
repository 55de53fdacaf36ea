"""What is measured: a model's shape and the sizes of each section."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from benchmarks.throughput.workers.products import step_shapes
from benchmarks.throughput.workers.protocol import Job
from benchmarks.throughput.workloads import SEED, Workload

WEIGHT_BYTES = 2
"""Bytes of one value of weights and of the KV cache: all are bfloat16."""
_FEW = 16


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama, and the sizes of each section for it. Lengths are in tokens."""

    name: str
    config: Mapping[str, Any]
    """Values of transformers' `LlamaConfig`."""
    copy_bytes: int
    product_rows: tuple[int, ...]
    """Numbers of rows in ascending order; the last is a full step of a prompt."""
    decodes: tuple[int, ...]
    """Numbers of sequences that decode at once."""
    context: int
    """Tokens of each of them, prompt and output so far, in the middle of the steps that count."""
    steps: int
    """Steps of decoding that count."""
    mixed: int
    """Requests whose prompt and output lengths are drawn uniformly from `shortest` to `longest`."""
    shortest: int
    longest: int
    sharing: int
    """Requests behind a common prefix."""
    prefix: int
    own: int
    """Prompt tokens of each after the prefix."""

    @property
    def warm_up(self) -> int:
        """Steps of decoding before those that count."""
        return max(1, self.steps // 4)

    @property
    def profiled(self) -> int:
        """Steps of decoding under the profiler."""
        return max(1, self.steps // 8)

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest request of any section."""
        return max(prompt + output for workload in self.workloads for prompt, output in workload.lengths)

    @property
    def workloads(self) -> list[Workload]:
        return [*map(self.decode, self.decodes), self.shared(with_prefix=True), self.lengths()]

    def decode(self, count: int) -> Workload:
        """`count` prompts after which decoding passes through `context` in the middle of the steps that count."""
        prompt = self.context - self.warm_up - self.steps // 2
        return Workload(f"decode-{count}", f"{count} that decode", ((prompt, self._room(count)),) * count)

    def shared(self, *, with_prefix: bool) -> Workload:
        """Prompts behind a common prefix, or their own ends alone."""
        prefix = self.prefix if with_prefix else 0
        lengths = ((prefix + self.own, self._room(self.sharing)),) * self.sharing
        return Workload(f"prefix-{prefix}", f"{self.sharing} behind a prefix of {prefix}", lengths, shared=prefix)

    def lengths(self) -> Workload:
        """The requests of mixed lengths."""
        draw = Random(f"{SEED}/{self.name}")
        lengths = tuple(
            (draw.randint(self.shortest, self.longest), draw.randint(self.shortest, self.longest))
            for _ in range(self.mixed)
        )
        return Workload("mixed", f"{self.mixed} of {self.shortest} to {self.longest} in and out", lengths)

    def short_round(self) -> Job:
        """The uncounted round before `lengths`: a full step of prompts, and a few steps of decoding."""
        job = self.lengths().warm_up(self.vocab_size)
        return {"prompts": job["prompts"][:_FEW], "outputs": job["outputs"][:_FEW]}

    @property
    def vocab_size(self) -> int:
        return int(self.config["vocab_size"])

    def _room(self, count: int) -> int:
        """Tokens that no sequence reaches: the first ones continue while the prompts of the others are computed."""
        return 4 * self.steps + 2 * count


@dataclass(frozen=True, slots=True)
class ModelCost:
    """Cost of computing a model, by its shape."""

    weight_bytes: int
    """Bytes read by each step: the matrices that are multiplied, including the output layer."""
    kv_bytes: int
    """Bytes of one token's keys and values in all layers."""
    layer_flops: int
    """Operations in the products of one token, without the output layer."""
    head_flops: int
    attention_flops: int
    """Operations of one query for each key that it sees, in all layers."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelCost:
        """Return the cost for a `LlamaConfig`'s values."""
        *layers, head = [fan_in * fan_out for fan_in, fan_out in step_shapes(dict(config))]
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        return cls(
            weight_bytes=WEIGHT_BYTES * (sum(layers) + head),
            kv_bytes=2 * WEIGHT_BYTES * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim,
            layer_flops=2 * sum(layers),
            head_flops=2 * head,
            attention_flops=4 * config["num_hidden_layers"] * config["num_attention_heads"] * head_dim,
        )


LLAMA_8B = Shape(
    name="llama-3.1-8b",
    config={
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    copy_bytes=4 * 2**30,
    product_rows=(1, 16, 32, 64, 128, 256, 8192),
    decodes=(1, 32, 128),
    context=1000,
    steps=64,
    mixed=256,
    shortest=100,
    longest=1024,
    sharing=32,
    prefix=16_384,
    own=128,
)

TINY = Shape(
    name="tiny",
    config={
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    copy_bytes=2**20,
    product_rows=(1, 4, 32),
    decodes=(1, 4),
    context=40,
    steps=8,
    mixed=6,
    shortest=4,
    longest=12,
    sharing=3,
    prefix=64,
    own=8,
)

SHAPES = {shape.name: shape for shape in (LLAMA_8B, TINY)}
