"""Which models there are, and which of them are in the cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from batchwright.models import cache
from batchwright.models.cache import CachedModel, Manifest
from batchwright.models.cache_keys import builtin_key, is_gguf_key
from batchwright.models.catalog import BUILTIN, BuiltinModel


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """One line of `batchwright models list`. `size` is in bytes, once in the cache."""

    name: str
    kind: str
    size: int
    licence: str
    state: Literal["cached", "absent", "damaged"]
    description: str
    path: Path | None


def inventory() -> list[ModelStatus]:
    """The built-in models, and after them the GGUF files that were converted into the cache."""
    builtin = [_builtin_status(model) for model in BUILTIN.values()]
    return builtin + [
        _stored_status(entry, entry.manifest, entry.manifest.origin.source, "converted GGUF file")
        for entry in cache.entries()
        if entry.manifest is not None and is_gguf_key(entry.folder.name)
    ]


def _builtin_status(model: BuiltinModel) -> ModelStatus:
    entry = cache.inspect(builtin_key(model))
    if entry.manifest is not None:
        return _stored_status(entry, entry.manifest, model.name, model.description)
    state: Literal["absent", "damaged"] = "damaged" if entry.damage else "absent"
    return ModelStatus(model.name, model.kind, model.installed_bytes, model.licence, state, model.description, None)


def _stored_status(entry: CachedModel, manifest: Manifest, name: str, description: str) -> ModelStatus:
    return ModelStatus(
        name=name,
        kind=manifest.origin.kind,
        size=sum(manifest.files.values()),
        licence=manifest.origin.licence,
        state="cached" if entry.ready else "damaged",
        description=description,
        path=entry.folder if entry.ready else None,
    )
