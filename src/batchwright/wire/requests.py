"""Reading of OpenAI request bodies: what to compute, how, and how soon.

A field that a body leaves out, or that is null, has OpenAI's default: temperature 1; in a chat as many tokens as the
context still holds, in a completion 16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, cast

import msgspec

from batchwright.constraints import schema_of
from batchwright.errors import InvalidRequest, shown
from batchwright.request import FORM_FIELDS, Prompt, SamplingParams
from batchwright.wire.answer_forms import FORM_NAMES, form_fields, named_in_body
from batchwright.wire.bounds import MAX_INPUTS, MAX_LOGPROBS, require_size
from batchwright.wire.chats import CHAT_NAMES, ChatTools, read_chat, read_tools
from batchwright.wire.fields import (
    ANSWER_LIMITS,
    MAX_TOKENS,
    check_names,
    completions_of,
    deadline_seconds,
    priority_of,
    require_type,
    sampling_overrides,
)

CHAT_URL = "/v1/chat/completions"
COMPLETION_URL = "/v1/completions"
EMBEDDINGS_URL = "/v1/embeddings"
RERANK_URL = "/v1/rerank"
SCORE_URL = "/v1/score"
CLASSIFY_URL = "/classify"
CLASSIFIER_URLS = frozenset({RERANK_URL, SCORE_URL, CLASSIFY_URL})
"""Endpoints of sequence classifiers, such as cross-encoders."""
PAIR_URLS = frozenset({RERANK_URL, SCORE_URL})
"""Those whose inputs are pairs of texts, which an embedding model can score, too."""
ENCODER_URLS = CLASSIFIER_URLS | {EMBEDDINGS_URL}
"""Endpoints whose answers are computed from the input alone, and have no generated tokens."""
ALIASES: Mapping[str, str] = {
    "/rerank": RERANK_URL,
    "/v2/rerank": RERANK_URL,
    "/score": SCORE_URL,
    "/v1/classify": CLASSIFY_URL,
}
"""Other paths of endpoints, which clients of vLLM, Cohere and Jina use."""
PAIR_FIELDS = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items"))
"""Fields with the first and the second texts of pairs in a body for `/v1/score`, in each of vLLM's forms."""
RESPONSES_URL = "/v1/responses"
"""Computed here in its text form (`wire/text_responses.py`); bodies for elsewhere are passed on as they are."""

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Roles of messages, as in OpenAI's API."""

EncodingFormat: TypeAlias = Literal["float", "base64"]

_Settings: TypeAlias = tuple[tuple[str, type, object], ...]
_SCALARS = frozenset({str, int, float, bool, type(None)})

_OURS = ("deadline", "deadline_ms", "expected_tokens", "priority")
"""Fields of batchwright that endpoints elsewhere do not know."""
_TOKENS_COUNTED = 4096
"""Most tokens of a completion that count towards `MAX_LOGPROBS`: a body without a limit means the whole context."""
OPENAI_DEFAULTS = SamplingParams(temperature=1.0, max_tokens=MAX_TOKENS)
"""Defaults of a chat."""
COMPLETION_LIMIT = 16
"""Most tokens of a completion whose body names no limit."""
_COMPLETION_DEFAULTS = replace(OPENAI_DEFAULTS, max_tokens=COMPLETION_LIMIT)
_MESSAGE_FIELDS: Mapping[str, type] = {"name": str, "tool_calls": list, "tool_call_id": str, "function_call": dict}
"""Types of a message's fields beside its role and content. Any other fields are for the chat template."""
_FIELDS_OF = {
    "max_tokens": {*ANSWER_LIMITS},
    "logprobs": {"logprobs", "top_logprobs"},
}
"""Names in a body for a field of `SamplingParams`, if they differ from its own."""
_CHAT_NAMES = frozenset({"messages", "stream", "stream_options"}) | CHAT_NAMES
_COMPLETION_NAMES = frozenset({"prompt", "echo", "stream", "stream_options"})
_EMBEDDING_NAMES = frozenset({
    "dimensions", "encoding_format", "input", "truncate_prompt_tokens", "priority", "deadline", "deadline_ms",
})  # fmt: skip
WHOLE_LENGTH = -1
"""Value of `truncate_prompt_tokens` for the most tokens that the model takes."""


_READ: dict[tuple[bool, int, _Settings], tuple[GenerationBody, SamplingParams]] = {}
"""What was read of bodies except their prompts: most bodies have the same settings as others. The defaults are kept, so
that nothing else can have their `id`."""
_MOST_READ = 256
_LONGEST_SETTINGS = 1024
"""Most characters of settings that are remembered."""


