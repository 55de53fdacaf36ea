"""Jobs on disk: their specification, the input, the output, and the state beside it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from batchwright.clock import Clock
from batchwright.durable_files import followed, is_special, sync
from batchwright.errors import InputError, ResumeRefused
from batchwright.jobs.lines import ID_FIELDS, LineParser, PromptTemplate
from batchwright.jobs.resume import Finished, JobIdentity, StateFile, scan, write_in_order
from batchwright.jobs.sources import InputFormat, Source, Spool, format_of, open_source, sha256_of
from batchwright.lines.custom_ids import IdTable
from batchwright.request import SamplingParams
from batchwright.wire.requests import OPENAI_DEFAULTS

STREAM = "-"
TABLES = ("csv", "tsv", "parquet")
_SECONDS_BETWEEN_SYNCS = 1.0


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """The specification of a job, as the caller gave it."""

    input: str
    """A path, or `-` for standard input."""
    output: str
    """A path, or `-` for standard output. A stream, such as that or a pipe, cannot be resumed."""
    model: str | None
    """Name of the model; None: the endpoint's default."""
    embedding_model: str | None = None
    backend: str | None = None
    """Address of an endpoint that computes; None: models in this process."""
    served_model_names: tuple[str, ...] = ()
    """Further names under which lines may ask for the models."""
    defaults: SamplingParams | Mapping[str, Any] = field(default_factory=SamplingParams)
    """See `Call.defaults`."""
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
        return self.output == STREAM or is_special(Path(self.output))

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
        given = {} if isinstance(self.defaults, SamplingParams) else self.defaults
        defaults = self.defaults if isinstance(self.defaults, SamplingParams) else replace(OPENAI_DEFAULTS, **given)
        chosen = {
            # The others are told by their values.
            "sent_defaults": [name for name in given if given[name] == getattr(OPENAI_DEFAULTS, name)] or None,
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
            **json.loads(json.dumps(asdict(defaults))),
        }

    def check(self) -> None:
        """Check everything that needs no look into files. Raises `InputError`."""
        self._check_input()
        self._check_output()
        if self.prompt_template is not None and self.resolved_format() not in TABLES:
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
        if self.output == STREAM and sys.stdout is None:
            raise InputError("standard output is closed: name an output file")
        if self.to_stream:
            return
        path = followed(Path(self.output))
        if path.is_dir():
            raise InputError(f"output {path} is a folder: name a file")
        if not path.absolute().parent.is_dir():
            raise InputError(f"output {path}: its folder does not exist; make it first")
        if not self.from_stream and path.exists() and path.samefile(self.input):
            raise InputError(f"output {path} is the input itself: name another file")


def _resolved(model: str | None) -> str | None:
    """The absolute path of a model that is a file or folder; any other name as it is."""
    return model if model is None or not Path(model).exists() else str(Path(model).resolve())


