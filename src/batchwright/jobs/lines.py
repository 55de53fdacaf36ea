"""A record of an input becomes a line of work, or the reason why it cannot. No record raises."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from batchwright.errors import BatchwrightError, InvalidRequest, shown
from batchwright.jobs.sources import InputFormat, Record
from batchwright.jobs.template import PromptTemplate
from batchwright.request import InferenceRequest, Prompt, SamplingParams
from batchwright.wire.fields import DEFAULT_PRIORITY, check_names, deadline_seconds, priority_of
from batchwright.wire.lines import MAX_CUSTOM_ID
from batchwright.wire.requests import (
    CHAT_URL,
    COMPLETION_URL,
    out_of_range,
    read_messages,
    read_params,
    read_prompts,
    require_answer_size,
)

ID_FIELDS = ("custom_id", "id")

_BATCH_FIELDS = frozenset({"method", "url"})
_BODY_FIELDS = frozenset({"prompt", "messages"})
_SIMPLE_FIELDS = _BODY_FIELDS | frozenset(ID_FIELDS)
_LONGEST_MESSAGE = 500


@dataclass(frozen=True, slots=True)
class Line:
    """What one record asks for."""

    number: int
    custom_id: str | None
    """None: the line has none, and gets its default."""
    chat: bool
    """Whether its answer is a chat completion (else a text completion)."""
    prompts: tuple[Prompt, ...]
    """One, or several for a completion of a list of prompts."""
    params: SamplingParams
    priority: int = DEFAULT_PRIORITY
    deadline: float | None = None
    """Seconds from when its requests are submitted, not from the start of the run; a line that is late fails."""

    def request(self, index: int, request_id: str) -> InferenceRequest:
        """The request for prompt `index`. Raises `InvalidRequest` for a prompt that is none."""
        return InferenceRequest.of(
            self.prompts[index],
            self.params,
            request_id=request_id,
            priority=self.priority,
            deadline=self.deadline,
        )


@dataclass(frozen=True, slots=True)
class BadLine:
    """A record that asks for nothing that can be done."""

    number: int
    custom_id: str | None
    """None where it has none that can be read."""
    error: BatchwrightError


@dataclass(frozen=True, slots=True)
class LineParser:
    """Reads records of one format."""

    input_format: InputFormat
    defaults: SamplingParams
    template: PromptTemplate | None = None
    """Needed for tables."""
    chat: bool = False
    """Whether a prompt that is plain text becomes the user message of a chat."""
    system: str | None = None
    """System message of such a chat."""
    max_line_bytes: int = 2**20

    def parse(self, record: Record) -> Line | BadLine:
        content = record.content
        custom_id: str | None = None
        try:
            if isinstance(content, InvalidRequest):
                raise content
            if isinstance(content, Mapping):
                # The id first: it names the line even when the template cannot be filled in.
                custom_id = _custom_id({name: content[name] for name in ID_FIELDS if content.get(name, "") != ""})
                return self._simple_line(record.number, custom_id, {"prompt": self._rendered(content)})
            if self.input_format == "txt":
                return self._simple_line(record.number, None, {"prompt": _decoded(content)})
            fields = _json_object(content)
            custom_id = _custom_id(fields)
            if _is_batch_line(fields):
                return self._batch_line(record.number, custom_id, fields)
            return self._simple_line(record.number, custom_id, fields)
        except InvalidRequest as error:
            return BadLine(record.number, custom_id, _shortened(error))
        except (ValueError, OverflowError, TypeError) as error:
            return BadLine(record.number, custom_id, _shortened(out_of_range(error)))

    def _rendered(self, row: Mapping[str, object]) -> str:
        if self.template is None:
            raise InvalidRequest("a row of a table needs a prompt template")
        prompt = self.template.render(row)
        if len(prompt.encode()) > self.max_line_bytes:
            raise InvalidRequest(
                f"the prompt has more than {self.max_line_bytes:,} bytes: shorten it, or raise --max-line-bytes",
                code="line_too_long",
            )
        return prompt

    def _simple_line(self, number: int, custom_id: str | None, fields: Mapping[str, object]) -> Line:
        check_names(fields, _SIMPLE_FIELDS, strict=False)
        if "messages" in fields and "prompt" in fields:
            raise InvalidRequest("the line has both prompt and messages: give one", param="prompt")
        if "messages" not in fields and "prompt" not in fields:
            raise InvalidRequest("the line has no prompt, no messages and no body: give one", code="missing_field")
        prompt_field = fields.get("prompt")
        if self.chat and isinstance(prompt_field, str):
            system = [{"role": "system", "content": self.system}] if self.system is not None else []
            user = {"role": "user", "content": prompt_field}
            fields = {**fields, "messages": [*system, user]}
        return self._of_body(number, custom_id, fields, chat="messages" in fields)

    def _batch_line(self, number: int, custom_id: str | None, fields: Mapping[str, object]) -> Line:
        if custom_id is None:
            raise InvalidRequest("custom_id is missing", param="custom_id", code="missing_field")
        for name in ("method", "url", "body"):
            if fields.get(name) is None:
                raise InvalidRequest(f"{name} is missing", param=name, code="missing_field")
        if fields["method"] != "POST":
            raise InvalidRequest(f"method={shown(fields['method'])}: must be POST", param="method")
        url, body = fields["url"], fields["body"]
        if url not in (CHAT_URL, COMPLETION_URL):
            raise InvalidRequest(
                f"url={shown(url)}: must be {CHAT_URL} or {COMPLETION_URL}", param="url", code="unsupported_url"
            )
        if not isinstance(body, Mapping):
            raise InvalidRequest("body must be an object", param="body")
        needed = "messages" if url == CHAT_URL else "prompt"
        check_names(body, frozenset({needed}), strict=True)
        if body.get(needed) is None:
            raise InvalidRequest(f"body.{needed} is missing", param=needed, code="missing_field")
        return self._of_body(number, custom_id, body, chat=url == CHAT_URL)

    def _of_body(self, number: int, custom_id: str | None, body: Mapping[str, object], *, chat: bool) -> Line:
        params = read_params(body, self.defaults, chat=chat)
        priority = priority_of(body)
        prompts = (read_messages(body["messages"]),) if chat else read_prompts(body["prompt"])
        require_answer_size(prompts, params, chat=chat)
        return Line(number, custom_id, chat, prompts, params, priority, deadline_seconds(body))


def _is_batch_line(fields: Mapping[str, object]) -> bool:
    """A simple line may have columns of its own called method or url."""
    return "body" in fields or bool(_BATCH_FIELDS & fields.keys() and not _BODY_FIELDS & fields.keys())


def _decoded(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the line is not UTF-8 (byte {error.start + 1})", code="invalid_encoding") from error


def _json_object(line: bytes) -> Mapping[str, object]:
    try:
        value = msgspec.json.decode(_decoded(line))
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"the line is not JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"the line is a JSON {type(value).__name__}, not an object", code="invalid_json")
    return value


def _custom_id(fields: Mapping[str, object]) -> str | None:
    for name in ID_FIELDS:
        value = fields.get(name)
        if value is None:
            continue
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        if not isinstance(value, str) or not value:
            raise InvalidRequest(f"{name} must be a text that is not empty, or a whole number", param=name)
        if len(value) > MAX_CUSTOM_ID:
            raise InvalidRequest(
                f"{name} has {len(value):,} characters, the most is {MAX_CUSTOM_ID}",
                param=name,
                code="string_above_max_length",
            )
        return value
    return None


def _shortened(error: InvalidRequest) -> InvalidRequest:
    message = str(error)
    if len(message) <= _LONGEST_MESSAGE:
        return error
    return InvalidRequest(message[:_LONGEST_MESSAGE] + "…", param=error.param, code=error.code)