class GenerationBody(msgspec.Struct, frozen=True, kw_only=True):
    """A body for chats or completions."""

    chat: bool
    model: str | None
    """Name of the model. None: the body names none."""
    prompts: tuple[Prompt, ...]
    """The prompts, each of which gets `n` choices. A chat has one."""
    priority: int
    deadline: float | None
    """Seconds after which the answer is of no use. None: no limit."""
    stream: bool
    include_usage: bool
    """Whether a stream ends with its token counts."""
    echo: bool
    """Whether each choice begins with its prompt."""
    prompt_logprobs: int | None
    """Number of alternatives to each prompt token in vLLM's form of log-probabilities. None: they are not wanted."""
    _params: SamplingParams
    tools: ChatTools | None = None
    """Tools of a chat. None: it has none."""

    @property
    def n(self) -> int:
        """Number of completions of each prompt."""
        return self._params.n

    @property
    def is_constrained(self) -> bool:
        """Whether the answer must have a form."""
        return self._params.is_constrained

    @property
    def is_json(self) -> bool:
        """Whether the answer must be JSON."""
        return self._params.json_object or self._params.schema is not None

    @property
    def echoed_logprobs(self) -> int | None:
        """Number of alternatives to each token of a prompt that is echoed. None: no log-probabilities are wanted."""
        return self._params.logprobs if self.echo else None

    def require_few_prompt_logprobs(self, prompt_tokens: int) -> None:
        """Raise `InvalidRequest` if this number of tokens, of all prompts, would have too many log-probabilities."""
        named = 1 + max(self.prompt_logprobs or 0, self.echoed_logprobs or 0)
        if self._params.prompt_logprobs is not None and prompt_tokens * named * self.n > MAX_LOGPROBS:
            raise InvalidRequest(
                f"{prompt_tokens:,} tokens of prompts with {named} log-probabilities each and n={self.n} are more than "
                f"{MAX_LOGPROBS:,} in all: ask for fewer",
                param="logprobs" if self.prompt_logprobs is None else "prompt_logprobs",
            )

    def with_prompts(self, body: Mapping[str, Any]) -> GenerationBody:
        """Return what a body says that differs from this one only in its prompts. Raises `InvalidRequest`."""
        name = "messages" if self.chat else "prompt"
        require_size(name, body.get(name))
        given = required(name, body)
        prompts = _prompts_of(given, body, self.tools, chat=self.chat)
        _require_answer_size(prompts, self._params, chat=self.chat)
        return msgspec.structs.replace(self, prompts=prompts)

    def params(self, room: int) -> SamplingParams:
        """Return the sampling parameters. `room`, the tokens left in the context, limits a body without `max_tokens`.

        Raises `InvalidRequest` when `min_tokens` is larger.
        """
        limited = self._params.max_tokens != MAX_TOKENS
        return self._params if limited else replace(self._params, max_tokens=max(1, room))


@dataclass(frozen=True, slots=True)
class EmbeddingsBody:
    """A body for embeddings."""

    model: str | None
    inputs: tuple[str | list[int], ...]
    """Texts, or lists of token ids, which are used as they are. At least one."""
    encoding_format: EncodingFormat
    dimensions: int | None
    most_tokens: int | None
    """Tokens to which each text is cut; `WHOLE_LENGTH`: as many as the model takes; None: none is cut."""
    priority: int
    deadline: float | None


def read_generation(
    body: Mapping[str, Any], *, chat: bool, defaults: SamplingParams | Mapping[str, Any] | None = None
) -> GenerationBody:
    """Read a body for `/v1/chat/completions`, or without `chat` for `/v1/completions`.

    `defaults` are for fields that the body leaves out; if they are None, and for what a mapping leaves out, OpenAI's
    apply.

    For any JSON object, raises nothing but `InvalidRequest`, naming the field.
    """
    is_same = not defaults or isinstance(defaults, SamplingParams)
    if not isinstance(defaults, SamplingParams):
        rest = OPENAI_DEFAULTS if chat else _COMPLETION_DEFAULTS
        defaults = replace(rest, **defaults) if defaults else rest
    key = _settings_key(body, "messages" if chat else "prompt") if is_same else None
    try:
        if key is not None and (known := _READ.get((chat, id(defaults), key))) is not None:
            return known[0].with_prompts(body)
        found = _read_generation(body, defaults, chat=chat)
    except InvalidRequest:
        raise
    except (ValueError, OverflowError, TypeError) as error:
        # A value that passed every check by name and still cannot be converted, such as thousands of digits.
        raise InvalidRequest(f"a value is out of range: {error}") from error
    if key is not None:
        if len(_READ) >= _MOST_READ:
            _READ.clear()
        _READ[chat, id(defaults), key] = msgspec.structs.replace(found, prompts=()), defaults
    return found


