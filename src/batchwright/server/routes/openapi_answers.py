"""Schemas of the bodies of online endpoints, for the OpenAPI description.

`wire/` decides what a request body means, for online requests and lines of batches alike. These schemas say the same
about each field by itself, but nothing about combinations: `min_tokens` above `max_tokens`, prompts times `n`, total
sizes. Answers are made by the model or the endpoint; the fields named here are those that clients read.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, WithJsonSchema

from batchwright.constraints import MAX_CHARACTERS
from batchwright.request import MAX_COMPLETIONS, MAX_DEADLINE, MAX_TOP_LOGPROBS
from batchwright.wire import bounds, classifying, text_responses
from batchwright.wire.api_model import ApiModel
from batchwright.wire.chats import EFFORTS, TEMPLATE_OPTIONS, TOOL_NAME
from batchwright.wire.fields import DEFAULT_PRIORITY, IGNORED, MAX_TEMPERATURE, RANGES, REFUSED
from batchwright.wire.requests import PAIR_FIELDS, ROLES

_Schema = dict[str, Any]

_NULL: _Schema = {"type": "null"}
_FLAG: _Schema = {"type": ["boolean", "null"]}


def _text(most: int, **more: Any) -> _Schema:
    return {"type": "string", "maxLength": most, **more}


def _list(items: _Schema, most: int, **more: Any) -> _Schema:
    return {"type": "array", "items": items, "maxItems": most, **more}


def _either(*schemas: _Schema, **more: Any) -> _Schema:
    return {"anyOf": [*schemas, _NULL], **more}


def _number(low: float, high: float, **more: Any) -> _Schema:
    return {"type": ["number", "null"], "minimum": low, "maximum": high, **more}


def _whole(low: int, high: int, **more: Any) -> _Schema:
    return {**_number(low, high, **more), "type": ["integer", "null"]}


def _inputs(**text: Any) -> _Schema:
    one = _text(bounds.MAX_TEXT, **text)
    tokens = _list({"type": "integer", "minimum": 0, "maximum": 2**31 - 1}, bounds.MAX_TOKEN_IDS, minItems=1)
    return {"anyOf": [one, tokens, *(_list(each, bounds.MAX_INPUTS, minItems=1) for each in (one, tokens))]}


_JSON: dict[type, _Schema] = {
    str: _text(bounds.MAX_LABEL),
    bool: {"type": "boolean"},
    dict: {"type": "object", "maxProperties": bounds.MAX_VALUES - 1},
}
_COMMON: dict[str, _Schema] = {
    **{name: _either(_JSON[kind], description="Changes nothing.") for name, kind in IGNORED.items()},
    "metadata": {
        "type": ["object", "null"],
        "maxProperties": bounds.MAX_METADATA,
        "propertyNames": {"maxLength": bounds.MAX_METADATA_KEY},
        "additionalProperties": _text(bounds.MAX_METADATA_VALUE),
        "description": "Changes nothing.",
    },
    "model": _either(
        _text(bounds.MAX_MODEL, minLength=1, pattern=r"^[^\x00]+$"),
        description="One of `GET /v1/models`; left out: the first of them.",
    ),
    "priority": _whole(*RANGES["priority"], default=DEFAULT_PRIORITY, description="Lower is sooner. Not OpenAI's."),
    "deadline_ms": {
        "type": ["number", "null"],
        "exclusiveMinimum": 0,
        "maximum": MAX_DEADLINE * 1000,
        "description": "Milliseconds after which the answer is of no use. Not OpenAI's.",
    },
    "deadline": {
        "type": ["number", "null"],
        "exclusiveMinimum": 0,
        "maximum": MAX_DEADLINE,
        "description": "The same in seconds. Only one of the two may be given.",
    },
}
_FORM_TEXT = _text(MAX_CHARACTERS, minLength=1)
_FORM_SCHEMA: _Schema = {"type": "object", "maxProperties": bounds.MAX_VALUES - 1}
_FORM_CHOICES = _list(_FORM_TEXT, bounds.MAX_VALUES - 1, minItems=1)
_FORMS: dict[str, _Schema] = {
    "json": _FORM_SCHEMA,
    "regex": _FORM_TEXT,
    "choice": _FORM_CHOICES,
    "grammar": _FORM_TEXT,
    "json_object": {"const": True},
}
"""Fields of vLLM's `structured_outputs`, of which exactly one is given."""
_NO_FORM: dict[str, _Schema] = {name: {"enum": [None, False] if name == "json_object" else [None]} for name in _FORMS}
_ANSWER_FORM: dict[str, _Schema] = {
    "response_format": _either(
        {
            "type": "object",
            "required": ["type"],
            "maxProperties": bounds.MAX_VALUES - 1,
            "properties": {"type": {"enum": ["text", "json_object"]}},
        },
        {
            "type": "object",
            "required": ["type", "json_schema"],
            "maxProperties": bounds.MAX_VALUES - 1,
            "properties": {
                "type": {"const": "json_schema"},
                "json_schema": {"type": "object", "required": ["schema"], "properties": {"schema": _FORM_SCHEMA}},
            },
        },
        description="Form of the answer: a JSON object, or JSON that satisfies a schema.",
    ),
    "structured_outputs": _either(
        *(
            {
                "type": "object",
                "required": [name],
                "properties": {**_NO_FORM, name: schema},
                "additionalProperties": _NULL,
            }
            for name, schema in (*_FORMS.items(), ("json_object", {"const": False}))
        ),
        description="The same for vLLM's clients: `json`, `regex`, `choice`, `grammar` (Lark) or `json_object`.",
    ),
    **{
        f"guided_{name}": _either(_FORMS[name], description=f"As `{name}` of `structured_outputs`.")
        for name in ("json", "regex", "choice", "grammar")
    },
}
_STOP = _text(bounds.MAX_STOP, minLength=1)
_GENERATION: dict[str, _Schema] = {
    **{name: {"enum": [None, *neutral], "description": "Not supported."} for name, neutral in REFUSED.items()},
    **_COMMON,
    "expected_tokens": _whole(
        *RANGES["expected_tokens"],
        description="Tokens that the answer is expected to have: a job puts sure short answers last. Not OpenAI's.",
    ),
    **_ANSWER_FORM,
    "max_tokens": _whole(
        *RANGES["max_tokens"],
        description="Most tokens of an answer; left out: as many as the model's context holds. 0: none, only what is "
        "asked of the prompt.",
    ),
    "max_completion_tokens": _whole(*RANGES["max_completion_tokens"], description="Goes before `max_tokens`."),
    "min_tokens": _whole(*RANGES["min_tokens"], description="At most `max_tokens`. Not OpenAI's."),
    "temperature": _number(0, MAX_TEMPERATURE, default=1, description="0: the likeliest token each time."),
    "top_p": _number(
        0, 1, default=1, description="Smallest set of tokens whose probability reaches this; 0: the likeliest token."
    ),
    "top_k": _whole(-1, 2**31 - 1, description="Number of tokens to choose from; 0 and -1: all. Not OpenAI's."),
    "min_p": _number(0, 1, description="Least probability of a token, of the likeliest one's. Not OpenAI's."),
    "n": _whole(1, MAX_COMPLETIONS, default=1, description="Number of answers to each prompt."),
    "seed": _whole(*RANGES["seed"], description="With a seed the same request gets the same answer."),
    "stop": _either(
        _STOP, _list(_STOP, bounds.MAX_STOPS), description="Texts before the first of which an answer ends."
    ),
    "stop_token_ids": _either(
        _list({"type": "integer", "minimum": 0}, bounds.MAX_STOP_TOKENS),
        description="Tokens with which an answer ends. Not OpenAI's.",
    ),
    "ignore_eos": {**_FLAG, "description": "Go on past the model's end-of-text token. Not OpenAI's."},
    "presence_penalty": _number(-2, 2, description="Lowers the logits of tokens that the answer has already."),
    "frequency_penalty": _number(-2, 2, description="The same, for each time that it has them."),
    "repetition_penalty": _number(
        0.01, 10, description="Divides the logits of tokens that the prompt or the answer has. Not OpenAI's."
    ),
    "logit_bias": {
        "type": ["object", "null"],
        "maxProperties": bounds.MAX_BIASES,
        "propertyNames": {"pattern": f"^[0-9]{{1,{bounds.MAX_TOKEN_DIGITS}}}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        "description": "Values added to the logits of these token ids.",
    },
    "prompt_logprobs": _either(
        {"type": "integer", "minimum": 0, "maximum": MAX_TOP_LOGPROBS},
        {"const": False},
        description="Give the log-probability of each token of the prompt, and those of the likeliest. Not OpenAI's.",
    ),
    "stream": {**_FLAG, "default": False, "description": "Answer with server-sent events, as the text is generated."},
    "stream_options": {
        "type": ["object", "null"],
        "maxProperties": bounds.MAX_VALUES - 1,
        "properties": {"include_usage": {**_FLAG, "default": False}},
        "description": "With `include_usage: true` the last event counts the tokens.",
    },
}
_TOOL: _Schema = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string", "pattern": f"^{TOOL_NAME}$"},
                "description": {"type": ["string", "null"]},
                "parameters": {"type": ["object", "null"], "description": "JSON schema of the arguments."},
                "strict": _FLAG,
            },
        },
    },
    "maxProperties": bounds.MAX_VALUES - 1,
}
_PARALLEL: _Schema = {**_FLAG, "default": True, "description": "Whether an answer may have several calls."}
_EFFORT: _Schema = {
    "enum": [None, *EFFORTS],
    "description": "How much a model that thinks is to think; others take none.",
}
_NAMED_TOOL: _Schema = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
    },
}
_TOOL_CALL: _Schema = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {"name": {"type": "string"}, "arguments": {"type": ["string", "object", "null"]}},
        }
    },
}
_PART: _Schema = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": _text(bounds.MAX_TEXT)},
    "propertyNames": {"maxLength": bounds.MAX_NAME},
    "maxProperties": bounds.MAX_MESSAGE_FIELDS,
}
_CONTENT = [_text(bounds.MAX_TEXT), _list(_PART, bounds.MAX_PARTS)]
_MESSAGE: _Schema = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"enum": list(ROLES)},
        "content": _either(*_CONTENT),
        "name": _either(_text(bounds.MAX_NAME)),
        "tool_calls": _either(_list(_TOOL_CALL, bounds.MAX_TOOLS)),
        "tool_call_id": _either(_text(bounds.MAX_LABEL)),
        "function_call": _either(_JSON[dict]),
    },
    "propertyNames": {"maxLength": bounds.MAX_NAME},
    "maxProperties": bounds.MAX_MESSAGE_FIELDS,
    "anyOf": [
        {"required": ["content"], "properties": {"content": {"type": ["string", "array"]}}},
        {"required": ["tool_calls"], "properties": {"tool_calls": {"type": "array", "minItems": 1}}},
        {"required": ["function_call"], "properties": {"function_call": {"type": "object", "minProperties": 1}}},
    ],
}
_NOT_EMPTY = [
    {"properties": {"max_tokens": {"not": {"const": 0}}}},
    {"properties": {"prompt_logprobs": {"type": "integer"}}, "required": ["prompt_logprobs"]},
]
"""Alternatives for a body: it wants an answer, or else log-probabilities of the prompt."""
_ONE_DEADLINE: _Schema = {"anyOf": [{"properties": {name: _NULL}} for name in ("deadline", "deadline_ms")]}
_TOP_LOGPROBS_NEED_LOGPROBS = [
    {"properties": {"top_logprobs": {"enum": [None, 0]}}},
    {"properties": {"logprobs": {"const": True}}, "required": ["logprobs"]},
]


