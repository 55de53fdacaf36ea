"""Classes for Ray Data's `Dataset.map_batches`: each actor has an engine, which computes several batches at once.

    dataset.map_batches(
        batchwright.ray.Generate,
        fn_constructor_kwargs={"prompt": "Is this good? {review}", "defaults": {"max_tokens": 64}},
        batch_size=16,
        compute=ray.data.ActorPoolStrategy(size=2, max_concurrent_calls_per_actor=32),
        num_gpus=1,
    )

Batches may be of any format, and keep it. Ray gives an actor four batches of one block at a time, and with
`max_concurrent_calls_per_actor` those of that many blocks. About twice as many rows as the engine computes at once
(`max_num_seqs`, by default 256) keep it full.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import random
import sys
import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from batchwright.clock import MonotonicClock
from batchwright.engine_config import EngineConfig
from batchwright.errors import Cancelled, GenerationError, InputError, InvalidRequest, RowsFailed, shown
from batchwright.inference.calls import device_failure
from batchwright.inference.inference import Call, Inference
from batchwright.inference.loading import load_models, local_inference, system_fingerprint
from batchwright.inference.stepped_engine import SteppedEngine
from batchwright.jobs.answers import answer_of
from batchwright.jobs.lines import BadLine, Line, LineParser
from batchwright.jobs.row_batches import ColumnKind, RowBatch, row_batch
from batchwright.jobs.run import sampling_defaults
from batchwright.jobs.sources import Record
from batchwright.jobs.templates import Templates
from batchwright.lines.batch_line import line_error, request_id
from batchwright.lines.line_executor import LineExecutor, Outcome
from batchwright.lines.line_retries import RetryPolicy, nobody_computes
from batchwright.models import DEFAULT_MODEL
from batchwright.request import SamplingParams
from batchwright.wire.requests import CHAT_URL, EMBEDDINGS_URL

if TYPE_CHECKING:
    from batchwright.engine.engine import Engine
    from batchwright.engine.engine_stats import EngineStats

__all__ = ["Embed", "Generate"]

OnError: TypeAlias = Literal["null", "raise"]

_log = logging.getLogger(__name__)
_BROKEN = 1
"""Exit status of a process that ends because its engine is dead."""


@dataclass(eq=False, slots=True)
class _Row:
    number: int
    line: Line
    outcome: asyncio.Future[dict[str, Any] | Exception]


class _MapsBatches(ABC):
    """Base of both classes: makes a line of each row, computes the lines, and adds columns to the batch."""

    _kind: ColumnKind = "text"
    _dim = 0

    def __init__(
        self,
        inference: Inference,
        engine: Engine | None,
        output: str,
        errors: OnError,
        defaults: SamplingParams | Mapping[str, Any] | None = None,
    ) -> None:
        self._engine = engine
        self._output = output
        self._errors = errors
        self._defaults = defaults
        self._key = uuid.uuid4().hex
        self._numbers = count(1)
        self._ends_process = _in_actor()
        self._waiting: deque[_Row] = deque()
        self._executor = LineExecutor[_Row](
            inference,
            call_of=self._call,
            done=self._done,
            following=lambda: self._waiting.popleft() if self._waiting else None,
            timeout=None,
            retries=RetryPolicy(),
            clock=MonotonicClock(),
            draw=random.Random(self._key),
        )

    async def __call__(self, batch: Any) -> AsyncIterator[Any]:
        """Yield `batch` with the added columns, in the same format."""
        rows = row_batch(batch)
        if not rows.columns:  # a block without rows may lack columns, too
            yield batch
            return
        yield await self._answered(rows)

    @abstractmethod
    def _lines(self, batch: RowBatch) -> Iterable[Line | BadLine]:
        """The lines of the rows, in order. Raises `InputError` if columns are missing."""

    @abstractmethod
    def _value(self, body: Mapping[str, Any]) -> object:
        """The value of the column in an answer."""

    async def _answered(self, batch: RowBatch) -> object:
        error_column = f"{self._output}_error"
        for name in (self._output, error_column) if self._errors == "null" else (self._output,):
            if name in batch.columns:
                raise InputError(f"output={self._output!r}: there is a column {name!r} already; choose another name")
        outcomes = await self._outcomes([*self._lines(batch)])
        failures = [_failure(each) if isinstance(each, Exception) else None for each in outcomes]
        if failed := [failure for failure in failures if failure is not None]:
            message = f"{len(failed):,} of {len(batch):,} rows of a batch failed, such as with {failed[0]}"
            if self._errors == "raise":
                raise RowsFailed(message)
            _log.warning("%s: see the column %r", message, error_column)
        values = [None if isinstance(each, Exception) else self._value(each) for each in outcomes]
        added: dict[str, tuple[ColumnKind, Sequence[Any]]] = {self._output: (self._kind, values)}
        if self._errors == "null":
            added[error_column] = ("text", failures)
        return batch.with_columns(added, self._dim)

    async def _outcomes(self, lines: Sequence[Line | BadLine]) -> list[dict[str, Any] | Exception]:
        """The answers or errors of the lines, which are computed beside those of other batches."""
        loop = asyncio.get_running_loop()
        rows = {
            position: _Row(next(self._numbers), line, loop.create_future())
            for position, line in enumerate(lines)
            if isinstance(line, Line)
        }
        self._waiting.extend(rows.values())
        self._fill()
        try:
            await asyncio.gather(*(row.outcome for row in rows.values()))
        except asyncio.CancelledError:
            unwanted = {*rows.values()}
            self._waiting = deque(row for row in self._waiting if row not in unwanted)
            self._executor.drop(lambda row: row not in unwanted)
            self._fill()
            raise
        return [
            line.error if isinstance(line, BadLine) else rows[position].outcome.result()
            for position, line in enumerate(lines)
        ]

    def _fill(self) -> None:
        while self._waiting and self._executor.room > 0:
            self._executor.start(self._waiting.popleft())

    def _call(self, row: _Row, pauses: Callable[[Exception | None], None]) -> Call:
        return Call(
            row.line.endpoint,
            row.line.body,
            request_id(self._key, row.number),
            traffic="batch",
            pauses=pauses,
            defaults=self._defaults,
        )

    def _done(self, row: _Row, outcome: Outcome) -> None:
        if isinstance(outcome, Exception) and self._ends_process and (reason := self._why_dead(outcome)) is not None:
            _end_process(reason)
        if row.outcome.done():
            return
        ended = Cancelled("the row was cancelled") if outcome is None else outcome
        if isinstance(ended, Exception) and nobody_computes(ended):
            row.outcome.set_exception(ended)  # which is no failure of the row
        else:
            row.outcome.set_result(ended)

    def _why_dead(self, error: Exception) -> str | None:
        """Why nothing more can be computed here, as `error` shows; None if something can."""
        if nobody_computes(error):
            return str(error)
        return device_failure(self._engine) if isinstance(error, GenerationError) else None


class Generate(_MapsBatches):
    """Texts for the rows of a dataset, computed by one engine in each actor. Give the class to `map_batches`.

    - `prompt`: a text with columns in braces, `"Is this good? {review}"`; by default the column `prompt`. `system`: a
      system message before it, of the same form, which makes it a chat; `chat` does so without one. Instead of these,
      `messages`: a column of lists of messages; or `messages_template`: a Jinja template of such a list as JSON.
    - `output`: name of the column of answers: texts, or lists of them if `defaults` ask for several.
    - `model`: a name or a path; each machine needs its files, or fetches them. `defaults`: sampling parameters.
    - `errors`: `"null"` makes the answer of a failed row null and says why in a further column, `answer_error` (named
      after `output`); with `"raise"`, one failed row raises `RowsFailed` and ends the whole execution.
    - `engine`: how the engine computes; `engine_options` are fields of `EngineConfig` that override it.

    When its engine dies it ends the process of its actor, so that Ray starts another one and computes the batches
    again.

    Raises `InputError` for columns that are missing or in the way, and what loading the model raises. Outside an actor
    a dead engine raises `EngineClosed`.
    """

    def __init__(
        self,
        *,
        prompt: str | None = None,
        messages: str | None = None,
        output: str = "answer",
        model: str = DEFAULT_MODEL,
        system: str | None = None,
        chat: bool = False,
        messages_template: str | None = None,
        defaults: SamplingParams | Mapping[str, Any] | None = None,
        errors: OnError = "null",
        engine: EngineConfig | None = None,
        **engine_options: Any,
    ) -> None:
        _check_errors(errors)
        self._messages = messages
        self._templates = None
        if messages is None:
            default = "{prompt}" if messages_template is None else None
            self._templates = Templates.of(default if prompt is None else prompt, system, messages_template)
        elif given := [text for text in (prompt, system, messages_template) if text is not None]:
            raise InputError(f"messages={messages!r}: the column holds whole chats; leave {shown(given[0])} out")
        self._parser = LineParser("jsonl", self._templates, chat=chat)
        params = defaults if isinstance(defaults, SamplingParams) else sampling_defaults(None, defaults or {})
        self._kind = "text" if not isinstance(params, SamplingParams) or params.n == 1 else "texts"
        try:
            config = (engine or EngineConfig()).with_options(**engine_options)
        except ValueError as error:
            raise InputError(str(error)) from error
        loaded, _ = load_models(model, None, config)
        assert loaded is not None
        # Nothing else runs on this event loop, which is not that of the actor: no thread is needed beside it.
        self._running = SteppedEngine(loaded)
        inference = local_inference(self._running, None, fingerprint=system_fingerprint(loaded))
        super().__init__(inference, loaded, output, errors, params)

    @property
    def stats(self) -> EngineStats:
        """Figures of the engine."""
        return self._running.stats

    def _lines(self, batch: RowBatch) -> Iterable[Line | BadLine]:
        if self._templates is None:
            assert self._messages is not None
            if self._messages not in batch.columns:
                there = ", ".join(map(repr, batch.columns))
                raise InputError(f"messages={self._messages!r}: the input has no such column; it has {there}")
            cells = batch.rows([self._messages])
            return [_chat(number, row[self._messages]) for number, row in enumerate(cells, 1)]
        self._templates.check(batch.columns)
        rows = batch.rows(self._templates.columns)
        return [self._parser.parse(Record(number, row)) for number, row in enumerate(rows, 1)]

    def _value(self, body: Mapping[str, Any]) -> object:
        return answer_of({"body": body}, None)[1].answer


class Embed(_MapsBatches):
    """Embeddings of the rows of a dataset, computed by one encoder in each actor. Give the class to `map_batches`.

    - `text`: a text with columns in braces, `"{title}: {body}"`; by default the column `text`.
    - `output`: name of the column of vectors: tensors for batches of numpy, else lists.
    - `model`: a name or a path. `device`: where it computes, `cpu` or `cuda`; by default on a GPU if there is one.
    - `errors`: as for `Generate`; without a null, the vector of a row that fails is NaN in batches of numpy.

    Otherwise as `Generate`.
    """

    _kind = "vector"

    def __init__(
        self,
        *,
        text: str = "{text}",
        output: str = "embedding",
        model: str = "minilm",
        device: str | None = None,
        errors: OnError = "null",
    ) -> None:
        _check_errors(errors)
        self._templates = Templates.of(text, None, None)
        _, encoder = load_models(
            None, model, EngineConfig().with_options(**({} if device is None else {"device": device}))
        )
        assert encoder is not None
        self._dim = encoder.dim
        super().__init__(local_inference(None, encoder), None, output, errors)

    def _lines(self, batch: RowBatch) -> Iterable[Line | BadLine]:
        self._templates.check(batch.columns)
        rows = batch.rows(self._templates.columns)
        return [self._line(number, row) for number, row in enumerate(rows, 1)]

    def _line(self, number: int, row: Mapping[str, object]) -> Line | BadLine:
        try:
            text = self._templates.render(row)["prompt"]
        except InvalidRequest as error:
            return BadLine(number, None, error)
        return Line(number, None, EMBEDDINGS_URL, {"input": text, "encoding_format": "base64"})

    def _value(self, body: Mapping[str, Any]) -> npt.NDArray[np.float32]:
        return np.frombuffer(base64.b64decode(body["data"][0]["embedding"]), "<f4")


def _chat(number: int, messages: object) -> Line | BadLine:
    """The line for a cell of messages, in which Arrow puts a null for each field that only other messages have."""
    if messages is None:
        return BadLine(number, None, InvalidRequest("the row has no messages", param="messages", code="missing_field"))
    if isinstance(messages, list):
        messages = [_without_nulls(each) for each in messages]
    return Line(number, None, CHAT_URL, {"messages": messages})


def _without_nulls(message: object) -> object:
    if not isinstance(message, dict):
        return message
    return {name: value for name, value in message.items() if value is not None or name == "content"}


def _check_errors(errors: str) -> None:
    if errors not in ("null", "raise"):
        raise InputError(f"errors={shown(errors)}: must be 'null' or 'raise'")


def _failure(error: Exception) -> str:
    failure = answer_of(None, line_error(error))[1].error
    assert failure is not None
    return failure


def _in_actor() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None


def _end_process(reason: str) -> None:
    """End this process at once.

    An actor whose method raises is given the same block again, even if its engine is dead; and the tasks of one that
    leaves by `ray.actor.exit_actor` are not retried.
    """
    _log.critical("nothing can be computed here any more, the actor ends: %s", reason)
    sys.stderr.flush()
    os._exit(_BROKEN)