def _settings_key(body: Mapping[str, Any], prompts: str) -> _Settings | None:
    """Return all fields but the prompts, with their types; None if one is a list or an object, or they are long."""
    found, size = [], 0
    for name, value in body.items():
        if name != prompts:
            kind = type(value)
            size += len(str(name)) + (len(value) if kind is str else 0)
            if kind not in _SCALARS or size > _LONGEST_SETTINGS:
                return None  # most often a form or tools, which take longer to compare than to read
            found.append((name, kind, value))
    return tuple(found)


def _read_generation(body: Mapping[str, Any], defaults: SamplingParams, *, chat: bool) -> GenerationBody:
    """Read all of a body. Raises as `read_generation` does, and what conversions raise."""
    check_names(body, _CHAT_NAMES if chat else _COMPLETION_NAMES)
    given = required("messages" if chat else "prompt", body)
    overrides = cast("dict[str, Any]", sampling_overrides(body, chat=chat))
    stream, echo = wants_stream(body), not chat and flag("echo", body.get("echo"))
    wanted = overrides.get("prompt_logprobs", defaults.prompt_logprobs)
    if echo:
        overrides |= _scores_to_echo(overrides, defaults)
    try:
        params = replace(defaults, **overrides) if overrides else defaults
    except InvalidRequest as error:
        raise named_in_body(error, body) from error
    if stream and (echo or wanted is not None):
        name = "echo" if echo else "prompt_logprobs"
        raise InvalidRequest(f"{name} cannot be streamed: leave out stream, or {name}", param=name)
    tools = read_tools(body) if chat else None
    if tools is not None and tools.choice == "required" and params.is_constrained:
        raise InvalidRequest(
            "tool_choice requires a call, which cannot have another form as well: leave out one of them",
            param="tool_choice",
        )
    prompts = _prompts_of(given, body, tools, chat=chat)
    _require_answer_size(prompts, params, chat=chat)
    return GenerationBody(
        chat=chat,
        model=read_model(body),
        prompts=prompts,
        priority=priority_of(body),
        deadline=deadline_seconds(body),
        stream=stream,
        include_usage=_include_usage(body.get("stream_options")),
        echo=echo,
        prompt_logprobs=wanted,
        _params=params,
        tools=tools,
    )


def _prompts_of(given: object, body: Mapping[str, Any], tools: ChatTools | None, *, chat: bool) -> tuple[Prompt, ...]:
    return (read_chat(_messages(given), body, tools),) if chat else texts_or_tokens("prompt", given)


def read_embeddings(body: Mapping[str, Any]) -> EmbeddingsBody:
    """Read a body for `/v1/embeddings`. Raises like `read_generation`."""
    check_names(body, frozenset(), _EMBEDDING_NAMES, {})
    given = required("input", body)
    encoding_format = body.get("encoding_format")
    if encoding_format not in (None, "float", "base64"):
        raise InvalidRequest(
            f"encoding_format={shown(encoding_format)}: must be float or base64", param="encoding_format"
        )
    dimensions = body.get("dimensions")
    if dimensions is not None and (type(dimensions) is not int or not 0 < dimensions < 2**31):
        raise InvalidRequest(f"dimensions={shown(dimensions)}: must be a whole number above 0", param="dimensions")
    model, inputs = read_model(body), texts_or_tokens("input", given)
    if "" in inputs:
        raise InvalidRequest(f"input[{inputs.index('')}] is an empty text", param="input")
    return EmbeddingsBody(
        model=model,
        inputs=inputs,
        encoding_format=encoding_format or "float",
        dimensions=dimensions,
        most_tokens=most_tokens_of(body),
        priority=priority_of(body),
        deadline=deadline_seconds(body),
    )


def most_tokens_of(body: Mapping[str, Any]) -> int | None:
    """Return `truncate_prompt_tokens` of a body for an encoder. Raises `InvalidRequest`."""
    most = body.get("truncate_prompt_tokens")
    if most is not None and (type(most) is not int or not (most == WHOLE_LENGTH or 0 < most < 2**31)):
        raise InvalidRequest(
            f"truncate_prompt_tokens={shown(most)}: must be a whole number above 0, or -1 for the model's length",
            param="truncate_prompt_tokens",
        )
    return most


