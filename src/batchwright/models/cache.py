"""The model cache: each entry is a folder that is complete or absent, even after a process was killed.

Layout under `cache_dir()`:

    models/KEY/             a finished model and its manifest
    tmp/KEY/PID-RANDOM/     work folder of the holder of KEY's lock
    locks/KEY.lock          flock: at most one process builds KEY
    native/KEY.so           compiled kernels, in their own form (`engine/native/build.py`); locks/ has theirs, too

Invariants:
- `models/KEY` is only ever created by renaming a complete, synced folder whose manifest was written last.
- Anything in `tmp/KEY` while KEY's lock is free was left by a dead process and may be removed.
- Reading needs no lock and no write permission.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import platformdirs

from batchwright.durable_files import sync
from batchwright.errors import ModelCacheError
from batchwright.models.catalog import BUILTIN

Progress = Callable[[str], None]

CACHE_VARIABLE = "BATCHWRIGHT_CACHE"
MANIFEST = "batchwright-model.json"
GGUF_PREFIX = "gguf"
"""Prefix of the keys of users' GGUF files."""
_MANIFEST_SCHEMA = 1
_CONVERSION_REVISION = 1
"""Part of every key. Raise it whenever the output of the GGUF converter changes."""


def cache_dir() -> Path:
    """Return the absolute path of the cache: `$BATCHWRIGHT_CACHE`, or else in the platform's folder for user caches."""
    configured = os.environ.get(CACHE_VARIABLE)
    folder = Path(configured).expanduser() if configured else Path(platformdirs.user_cache_dir("batchwright"))
    return folder.absolute()


class Origin(msgspec.Struct, frozen=True):
    """The origin of an entry. `source` is a wheel requirement or the path of a file."""

    name: str
    kind: str
    licence: str
    source: str
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """The manifest, written into every entry last: its origin and the size in bytes of each of its files."""

    schema: int
    origin: Origin
    files: dict[str, int]


@dataclass(frozen=True, slots=True)
class CachedModel:
    """The state of one key of the cache. If the entry is absent, `manifest` and `damage` are both None."""

    folder: Path
    manifest: Manifest | None = None
    damage: str | None = None

    @property
    def ready(self) -> bool:
        """Whether the folder is complete and may be used."""
        return self.manifest is not None and self.damage is None


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """One line of `batchwright models list`. `size` is in bytes: as cached, else as expected."""

    name: str
    kind: str
    size: int
    licence: str
    state: str
    """`cached`, `absent` or `damaged`."""
    description: str
    path: Path | None


def entry_key(name: str, sha256: str) -> str:
    """Return the key of an entry. It changes with `sha256`, the checksum of the source, and with the conversion."""
    return f"{name}-{hashlib.sha256(f'{_CONVERSION_REVISION} {sha256}'.encode()).hexdigest()[:16]}"


def inventory() -> list[ModelStatus]:
    """List the built-in models, and after them the GGUF files that were converted into the cache."""
    listed = []
    for model in BUILTIN.values():
        entry = inspect(entry_key(model.name, model.content_sha256))
        if entry.manifest is None:
            kind, size, state = model.kind, model.installed_bytes, "damaged" if entry.damage else "absent"
            listed.append(ModelStatus(model.name, kind, size, model.licence, state, model.description, None))
        else:
            listed.append(_stored_status(entry, entry.manifest, model.name, model.description))
    for folder in sorted((cache_dir() / "models").glob(f"{GGUF_PREFIX}-*")):
        entry = inspect(folder.name)
        if entry.manifest is not None:
            listed.append(_stored_status(entry, entry.manifest, entry.manifest.origin.source, "converted GGUF file"))
    return listed


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


def inspect(key: str) -> CachedModel:
    """Check the entry `key` cheaply: its manifest, and the size of every file that the manifest names."""
    folder = cache_dir() / "models" / key
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except FileNotFoundError:
        return CachedModel(folder, damage="its manifest is missing") if folder.exists() else CachedModel(folder)
    except (OSError, msgspec.DecodeError) as error:
        return CachedModel(folder, damage=f"its manifest cannot be read: {error}")
    if manifest.schema != _MANIFEST_SCHEMA:
        return CachedModel(folder, manifest, f"its manifest has schema {manifest.schema}, not {_MANIFEST_SCHEMA}")
    for name, size in manifest.files.items():
        try:
            actual = (folder / name).stat().st_size
        except OSError as error:
            return CachedModel(folder, manifest, f"{name} cannot be read: {error.strerror}")
        if actual != size:
            return CachedModel(folder, manifest, f"{name} has {actual} bytes instead of {size}")
    return CachedModel(folder, manifest)


