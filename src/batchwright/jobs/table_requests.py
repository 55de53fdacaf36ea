"""Batch lines made of the rows of a table, or of prompts.

As a program, it writes the lines to standard output: a table of strangers is read in a process of its own, whose memory
and time are limited, since a small Parquet file may decompress to any size.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from batchwright.errors import BatchwrightError, InputError, InvalidRequest
from batchwright.jobs.lines import BadLine, LineParser
from batchwright.jobs.sources import InputFormat, format_of
from batchwright.jobs.table_sources import open_source
from batchwright.jobs.templates import Templates
from batchwright.wire.requests import CHAT_URL

_TABLES = ("csv", "tsv", "parquet")
_MEMORY = 4 * 2**30
"""Most bytes of address space."""
_SECONDS = 120
"""Most seconds of processor time."""
_NICENESS = 10
"""How much everything else goes before it, such as the engine of the service."""


class TableOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How rows become requests."""

    name: str
    """Name of the file, whose extension tells its format."""
    endpoint: str = CHAT_URL
    prompt_template: str | None = None
    """Text with columns as `{column}`. None: each line is a prompt, or an object with one."""
    system_template: str | None = None
    messages_template: str | None = None
    """Jinja template of a JSON list of messages, in place of the others."""
    body: Mapping[str, Any] = {}
    """Fields of all requests, such as `model` and `max_tokens`."""
    max_line_bytes: int = 2**20


@dataclass(slots=True)
class TableRequests:
    """The requests of one table. Iterate once; then it says how many there were."""

    path: Path
    options: TableOptions
    rows: int = 0
    """Rows that became requests."""
    skipped: list[int] = field(default_factory=list)
    """Numbers of rows that have nothing in the columns of the template."""

    def __iter__(self) -> Iterator[bytes]:
        """Yield batch lines. Raises `InputError` and `InvalidRequest`, which name the row and what is wrong with it."""
        options = self.options
        source_format, templates = self._format(), self._templates()
        parser = LineParser(
            source_format, templates, chat=options.endpoint == CHAT_URL, max_line_bytes=options.max_line_bytes
        )
        source = open_source(
            [self.path],
            source_format,
            max_line_bytes=options.max_line_bytes,
            wanted=None if templates is None else templates.columns,
            rows=templates is not None,
        )
        if templates is not None:
            templates.check(source.columns or ())
        for record in source.records():
            line = parser.parse(record)
            if isinstance(line, BadLine):
                if line.error.code == "missing_field":
                    self.skipped.append(record.number)
                    continue
                raise InvalidRequest(f"row {record.number}: {line.error}", param=line.error.param, code=line.error.code)
            if line.endpoint != options.endpoint:
                raise InvalidRequest(
                    f"row {record.number} is a request for {line.endpoint}: choose that endpoint", param="endpoint"
                )
            self.rows += 1
            yield msgspec.json.encode({
                "custom_id": line.custom_id or f"row-{record.number}",
                "method": "POST",
                "url": line.endpoint,
                "body": {**self.options.body, **line.body},
            }) + b"\n"  # fmt: skip

    def _templates(self) -> Templates | None:
        texts = self.options.prompt_template, self.options.system_template, self.options.messages_template
        return None if texts == (None, None, None) else Templates.of(*texts)

    def _format(self) -> InputFormat:
        found = format_of(Path(self.options.name), None)
        if found in _TABLES and self._templates() is None:
            raise InvalidRequest(
                f"{self.options.name} is a table: give a prompt_template with columns as {{column}}",
                param="prompt_template",
                code="missing_required_parameter",
            )
        return found


def main() -> int:
    """Write the lines of the table on file descriptor `argv[1]` by the options in `argv[2]` to standard output.

    At the end, write what was found to standard error, as JSON: the rows, or the error.
    """
    os.nice(_NICENESS)
    for limit, most in ((resource.RLIMIT_AS, _MEMORY), (resource.RLIMIT_CPU, _SECONDS)):
        with suppress(ValueError, OSError):  # systems without this limit
            resource.setrlimit(limit, (most, most))
    table = TableRequests(Path(f"/dev/fd/{sys.argv[1]}"), msgspec.json.decode(sys.argv[2], type=TableOptions))
    told: dict[str, Any]
    try:
        for line in table:
            sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()
        told = {"rows": table.rows, "skipped": len(table.skipped), "first_skipped": table.skipped[:1]}
    except MemoryError:
        told = {"error": "the table needs more memory than is given to one: make its row groups smaller"}
    except (BatchwrightError, InputError) as error:
        message = str(error).replace(str(table.path), table.options.name)
        told = {"error": message, "param": getattr(error, "param", None), "code": getattr(error, "code", None)}
    except Exception as error:  # libraries that read tables are foreign code, and the table may be anything
        told = {"error": f"{table.options.name} cannot be read: {type(error).__name__}: {error}"}
    sys.stderr.buffer.write(msgspec.json.encode(told))
    return 0 if "error" not in told else 2


if __name__ == "__main__":
    sys.exit(main())
