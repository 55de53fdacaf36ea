"""Ids in addresses: what cannot be one is not looked up."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import Depends, Path, Query
from starlette.convertors import StringConvertor, register_url_convertor

from batchwright.errors import NotFound

_FILE = re.compile(r"file-[0-9a-f]{24}")
_BATCH = re.compile(r"batch_[0-9a-f]{24}")


class SimpleBatchConvertor(StringConvertor):
    """`{batch_id:simple}` in the path of a route: anything but the names that stand in the place of an id."""

    regex = "(?!(?:sync|async|stats)$)[^/]+"


register_url_convertor("simple", SimpleBatchConvertor())


async def file_id_of(file_id: Annotated[str, Path(examples=["file-0123456789abcdef01234567"])]) -> str:
    """The id in the path. Raises `NotFound`."""
    if not _FILE.fullmatch(file_id):
        raise NotFound(f"no file {file_id!r}")
    return file_id


async def batch_id_of(batch_id: Annotated[str, Path(examples=["batch_0123456789abcdef01234567"])]) -> str:
    """The id in the path. Raises `NotFound`."""
    if not _BATCH.fullmatch(batch_id):
        raise NotFound(f"no batch {batch_id!r}")
    return batch_id


FileId = Annotated[str, Depends(file_id_of)]
BatchId = Annotated[str, Depends(batch_id_of)]
After = Annotated[
    str | None, Query(pattern=r"^[A-Za-z0-9_\-]*$", max_length=64, description="The last id of the page before.")
]