def build(
    key: str, origin: Origin, fill: Callable[[Path, Path], None], *, needs_bytes: int, progress: Progress
) -> Path:
    """Return the folder of entry `key`, created by `fill(work, model)` unless it exists already.

    `fill` puts the model's files into the existing empty folder `model`, and may use the folder `work` for anything
    else it needs; both are on the disk of the cache, and `work` is removed afterwards. If another process is building
    the same key, wait for it.

    Raises ModelCacheError if fewer than `needs_bytes` bytes are free or the cache cannot be written, and whatever
    `fill` raises; in either case nothing is left behind.
    """
    root = cache_dir()
    try:
        with locked(root, key, progress):
            found = inspect(key)
            if found.ready:
                return found.folder
            if found.damage:
                progress(f"{found.folder} is damaged ({found.damage}); building it again")
            remove_abandoned(root, key, ((path.name, path) for path in (root / "tmp").glob("*")))
            require_free(root, needs_bytes)
            return _build_locked(root, key, origin, fill)
    except OSError as error:
        raise ModelCacheError(
            f"cannot build {key} in the model cache {root}: {error}; free some space there, or set"
            f" {CACHE_VARIABLE} to a folder that can be written"
        ) from error


def require_free(root: Path, needs_bytes: int) -> None:
    """Raise ModelCacheError if fewer than `needs_bytes` bytes are free on the disk of the cache `root`."""
    free = shutil.disk_usage(root).free
    if free < needs_bytes:
        raise ModelCacheError(
            f"the model cache {root} has {free / 1e6:.0f} MB free, {needs_bytes / 1e6:.0f} MB are needed;"
            f" free some space there, or set {CACHE_VARIABLE} to a folder on another disk"
        )


def _build_locked(root: Path, key: str, origin: Origin, fill: Callable[[Path, Path], None]) -> Path:
    # Plain mkdir, not tempfile: folders of a shared cache must get the permissions of the umask.
    work = root / "tmp" / key / f"{os.getpid()}-{secrets.token_hex(4)}"
    model = work / "model"
    try:
        model.mkdir(parents=True)
        fill(work, model)
        # Drop the scratch files of `fill`, so that a kill after publication leaves nothing large behind.
        for path in work.iterdir():
            if path.is_dir() and path != model:
                shutil.rmtree(path, ignore_errors=True)
            elif path != model:
                path.unlink()
        _seal(model, origin)
        return _publish(model, root / "models" / key, work)
    finally:
        shutil.rmtree(work, ignore_errors=True)  # a failure only costs disk space: the next build tries again
        with contextlib.suppress(OSError):
            work.parent.rmdir()


def _seal(model: Path, origin: Origin) -> None:
    """Write the manifest and sync everything to disk."""
    files = {str(path.relative_to(model)): path.stat().st_size for path in sorted(model.rglob("*")) if path.is_file()}
    manifest = model / MANIFEST
    manifest.write_bytes(msgspec.json.format(msgspec.json.encode(Manifest(_MANIFEST_SCHEMA, origin, files))))
    mode = manifest.stat().st_mode
    for path in model.rglob("*"):
        if path.is_file():
            path.chmod(mode)  # libraries write weights as 0600, useless in a shared cache
        sync(path)
    sync(model)


def _publish(model: Path, folder: Path, work: Path) -> Path:
    """Move the sealed folder to its place, after removing a damaged entry."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.exists():
        folder.rename(work / "damaged")
    model.rename(folder)
    sync(folder.parent)
    return folder


@contextlib.contextmanager
def locked(root: Path, key: str, progress: Progress | None) -> Iterator[bool]:
    """Hold the lock of `key`. If another process holds it, wait or, without `progress`, yield False immediately.

    Raises OSError if the cache cannot be written.
    """
    path = root / "locks" / f"{key}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    # Read-only is enough for flock, and also lets other users of a shared cache take the lock.
    descriptor = os.open(path, os.O_RDONLY | os.O_CREAT, 0o666)
    held = True
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            held = progress is not None
            if progress is not None:
                progress(f"another process is preparing {key}; waiting for it")
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield held
    finally:
        os.close(descriptor)  # also unlocks; the file stays, since removing it would split the lock in two


def remove_abandoned(root: Path, held: str, leftovers: Iterable[tuple[str, Path]]) -> None:
    """Remove folders of dead processes, given with keys: those of `held`, whose lock we hold, and of free keys."""
    for key, folder in leftovers:
        with contextlib.nullcontext(True) if key == held else locked(root, key, None) as free:
            if free:
                shutil.rmtree(folder, ignore_errors=True)
