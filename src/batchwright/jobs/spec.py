"""The specification of a job, and the checks of it that do not read files."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from batchwright.durable_files import followed, is_special
from batchwright.errors import InputError, shown
from batchwright.jobs.answer_tables import TableColumns
from batchwright.jobs.compression import pyarrow_for
from batchwright.jobs.input_names import STREAM
from batchwright.jobs.output_forms import OutputForm, output_form_of
from batchwright.jobs.remote.addresses import scheme_of, shown_address
from batchwright.jobs.remote.parts import MANIFEST
from batchwright.jobs.remote.remote_file import AnyPath, RemotePath, located
from batchwright.jobs.schema_columns import columns_of
from batchwright.jobs.sources import InputFormat, format_of
from batchwright.request import FORM_FIELDS, SamplingParams, portable
from batchwright.wire.requests import OPENAI_DEFAULTS

TABLES = ("csv", "tsv", "parquet", "arrow")
_NEWER = frozenset({*FORM_FIELDS, "prompt_logprobs_start"})
"""Sampling parameters that a job only includes if they are set, since older jobs do not have them."""
_INPUTS_SHOWN = 10

RetryFailed: TypeAlias = Literal["passing", "all"]
"""Failed lines that are tried again: those whose error may be temporary, or all."""

_FORM_FLAGS = {"schema": "--json-schema", "regex": "--regex", "choices": "--choices"}


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """The specification of a job, as the caller gave it."""

    inputs: tuple[str, ...]
    """Paths and addresses, or `-` alone for standard input."""
    output: str
    """A path, an address, or `-` for standard output. A stream, such as that or a pipe, cannot be resumed."""
    model: str | None
    """Name of the model; None: the endpoint's default."""
    embedding_model: str | None = None
    classifiers: tuple[str, ...] = ()
    backend: str | None = None
    """Address of an endpoint that computes; None: models in this process."""
    dialect: str | None = None
    """Dialect of the endpoint, if it is not that of its host."""
    served_model_names: tuple[str, ...] = ()
    """Further names under which lines may ask for the models."""
    defaults: SamplingParams | Mapping[str, Any] = field(default_factory=SamplingParams)
    """See `Call.defaults`."""
    input_format: str | None = None
    prompt_template: str | None = None
    system_template: str | None = None
    messages_template: str | None = None
    reorder_fields: bool = False
    """Whether independent fields of the prompt template are ordered so that rows share the most."""
    chat: bool = False
    system: str | None = None
    id_column: str | None = None
    """Column with the ids of the rows of a table."""
    limit: int | None = None
    sample: int | None = None
    sample_seed: int = 0
    columns: TableColumns = field(default_factory=TableColumns)
    """Columns of the output if it is a table."""
    retry_failed: RetryFailed | None = None
    retry_invalid: int = 0
    """Times that the answer to a line is requested again if it should be JSON and is not."""
    ordered: bool = False
    overwrite: bool = False
    max_line_bytes: int = 2**20
    engine_parameters: dict[str, Any] = field(default_factory=dict)
    """Options of the engine that affect results."""
    model_files: str | None = None
    """See `JobIdentity`."""

    @property
    def shown_inputs(self) -> list[str]:
        """The first names of the input, without what may be secret."""
        return [shown_address(name) for name in self.inputs[:_INPUTS_SHOWN]]

    @property
    def to_stream(self) -> bool:
        return self.output == STREAM or (self.address is None and is_special(Path(self.output)))

    @property
    def address(self) -> RemotePath | None:
        """The address of the output; None if it is on this machine."""
        return None if scheme_of(self.output) is None else RemotePath(self.output.rstrip("/"))

    @property
    def to_folder(self) -> bool:
        """Whether the output is named as a folder of parts, or already is one."""
        if self.output.endswith("/"):
            return True
        return self.address is None and not self.to_stream and (Path(self.output) / MANIFEST).is_file()

    @property
    def at_once(self) -> bool:
        """Whether results are written into the output as they finish; others are made at the end."""
        is_there = self.address is not None or not self.to_folder
        return self.form.is_plain and not self.ordered and not self.writes_rows and is_there

    @property
    def from_stream(self) -> bool:
        """Whether the input can be read only once: standard input, a pipe."""
        return any(map(_is_stream, self.inputs))

    @property
    def paths(self) -> tuple[AnyPath, ...]:
        return tuple(map(located, self.inputs))

    @property
    def form(self) -> OutputForm:
        """The form of the output. Raises `InputError`."""
        return OutputForm() if self.to_stream else output_form_of(Path((self.address or Path(self.output)).name))

    @property
    def is_table(self) -> bool:
        """Whether the input is a table, so that the output is one too."""
        templates = (self.prompt_template, self.system_template, self.messages_template)
        return self.resolved_format() in TABLES or templates != (None, None, None)

    @property
    def writes_rows(self) -> bool:
        """Whether the output is a table of answers, made from the results when all are there."""
        return not self.to_stream and (self.is_table or self.form.is_table)

    @property
    def table_columns(self) -> TableColumns:
        """Columns of the output if it is a table, including those for the properties of the job's schema."""
        given = self.defaults
        schema = given.schema if isinstance(given, SamplingParams) else given.get("schema")
        return replace(self.columns, properties=columns_of(schema))

    def resolved_format(self) -> InputFormat:
        """The format of the input; that of a stream is JSON Lines by default. Raises `InputError`."""
        if self.from_stream and self.input_format is None:
            return "jsonl"
        formats = {path: format_of(path, self.input_format) for path in self.paths}
        first = self.paths[0]
        for path, found in formats.items():
            if found != formats[first]:
                raise InputError(f"{path} is {found} and {first} is {formats[first]}: give files of one format")
        return formats[first]

    def parameters(self) -> dict[str, Any]:
        """Everything that the results depend on besides the input, as JSON values by name."""
        given = {} if isinstance(self.defaults, SamplingParams) else self.defaults
        defaults = self.defaults if isinstance(self.defaults, SamplingParams) else replace(OPENAI_DEFAULTS, **given)
        chosen = {
            # The others show in the values.
            "sent_defaults": [name for name in given if given[name] == getattr(OPENAI_DEFAULTS, name)] or None,
            "backend": self.backend,
            "dialect": self.dialect,
            "embedding_model": _resolved(self.embedding_model),
            "classifiers": [_resolved(name) for name in self.classifiers] or None,
            "served_model_names": sorted(self.served_model_names) or None,
            "system_template": self.system_template,
            "messages_template": self.messages_template,
            "reorder_fields": self.reorder_fields or None,
            "id_column": self.id_column,
            "sample": self.sample,
            "sample_seed": self.sample_seed if self.sample is not None else None,
            "output": "rows" if self.writes_rows else None,
        }
        return {
            **{name: value for name, value in chosen.items() if value is not None},
            "model": _resolved(self.model),
            "input_format": self.resolved_format(),
            "prompt_template": self.prompt_template,
            "chat": self.chat,
            "system": self.system,
            "ordered": self.ordered,
            "max_line_bytes": self.max_line_bytes,
            **self.engine_parameters,
            **_parameters_of(defaults),
        }

    def check(self) -> None:
        """Check everything that can be checked without reading files. Raises `InputError`."""
        self._check_input()
        self._check_output()
        input_format = self.resolved_format()
        if input_format == "txt" and self.is_table:
            raise InputError("templates are for rows with columns, not for txt: give a CSV, Parquet or JSON file")
        if self.from_stream and input_format in ("parquet", "arrow", "json"):
            raise InputError(f"{input_format} cannot be read from a stream: save it to a file first")
        if self.system is not None and not self.chat:
            raise InputError("--system needs --chat: it is put before prompts that are made into chats")
        if self.retry_failed not in (None, "passing", "all"):
            raise InputError(f"retry_failed={shown(self.retry_failed)}: must be 'passing' or 'all'")
        if self.system is not None and self.system_template is not None:
            raise InputError("--system and --system-template are both the system message: give one")
        if self.ordered and self.to_stream:
            raise InputError("--ordered needs an output file: results are put in order when all are there")
        if self.columns != TableColumns() and not self.writes_rows:
            raise InputError("--keep and --output-column are for outputs that are tables: a table as input makes one")
        if self.id_column is not None and not self.is_table:
            raise InputError(f"--id-column {self.id_column!r} is for tables: lines have their ids in custom_id or id")
        if self.retry_failed is not None and (self.to_stream or self.overwrite):
            other = "--overwrite starts over" if self.overwrite else "a stream keeps no results"
            raise InputError(f"--retry-failed goes on with an output, and {other}: leave one of them out")
        numbers = {"limit": self.limit, "sample": self.sample, "max_line_bytes": self.max_line_bytes}
        for name, number in {**numbers, "retry_invalid": self.retry_invalid}.items():
            if number is not None and number < (least := name != "retry_invalid"):
                raise InputError(f"{name}={number}: must be ≥ {least:d}")
        self._check_form()

    def _check_form(self) -> None:
        """Check that the form of answers that the job asks for is valid, before each of its lines fails for it."""
        form = self.defaults.constraint if isinstance(self.defaults, SamplingParams) else None
        if form is None or self.backend is not None:
            return  # an endpoint decides for itself which forms it supports
        from batchwright.engine.grammars import refusal_of

        try:
            refusal = refusal_of(form)
        except ModuleNotFoundError:
            return  # what computes is elsewhere, or will ask for the extra
        if refusal is not None:
            raise InputError(f"{_FORM_FLAGS.get(form.kind, form.kind)}: {refusal}")

    def _check_input(self) -> None:
        if not self.inputs:
            raise InputError("no input: name a file")
        if STREAM in self.inputs and sys.stdin is None:
            raise InputError("standard input is closed: name an input file")
        if self.from_stream:
            if len(self.inputs) > 1:
                raise InputError(f"inputs {', '.join(self.inputs)}: a stream must be the only one")
            return
        for path in self.paths:
            if isinstance(path, RemotePath):
                continue  # it is looked at when it is fingerprinted
            if path.is_dir():
                raise InputError(f"input {path} is a folder: name a file, or all of them: '{path}/*.jsonl'")
            if not path.exists():
                raise InputError(f"input {path} does not exist")

    def _check_output(self) -> None:
        if self.output == STREAM and sys.stdout is None:
            raise InputError("standard output is closed: name an output file")
        if self.to_stream:
            return
        if (self.form.content == "parquet" or self.form.compression == ".zst") and self.output:
            pyarrow_for(f"output {self.address or self.output}")
        if self.address is not None:
            if scheme_of(self.output) in ("http", "https"):
                raise InputError(
                    f"output {self.address}: the web cannot be written to; use s3://, gs://, az:// or hf://"
                )
            if self.address.address in {name.rstrip("/") for name in self.inputs}:
                raise InputError(f"output {self.address} is the input itself: name another file")
            return
        path = followed(Path(self.output))
        if path.is_dir() and not (self.to_folder and ((path / MANIFEST).is_file() or not any(path.iterdir()))):
            raise InputError(f"output {path} is a folder{' with other files' * self.to_folder}: name a file")
        if self.to_folder and path.exists() and not path.is_dir():
            raise InputError(f"output {path}/ is a file: leave out the / at its end, or name another folder")
        if not path.absolute().parent.is_dir():
            raise InputError(f"output {path}: its folder does not exist; make it first")
        if (
            not self.from_stream
            and path.exists()
            and any(path.samefile(each) for each in self.paths if isinstance(each, Path))
        ):
            raise InputError(f"output {path} is the input itself: name another file")


def require_local(role: str, name: str) -> None:
    """Raise `InputError` for an address such as `s3://…` as the name of a file."""
    if scheme := scheme_of(name):
        raise InputError(f"{role} {name}: {scheme}:// is not supported for it, only files on this machine")


def _parameters_of(defaults: SamplingParams) -> dict[str, Any]:
    """Sampling parameters as JSON values by name; those that jobs of earlier versions lack only if they are set."""
    values: dict[str, Any] = json.loads(json.dumps(asdict(portable(defaults))))
    return {name: value for name, value in values.items() if name not in _NEWER or value not in (None, False, 0, [])}


def _is_stream(name: str) -> bool:
    return name == STREAM or (scheme_of(name) is None and (Path(name).is_fifo() or Path(name).is_char_device()))


def _resolved(model: str | None) -> str | None:
    """The absolute path of a model that is a file or folder; any other name as it is."""
    return model if model is None or not Path(model).exists() else str(Path(model).resolve())
