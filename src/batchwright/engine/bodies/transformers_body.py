"""Any decoder-only architecture of transformers, with our paged attention plugged in through `AttentionInterface`.

transformers runs everything else of the model on one flat row of tokens. In place of the attention mask that the model
requests, each layer is passed the sliding window that the mask describes, since our attention knows the rest. Not every
architecture that accepts the switch obeys it, so three things are checked when the model is loaded: each layer really
calls our attention; its mask is causal, or causal within a window, and nothing else; and logits computed through our
attention, in two chunks beside another sequence, equal those of the model's own forward pass.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from batchwright.engine.attention import AttentionShape, KVShape
from batchwright.engine.bodies.body import ModelBody
from batchwright.engine.pretrained import load_pretrained
from batchwright.engine.step.batch import StepBatch, build_batch
from batchwright.errors import UnsupportedModel
from batchwright.kv import BlockManager
from batchwright.scheduling import Chunk, Sequence

_PROBE_TOKENS = 24
_CHANGING_ROPE = frozenset({"dynamic", "longrope"})
"""Rope types whose frequencies change for all sequences of a step once one exceeds the model's original context."""
_serial = itertools.count()


class TransformersBody(ModelBody):
    """Body that runs transformers' code. Raises `UnsupportedModel` if that cannot run the architecture correctly."""

    name = "transformers"

    def __init__(self, folder: Path, config: Any, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.dtype, self.device = dtype, device
        self._architecture = str((getattr(config, "architectures", None) or [config.model_type])[0])
        if self._architecture.endswith("ForSequenceClassification"):
            raise UnsupportedModel(
                f"{folder} holds a {self._architecture}, which ranks, scores or classifies texts and generates none: "
                "it is loaded as a Classifier, or with --classifier"
            )
        self._interface = f"batchwright_{next(_serial)}"
        self._batch: StepBatch | None = None
        self._recorded: dict[int, tuple[int, int]] | None = None
        self._model = self._load(folder)
        text = self._model.config.get_text_config()
        self._config = text
        self.vocab_size = text.vocab_size
        self.max_model_len = min(getattr(text, "max_position_embeddings", None) or 2**20, _fixed_rope_length(text))
        self._kv = self._record_shapes(text.num_hidden_layers)
        self._check_outputs()

    def kv_shapes(self, num_blocks: int, block_size: int, attention: str) -> list[KVShape]:
        return [KVShape(num_blocks, block_size, *heads, self.dtype, self.device) for heads in self._kv]

    def forward(self, batch: StepBatch) -> Tensor:
        self._batch = batch
        try:
            out = self._model(
                input_ids=batch.token_ids[None],
                position_ids=batch.positions[None],
                use_cache=False,
                logits_to_keep=batch.logit_rows,
            )
        finally:
            self._batch = None
        logits: Tensor = out.logits[0]
        return logits

    def _load(self, folder: Path) -> Any:
        from transformers import AttentionInterface, AutoModelForCausalLM
        from transformers.masking_utils import AttentionMaskInterface

        # The registries live as long as the process, and must not keep the model alive.
        attend, mask = weakref.WeakMethod(self._attend), weakref.WeakMethod(self._mask)
        AttentionInterface.register(self._interface, lambda *args, **kwargs: _alive(attend)(*args, **kwargs))
        AttentionMaskInterface.register(self._interface, lambda *args, **kwargs: _alive(mask)(*args, **kwargs))
        wanted = f"{self._architecture} as a causal language model"
        model, _ = load_pretrained(
            AutoModelForCausalLM, folder, wanted, self.dtype, self.device, attn_implementation="eager"
        )
        if not model._supports_attention_backend:  # noqa: SLF001 the flag has no public name
            raise UnsupportedModel(
                f"{self._architecture} does not take another attention implementation (its "
                "_supports_attention_backend is false), so its KV cache cannot be paged"
            )
        if self.device.type == "cpu":
            _compute_single_rows_twice(model)
        return model

    def _attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Attend for a layer of transformers: query [1, heads, T, dim], key and value [1, kv_heads, T, dim]."""
        _, heads, tokens, head_dim = query.shape
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        if value.shape[-1] != head_dim:
            raise UnsupportedModel(f"{self._architecture} has values of another size than its keys")
        if others.get("s_aux") is not None or others.get("position_bias") is not None:
            raise UnsupportedModel(f"{self._architecture} adds attention sinks or a position bias to its scores")
        if self._recorded is not None:
            self._recorded[layer] = (key.shape[1], head_dim)
            return query.transpose(1, 2).contiguous(), None
        if self._batch is None:
            raise RuntimeError("attention was called outside of a step")
        cache, batch = self.caches[layer], self._batch
        self.attention.store(key[0].transpose(0, 1), value[0].transpose(0, 1), cache, batch)
        shape = AttentionShape(
            heads,
            head_dim**-0.5 if scaling is None else float(scaling),
            attention_mask.window if isinstance(attention_mask, _Window) else self._window(layer, sliding_window),
            softcap,
        )
        flat = query[0].transpose(0, 1).reshape(tokens, heads * head_dim)
        attended = self.attention.attend(flat, cache, shape, batch)
        return attended.view(1, tokens, heads, head_dim), None

    def _mask(self, *_: Any, local_size: int | None = None, mask_function: Any = None, **__: Any) -> Tensor:
        """Return the window that a mask of transformers describes."""
        if self._recorded is not None and not _is_window(mask_function, local_size, self.device):
            raise UnsupportedModel(f"{self._architecture} masks its attention otherwise than causally in a window")
        return _Window.of(local_size)

    def _window(self, layer: int, given: int | None) -> int | None:
        """Return the window of a layer that was passed no mask."""
        if given is not None:
            return given
        kinds = getattr(self._config, "layer_types", None)
        if kinds is None or kinds[layer] != "sliding_attention":
            return None
        return int(self._config.sliding_window)

    @torch.inference_mode()
    def _record_shapes(self, layers: int) -> list[tuple[int, int]]:
        self._model.set_attn_implementation(self._interface)
        self._recorded = {}
        try:
            self._model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=self.device), use_cache=False)
            recorded = self._recorded
        except UnsupportedModel:
            raise
        except Exception as error:  # the model's code may not support this, and then can raise anything
            raise UnsupportedModel(
                f"{self._architecture} fails with another attention implementation: {type(error).__name__}: {error}"
            ) from error
        finally:
            self._recorded = None
        if sorted(recorded) != list(range(layers)):
            raise UnsupportedModel(
                f"{self._architecture}: {len(recorded)} of {layers} layers attend through AttentionInterface; the "
                "others keep a state of their own, which cannot be paged"
            )
        return [recorded[layer] for layer in range(layers)]

    @torch.inference_mode()
    def _check_outputs(self) -> None:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, self.vocab_size, (_PROBE_TOKENS,), generator=generator).tolist()
        self._model.set_attn_implementation("eager")
        ids = torch.tensor([tokens], device=self.device)
        own = self._model(input_ids=ids, use_cache=False).logits[0, -1].float()
        self._model.set_attn_implementation(self._interface)
        self.allocate(8, 16, "reference")
        ours = self._probe(tokens).float()
        error = (ours - own).norm() / own.norm()
        tolerance = 1e-3 if self.dtype is torch.float32 else 0.1
        if not error < tolerance:
            raise UnsupportedModel(
                f"{self._architecture}: logits through paged attention differ from the model's own by {error:.2g} "
                f"(relative norm); running it would give wrong output"
            )

    def _probe(self, tokens: list[int]) -> Tensor:
        """Return the logits [vocab] after `tokens`, computed in two chunks, the second beside another sequence."""
        blocks = BlockManager(8, 16, prefix_caching=False)
        first, other = (Sequence(list(tokens), len(tokens), len(tokens)) for _ in range(2))
        for sequence in (first, other):
            blocks.grow(sequence.table, len(tokens))
        half = len(tokens) // 2
        self.forward(build_batch([Chunk(first, 0, half, True, False)], 16, self.device))
        rest = Chunk(first, half, len(tokens) - half, False, True)
        beside = Chunk(other, 0, half, True, False)
        return self.forward(build_batch([beside, rest], 16, self.device))[0]


def _alive(method: weakref.WeakMethod[Callable[..., Any]]) -> Callable[..., Any]:
    found = method()
    if found is None:
        raise RuntimeError("attention was called after the model was closed")
    return found


def _compute_single_rows_twice(model: nn.Module) -> None:
    """Double single rows (see `ModelBody.rows_for`); a doubled row is known by the stride of 0 between its copies."""
    from transformers.pytorch_utils import Conv1D

    def double(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor] | None:
        x = args[0]
        return (x.expand(*x.shape[:-2], 2, -1),) if x.dim() > 1 and x.numel() == x.shape[-1] else None

    def halve(module: nn.Module, args: tuple[Tensor], out: Tensor) -> Tensor | None:
        doubled = args[0].dim() > 1 and args[0].shape[-2] == 2 and args[0].stride(-2) == 0
        return out[..., :1, :] if doubled else None

    for module in model.modules():
        if type(module) in (nn.Linear, Conv1D):  # a subclass may return something other than rows
            module.register_forward_pre_hook(double)
            module.register_forward_hook(halve)


class _Window(Tensor):
    """Empty tensor in place of a mask, which carries the window of the layers that it is passed to."""

    window: int | None

    @classmethod
    def of(cls, window: int | None) -> _Window:
        mask = torch.empty(0).as_subclass(cls)
        mask.window = window
        return mask


def _is_window(mask_function: Any, window: int | None, device: torch.device) -> bool:
    """Return whether `mask_function(batch, head, query, key)` holds only for the last `window` keys up to the query."""
    span = 64 if window is None else window
    far = torch.tensor([0, 1, 2, span - 1, span, span + 1, 2 * span, 2 * span + 1, 3 * span], device=device)
    query, key = far.clamp(min=0)[:, None], far.clamp(min=0)[None, :]
    zero = torch.zeros((), dtype=torch.long, device=device)
    expected = key <= query
    if window is not None:
        expected &= key > query - window
    return torch.equal(torch.as_tensor(mask_function(zero, zero, query, key)).expand_as(expected), expected)


def _fixed_rope_length(config: Any) -> int:
    """Return how many positions have rotary frequencies that do not depend on the longest sequence of the step."""
    parameters = getattr(config, "rope_parameters", None) or {}
    each = parameters.values() if all(isinstance(value, dict) for value in parameters.values()) else [parameters]
    changing = [p for p in each if p and p.get("rope_type", "default") in _CHANGING_ROPE]
    lengths = [p.get("original_max_position_embeddings") or config.max_position_embeddings for p in changing]
    return min(lengths, default=2**20)
