"""Compressed files, recognised by their extensions: gzip (`.gz`) and Zstandard (`.zst`, which needs pyarrow)."""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, BinaryIO, cast

from batchwright.errors import InputError, MissingExtra
from batchwright.jobs.remote.remote_file import AnyPath, RemotePath

COMPRESSED = (".gz", ".zst")
"""Extensions of compressed files."""


def without_compression(name: str) -> str:
    """The name of a file without the extension of its compression."""
    return name.removesuffix(".gz").removesuffix(".zst")


def pyarrow_for(subject: str) -> Any:
    """The module pyarrow. Raises `MissingExtra`, which says that `subject` needs it, if it is not installed."""
    try:
        import pyarrow as pa
    except ImportError as error:
        raise MissingExtra(f"{subject} needs pyarrow; install it: pip install 'batchwright[parquet]'") from error
    return pa


@contextmanager
def reading(path: AnyPath) -> Iterator[IO[bytes]]:
    """Read the uncompressed content of `path`. Raises `InputError` for a file that is damaged or cannot be read."""
    suffix = path.suffix.lower()
    try:
        if suffix == ".gz":
            with path.open("rb") as packed, gzip.open(packed, "rb") as file:
                yield cast("IO[bytes]", file)
        elif suffix == ".zst":
            pa = pyarrow_for(f"{path}: Zstandard")
            packed_zst = pa.PythonFile(path.open("rb")) if isinstance(path, RemotePath) else pa.OSFile(str(path))
            with io.BufferedReader(pa.CompressedInputStream(packed_zst, "zstd")) as stream:
                yield stream
        else:
            with path.open("rb") as plain:
                yield plain
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{path} is damaged: {error}") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error


@contextmanager
def compressing(file: BinaryIO, suffix: str) -> Iterator[BinaryIO]:
    """Write to `file`, compressed as `suffix` says if it is one of `COMPRESSED`, uncompressed otherwise."""
    if suffix == ".gz":
        # Without a time, the same content makes the same file.
        with gzip.GzipFile(fileobj=file, mode="wb", mtime=0) as packed:
            yield cast("BinaryIO", packed)
    elif suffix == ".zst":
        pa = pyarrow_for("Zstandard")
        # It closes the file that it writes to.
        with os.fdopen(os.dup(file.fileno()), "wb") as copy, pa.CompressedOutputStream(copy, "zstd") as packed:
            yield packed
    else:
        yield file