def _body(title: str, needed: str | None, properties: dict[str, _Schema], **more: Any) -> WithJsonSchema:
    """Return the schema of a body with these fields; any other field has to be null."""
    return WithJsonSchema(
        {
            "title": title,
            "type": "object",
            "required": [] if needed is None else [needed],
            "properties": properties,
            "additionalProperties": _NULL,
            "maxProperties": bounds.MAX_FIELDS,
            "allOf": [_ONE_DEADLINE],
            **more,
        }
    )


ChatBody = Annotated[
    dict[str, Any],
    _body(
        "ChatCompletionRequest",
        "messages",
        {
            **_GENERATION,
            "messages": _list(_MESSAGE, bounds.MAX_MESSAGES, minItems=1, description="The chat so far."),
            "logprobs": {**_FLAG, "description": "Give the log-probability of each token of the answer."},
            "top_logprobs": _whole(0, MAX_TOP_LOGPROBS, description="Needs `logprobs: true`."),
            "tools": _either(_list(_TOOL, bounds.MAX_TOOLS), description="Functions that the model may call."),
            "tool_choice": {
                "anyOf": [{"enum": [None, "none", "auto", "required"]}, _NAMED_TOOL],
                "default": "auto",
                "description": "Whether a tool may or must be called, or which one must.",
            },
            "parallel_tool_calls": _PARALLEL,
            "reasoning_effort": _EFFORT,
            "chat_template_kwargs": {
                "type": ["object", "null"],
                "properties": {
                    name: {"type": {bool: "boolean", int: "integer"}[kind]} for name, kind in TEMPLATE_OPTIONS.items()
                },
                "additionalProperties": False,
                "description": "Variables of the model's chat template. Not OpenAI's.",
            },
        },
        allOf=[_ONE_DEADLINE, {"anyOf": _NOT_EMPTY}],
        anyOf=_TOP_LOGPROBS_NEED_LOGPROBS,
    ),
]
CompletionBody = Annotated[
    dict[str, Any],
    _body(
        "CompletionRequest",
        "prompt",
        {
            **_GENERATION,
            "prompt": {**_inputs(), "description": "A text, the ids of its tokens, or several of either."},
            "logprobs": {
                **_whole(0, MAX_TOP_LOGPROBS, description="Give log-probabilities, and those of the likeliest."),
                "type": ["integer", "boolean", "null"],
            },
            "echo": {**_FLAG, "description": "Begin each answer with its prompt, and `logprobs` with the prompt's."},
        },
        allOf=[
            _ONE_DEADLINE,
            {"anyOf": [*_NOT_EMPTY, {"properties": {"echo": {"const": True}}, "required": ["echo"]}]},
        ],
    ),
]
_RESPONSE_PART: _Schema = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"enum": list(text_responses.TEXT_PARTS)}, "text": _text(bounds.MAX_TEXT)},
}
_RESPONSE_MESSAGE: _Schema = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "type": {"const": "message"},
        "role": {"enum": list(text_responses.ROLES)},
        "content": {"anyOf": [_text(bounds.MAX_TEXT), {"type": "array", "items": _RESPONSE_PART}]},
    },
}
_CALL_ID = _text(bounds.MAX_LABEL, minLength=1)
_RESPONSE_CALL: _Schema = {
    "type": "object",
    "required": ["type", "call_id", "name", "arguments"],
    "properties": {
        "type": {"const": "function_call"},
        "call_id": _CALL_ID,
        "name": {"type": "string"},
        "arguments": {"type": "string"},
    },
}
_RESPONSE_OUTPUT: _Schema = {
    "type": "object",
    "required": ["type", "call_id", "output"],
    "properties": {
        "type": {"const": "function_call_output"},
        "call_id": _CALL_ID,
        "output": {"anyOf": [_text(bounds.MAX_TEXT), {"type": "array", "items": _RESPONSE_PART}]},
    },
}
_THOUGHT_PART: _Schema = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"enum": list(text_responses.THOUGHT_PARTS)}, "text": _text(bounds.MAX_TEXT)},
}
_RESPONSE_THOUGHT: _Schema = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"const": "reasoning"},
        **{name: _either({"type": "array", "items": _THOUGHT_PART}) for name in ("content", "summary")},
        "encrypted_content": _NULL,
    },
}
_RESPONSE_TEXT: _Schema = {
    "type": ["object", "null"],
    "properties": {
        "format": _either(
            {
                "type": "object",
                "required": ["type"],
                "properties": {"type": {"enum": ["text", "json_object"]}},
            },
            {
                "type": "object",
                "required": ["type", "schema"],
                "properties": {"type": {"const": "json_schema"}, "schema": _FORM_SCHEMA},
            },
        )
    },
    "additionalProperties": _NULL,
    "description": "`format`: form of the answer, text, a JSON object, or JSON that satisfies a schema.",
}
_RESPONSE_TOOL: _Schema = {
    "type": "object",
    "required": ["type", "name"],
    "properties": {"type": {"const": "function"}, **_TOOL["properties"]["function"]["properties"]},
    "additionalProperties": {"enum": [None, False]},
}
_NAMED_FUNCTION: _Schema = {
    "type": "object",
    "required": ["type", "name"],
    "properties": {"type": {"const": "function"}, "name": {"type": "string"}},
}
ResponseBody = Annotated[
    dict[str, Any],
    _body(
        "ResponseRequest",
        "input",
        {
            **{
                name: {"enum": [None, *neutral], "description": "Not supported."}
                for name, neutral in text_responses.REFUSED.items()
            },
            **_COMMON,
            **{name: each for name, each in _GENERATION.items() if name in text_responses.NAMES},
            "input": {
                "anyOf": [
                    _text(bounds.MAX_TEXT),
                    _list(
                        {"anyOf": [_RESPONSE_MESSAGE, _RESPONSE_THOUGHT, _RESPONSE_CALL, _RESPONSE_OUTPUT]},
                        bounds.MAX_INPUTS,
                        minItems=1,
                    ),
                ],
                "description": "A text, or messages, thoughts, calls of functions and their outputs.",
            },
            "instructions": _either(_text(bounds.MAX_TEXT), description="A system message before the input."),
            "max_output_tokens": _whole(
                1, 2**31 - 1, description="Most tokens of the answer; left out: as many as the model's context holds."
            ),
            "parallel_tool_calls": _PARALLEL,
            "reasoning": {
                "type": ["object", "null"],
                "properties": {"effort": _EFFORT},
                "additionalProperties": _NULL,
                "description": "Only `effort` is supported.",
            },
            "text": _RESPONSE_TEXT,
            "tools": _either(_list(_RESPONSE_TOOL, bounds.MAX_TOOLS), description="Functions that the model may call."),
            "tool_choice": {
                "anyOf": [{"enum": [None, *text_responses.CHOICES]}, _NAMED_FUNCTION],
                "default": "auto",
                "description": "Whether a tool may or must be called, or which one must.",
            },
        },
    ),
]
_TRUNCATE: _Schema = {
    "type": ["integer", "null"],
    "anyOf": [{"const": -1}, {"minimum": 1, "maximum": 2**31 - 1}, {"type": "null"}],
    "description": "Tokens to which each input is cut; -1: as many as the model takes. Else longer ones are refused.",
}
EmbeddingsBody = Annotated[
    dict[str, Any],
    _body(
        "EmbeddingsRequest",
        "input",
        {
            **_COMMON,
            "input": {**_inputs(minLength=1), "description": "A text, the ids of its tokens, or several of either."},
            "encoding_format": {"enum": ["float", "base64", None], "description": "base64: little-endian float32."},
            "dimensions": _whole(1, 2**31 - 1, description="Fewer than the model has, if it is Matryoshka."),
            "truncate_prompt_tokens": _TRUNCATE,
        },
    ),
]
_TEXT = _text(bounds.MAX_TEXT, minLength=1)
_DOCUMENT: _Schema = {
    "type": "object",
    "required": ["text"],
    "properties": {"text": _TEXT},
    "propertyNames": {"maxLength": bounds.MAX_NAME},
    "maxProperties": bounds.MAX_MESSAGE_FIELDS,
}
_NEUTRAL: dict[str, _Schema] = {
    name: {"enum": [None, *neutral], "description": "Not supported."} for name, neutral in classifying.REFUSED.items()
}
RerankBody = Annotated[
    dict[str, Any],
    _body(
        "RerankRequest",
        "query",
        {
            **_COMMON,
            "query": {**_TEXT, "description": "What the documents are ranked by."},
            "documents": {
                "anyOf": [_TEXT, _list({"anyOf": [_TEXT, _DOCUMENT]}, bounds.MAX_INPUTS, minItems=1)],
                "description": "Texts, or objects with `text`.",
            },
            "top_n": _whole(0, 2**31 - 1, description="Number of documents to return, best first; 0 or left out: all."),
            "return_documents": {**_FLAG, "default": False, "description": "Whether their texts are returned."},
            "truncate_prompt_tokens": _TRUNCATE,
            **_NEUTRAL,
        },
        required=["query", "documents"],
    ),
]
_TEXTS: _Schema = {"anyOf": [_TEXT, _list(_TEXT, bounds.MAX_INPUTS, minItems=1)]}
_PAIR_NAMES = sorted({name for names in PAIR_FIELDS for name in names})
_PAIR: dict[str, _Schema] = {
    "text_1": {"description": "One text for all of `text_2`, or as many."},
    "text_2": {"description": "Texts to compare with it."},
}
ScoreBody = Annotated[
    dict[str, Any],
    _body(
        "ScoreRequest",
        None,
        {
            **_COMMON,
            **{
                name: {**_either(_TEXTS), "description": "Another name of one of the two, in vLLM's other forms."}
                | _PAIR.get(name, {})
                for name in _PAIR_NAMES
            },
            "truncate_prompt_tokens": _TRUNCATE,
            **_NEUTRAL,
        },
        anyOf=[
            {
                "required": list(names),
                "properties": {name: _TEXTS if name in names else _NULL for name in _PAIR_NAMES},
            }
            for names in PAIR_FIELDS
        ],
    ),
]
ClassifyBody = Annotated[
    dict[str, Any],
    _body(
        "ClassifyRequest",
        "input",
        {
            **_COMMON,
            "input": {**_inputs(minLength=1), "description": "A text, the ids of its tokens, or several of either."},
            "truncate_prompt_tokens": _TRUNCATE,
            **_NEUTRAL,
        },
    ),
]


