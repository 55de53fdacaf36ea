"""Specifications of jobs, with the checks that need only look at names."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from batchwright.errors import InputError
from batchwright.jobs.sources import InputFormat, format_of
from batchwright.request import SamplingParams

STREAM = "-"
TABLES = ("csv", "tsv", "parquet")


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """The specification of a job, as the caller gave it."""

    input: str
    """A path, or `-` for standard input."""
    output: str
    """A path, or `-` for standard output (then nothing can be resumed)."""
    model: str | None
    """Name of the model; None: the endpoint's default."""
    embedding_model: str | None = None
    backend: str | None = None
    """Address of an endpoint that computes; None: models in this process."""
    served_model_names: tuple[str, ...] = ()
    """Further names under which lines may ask for the models."""
    defaults: SamplingParams = field(default_factory=SamplingParams)
    input_format: str | None = None
    prompt_template: str | None = None
    chat: bool = False
    system: str | None = None
    ordered: bool = False
    overwrite: bool = False
    max_line_bytes: int = 2**20
    engine_parameters: dict[str, Any] = field(default_factory=dict)
    """Options of the engine that affect results."""
    model_files: str | None = None
    """See `JobIdentity`."""

    @property
    def to_stream(self) -> bool:
        return self.output == STREAM

    @property
    def from_stream(self) -> bool:
        """Whether the input can be read only once: standard input, a pipe."""
        return self.input == STREAM or Path(self.input).is_fifo() or Path(self.input).is_char_device()

    def resolved_format(self) -> InputFormat:
        """The format of the input; that of a stream is JSON Lines by default. Raises `InputError`."""
        if self.from_stream and self.input_format is None:
            return "jsonl"
        return format_of(Path(self.input), self.input_format)

    def parameters(self) -> dict[str, Any]:
        """Everything that the results depend on besides the input, as JSON values by name."""
        chosen = {
            "backend": self.backend,
            "embedding_model": _resolved(self.embedding_model),
            "served_model_names": sorted(self.served_model_names) or None,
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
            **json.loads(json.dumps(asdict(self.defaults))),
        }

    def check(self) -> None:
        """Check everything that needs no look into files. Raises `InputError`."""
        self._check_input()
        self._check_output()
        table = self.resolved_format() in TABLES
        if self.prompt_template is not None and not table:
            raise InputError(f"--prompt-template is for tables ({', '.join(TABLES)}), not for {self.resolved_format()}")
        if self.from_stream and self.resolved_format() == "parquet":
            raise InputError("Parquet cannot be read from a stream: save it to a file first")
        if self.system is not None and not self.chat:
            raise InputError("--system needs --chat: it is put before prompts that are made into chats")
        if self.ordered and self.to_stream:
            raise InputError("--ordered needs an output file: results are put in order when all are there")
        if self.max_line_bytes < 1:
            raise InputError(f"max_line_bytes={self.max_line_bytes}: must be ≥ 1")

    def _check_input(self) -> None:
        if self.input == STREAM and sys.stdin is None:
            raise InputError("standard input is closed: name an input file")
        if self.from_stream:
            return
        path = Path(self.input)
        if path.is_dir():
            raise InputError(f"input {path} is a folder: name a file")
        if not path.exists():
            raise InputError(f"input {path} does not exist")

    def _check_output(self) -> None:
        if self.to_stream:
            if sys.stdout is None:
                raise InputError("standard output is closed: name an output file")
            return
        path = Path(self.output)
        if path.is_dir():
            raise InputError(f"output {path} is a folder: name a file")
        if path.exists() and not path.is_file():
            raise InputError(f"output {path} is not a regular file: name one, or - for standard output")
        if not path.absolute().parent.is_dir():
            raise InputError(f"output {path}: its folder does not exist; make it first")
        if not self.from_stream and path.exists() and path.samefile(self.input):
            raise InputError(f"output {path} is the input itself: name another file")


def _resolved(model: str | None) -> str | None:
    """The absolute path of a model that is a file or folder; any other name as it is."""
    return model if model is None or not Path(model).exists() else str(Path(model).resolve())
