"""Jobs on disk: the input, the output, and the state beside it."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from batchwright.clock import Clock
from batchwright.durable_files import followed, replacing, sync
from batchwright.errors import InputError, InvalidRequest, ResumeRefused
from batchwright.jobs.answer_tables import write_table
from batchwright.jobs.compression import COMPRESSED, compressing, reading
from batchwright.jobs.failures import RETRYABLE
from batchwright.jobs.input_names import STREAM
from batchwright.jobs.lines import BadLine, LineParser, check_body
from batchwright.jobs.remote.remote_file import AnyPath
from batchwright.jobs.resume import (
    Finished,
    InputFile,
    JobIdentity,
    JobState,
    ResultsByNumber,
    StateFile,
    answer_places,
    leave_out,
    nothing_succeeded,
    scan,
)
from batchwright.jobs.sink import Sink
from batchwright.jobs.sources import SelectedSource, Source, Spool, begins_with, fingerprint_of, version_of
from batchwright.jobs.spec import JobSpec, RetryFailed
from batchwright.jobs.spend_journal import journal_path
from batchwright.jobs.table_sources import TextRowSource, open_source
from batchwright.jobs.templates import Templates
from batchwright.lines.custom_ids import IdTable
from batchwright.planning.identical import Place

_SUFFIXES = (".partial", ".results.jsonl")
"""Ends of the names of files beside the output that hold results: of lines, and of a table."""
_log = logging.getLogger(__name__)
_BATCHES = ".batches"
_RETRIED: dict[RetryFailed | None, Callable[[Mapping[str, Any]], bool]] = {
    None: lambda error: False,
    "passing": lambda error: bool(error.get(RETRYABLE)),
    "all": lambda error: True,
}


def state_path(output: Path) -> Path:
    """The path of the state file of the job that writes `output`."""
    return output.with_name(output.name + ".batchwright.json")


class Job:
    """A job that was checked, fingerprinted and compared with the content of its output. A context manager.

    Files beside OUTPUT: `OUTPUT.batchwright.json` (state and lock), `OUTPUT.spend` (what was paid, where that is
    known), `OUTPUT.input` (the content of a stream, until the job is complete), `OUTPUT.batches` (the journal of
    batches at a provider, likewise), and results as they finish, wherever OUTPUT is only written at the end:
    `OUTPUT.results.jsonl` for a table, which stays, and `OUTPUT.partial` for lines in order or compressed. Before
    `begin`, no file of an earlier run is changed, and no file of this run is left behind.
    """

    def __init__(self, spec: JobSpec, clock: Clock) -> None:
        """Raises `InputError` and `ResumeRefused`."""
        spec.check()
        self.spec = spec
        self._clock = clock
        self._form = spec.form
        self._output = followed(Path(spec.output))
        self._at_once = self._form.is_plain and not spec.ordered and not spec.writes_rows
        of_lines, of_rows = _SUFFIXES
        self._working = self._output if self._at_once else self._beside(of_rows if spec.writes_rows else of_lines)
        """File that results are appended to."""
        self._again = _RETRIED[spec.retry_failed]
        self._spool: Spool | None = None
        self._state_file: StateFile | None = None
        self._begun = False
        self._fresh = True
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise

    def _prepare(self) -> None:
        if not self.spec.to_stream:
            self._state_file = StateFile(state_path(self._output))
        if self.spec.from_stream:
            kept = None if self.spec.to_stream else self._beside(".input")
            self._spool = Spool(self.spec.inputs[0], kept)
        self._opened = [version_of(path) for path in self._paths]
        files = tuple(
            InputFile(name if isinstance(path, Path) else str(path), seen.size or 0, fingerprint_of(path, seen))
            for name, path, seen in zip(self.spec.inputs, self._paths, self._opened, strict=True)
        )
        identity = JobIdentity(files, self.spec.parameters(), self.spec.model_files, self.spec.limit)
        self._state = JobState(identity.key, identity)
        self._fresh = not self._resumes(identity)
        self._read_anew()
        if self.spec.writes_rows:
            self.spec.columns.kept(_rows(self.spec, self._paths).columns or ())
        self.total, self.weight = self.source.measure()
        """Number of lines of the input, without blank lines, and the sum of their weights."""
        self.ids = IdTable(self.total)
        nothing = self._fresh or not self._held.exists()
        self.finished = Finished() if nothing else scan(self._held, self.key, self.ids, self._again)
        """Lines that earlier runs finished."""

    def _beside(self, suffix: str) -> Path:
        return self._output.with_name(self._output.name + suffix)

    @property
    def key(self) -> str:
        """Key of this job in the ids of its results."""
        return self._state.key

    @property
    def spend_journal(self) -> Path | None:
        """Path of the journal of what the job spends; None if the job cannot be resumed."""
        return None if self.spec.to_stream else journal_path(self._output)

    @property
    def _paths(self) -> tuple[AnyPath, ...]:
        return self.spec.paths if self._spool is None else (self._spool.path,)

    def _read_anew(self) -> None:
        self.parser, self.source = _reader(self.spec, self._paths)
        if self.spec.limit is not None or self.spec.sample is not None:
            self.source = SelectedSource(
                self.source, limit=self.spec.limit, sample=self.spec.sample, seed=self.spec.sample_seed
            )

    def _resumes(self, identity: JobIdentity) -> bool:
        """Whether there are results of this job. Raises `ResumeRefused` for results of anything else."""
        if self._state_file is None or self.spec.overwrite:
            return False
        present = [path for path in (self._output, self._working) if path.exists() and path.stat().st_size]
        # Lines in a provider's batches may be paid already, though none has a result yet.
        has_batches = self.batches.is_dir()
        if has_batches:
            present.append(self.batches)
        if not present:
            return False
        saved = self._state_file.read()
        if saved is None:
            raise ResumeRefused(
                f"{present[0]} exists and does not belong to a batchwright job: "
                "name another output, or replace it with --overwrite"
            )
        changes = identity.changes(saved.identity, self._has_grown(identity, saved.identity))
        if changes:
            # Results of another job that are all errors are of no use to anybody.
            if not has_batches and self._held.exists() and nothing_succeeded(self._held, saved.key):
                return False
            raise ResumeRefused(
                f"{present[0]} holds results of a run that differs in {'; '.join(changes)}. To go on, run it as it "
                "was; to keep it, name another output; to lose its results and start over, add --overwrite"
            )
        self._state = replace(saved, identity=identity)
        if self.spec.writes_rows and self._output.exists() and not self._held.exists():
            raise ResumeRefused(
                f"{self._held} is missing, which holds the results that {self._output} was made of: restore it, name "
                "another output, or start over with --overwrite"
            )
        return self._held.exists() or has_batches

    def _has_grown(self, now: JobIdentity, then: JobIdentity) -> bool:
        """Whether the input is what it was, with lines appended to the last file, or further files."""
        if self.spec.sample is not None or len(now.files) < len(then.files):
            return False
        last = len(then.files) - 1
        same = all(now.files[index].sha256 == file.sha256 for index, file in enumerate(then.files[:last]))
        path, before = self._paths[last], then.files[last]
        if not same or now.files[last].sha256 == before.sha256:
            return same
        lines = self.spec.resolved_format() in ("jsonl", "txt", "csv", "tsv") and path.suffix not in COMPRESSED
        return lines and 0 < before.size < now.files[last].size and begins_with(path, before.size, before.sha256)

    @property
    def _held(self) -> Path:
        """File with the results of earlier runs."""
        return self._working if self._working.exists() or self.spec.writes_rows else self._output

    def endpoints(self) -> set[str]:
        """The endpoints of the lines, found without checking them; at most two."""
        found: set[str] = set()
        for record in self.source.records():
            found.add(self.parser.endpoint_of(record))
            if len(found) == 2:
                break
        return found

    def has_valid_line(self) -> bool:
        """Whether there is a valid line that earlier runs did not finish."""
        for record in self.source.records():
            if record.number not in self.finished:
                line = self.parser.parse(record)
                if not isinstance(line, BadLine):
                    with suppress(InvalidRequest):
                        check_body(line.endpoint, line.body, self.spec.defaults)
                        return True
        return False

    @property
    def complete(self) -> bool:
        """Whether all lines are finished."""
        return len(self.finished) == self.total

    def begin(self) -> Sink:
        """Start writing after the results of earlier runs, or in place of results to overwrite. Raises OSError."""
        self._begun = True
        if self._spool is not None:
            self._spool.keep()
            self._read_anew()
        if self._state_file is None:
            if self.spec.output == STREAM:
                return Sink(sys.stdout.fileno(), "standard output", self._clock)
            return Sink(os.open(self._output, os.O_WRONLY | os.O_CLOEXEC), self.spec.output, self._clock, owned=True)
        if self.spec.overwrite:
            journal_path(self._output).unlink(missing_ok=True)
        if self._fresh:
            for path in (self._output, *map(self._beside, _SUFFIXES)):
                if path != self._working:
                    path.unlink(missing_ok=True)
            if self.batches.is_dir():
                _log.warning(
                    "%s is forgotten: batches in it that have not ended go on at the provider and are paid; "
                    "`batchwright batches list` shows them, `batches cancel` ends them",
                    self.batches,
                )
                shutil.rmtree(self.batches)
        else:
            self._bring_back()
            if not self.complete:
                # A table that was made of other results is made anew, even if they have the same size.
                self._state = replace(self._state, table={})
                self._state_file.write(self._state)
            if self.finished.left_out:
                self.finished.size = leave_out(self._working, self.key, self._again)
        sink = Sink.append_to(self._working, self.finished.size, self._clock)
        self._state_file.write(self._state)
        sync(self._output.absolute().parent)
        return sink

    def earlier_answers(self) -> Iterator[tuple[int, Place]]:
        """The lines that earlier runs answered, and the places of their results in the file of the sink.

        Reads all results, after `begin` and before anything is written.
        """
        return iter(()) if self._state_file is None or self._fresh else answer_places(self._working, self.key)

    def _bring_back(self) -> None:
        """Make the results in an output that is complete the file that results are appended to."""
        if self._held == self._working or not self._held.exists():
            return
        if self._form.compression:
            with reading(self._held) as source, replacing(self._working) as target:
                shutil.copyfileobj(source, target)
        else:
            self._held.replace(self._working)

    def end(self) -> None:
        """Complete the output, when every line is finished. Raises OSError."""
        if self.spec.writes_rows:
            self._make_table()
        elif not self._at_once and self._working.exists():
            with (
                ResultsByNumber(self._working, self.key) as results,
                self._working.open("rb") as source,
                replacing(self._output) as file,
                compressing(file, self._form.compression) as target,
            ):
                for line in results if self.spec.ordered else source:
                    target.write(line)
            self._working.unlink()
        if self._state_file is not None and self.batches.is_dir():
            shutil.rmtree(self.batches)
        if self._spool is not None:
            # An earlier run may have kept one, and been killed before removing it: this replaces and removes it.
            self._spool.keep()
            self._spool.remove()

    @property
    def batches(self) -> Path:
        """Folder with the journal of the batches that providers compute for this job, until it is complete."""
        return self._beside(_BATCHES)

    def _make_table(self) -> None:
        """Write the table of answers, unless it is there and was made of the same results."""
        assert self._state_file is not None
        columns = self.spec.columns
        made_of: dict[str, Any] = {
            "keep": None if columns.keep is None else [*columns.keep],
            "answer": columns.answer,
            "size": self._working.stat().st_size,
        }
        if self._output.exists() and made_of == self._state.table:
            return
        rows = _rows(self.spec, self._paths)
        with ResultsByNumber(self._working, self.key) as results, replacing(self._output) as file:
            write_table(rows, results, file, self._form, columns)
        self._state = replace(self._state, table=made_of)
        self._state_file.write(self._state)

    def check_unchanged(self) -> None:
        """Raise `InputError` if the input was written to since it was fingerprinted."""
        for path, before in zip(self._paths, self._opened, strict=True):
            if version_of(path) != before:
                raise InputError(
                    f"{path} changed while it was being read, so results may be of either content: "
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
        if self._state_file is not None:
            self._state_file.close()
            self._state_file = None

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _reader(spec: JobSpec, paths: Sequence[AnyPath]) -> tuple[LineParser, Source]:
    """The parser of the records of an input, and their source. Raises `InputError`."""
    input_format = spec.resolved_format()
    templates, wanted = None, None
    if spec.is_table:
        default = "{prompt}" if spec.messages_template is None else None
        prompt = spec.prompt_template if spec.prompt_template is not None else default
        templates = Templates.of(prompt, spec.system_template, spec.messages_template)
        wanted = {*templates.columns, *([spec.id_column] if spec.id_column is not None else [])}
    source = open_source(
        paths, input_format, max_line_bytes=spec.max_line_bytes, wanted=wanted, rows=templates is not None
    )
    if templates is not None and source.columns is not None:
        if spec.prompt_template is spec.messages_template is None and "prompt" not in source.columns:
            raise InputError(
                f"{spec.inputs[0]} has no column 'prompt': say how a row becomes a prompt with --prompt-template "
                f"'… {{column}} …'; its columns are {', '.join(map(repr, source.columns))}"
            )
        templates.check(source.columns)
        if spec.id_column is not None and spec.id_column not in source.columns:
            raise InputError(
                f"--id-column {spec.id_column!r}: the input has the columns {', '.join(map(repr, source.columns))}"
            )
    parser = LineParser(input_format, templates, spec.id_column, spec.chat, spec.system, spec.max_line_bytes)
    return parser, source


def _rows(spec: JobSpec, paths: Sequence[AnyPath]) -> Source:
    """The rows of the input, for a table of answers. Raises `InputError`."""
    input_format = spec.resolved_format()
    source = open_source(paths, input_format, max_line_bytes=spec.max_line_bytes, wanted=spec.columns.keep, rows=True)
    return source if source.columns is not None else TextRowSource(source)
