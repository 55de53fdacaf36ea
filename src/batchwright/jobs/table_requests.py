"""Batch lines made from the rows of a table, or from prompts.

As a program, it writes the lines to standard output: an untrusted table is read in a process of its own, whose memory
and time are limited, since a small Parquet file may decompress to any size.
"""

from __future__ import annotations

import os
import re
import resource
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from batchwright.errors import BatchwrightError, InputError, InvalidRequest
from batchwright.jobs.compression import COMPRESSED
from batchwright.jobs.lines import BadLine, LineParser
from batchwright.jobs.sources import InputFormat, Source, format_of
from batchwright.jobs.table_sources import TextRowSource, open_source
from batchwright.jobs.templates import PromptTemplate, Templates
from batchwright.wire.requests import CHAT_URL

_TABLES = ("csv", "tsv", "parquet", "arrow")
_DEFAULT_ID = re.compile(r"row-\d+")
_MEMORY = 2 * 2**30
"""Most bytes of address space."""
_LONGEST_ERROR = 4000
"""Most characters of an error, which may quote the table or the template."""
_SECONDS = 120
"""Most seconds of processor time."""
_NICENESS = 10
"""Niceness of the process: everything else goes first, such as the engine of the service."""


class TableOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How rows become requests."""

    name: str
    """Name of the file, whose extension gives its format."""
    endpoint: str = CHAT_URL
    prompt_template: str | None = None
    """Text with columns as `{column}`. None: each line is a prompt, or an object with one."""
    system_template: str | None = None
    """System message, in the same form; without columns it is the same for all rows."""
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
    """Numbers of rows that are empty in all columns of the template."""

    def __iter__(self) -> Iterator[bytes]:
        """Yield batch lines. Raises `InputError` and `InvalidRequest`, which name the row and what is wrong with it."""
        options = self.options
        source_format, templates = self._format(), self._templates()
        parser = LineParser(
            source_format,
            templates,
            chat=options.endpoint == CHAT_URL,
            system=self._common_system(templates),
            max_line_bytes=options.max_line_bytes,
        )
        source: Source = open_source(
            [self.path],
            source_format,
            max_line_bytes=options.max_line_bytes,
            wanted=None if templates is None else templates.columns,
            rows=templates is not None,
        )
        if templates is not None:
            source = source if source.columns is not None else TextRowSource(source)
            templates.check(source.columns or ())
        for record in source.records():
            line = parser.parse(record)
            if isinstance(line, BadLine):
                if line.error.code == "missing_field":
                    self.skipped.append(record.number)
                    continue
                if line.error.code == "line_too_long":
                    raise InvalidRequest(
                        f"row {record.number}: its prompt has more than {options.max_line_bytes:,} bytes: shorten it",
                        code="line_too_long",
                    )
                raise InvalidRequest(f"row {record.number}: {line.error}", param=line.error.param, code=line.error.code)
            if line.endpoint != options.endpoint:
                raise InvalidRequest(
                    f"row {record.number} is a request for {line.endpoint}: choose that endpoint", param="endpoint"
                )
            if line.custom_id is not None and _DEFAULT_ID.fullmatch(line.custom_id):
                raise InvalidRequest(
                    f"row {record.number}: ids like {line.custom_id!r} are for rows without one: choose another",
                    param="custom_id",
                )
            self.rows += 1
            yield msgspec.json.encode({
                "custom_id": line.custom_id or f"row-{record.number}",
                "method": "POST",
                "url": line.endpoint,
                "body": {**self.options.body, **line.body},
            }) + b"\n"  # fmt: skip

    def _templates(self) -> Templates | None:
        options = self.options
        prompt, system = options.prompt_template, options.system_template
        if prompt is None and options.messages_template is None:
            if system is None or not PromptTemplate.parse(system).columns:
                return None  # prompts as they are, all behind the same system message
            prompt = "{prompt}"
        return Templates.of(prompt, system, options.messages_template)

    def _common_system(self, templates: Templates | None) -> str | None:
        """The system message of all prompts, if no template makes one for each."""
        system = self.options.system_template
        return None if templates is not None or system is None else PromptTemplate.parse(system).render({})

    def _format(self) -> InputFormat:
        path = Path(self.options.name)
        if path.suffix.lower() in COMPRESSED:
            raise InvalidRequest(f"{path} is compressed: upload it as {path.stem}", param="file", code="invalid_file")
        found = format_of(path, None)
        if found in _TABLES and self._templates() is None:
            raise InvalidRequest(
                f"{path} is a table: give a prompt_template with columns as {{column}}",
                param="prompt_template",
                code="missing_required_parameter",
            )
        return found


def main() -> int:
    """Write the lines of the table on file descriptor `argv[1]` to standard output; options are on standard input.

    At the end, write what was found to standard error, as a line of JSON: the rows, or the error.
    """
    os.nice(_NICENESS)
    with suppress(OSError):  # so that the system ends this process, and not the service, when memory runs out
        Path("/proc/self/oom_score_adj").write_text("1000")
    for limit, most in ((resource.RLIMIT_AS, _MEMORY), (resource.RLIMIT_CPU, _SECONDS)):
        with suppress(ValueError, OSError):  # systems without this limit
            resource.setrlimit(limit, (most, most))
    table = TableRequests(
        Path(f"/dev/fd/{sys.argv[1]}"), msgspec.json.decode(sys.stdin.buffer.read(), type=TableOptions)
    )
    report: dict[str, Any]
    try:
        for line in table:
            sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()
        report = {"rows": table.rows, "skipped": len(table.skipped), "first_skipped": table.skipped[:1]}
    except MemoryError:
        report = {"error": "the table needs more memory than is given to one: make it smaller, or divide it"}
    except (BatchwrightError, InputError) as error:
        message = str(error).replace(str(table.path), table.options.name)
        report = {"error": message, "param": getattr(error, "param", None), "code": getattr(error, "code", None)}
    except Exception as error:  # libraries that read tables are foreign code, and the table may be anything
        report = {"error": f"{table.options.name} cannot be read: {type(error).__name__}: {error}"}
    if "error" in report:
        report["error"] = report["error"][:_LONGEST_ERROR]
    sys.stderr.buffer.write(b"\n" + msgspec.json.encode(report))
    return 0 if "error" not in report else 2


if __name__ == "__main__":
    sys.exit(main())
