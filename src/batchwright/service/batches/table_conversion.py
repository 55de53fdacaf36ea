"""Conversion of uploaded tables into inputs of batches, each in a process of its own."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO

import msgspec

from batchwright.errors import InvalidRequest, Overloaded
from batchwright.jobs.table_requests import TableOptions

_PIECE = 2**18
_PATIENCE = 120.0
"""Seconds without a line after which a conversion is given up."""
_AT_ONCE = 2
"""Most conversions of one service at the same time, each for a different tenant."""
_KEPT = 2**16
"""Bytes that are kept from the end of a conversion's standard error."""


class Converted(msgspec.Struct):
    """Report of a conversion at its end."""

    rows: int = 0
    skipped: int = 0
    """Rows without a value in the columns of the template."""
    first_skipped: list[int] = []
    error: str | None = None
    param: str | None = None
    code: str | None = None


class TableConverter:
    """Converter of the tables of all tenants, few at a time."""

    def __init__(self) -> None:
        self.running: set[str] = set()
        """Tenants whose tables are being converted."""

    @contextmanager
    def conversion(self, tenant: str, table: BinaryIO, options: TableOptions) -> Iterator[TableConversion]:
        """Provide a conversion for the duration of the block. Raises `Overloaded` while too many are under way."""
        if tenant in self.running:
            raise Overloaded("a table of yours is being converted already: try again when it is done", retry_after=2.0)
        if len(self.running) >= _AT_ONCE:
            raise Overloaded(f"{_AT_ONCE} tables are being converted already: try again later", retry_after=2.0)
        self.running.add(tenant)
        try:
            yield TableConversion(table, options)
        finally:
            self.running.discard(tenant)


class TableConversion:
    """One conversion: first read `lines` to the end, then `outcome` says how many there were."""

    def __init__(self, table: BinaryIO, options: TableOptions) -> None:
        self.outcome = Converted()
        self._table = table
        self._options = options

    async def lines(self) -> AsyncGenerator[bytes]:
        """Yield the lines in pieces. Raises `InvalidRequest` for a table that cannot be converted."""
        descriptor = self._table.fileno()
        command = ["-P", "-m", "batchwright.jobs.table_requests", str(descriptor)]
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, stdin=PIPE, stdout=PIPE, stderr=PIPE, pass_fds=(descriptor,)
        )
        errors = asyncio.create_task(_error_output(process))
        try:
            # Templates are too large for an argument, which other users of the machine could read, too.
            await _send(process, msgspec.json.encode(self._options))
            async for piece in _pieces(process):
                yield piece
            self.outcome = _outcome(await errors, await process.wait())
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await _drained(process)
            await errors
        if self.outcome.error is not None:
            raise InvalidRequest(self.outcome.error, param=self.outcome.param, code=self.outcome.code)
        if not self.outcome.rows:
            raise InvalidRequest(
                f"{self._options.name} has no row from which a request could be made", param="file", code="empty_file"
            )


async def _send(process: Process, options: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(options)
    with suppress(BrokenPipeError, ConnectionResetError):  # what it reports at its end shows why
        await process.stdin.drain()
    process.stdin.close()


async def _pieces(process: Process) -> AsyncGenerator[bytes]:
    assert process.stdout is not None
    while True:
        try:
            async with asyncio.timeout(_PATIENCE):
                piece = await process.stdout.read(_PIECE)
        except TimeoutError:
            raise _too_slow() from None
        if not piece:
            return
        yield piece


async def _error_output(process: Process) -> bytes:
    """Return the end of the process's standard error, all of which is read so that the process never has to wait."""
    assert process.stderr is not None
    output = b""
    while piece := await process.stderr.read(_KEPT):
        output = (output + piece)[-_KEPT:]
    return output


async def _drained(process: Process) -> None:
    """Wait for a killed process, for which asyncio waits until the pipes have been read to the end."""
    assert process.stdout is not None
    while await process.stdout.read(_PIECE):
        pass
    await process.wait()


def _outcome(output: bytes, status: int) -> Converted:
    try:
        # Libraries may write lines before it.
        return msgspec.json.decode(output.rpartition(b"\n")[2], type=Converted)
    except ValueError:
        if status < 0:
            raise _too_slow() from None
        return Converted(error=f"the table could not be read: its reader ended with status {status}")


def _too_slow() -> InvalidRequest:
    return InvalidRequest(
        "the table takes too much time or memory to read: make it smaller, or divide it", code="table_too_slow"
    )
