"""What the names of an input stand for: files, patterns, addresses, and folders of data."""

from __future__ import annotations

import glob
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from batchwright.errors import InputError
from batchwright.jobs.output_names import is_own_name
from batchwright.jobs.remote.addresses import explained, is_pattern, local_name, scheme_of
from batchwright.jobs.remote.parts import MANIFEST, Manifest
from batchwright.jobs.remote.remote_file import RemotePath, retried
from batchwright.jobs.sources import InputFormat, format_of_suffix

STREAM = "-"


def expanded(inputs: Sequence[str], output: str | None = None) -> tuple[str, ...]:
    """The files that `inputs` name, in order: those that match a pattern such as `data/*.csv`, those in a folder.

    What a run with `output` writes is left out of patterns and folders, where it appears while the job runs. Raises
    `InputError` for a pattern without a match, and for a folder that contains no data.
    """
    found: list[str] = []
    for name in inputs:
        if name == STREAM:
            found.append(name)
        elif scheme_of(name) is not None:
            found += _remote(RemotePath(name), output)
        else:
            found += _local(local_name(name), None if output is None else Path(local_name(output)))
    return tuple(dict.fromkeys(found))


def _local(name: str, output: Path | None) -> list[str]:
    path = Path(name)
    if path.is_dir():
        names = [each.name for each in path.iterdir() if each.is_file() and not _is_of(output, each)]
        return [str(path / each) for each in files_of_folder(str(path), names, partial(_read_local, path))]
    if path.exists() or not glob.has_magic(name):
        return [name]
    matches = sorted(
        match
        for match in glob.glob(name, recursive=True)  # noqa: PTH207 - of any folder
        if not _is_of(output, Path(match))
    )
    if not matches:
        raise InputError(f"input {name}: no file matches it")
    return matches


def _is_of(output: Path | None, file: Path) -> bool:
    """Return whether `file` is the output of a run, or one of the files beside it."""
    return (
        output is not None and is_own_name(file.name, output.name) and file.parent.resolve() == output.parent.resolve()
    )


def _remote(path: RemotePath, output: str | None) -> list[str]:
    own = None if output is None or scheme_of(output) is None else RemotePath(output).path.rstrip("/")
    if is_pattern(path.address):
        path.filesystem.invalidate_cache()
        try:
            found = retried(partial(path.filesystem.glob, path.path))
        except Exception as error:
            raise InputError(f"input {path} cannot be listed: {explained(path.address, error)}") from error
        matches = sorted(each for each in found if own is None or not _is_below(each, own))
        if not matches:
            raise InputError(f"input {path}: no file matches it")
        return [path.filesystem.unstrip_protocol(each) for each in matches]
    if scheme_of(path.address) in ("http", "https"):
        return [path.address]
    info = path.info()
    if info is None:
        raise InputError(f"input {path} does not exist")
    if info["type"] != "directory":
        return [path.address]
    try:
        names = [each for each in path.listed() if own is None or not is_own_name((path / each).path, own)]
    except OSError as error:
        raise InputError(f"input {path} cannot be listed: {error.strerror}") from error
    return [
        (path / each).address for each in files_of_folder(str(path), names, lambda name: (path / name).read_bytes())
    ]


def _is_below(path: str, output: str) -> bool:
    """Return whether a path of an address is the output of a run, in it, or one of the files beside it."""
    return path.startswith(output + "/") or is_own_name(path, output)


def _read_local(folder: Path, name: str) -> bytes:
    return (folder / name).read_bytes()


def files_of_folder(folder: str, names: Sequence[str], read: Callable[[str], bytes | None]) -> list[str]:
    """The data files among `names` in a folder, in order; `read` returns the content of one.

    A folder is what a run wrote, what `datasets.save_to_disk` wrote, or files of one format. Raises `InputError`.
    """
    if "dataset_dict.json" in names:
        splits = _json(folder, "dataset_dict.json", read).get("splits", ["train"])
        raise InputError(
            f"input {folder} is a dataset of several splits: name one of them, such as {folder}/{splits[0]}"
        )
    if MANIFEST in names:
        return [part.name for part in Manifest.decode(folder, read(MANIFEST) or b"").parts]
    if "dataset_info.json" in names and "state.json" in names:
        files = _json(folder, "state.json", read).get("_data_files", ())
        return [str(file["filename"]) for file in files]
    formats: dict[InputFormat, list[str]] = {}
    for name in sorted(names):
        if not name.startswith((".", "_")) and (found := format_of_suffix(name)) is not None:
            formats.setdefault(found, []).append(name)
    if len(formats) == 1:
        return next(iter(formats.values()))
    kinds = f"with files of the formats {', '.join(sorted(formats))}" if formats else "without files of a known format"
    raise InputError(f"input {folder} is a folder {kinds}: name a file, or all of one kind: '{folder}/*.jsonl'")


def _json(folder: str, name: str, read: Callable[[str], bytes | None]) -> dict[str, Any]:
    try:
        content = json.loads(read(name) or b"")
    except ValueError as error:
        raise InputError(f"{folder}/{name} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise InputError(f"{folder}/{name} is damaged: it is no JSON object")
    return content
