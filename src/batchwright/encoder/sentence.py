"""Settings of a sentence-transformers folder, and the pooling of tokens into one vector."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from batchwright.errors import UnsupportedModel

_LEGACY = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_POOLINGS = ("cls", "mean", "max", "lasttoken")


@dataclass(frozen=True, slots=True)
class SentenceSettings:
    """How tokens become one vector. Defaults are those of sentence-transformers for a folder without `modules.json`."""

    pooling: tuple[str, ...] = ("mean",)
    """One or several of cls, mean, max and lasttoken; the vectors of several are concatenated."""
    normalize: bool = False
    max_length: int | None = None
    lower_case: bool = False
    shortens: bool = False
    """Whether the model was trained so that beginnings of its vectors are also vectors (Matryoshka)."""
    shorter: tuple[int, ...] = ()
    """Allowed lengths of such beginnings. Empty: any."""


def read_settings(folder: Path) -> SentenceSettings:
    """Read `modules.json` and the files that it names. Raises `UnsupportedModel` for an unknown module or pooling."""
    modules = _read(folder / "modules.json")
    config = _read(folder / "config.json") or {}
    # The fields by which vLLM recognizes such models.
    shorter = tuple(config.get("matryoshka_dimensions") or ())
    shortens = bool(config.get("is_matryoshka")) or bool(shorter)
    if modules is None:
        return SentenceSettings(shortens=shortens, shorter=shorter)
    pooling: tuple[str, ...] = ()
    normalize = False
    transformer: dict[str, Any] = {}
    for module in modules:
        kind = str(module["type"]).rpartition(".")[2]
        if kind == "Transformer":
            transformer = _read(folder / module["path"] / "sentence_bert_config.json") or {}
        elif kind == "Pooling" and not normalize:
            pooling = _pooling(_read(folder / module["path"] / "config.json") or {})
        elif kind == "Normalize":
            normalize = True
        else:
            raise UnsupportedModel(f"{folder} wants a {kind} module: only Transformer, Pooling and Normalize are known")
    return SentenceSettings(
        pooling=pooling or ("mean",),
        normalize=normalize,
        max_length=transformer.get("max_seq_length"),
        lower_case=bool(transformer.get("do_lower_case")),
        shortens=shortens,
        shorter=shorter,
    )


def pool(hidden: Tensor, starts: Tensor, lengths: Tensor, pooling: tuple[str, ...]) -> Tensor:
    """Pool `hidden` [cells, dim] -> [sequences, dim · number of poolings] float32; cells between sequences are ignored.

    `starts` and `lengths` are [sequences] int64, no length is 0.
    """
    starts, lengths = starts.to(hidden.device), lengths.to(hidden.device)
    wide = hidden.float()
    if {"mean", "max"} & set(pooling) and int(lengths.sum()) != len(wide):
        ends = lengths.cumsum(0)
        shift = torch.repeat_interleave(starts - (ends - lengths), lengths)
        tokens = wide[torch.arange(int(ends[-1]), device=wide.device) + shift]
    else:
        tokens = wide
    parts = []
    for mode in pooling:
        if mode == "cls":
            parts.append(wide[starts])
        elif mode == "lasttoken":
            parts.append(wide[starts + lengths - 1])
        else:
            parts.append(torch.segment_reduce(tokens, mode, lengths=lengths))
    return torch.cat(parts, dim=1)


def _pooling(config: dict[str, Any]) -> tuple[str, ...]:
    named = config.get("pooling_mode")
    if named is None:
        named = [mode for field, mode in _LEGACY.items() if config.get(field)]
    modes = (named,) if isinstance(named, str) else tuple(named)
    for mode in modes:
        if mode not in _POOLINGS:
            raise UnsupportedModel(f"pooling {mode!r} is not known: {', '.join(_POOLINGS)} are")
    return modes


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
