"""Local model files: completeness of folders in transformers format, and cached SHA-256 checksums."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from pathlib import Path

import msgspec

from batchwright.errors import ModelNotFound, UnsupportedModel
from batchwright.models.cache import cache_dir

_INDEX = "model.safetensors.index.json"


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class _Remembered(msgspec.Struct, frozen=True):
    path: str
    size: int
    mtime_ns: int
    inode: int
    sha256: str


def require_complete(folder: Path) -> Path:
    """Return the absolute path of `folder`, which must hold a configuration and all its safetensors weights.

    Raises ModelNotFound naming the missing files, UnsupportedModel if the weights are in another format.
    """
    folder = folder.absolute()
    missing = missing_files(folder)
    if not missing:
        return folder
    other = sorted(path.name for pattern in ("*.bin", "*.pth", "*.gguf") for path in folder.glob(pattern))
    if missing == ["*.safetensors"] and other:
        raise UnsupportedModel(
            f"{folder} holds its weights as {other[0]}, not as safetensors; "
            + (
                f"give the path of the file itself: {folder / other[0]}"
                if other[0].endswith(".gguf")
                else "load it with transformers and write it again with save_pretrained"
            )
        )
    raise ModelNotFound(f"{folder} is not a model in transformers format: it lacks {', '.join(missing)}")


def missing_files(folder: Path) -> list[str]:
    """Return the names of the required files that `folder` lacks."""
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    index = folder / _INDEX
    if index.is_file():
        try:
            shards = set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values())
        except msgspec.DecodeError:
            return [*missing, f"a readable {_INDEX}"]
        return missing + [name for name in sorted(shards) if not (folder / name).is_file()]
    if not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    return missing


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hex. Raises OSError if the file cannot be read."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remembered_sha256(path: Path) -> str:
    """Like `file_sha256`, but read the file again only if its size, time or inode has changed."""
    path = path.resolve()
    stat = path.stat()
    note = cache_dir() / "checksums" / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.json"

    def entry(sha256: str) -> _Remembered:
        return _Remembered(str(path), stat.st_size, stat.st_mtime_ns, stat.st_ino, sha256)

    with contextlib.suppress(OSError, msgspec.DecodeError):
        known = msgspec.json.decode(note.read_bytes(), type=_Remembered)
        if known == entry(known.sha256):
            return known.sha256
    sha256 = file_sha256(path)
    # If the cache cannot be written, the only cost is reading the file again.
    with contextlib.suppress(OSError):
        note.parent.mkdir(parents=True, exist_ok=True)
        draft = note.with_suffix(f".{os.getpid()}-{secrets.token_hex(4)}")
        draft.write_bytes(msgspec.json.encode(entry(sha256)))
        draft.replace(note)
    return sha256