def read_model(body: Mapping[str, Any]) -> str | None:
    """Return the name of the model, None if the body names none. Raises `InvalidRequest`."""
    model = body.get("model")
    require_size("model", model)
    if model is None or (isinstance(model, str) and model and "\0" not in model):
        return model
    raise InvalidRequest(f"model={shown(model)}: must be the name of a model", param="model")


def require_response_now(body: Mapping[str, Any]) -> None:
    """Raise `InvalidRequest` if a body for `/v1/responses` asks for an answer that has to be fetched later."""
    if body.get("background") not in (None, False):
        raise InvalidRequest(
            "background is not supported: the answer is waited for; leave it out",
            param="background",
            code="unsupported_parameter",
        )


def texts_of_response(body: Mapping[str, Any]) -> list[str]:
    """Return the one prompt in a body for `/v1/responses`: its instructions and the texts of its input.

    Raises `InvalidRequest` if it has neither an input nor a stored prompt. All else is left to the endpoint.
    """
    if body.get("input") is None and body.get("prompt") is None:
        raise InvalidRequest("input is missing", param="input", code="missing_required_parameter")
    require_response_now(body)
    instructions = body.get("instructions")
    texts = [*([instructions] if isinstance(instructions, str) else []), *_texts_in(body.get("input"))]
    return ["\n".join(texts)]


def texts_of_sent(body: Mapping[str, Any]) -> list[str]:
    """Return the texts of the prompts in a body for chats or completions, without what is not text, such as images."""
    messages = body.get("messages")
    if messages is not None:
        return ["\n".join(_texts_in(messages))]
    prompt = body.get("prompt", "")
    is_several = isinstance(prompt, list) and prompt and all(isinstance(each, str) for each in prompt)
    return list(prompt) if is_several else [str(prompt)]


def _texts_in(messages: object) -> list[str]:
    """Return the texts of messages, or of the items of a response's input, in whatever form."""
    texts = []
    for message in _items(messages):
        content = message.get("content") if isinstance(message, Mapping) else message
        texts += [part.get("text") if isinstance(part, Mapping) else part for part in _items(content)]
    return [text for text in texts if isinstance(text, str)]


def wants_stream(body: Mapping[str, Any]) -> bool:
    """Return whether the answer is to be streamed. Raises `InvalidRequest`."""
    return flag("stream", body.get("stream"))


def with_defaults(
    body: Mapping[str, Any],
    defaults: SamplingParams | Mapping[str, Any],
    *,
    chat: bool,
    responses: bool = False,
) -> dict[str, Any]:
    """Return `body` with the fields of `defaults` that it leaves out; only those that differ from `OPENAI_DEFAULTS`,
    unless `defaults` is a mapping. A form that is null counts as left out.

    `chat` and `responses` say whether the body is for chats or responses, which have their own names for some fields.
    Values are for msgspec, which also writes tuples and integer keys as JSON.
    """
    if isinstance(defaults, SamplingParams):
        defaults = {name: value for name, value in vars(defaults).items() if value != getattr(OPENAI_DEFAULTS, name)}
    form = {name: defaults[name] for name in FORM_FIELDS if name in defaults}
    if form.get("schema") is not None:
        form["schema"] = schema_of(form["schema"])
    filled = {
        name: value
        for name, value in defaults.items()
        if name not in form and not _FIELDS_OF.get(name, {name}) & body.keys()
    }
    if all(body.get(name) is None for name in (*FORM_NAMES, "text")):
        filled |= form_fields(form, responses=responses)
    if chat and (number := filled.pop("logprobs", None)) is not None:
        filled |= {"logprobs": True, "top_logprobs": number}
    if responses and "max_tokens" in filled:
        filled["max_output_tokens"] = filled.pop("max_tokens")
    return {**filled, **{name: value for name, value in body.items() if value is not None or name not in filled}}


