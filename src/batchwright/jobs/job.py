"""A job on disk: one input, one output, and what is known about both before and after the work."""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType

from batchwright.clock import Clock
from batchwright.durable_files import sync
from batchwright.errors import InputError, ResumeRefused
from batchwright.jobs.job_state import JobIdentity, StateFile
from batchwright.jobs.lines import ID_FIELDS, LineParser
from batchwright.jobs.resume import Finished, scan, write_in_order
from batchwright.jobs.sink import Sink
from batchwright.jobs.sources import Source, open_source
from batchwright.jobs.spec import TABLES, JobSpec
from batchwright.jobs.spool import Spool, sha256_of
from batchwright.jobs.template import PromptTemplate
from batchwright.lines.custom_ids import IdTable


class Job:
    """A job that was checked, fingerprinted and compared with what its output holds. A context manager.

    Files beside OUTPUT: `OUTPUT.batchwright.json` (state and lock), `OUTPUT.partial` (results in the order in which
    they finished, while an ordered job runs), `OUTPUT.input` (what a stream held, until the job is complete). Nothing
    of an earlier run is touched, and nothing of this one is left behind, before `begin`.
    """

    def __init__(self, spec: JobSpec, clock: Clock) -> None:
        """Raises `InputError` and `ResumeRefused`."""
        spec.check()
        self.spec = spec
        self._clock = clock
        self._output = Path(spec.output)
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
        """Part of the results' ids that tells this job from others."""
        self._fresh = not self._resumes()
        self._input = self._spool.path if self._spool is not None else Path(self.spec.input)
        self._opened = self._input.stat()
        self.parser, self.source = _reader(self.spec, self._input)
        self.total = self.source.count()
        """Number of lines of the input, without blank ones."""
        self.ids = IdTable(self.total)
        self.finished = Finished() if self._fresh else scan(self._held, self.key, self.ids)
        """The lines that earlier runs finished."""

    def _resumes(self) -> bool:
        """Return whether there are results of this very job. Raises `ResumeRefused` for results of anything else."""
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
        """Path of the results of earlier runs: complete ordered ones have left the working file."""
        return self._working if self._working.exists() else self._output

    def endpoints(self) -> set[str]:
        """Return the endpoints of the lines, as far as they can be told without checking them, two at most."""
        found: set[str] = set()
        for record in self.source.records():
            found.add(self.parser.endpoint_of(record))
            if len(found) == 2:
                break
        return found

    @property
    def complete(self) -> bool:
        """Whether there is nothing left to do."""
        return len(self.finished) == self.total

    def begin(self) -> Sink:
        """Start writing: after the results of earlier runs, or in place of those to overwrite. Raises OSError."""
        self._begun = True
        if self._spool is not None:
            self._input = self._spool.keep()
            self.parser, self.source = _reader(self.spec, self._input)
        if self._state is None:
            return Sink(sys.stdout.fileno(), "standard output", self._clock, durable=False)
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
        """Put the results in order where that was asked for, once every line is finished. Raises OSError."""
        if self.spec.ordered and self._working.exists():
            write_in_order(self._working, self._output, self.key)
            self._working.unlink()
        if self._spool is not None:
            # In place of one that an earlier run kept and was killed before removing, so that both go.
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
        """Path at which the content of a stream can be read again, when the job is not complete."""
        return self._spool.path if self._spool is not None and not self.spec.to_stream else None

    def close(self) -> None:
        """Release the output. Safe to call twice."""
        if self._spool is not None and (self.spec.to_stream or not self._begun):
            self._spool.remove()
        if self._state is not None:
            self._state.close()
            self._state = None

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _reader(spec: JobSpec, path: Path) -> tuple[LineParser, Source]:
    """Return the reader of the input's records, and the parser that makes lines of them. Raises `InputError`."""
    input_format = spec.resolved_format()
    template = None
    if input_format in TABLES:
        template = PromptTemplate.parse("{prompt}" if spec.prompt_template is None else spec.prompt_template)
    wanted = None if template is None else {*template.columns, *ID_FIELDS}
    source = open_source(path, input_format, max_line_bytes=spec.max_line_bytes, wanted=wanted)
    if template is not None and source.columns is not None:
        if spec.prompt_template is None and "prompt" not in source.columns:
            raise InputError(
                f"{spec.input} has no column 'prompt': say how a row becomes a prompt with --prompt-template "
                f"'… {{column}} …'; its columns are {', '.join(map(repr, source.columns))}"
            )
        template.check(source.columns)
    parser = LineParser(input_format, template, spec.chat, spec.system, spec.max_line_bytes)
    return parser, source
