"""Jobs on disk: the input, the output, and the state beside it."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

from batchwright.clock import Clock
from batchwright.durable_files import followed, replacing, sync
from batchwright.errors import InputError, InvalidRequest, ResumeRefused
from batchwright.jobs.answer_tables import write_lines, write_table
from batchwright.jobs.compression import COMPRESSED, compressing, reading
from batchwright.jobs.failures import RETRYABLE
from batchwright.jobs.field_reordering import check_fields, reordered
from batchwright.jobs.input_names import STREAM
from batchwright.jobs.lines import BadLine, Line, LineParser, check_body, check_form
from batchwright.jobs.output_names import BATCHES, INPUT, LINES, MAKING, ROWS, STATE
from batchwright.jobs.remote.parts import FileTarget, FolderTarget, OutputTarget, RemoteFileTarget, no_fence
from batchwright.jobs.remote.remote_file import AnyPath, RemotePath
from batchwright.jobs.remote.results import PartedSink, RemoteResults, work_folder
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
    sizes_of_lines,
    states_costs,
)
from batchwright.jobs.sink import Sink
from batchwright.jobs.sources import SelectedSource, Source, Spool, begins_with, fingerprint_of, version_of
from batchwright.jobs.spec import JobSpec, RetryFailed
from batchwright.jobs.spend_journal import journal_path
from batchwright.jobs.table_sources import TextRowSource, open_source
from batchwright.jobs.templates import Templates
from batchwright.lines.custom_ids import IdTable
from batchwright.planning.field_order import FieldReuse
from batchwright.planning.identical import Place
from batchwright.wire.requests import COMPLETION_URL

_log = logging.getLogger(__name__)
_RETRIED: dict[RetryFailed | None, Callable[[Mapping[str, Any]], bool]] = {
    None: lambda error: False,
    "passing": lambda error: bool(error.get(RETRYABLE)),
    "all": lambda error: True,
}


def state_path(output: Path) -> Path:
    """The path of the state file of the job that writes `output`."""
    return output.with_name(output.name + STATE)


def local_output(spec: JobSpec) -> Path:
    """The path of an output, or of the local part of one elsewhere; the journals are beside it."""
    address = spec.address
    return followed(Path(spec.output)) if address is None else work_folder(address) / address.name


class Job:
    """A job that was checked, fingerprinted and compared with the content of its output. A context manager.

    Files beside OUTPUT: `OUTPUT.batchwright.json` (state and lock), `OUTPUT.spend` (what was paid, if that is known),
    `OUTPUT.input` (the content of a stream, until the job is complete), `OUTPUT.batches` (the journal of batches at a
    provider, likewise), and results as they finish, if OUTPUT is only written at the end: `OUTPUT.results.jsonl` for a
    table, which stays, and `OUTPUT.partial` for lines in order or compressed. Before `begin`, no file of an earlier run
    is changed, and no file of this run is left behind.
    """

    def __init__(self, spec: JobSpec, clock: Clock) -> None:
        """Raises `InputError` and `ResumeRefused`."""
        spec.check()
        self.spec = spec
        self._clock = clock
        self._form = spec.form
        address = spec.address
        self._output = local_output(spec)
        self._at_once = spec.at_once
        self._keeps_results = spec.writes_rows or address is not None or spec.to_folder
        """Whether the results stay once the output was made from them."""
        self._working = self._output if self._at_once else self._beside(ROWS if self._keeps_results else LINES)
        """File that results are appended to."""
        self._again = _RETRIED[spec.retry_failed]
        self._remote: RemoteResults | None = None
        """The results at the address of the output; None for one on this machine."""
        if address is not None:
            folder = address if self._at_once else address.with_name(address.name + ROWS)
            self._remote = RemoteResults(folder, self._working, (journal_path(self._output), self.batches))
        self._target = self._target_of(address)
        self._spool: Spool | None = None
        self._state_file: StateFile | None = None
        self._reordered: tuple[Templates, FieldReuse] | None = None
        self._begun = False
        self._fresh = True
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise

    def _prepare(self) -> None:
        if self._remote is not None:
            self._output.parent.mkdir(parents=True, exist_ok=True)
        if not self.spec.to_stream:
            self._state_file = StateFile(state_path(self._output))
        if self._remote is not None and self._state_file is not None:
            self._restore(self._remote, self._state_file)
        if self.spec.from_stream:
            kept = None if self.spec.to_stream else self._beside(INPUT)
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
            self.spec.table_columns.kept(_rows(self.spec, self._paths).columns or ())
        self.total, self.weight = self.source.measure()
        """Number of lines of the input, without blank lines, and the sum of their weights."""
        self.ids = IdTable(self.total)
        nothing = self._fresh or not self._held.exists()
        self.finished = Finished() if nothing else scan(self._held, self.key, self.ids, self._again)
        """Lines that earlier runs finished."""
        self._require_costs()
        self._reorder()

    def _require_costs(self) -> None:
        """Raise `ResumeRefused` if a column of costs is wanted that the results of a complete job do not state."""
        asked = self.spec.columns.cost and self.complete and self.finished.succeeded
        if asked and not states_costs(self._held, self.key):
            raise ResumeRefused(
                f"--cost: the answers of {self._output} were computed without it, and do not say what they cost: leave "
                "it out, or start over with --overwrite"
            )

    def _target_of(self, address: RemotePath | None) -> OutputTarget:
        suffix = "".join(PurePath(self._output.name).suffixes[-1 - bool(self._form.compression) :]) or ".jsonl"
        made = self._beside(MAKING)
        fence = no_fence if self._remote is None else self._remote.fence
        if self.spec.to_folder:
            return FolderTarget(address or self._output, suffix, made, fence)
        return FileTarget(self._output) if address is None else RemoteFileTarget(address, made, fence)

    def _restore(self, remote: RemoteResults, state_file: StateFile) -> None:
        """Bring what is at the address of the output to this machine. Raises `ResumeRefused` and `InputError`."""
        try:
            state_file.write_content(remote.restore(copies=not self.spec.overwrite))
        except OSError as error:
            raise InputError(f"output {remote.folder} cannot be read: {error.strerror or error}") from error
        if not (self._at_once or self.spec.overwrite or remote.size) and self._target.exists():
            raise ResumeRefused(
                f"{self.spec.address} exists and does not belong to a batchwright job: "
                "name another output, or replace it with --overwrite"
            )
        if self.batches.name in remote.lost_journals and not self.spec.overwrite:
            raise ResumeRefused(
                f"lines of this job are in batches of the provider, which are noted on {remote.host} in "
                f"{self._output.parent}: go on there, or copy that folder here"
            )

    def require_journal(self) -> None:
        """Raise `ResumeRefused` if what the job has spent was recorded on another machine."""
        remote = self._remote
        if remote is not None and not self.spec.overwrite and journal_path(self._output).name in remote.lost_journals:
            raise ResumeRefused(
                f"what this job has spent is noted on {remote.host} in {self._output.parent}, so its budget cannot be "
                "kept here: go on there, copy that folder here, or leave the budget out"
            )

    def _beside(self, suffix: str) -> Path:
        return self._output.with_name(self._output.name + suffix)

    @property
    def key(self) -> str:
        """Key of this job in the ids of its results."""
        return self._state.key

    @property
    def contents(self) -> tuple[str, ...]:
        """Fingerprints of the content of the files of the input."""
        return tuple(file.sha256 for file in self._state.identity.files)

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
        if self.spec.reorder_fields:
            check_fields(self.parser.templates)
            if self._reordered is not None:
                self.parser = replace(self.parser, templates=self._reordered[0])

    def _reorder(self) -> None:
        """Find the order of independent fields, if it is asked for and there are lines to compute."""
        if self.spec.reorder_fields and self.parser.templates is not None and not self.complete:
            self._reordered = reordered(self.parser.templates, self.source)
            self.parser = replace(self.parser, templates=self._reordered[0])

    @property
    def field_reuse(self) -> FieldReuse | None:
        """What rows share of their independent fields; None unless these are reordered."""
        return None if self._reordered is None else self._reordered[1]

    def _resumes(self, identity: JobIdentity) -> bool:
        """Whether there are results of this job. Raises `ResumeRefused` for results of anything else."""
        if self._state_file is None or self.spec.overwrite:
            return False
        present = [path for path in (self._output, self._working) if path.is_file() and path.stat().st_size]
        if self._output.is_dir() and self._target.exists():
            present.append(self._output)
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
            # Results of another job that are all errors are useless.
            if not has_batches and self._held.exists() and nothing_succeeded(self._held, saved.key):
                return False
            raise ResumeRefused(
                f"{present[0]} holds results of a run that differs in {'; '.join(changes)}. To go on, run it as it "
                "was; to keep it, name another output; to lose its results and start over, add --overwrite"
            )
        self._state = replace(saved, identity=identity)
        if self._keeps_results and not self._at_once and self._output.exists() and not self._held.exists():
            raise ResumeRefused(
                f"{self._held} is missing, which holds the results that {self._output} was made of: restore it, name "
                "another output, or start over with --overwrite"
            )
        return self._held.exists() or has_batches

    def _has_grown(self, now: JobIdentity, then: JobIdentity) -> bool:
        """Whether the input is unchanged except for lines appended to the last file, or further files."""
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
        return self._working if self._working.exists() or self._keeps_results else self._output

    def endpoints(self, separate: Collection[str]) -> set[str]:
        """The endpoints of the lines that are in `separate`, and one for all others; unchecked."""
        found: set[str] = set()
        for record in self.source.records():
            endpoint = self.parser.endpoint_of(record)
            found.add(endpoint if endpoint in separate else COMPLETION_URL)
            if len(found) > len(separate):
                break
        return found

    @property
    def bytes(self) -> int:
        """Bytes of the input, in compressed form if it is; 0 where its store does not state them."""
        return sum(version.size or 0 for version in self._opened)

    def first_valid_line(self) -> Line | None:
        """The first valid line that earlier runs did not finish; None if there is none."""
        for record in self.source.records():
            if record.number not in self.finished:
                line = self.parser.parse(record)
                if not isinstance(line, BadLine):
                    with suppress(InvalidRequest):
                        check_body(line.endpoint, line.body, self.spec.defaults)
                        if self.spec.backend is None:
                            check_form(line.endpoint, line.body)
                        return line
        return None

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
            self._forget_earlier()
        else:
            self._bring_back()
            if not self.complete:
                # A table that was made of other results is made anew, even if they have the same size.
                self._state = replace(self._state, table={})
                self._state_file.write(self._state)
            if self.finished.left_out and self._remote is None:
                self.finished.size = leave_out(self._working, self.key, self._again)
        if self._remote is not None:
            return self._begin_elsewhere(self._remote)
        sink = Sink.append_to(self._working, self.finished.size, self._clock)
        self._state_file.write(self._state)
        sync(self._output.absolute().parent)
        return sink

    def _forget_earlier(self) -> None:
        if not self._at_once:
            self._target.remove()
        for path in map(self._beside, (LINES, ROWS)):
            if path != self._working:
                path.unlink(missing_ok=True)
        if self._remote is not None:
            self._remote.forget()
        if self.batches.is_dir():
            _log.warning(
                "%s is forgotten: batches in it that have not ended go on at the provider and are paid; "
                "`batchwright batches list` shows them, `batches cancel` ends them",
                self.batches,
            )
            shutil.rmtree(self.batches)

    def _begin_elsewhere(self, remote: RemoteResults) -> Sink:
        assert self._state_file is not None
        with Sink.append_to(self._working, self.finished.size, self._clock):
            pass  # half a line at the end is removed
        remote.begin(self._state.content)
        self._state_file.write(self._state)
        remote.commit(self.finished.size)
        if self.finished.left_out:
            kept = sizes_of_lines(self._working, self.key, self._again)
            remote.replace_lines(kept, lambda: leave_out(self._working, self.key, self._again))
            self.finished.size = remote.size
        sink = PartedSink.append_to(self._working, self.finished.size, self._clock)
        sink.copy_to(remote)
        return sink

    def earlier_answers(self) -> Iterator[tuple[int, Place]]:
        """The lines that earlier runs answered, and the places of their results in the file of the sink.

        Reads all results, after `begin` and before anything is written.
        """
        return iter(()) if self._state_file is None or self._fresh else answer_places(self._working, self.key)

    def _bring_back(self) -> None:
        """Make the results in a complete output the file to which results are appended."""
        if self._held == self._working or not self._held.exists():
            return
        if self._form.compression:
            with reading(self._held) as source, replacing(self._working) as target:
                shutil.copyfileobj(source, target)
        else:
            self._held.replace(self._working)

    def end(self) -> None:
        """Complete the output, when every line is finished. Raises OSError."""
        if self._remote is not None and not self._begun and self._remote.size < self.finished.size:
            with self.begin():
                pass  # an earlier run was killed before it had copied its last lines
        if self._keeps_results and not self._at_once:
            self._make_output()
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
        if self._remote is not None:
            self._remote.remove_copy()
            if self._state_file is not None:
                self._state_file.write_content(None)

    @property
    def batches(self) -> Path:
        """Folder with the journal of the batches that providers compute for this job, until it is complete."""
        return self._beside(BATCHES)

    def _make_output(self) -> None:
        """Make the output from the results, unless it exists and was made from the same ones."""
        assert self._state_file is not None
        columns = self.spec.table_columns
        made_of: dict[str, Any] = {
            "keep": None if columns.keep is None else [*columns.keep],
            "answer": columns.answer,
            "size": self._working.stat().st_size,
            # Tables of earlier versions have no such column.
            **({"cost": True} if columns.cost else {}),
        }
        if made_of == self._state.table and self._target.exists():
            return
        with ResultsByNumber(self._working, self.key) as results:
            if self.spec.writes_rows:
                write_table(_rows(self.spec, self._paths), results, self._target, self._form, columns)
            else:
                with self._working.open("rb") as lines:
                    write_lines(results if self.spec.ordered else lines, self._target, self._form)
        self._state = replace(self._state, table=made_of)
        self._state_file.write(self._state)
        if self._remote is not None:
            self._remote.save_state(self._state.content)

    def check_unchanged(self) -> None:
        """Raise `InputError` if the input was changed since it was fingerprinted."""
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
        if self._remote is not None:
            self._remote.close()
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