class Sink:
    """Output that appends whole lines to a file descriptor. A context manager.

    Each line is written at once, so that it survives the death of this process; about once a second, and at the end,
    the lines in a file are also made to survive a loss of power.
    """

    def __init__(self, descriptor: int, name: str, clock: Clock, *, owned: bool = False, durable: bool = False) -> None:
        """`owned`: whether it is closed with the sink; `durable`: whether it is a file. `name` is for errors."""
        self._name = name
        self._descriptor = descriptor
        self._clock = clock
        self._owned = owned
        self._durable = durable
        self._synced_at = clock.now()

    @classmethod
    def append_to(cls, path: Path, size: int, clock: Clock) -> Sink:
        """Go on after the first `size` bytes of `path`, which is made if it does not exist. Raises OSError."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        os.ftruncate(descriptor, size)
        return cls(descriptor, str(path), clock, owned=True, durable=True)

    def write(self, line: bytes) -> None:
        """Append a line. Raises OSError, such as for a full disk; half a line left then is removed on resume."""
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._name) from error
        now = self._clock.now()
        if self._durable and now - self._synced_at >= _SECONDS_BETWEEN_SYNCS:
            os.fsync(self._descriptor)
            self._synced_at = now

    def __enter__(self) -> Sink:
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            if self._durable:
                os.fsync(self._descriptor)
        finally:
            if self._owned:
                os.close(self._descriptor)


class Job:
    """A job that was checked, fingerprinted and compared with the content of its output. A context manager.

    Files beside OUTPUT: `OUTPUT.batchwright.json` (state and lock), `OUTPUT.partial` (results in the order in which
    they finished, while an ordered job runs), `OUTPUT.input` (the content of a stream, until the job is complete).
    Before `begin`, no file of an earlier run is changed, and no file of this run is left behind.
    """

    def __init__(self, spec: JobSpec, clock: Clock) -> None:
        """Raises `InputError` and `ResumeRefused`."""
        spec.check()
        self.spec = spec
        self._clock = clock
        self._output = followed(Path(spec.output))
        self._partial = self._output.with_name(self._output.name + ".partial")
        self._working = self._partial if spec.ordered else self._output
        self._spool: Spool | None = None
        self._state: StateFile | None = None
        self._begun = False
        self._fresh = True
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise

    def _prepare(self) -> None:
        if not self.spec.to_stream:
            self._state = StateFile(self._output.with_name(self._output.name + ".batchwright.json"))
        if self.spec.from_stream:
            kept = None if self.spec.to_stream else self._output.with_name(self._output.name + ".input")
            self._spool = Spool(self.spec.input, kept)
        sha256 = self._spool.sha256 if self._spool is not None else sha256_of(Path(self.spec.input))
        self._identity = JobIdentity(sha256, self.spec.input, self.spec.parameters(), self.spec.model_files)
        self.key = self._identity.key
        """Key of this job in the ids of its results."""
        self._fresh = not self._resumes()
        self._input = self._spool.path if self._spool is not None else Path(self.spec.input)
        self._opened = self._input.stat()
        self.parser, self.source = _reader(self.spec, self._input)
        self.total = self.source.count()
        """Number of lines of the input, without blank lines."""
        self.ids = IdTable(self.total)
        self.finished = Finished() if self._fresh else scan(self._held, self.key, self.ids)
        """Lines that earlier runs finished."""

    def _resumes(self) -> bool:
        """Whether there are results of this job. Raises `ResumeRefused` for results of anything else."""
        if self._state is None or self.spec.overwrite:
            return False
        present = [path for path in (self._output, self._partial) if path.exists() and path.stat().st_size]
        if not present:
            return False
        saved = self._state.read()
        if saved is None:
            raise ResumeRefused(
                f"{present[0]} exists and does not belong to a batchwright job: "
                "name another output, or replace it with --overwrite"
            )
        changes = self._identity.changes(saved)
        if changes:
            raise ResumeRefused(
                f"{present[0]} holds results of a run that differs in {'; '.join(changes)}. To go on, run it as it "
                "was; to keep it, name another output; to lose its results and start over, add --overwrite"
            )
        return self._held.exists()

    @property
    def _held(self) -> Path:
        """File with the results of earlier runs: the output once those of an ordered job are complete."""
        return self._working if self._working.exists() else self._output

    def endpoints(self) -> set[str]:
        """The endpoints of the lines, found without checking them; at most two."""
        found: set[str] = set()
        for record in self.source.records():
            found.add(self.parser.endpoint_of(record))
            if len(found) == 2:
                break
        return found

    @property
    def complete(self) -> bool:
        """Whether all lines are finished."""
        return len(self.finished) == self.total

    def begin(self) -> Sink:
        """Start writing after the results of earlier runs, or in place of results to overwrite. Raises OSError."""
        self._begun = True
        if self._spool is not None:
            self._input = self._spool.keep()
            self.parser, self.source = _reader(self.spec, self._input)
        if self._state is None:
            if self.spec.output == STREAM:
                return Sink(sys.stdout.fileno(), "standard output", self._clock)
            return Sink(os.open(self._output, os.O_WRONLY | os.O_CLOEXEC), self.spec.output, self._clock, owned=True)
        if self._fresh:
            (self._output if self.spec.ordered else self._partial).unlink(missing_ok=True)
        elif self._held != self._working:
            self._held.replace(self._working)
        sink = Sink.append_to(self._working, self.finished.size, self._clock)
        if self._fresh:
            self._state.write(self._identity)
        sync(self._output.absolute().parent)
        return sink

    def end(self) -> None:
        """Complete the output, when every line is finished: put an ordered one in order. Raises OSError."""
        if self.spec.ordered and self._working.exists():
            write_in_order(self._working, self._output, self.key)
            self._working.unlink()
        if self._spool is not None:
            # An earlier run may have kept one, and been killed before removing it: this replaces and removes it.
            self._spool.keep()
            self._spool.remove()

    def check_unchanged(self) -> None:
        """Raise `InputError` if the input was written to since it was fingerprinted."""
        now = self._input.stat()
        if (now.st_size, now.st_mtime_ns) != (self._opened.st_size, self._opened.st_mtime_ns):
            raise InputError(
                f"{self._input} changed while it was being read, so results may be of either content: "
                "start over with --overwrite"
            )

    @property
    def kept_input(self) -> Path | None:
        """File with the content of a stream, while the job is not complete; None if there is none."""
        return self._spool.path if self._spool is not None and self._begun and not self.spec.to_stream else None

    def close(self) -> None:
        """Release the output. Safe to call twice."""
        if self._spool is not None and (self.spec.to_stream or not self._begun):
            self._spool.remove()
        if self._state is not None:
            self._state.close()
            self._state = None

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _reader(spec: JobSpec, path: Path) -> tuple[LineParser, Source]:
    """The parser of the records of an input, and their source. Raises `InputError`."""
    input_format = spec.resolved_format()
    template = wanted = None
    if input_format in TABLES:
        template = PromptTemplate.parse("{prompt}" if spec.prompt_template is None else spec.prompt_template)
        wanted = {*template.columns, *ID_FIELDS}
    source = open_source(path, input_format, max_line_bytes=spec.max_line_bytes, wanted=wanted)
    if template is not None and source.columns is not None:
        if spec.prompt_template is None and "prompt" not in source.columns:
            raise InputError(
                f"{spec.input} has no column 'prompt': say how a row becomes a prompt with --prompt-template "
                f"'… {{column}} …'; its columns are {', '.join(map(repr, source.columns))}"
            )
        template.check(source.columns)
    return LineParser(input_format, template, spec.chat, spec.system, spec.max_line_bytes), source