def filled(
    endpoint: str, body: Mapping[str, Any], defaults: SamplingParams | Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return a body that is passed on: without batchwright's own fields, and with `defaults` as in `with_defaults`."""
    sent = {name: value for name, value in body.items() if name not in _OURS}
    if defaults is None or endpoint in ENCODER_URLS:
        return sent
    return with_defaults(sent, defaults, chat=endpoint == CHAT_URL, responses=endpoint == RESPONSES_URL)


def require_few_completions(body: Mapping[str, Any]) -> None:
    """Raise `InvalidRequest` if a body that is passed on asks for too many completions."""
    prompt = body.get("prompt")
    # The prompt is judged by its form alone: a list of numbers is one prompt.
    several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    _require_few(len(cast("list[object]", prompt)) if several else 1, completions_of(body))


def _require_answer_size(prompts: Sequence[Prompt], params: SamplingParams, *, chat: bool) -> None:
    """Raise `InvalidRequest` if one body asks for too many completions or log-probabilities."""
    completions = _require_few(len(prompts), params.n)
    if params.logprobs is None:
        return
    named, tokens = 1 + params.logprobs, min(params.max_tokens, _TOKENS_COUNTED)
    if completions * named * tokens > MAX_LOGPROBS:
        raise InvalidRequest(
            f"{completions} completions of {tokens:,} tokens with {named} log-probabilities each are more than "
            f"{MAX_LOGPROBS:,} in all: ask for fewer",
            param="top_logprobs" if chat else "logprobs",
        )


def _scores_to_echo(overrides: Mapping[str, Any], defaults: SamplingParams) -> dict[str, Any]:
    """Return the parameters that change because the prompt is echoed, with log-probabilities if the answer has any."""
    given = [overrides.get(name, getattr(defaults, name)) for name in ("logprobs", "prompt_logprobs")]
    numbers = [number for number in given if isinstance(number, int)]
    # Nothing else is computed if there is no answer.
    needed = numbers or overrides.get("max_tokens") == 0
    return {"prompt_logprobs": max(numbers, default=0)} if needed else {}


def _require_few(prompts: int, n: int) -> int:
    """Return the number of completions. Raises `InvalidRequest` if they are too many for one body."""
    if prompts * n > MAX_INPUTS:
        raise InvalidRequest(
            f"{prompts} prompts with n={n} are more than {MAX_INPUTS} completions: send several requests",
            param="prompt" if prompts > 1 else "n",
        )
    return prompts * n


def required(name: str, body: Mapping[str, Any]) -> Any:
    """Return the value of a field. Raises `InvalidRequest` if it is left out or null."""
    if body.get(name) is None:
        raise InvalidRequest(f"{name} is missing", param=name, code="missing_required_parameter")
    return body[name]


def _include_usage(options: object) -> bool:
    if options is None:
        return False
    if not isinstance(options, Mapping):
        raise InvalidRequest("stream_options must be an object", param="stream_options")
    return flag("stream_options.include_usage", options.get("include_usage"))


def _items(value: object) -> list[Any]:
    return value if isinstance(value, list) else [value]


def flag(name: str, value: object) -> bool:
    """Return whether a field is true; null is false. Raises `InvalidRequest`."""
    if value is None or isinstance(value, bool):
        return bool(value)
    raise InvalidRequest(f"{name}={shown(value)}: must be true or false", param=name)


def texts_or_tokens(name: str, value: object) -> tuple[str | list[int], ...]:
    """Return the texts, or the lists of token ids, of a field, which may be one or several. Raises `InvalidRequest`."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if _are_token_ids(value):
            return (value,)
        if all(isinstance(item, str) for item in value) or all(_are_token_ids(item) for item in value):
            return tuple(value)
    raise InvalidRequest(
        f"{name} must be a text, a list of token ids, or a list of either that is not empty", param=name
    )


def _are_token_ids(value: object) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**31 for item in value)


def _messages(messages: object) -> list[Mapping[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages must be a list of at least one message", param="messages")
    return [_message(f"messages[{position}]", message) for position, message in enumerate(messages)]


def _message(where: str, message: object) -> Mapping[str, Any]:
    """Return the message with its content as one text."""
    if not isinstance(message, dict) or not isinstance(role := message.get("role"), str):
        raise InvalidRequest(f"{where} must be an object with a role and content", param=where)
    if role not in ROLES:
        raise InvalidRequest(f"{where}.role={shown(role)}: must be one of {', '.join(ROLES)}", param=f"{where}.role")
    for name, kind in _MESSAGE_FIELDS.items():
        if message.get(name) is not None:
            require_type(f"{where}.{name}", message[name], kind)
    content = message.get("content")
    if isinstance(content, str):
        return message
    if isinstance(content, list):
        return {**message, "content": "".join(_text_part(where, part) for part in content)}
    if content is None and (message.get("tool_calls") or message.get("function_call")):
        return {**message, "content": ""}
    raise InvalidRequest(f"{where}.content must be a text or a list of text parts", param=where)


def _text_part(where: str, part: object) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return cast("str", part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise InvalidRequest(
        f"{where}.content has a part of type {kind!r}: only text is supported",
        param=where,
        code="unsupported_parameter",
    )