class _Open(ApiModel):
    model_config = ConfigDict(extra="allow")


class UsageObject(_Open):
    """Tokens, by the model's tokenizer."""

    prompt_tokens: int
    total_tokens: int


class GenerationUsage(UsageObject):
    completion_tokens: int


class FunctionCall(_Open):
    name: str
    arguments: str
    """Text of a JSON object."""


class ToolCall(_Open):
    id: str
    type: str
    function: FunctionCall


class ChatMessage(_Open):
    role: str
    content: str | None
    reasoning_content: str | None = None
    """What a model that thinks wrote before its answer."""
    tool_calls: list[ToolCall] | None = None


class ChatChoice(_Open):
    index: int
    message: ChatMessage
    finish_reason: str | None


class ChatCompletion(_Open):
    """The answer to a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: GenerationUsage


class TextChoice(_Open):
    index: int
    text: str
    finish_reason: str | None


class Completion(_Open):
    """The answer to prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: GenerationUsage


class ResponseUsage(_Open):
    input_tokens: int
    output_tokens: int
    total_tokens: int


class ResponseObject(_Open):
    """The answer to an input."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    """Incomplete if `max_output_tokens` ended the answer, which `incomplete_details` says then."""
    model: str
    output: list[dict[str, Any]]
    """A thought, a message whose `content` has one part, of type `output_text`, and calls of functions; what there is
    of these."""
    usage: ResponseUsage


class Embedding(_Open):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str
    """The vector; base64 of little-endian float32 if the request asked for that."""


class Embeddings(_Open):
    """The vectors of the inputs, in order."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: UsageObject


class RankedDocument(_Open):
    index: int
    """Position among the documents of the request."""
    relevance_score: float


class Reranked(_Open):
    """The documents, best first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: UsageObject


class Score(_Open):
    index: int
    object: Literal["score"]
    score: float


class Scores(_Open):
    """The scores of the pairs, in order."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: UsageObject


class Class(_Open):
    index: int
    label: str
    """The likeliest label."""
    probs: list[float]
    """Probabilities of all labels, in the order of the model's config."""
    num_classes: int


class Classes(_Open):
    """The labels of the inputs, in order."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Class]
    usage: UsageObject
