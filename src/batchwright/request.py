"""Sampling parameters, requests and responses."""

from __future__ import annotations

import inspect
import itertools
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import partial, wraps
from numbers import Integral
from typing import Any, Literal, TypeAlias

from batchwright.constraints import Constraint, constraint_of, parsed_as, require_constraint, schema_of
from batchwright.errors import BatchwrightError, InvalidRequest, shown

ChatMessage: TypeAlias = Mapping[str, Any]
"""One chat message: `role`, `content`, and whatever else the model's chat template reads."""

Prompt: TypeAlias = str | Sequence[int] | Sequence[ChatMessage]
"""Text, token ids (used as they are), or chat messages (rendered with the model's chat template)."""

Traffic: TypeAlias = Literal["online", "batch"]
"""Class of traffic. Online requests have a client waiting for each token; batch requests use what these leave."""

FinishReason: TypeAlias = Literal["stop", "length", "cancelled", "error"]

MAX_TOP_LOGPROBS = 20
MAX_COMPLETIONS = 128
"""Most completions of one prompt, OpenAI's limit."""
MAX_DEADLINE = 1e9
"""Most seconds of a deadline: 30 years, so that sums with a clock keep their microseconds."""
MAX_STOPS = 65_536
MAX_STOP_CHARACTERS = 2**20
"""Most characters of a request's stop strings together. Their tables take 20 bytes for each, made within seconds."""


FORM_FIELDS = ("schema", "json_object", "regex", "choices", "grammar")
"""Fields of `SamplingParams` that say which form an answer must have; at most one of them is set."""


class _Ids:
    """Ids that no other process generates: the digits of this process's random bytes and of a counter."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Take new random bytes, as a forked process has to."""
        self._random = os.urandom(10).hex()
        # `next` on it is a single operation, which threads cannot interleave.
        self._count = itertools.count()

    def new(self) -> str:
        """Return an id of 32 hex digits."""
        return f"{self._random}{next(self._count):012x}"


_IDS = _Ids()
_new_id = _IDS.new
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_IDS.start)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen. Raises `InvalidRequest`, naming the field, for values out of range.

    Penalties apply in this order: repetition (prompt and output, Keskar et al. 2019), then presence and frequency
    (output only, as in the OpenAI API). Then temperature, top-k, min-p, top-p.
    """

    max_tokens: int = 256
    """Most tokens to generate, ≥ 1; 0 only to have the prompt's log-probabilities, with `prompt_logprobs`."""
    min_tokens: int = 0
    """No end-of-text, stop token or stop string is honoured before this many tokens."""
    temperature: float = 0.7
    """0 is greedy; at most 10."""
    top_p: float = 1.0
    """Choose from the smallest set of tokens whose probability reaches this, in [0, 1]; at 0, the likeliest token."""
    top_k: int = 0
    """Number of likeliest tokens to choose from; 0 (or -1) is off."""
    min_p: float = 0.0
    """Least probability of a token as a fraction of the likeliest one's, in [0, 1]."""
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Values added to the logits of these token ids."""
    seed: int | None = None
    """With a seed the same request gives the same tokens, whatever else is in the batch (one machine, one dtype)."""
    stop: tuple[str, ...] = ()
    """Texts at the first of which generation ends; it is not part of the output. A str or list is accepted.

    At most 65,536 texts with 1,048,576 characters in all; the time per token does not depend on their number.
    """
    stop_token_ids: tuple[int, ...] = ()
    n: int = 1
    """Number of completions to generate for the prompt."""
    logprobs: int | None = None
    """None: no log-probabilities. k: those of each chosen token and of the k likeliest, 0 ≤ k ≤ 20."""
    prompt_logprobs: int | None = None
    """None: none of the prompt. k: those of its tokens after the first, and of the k likeliest at each position."""
    prompt_logprobs_start: int = 0
    """Position of the first prompt token whose log-probability is wanted, with `prompt_logprobs`.

    Tokens before it may be found in the prefix cache; the rest is always computed.
    """
    ignore_eos: bool = False
    """Go on past the model's end-of-text token (benchmarks)."""
    schema: Any = None
    """JSON Schema that the answer satisfies: a dict, or a pydantic model, a dataclass or another type with a schema.

    At most one of this and the next four may be given. The answer then has the form whenever it ends by itself
    (`finish_reason` is `"stop"`); JSON has no white space between its tokens.
    """
    json_object: bool = False
    """Whether the answer is a JSON object, of any properties."""
    regex: str | None = None
    """Regular expression that the whole answer matches, in the syntax of Rust's `regex`."""
    choices: tuple[str, ...] = ()
    """Texts to choose the answer from. A list is accepted."""
    grammar: str | None = None
    """Lark grammar of the answer, with a rule `start`."""

    def __post_init__(self) -> None:
        if type(self.stop) is not tuple:
            stop = (self.stop,) if isinstance(self.stop, str) else _as_tuple("stop", self.stop)
            object.__setattr__(self, "stop", stop)
        if type(self.stop_token_ids) is not tuple:
            object.__setattr__(self, "stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids))
        if type(self.choices) is not tuple:
            object.__setattr__(self, "choices", _choices(self.choices))
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        values = self.__dict__
        for name, default, check in _CHECKS:
            # Most fields are left as they are, and requests are made by the thousand.
            if (value := values[name]) is not default:
                check(name, value)
        if self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens={shown(self.min_tokens)}: must be ≤ max_tokens={shown(self.max_tokens)}",
                param="min_tokens",
            )
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise InvalidRequest(
                "max_tokens=0: must be ≥ 1, unless prompt_logprobs, or echo of a completion, asks for the prompt",
                param="max_tokens",
            )
        if self.stop or self.stop_token_ids or self.logit_bias:
            self._check_stops()
        if self.is_constrained:
            require_constraint(**self._form)

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOPS:
            raise InvalidRequest(f"stop has {len(self.stop):,} texts, the most is {MAX_STOPS:,}", param="stop")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise InvalidRequest(
                    f"stop={shown(text)}: each stop must be a text of at least one character", param="stop"
                )
        if (characters := sum(map(len, self.stop))) > MAX_STOP_CHARACTERS:
            raise InvalidRequest(
                f"stop has {characters:,} characters in all, the most is {MAX_STOP_CHARACTERS:,}", param="stop"
            )
        for token in self.stop_token_ids:
            _require_int("stop_token_ids", token, low=0)
        for token, bias in self.logit_bias.items():
            _require_int("logit_bias", token, low=0)
            _require_real("logit_bias", bias, low=-100.0, high=100.0)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0.0 or self.top_p == 0.0

    @property
    def is_constrained(self) -> bool:
        """Whether the answer must have a form."""
        # Each request is asked.
        return self.schema is not None or bool(
            self.json_object or self.choices or self.regex is not None or self.grammar is not None
        )

    @property
    def constraint(self) -> Constraint | None:
        """Form that the answer must have, None for any."""
        return constraint_of(**self._form) if self.is_constrained else None

    @property
    def _form(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in FORM_FIELDS}


def portable(params: SamplingParams) -> SamplingParams:
    """Return `params` with a JSON Schema in place of a Python class."""
    if params.schema is None or isinstance(params.schema, Mapping):
        return params
    return replace(params, schema=schema_of(params.schema))


@dataclass(frozen=True, slots=True)
class Flow:
    """Owner whose share of an engine a request uses, where several share one.

    Owners (API keys, customers) get equal shares, or shares in proportion to their weights; within an owner's share, so
    do its requests. Raises `InvalidRequest` for a weight that is not 0.000001 to 1,000,000.
    """

    owner: str
    request: str
    """Group of requests that came as one, such as the prompts of one call."""
    weight: float = 1.0
    """Weight of the owner."""

    def __post_init__(self) -> None:
        for name in ("owner", "request"):
            if not isinstance(value := getattr(self, name), str):
                raise InvalidRequest(f"{name}={shown(value)}: must be a text", param=name)
        # In a wider range, a sum of weights would lose the small ones.
        _require_real("weight", self.weight, low=1e-6, high=1e6)


@dataclass(frozen=True)
class InferenceRequest(SamplingParams):
    """One prompt with its sampling parameters and its place in the queue.

    Two or more positional values are `request_id, prompt, max_tokens, temperature, created_at, callback`, as in code
    written for hand-made batchers; a single one is the prompt, or the id if `prompt` is given by name.
    """

    prompt: Prompt
    request_id: str = field(default_factory=lambda: _new_id(), kw_only=True)
    priority: int = field(default=5, kw_only=True)
    """Priority; lower is sooner, among requests of the same `traffic`."""
    traffic: Traffic = field(default="online", kw_only=True)
    """Class of traffic; batch requests use what online ones leave, whatever the priorities."""
    flow: Flow | None = field(default=None, kw_only=True)
    """Flow whose share of the engine it uses. Requests without one share a flow, first come, first served."""
    deadline: float | None = field(default=None, kw_only=True)
    """Seconds from submission after which an answer is of no use, or None."""
    max_wait_ms: float | None = field(default=None, kw_only=True)
    """Milliseconds for which a batcher may hold it back to fill its batch; None: as long as the batcher's policy says.

    Whatever computes token by token, such as an engine, holds nothing back.
    """
    around_form: str = field(default="", kw_only=True)
    """Lark grammar of an answer only part of which must have the form, its `@answer`; empty: all of it."""
    created_at: float = field(default_factory=time.time, kw_only=True)
    """Unix time in seconds."""
    callback: Callable[[InferenceResponse], object] | None = field(default=None, kw_only=True, compare=False)
    """A plain function, called with the response when it is complete. It must not block."""
    metadata: Mapping[str, Any] = field(default_factory=dict, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check()

    @property
    def constraint(self) -> Constraint | None:
        found = super().constraint
        return found if found is None or not self.around_form else replace(found, around=self.around_form)

    def __hash__(self) -> int:
        # Some fields cannot be hashed; requests with the same id are seldom different ones.
        return hash(self.request_id)

    def _check(self) -> None:
        """Check the fields that are not among the sampling parameters."""
        _check_prompt(self.prompt)
        if not isinstance(self.request_id, str) or not self.request_id:
            raise InvalidRequest(
                f"request_id={shown(self.request_id)}: must be a text that is not empty", param="request_id"
            )
        _require_int("priority", self.priority)
        if self.traffic not in ("online", "batch"):
            raise InvalidRequest(f"traffic={shown(self.traffic)}: must be online or batch", param="traffic")
        if self.callback is not None:
            _require_callback(self.callback)
        if self.deadline is not None:
            _require_real("deadline", self.deadline, low=0.0, high=MAX_DEADLINE, above_low=True)
        if self.max_wait_ms is not None:
            _require_real("max_wait_ms", self.max_wait_ms, low=0.0, high=1e3 * MAX_DEADLINE)

    @classmethod
    def of(cls, prompt: Prompt, params: SamplingParams, **rest: Any) -> InferenceRequest:
        """Make a request for `prompt` with the fields of `params`; `rest` are fields of the request itself."""
        if unknown := rest.keys() - _OWN_FIELDS:
            raise TypeError(f"a request has no field {min(unknown)!r} of its own")
        request = cls.__new__(cls)
        # `params` was checked when it was made. To set and check its fields anew would take three times as long.
        own = {**_OWN_DEFAULTS, "prompt": prompt, "created_at": time.time(), "metadata": {}, **rest}
        if "request_id" not in own:
            own["request_id"] = _new_id()
        request.__dict__.update(vars(params), **own)
        request._check()  # noqa: SLF001 - of this class
        return request

    @classmethod
    def bare(cls, prompt: Prompt) -> InferenceRequest:
        """Make a request for `prompt` with defaults for all other fields. Raises `InvalidRequest` for a bad prompt."""
        if not isinstance(prompt, str):
            _check_prompt(prompt)
        # A third of the time that setting and checking each field takes.
        request = cls.__new__(cls)
        values = _DEFAULTS.copy()
        values["prompt"] = prompt
        values["request_id"] = _new_id()
        values["created_at"] = time.time()
        values["logit_bias"], values["metadata"] = {}, {}
        object.__setattr__(request, "__dict__", values)
        return request


_POSITIONS = ("request_id", "prompt", "max_tokens", "temperature", "created_at", "callback")
"""Fields of a request that is given by position."""
_init_request = InferenceRequest.__init__


@wraps(_init_request)
def _init_by_position(self: InferenceRequest, *values: Any, **named: Any) -> None:
    if len(values) < 2 and not (values and "prompt" in named):
        _init_request(self, *values, **named)
        return
    if len(values) > len(_POSITIONS):
        raise TypeError(f"InferenceRequest takes at most {len(_POSITIONS)} values by position: {', '.join(_POSITIONS)}")
    by_position = dict(zip(_POSITIONS, values, strict=False))
    if twice := by_position.keys() & named:
        raise TypeError(f"{min(twice)} is given by position and by name")
    _init_request(self, **by_position, **named)


# Replaces the initializer that `dataclass` made, whose signature stays the documented and checked one.
InferenceRequest.__init__ = _init_by_position  # type: ignore[method-assign]

_OWN_FIELDS = frozenset(each.name for each in fields(InferenceRequest)) - {each.name for each in fields(SamplingParams)}
_OWN_DEFAULTS = {
    each.name: each.default
    for each in fields(InferenceRequest)
    if each.name in _OWN_FIELDS and each.default is not MISSING
}


_DEFAULTS: dict[str, Any] = {
    # A value for each field, so that setting one makes no room in a copy.
    each.name: None if each.default is MISSING else each.default
    for each in fields(InferenceRequest)
}


@dataclass(frozen=True)
class Usage:
    """Token counts, by the model's tokenizer."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Prompt tokens that were found in the prefix cache."""
    is_estimate: bool = False
    """Whether the model has no tokenizer, so that four characters of text are counted as a token."""

    @property
    def total_tokens(self) -> int:
        """Tokens of the prompt and of all completions."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of a chosen token, under the model's own distribution (before any sampling parameter)."""

    token_id: int
    token: str
    logprob: float
    top: tuple[tuple[int, str, float], ...] = ()
    """`(token_id, token, logprob)` of the likeliest tokens, likeliest first."""
    rank: int | None = None
    """Rank of the token at its position, 1 for the one that greedy decoding takes. Only prompt tokens have one."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One completion of a prompt."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] | None = None
    form: Any = field(default=None, repr=False, compare=False)
    """Schema or class that the text should satisfy, or True for any JSON; None: no JSON was asked for."""

    @property
    def parsed(self) -> Any:
        """Value of the text, if JSON was asked for: of the class given as `schema`, else as `json.loads` returns it.

        None if no JSON was asked for, or if the text does not satisfy the class or was cut short, as by `max_tokens`.
        """
        if self.form is None:
            return None
        try:
            return parsed_as(None if self.form is True else self.form, self.text)
        except (ValueError, RecursionError):
            return None


@dataclass(frozen=True)
class InferenceResponse:
    """The answer to one request, even if it failed (then `error` is set and `choices` hold what there was)."""

    request_id: str
    output: str
    """Text of the first choice."""
    tokens_generated: int
    latency_ms: float
    """Time from submission to the last token, queue included."""
    queue_ms: float = 0.0
    """Time from submission to the first step that computed any of it."""
    finish_reason: FinishReason = "stop"
    usage: Usage = Usage(0, 0)
    token_ids: tuple[int, ...] = ()
    error: BatchwrightError | None = None
    ttft_ms: float | None = None
    """Time from submission to the first generated token; None when there was none."""
    choices: tuple[Choice, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """Log-probability of each prompt token, None for the first one and for those before `prompt_logprobs_start`; None
    altogether where they were not asked for, or the request failed.
    """

    @property
    def parsed(self) -> Any:
        """Value of the first choice's text, as `Choice.parsed`."""
        return self.choices[0].parsed if self.choices else None


@dataclass(frozen=True, slots=True)
class Score:
    """The log-likelihood of a continuation after its context."""

    logprob: float
    """Sum of the natural-log probabilities of the continuation's tokens; NaN if there is an `error`."""
    is_greedy: bool
    """Whether greedy decoding after the context gives the continuation."""
    tokens: tuple[TokenLogprob, ...] = ()
    """The tokens of the continuation."""
    error: BatchwrightError | None = None


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """New text of one choice of one request. The last event of a request carries its `response`."""

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    response: InferenceResponse | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    """Log-probabilities of `token_ids`; None where none were asked for."""


def _as_tuple(name: str, value: Iterable[Any] | None) -> tuple[Any, ...]:
    if value is None:
        return ()
    if not isinstance(value, Iterable) or isinstance(value, Mapping):
        raise InvalidRequest(f"{name}={shown(value)}: must be a list", param=name)
    return tuple(value)


def _choices(value: Any) -> tuple[Any, ...]:
    if isinstance(value, str):
        raise InvalidRequest(f"choices={shown(value)}: must be a list of texts", param="choices")
    given = _as_tuple("choices", value)
    if not given:  # a list that came out empty must not mean any text, as the default does
        raise InvalidRequest("choices=[]: must be a list of at least one text", param="choices")
    return given


def _require_int(name: str, value: object, *, low: int | None = None, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name}={shown(value)}: must be a whole number", param=name)
    if (low is not None and value < low) or (high is not None and value > high):
        raise InvalidRequest(f"{name}={shown(value)}: must be {_range(low, high, '≥')}", param=name)


def _require_real(name: str, value: object, *, low: float, high: float | None = None, above_low: bool = False) -> None:
    # `x - x == 0` is false for NaN and the infinities, and unlike `math.isfinite` takes integers of any size.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value - value != 0:
        raise InvalidRequest(f"{name}={shown(value)}: must be a finite number", param=name)
    if value < low or (above_low and value == low) or (high is not None and value > high):
        raise InvalidRequest(
            f"{name}={shown(value)}: must be {_range(low, high, '>' if above_low else '≥')}", param=name
        )


def _require_mapping(name: str, value: object) -> None:
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{name}={shown(value)}: must map token ids to numbers", param=name)


def _require_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name}={shown(value)}: must be true or false", param=name)


def _require_callback(callback: object) -> None:
    if not callable(callback):
        raise InvalidRequest(
            f"callback={shown(callback)}: must be a function that takes the response", param="callback"
        )
    if inspect.iscoroutinefunction(callback) or inspect.iscoroutinefunction(type(callback).__call__):
        raise InvalidRequest(
            "callback: must be a plain function, since nobody would await an async one; start a task in it, or await "
            "the response instead",
            param="callback",
        )


def _range(low: float | None, high: float | None, low_sign: str) -> str:
    ends = []
    if low is not None:
        ends.append(f"{low_sign} {low}")
    if high is not None:
        ends.append(f"≤ {high}")
    return " and ".join(ends)


def _check_prompt(prompt: object) -> None:
    if isinstance(prompt, str):
        return
    if not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray)):
        raise InvalidRequest(
            f"prompt of type {type(prompt).__name__}: must be text, a list of token ids or a list of chat messages",
            param="prompt",
        )
    if not prompt:
        raise InvalidRequest("prompt is an empty list: give at least one token id or message", param="prompt")
    # By type, of which there are few, as a prompt may have a hundred thousand tokens.
    if all(issubclass(kind, Integral) and not issubclass(kind, bool) for kind in {*map(type, prompt)}):
        _require_int("prompt", int(min(prompt)), low=0)
        return
    for position, message in enumerate(prompt):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequest(
                f"messages[{position}]={shown(message)}: must be an object with a role (and usually content)",
                param=f"messages[{position}]",
            )


_RANGES: dict[str, Callable[[str, object], None]] = {
    "max_tokens": partial(_require_int, low=0),
    "min_tokens": partial(_require_int, low=0),
    "temperature": partial(_require_real, low=0.0, high=10.0),
    "top_p": partial(_require_real, low=0.0, high=1.0),
    "top_k": partial(_require_int, low=0, high=2**31 - 1),
    "min_p": partial(_require_real, low=0.0, high=1.0),
    "repetition_penalty": partial(_require_real, low=0.01, high=10.0),
    "presence_penalty": partial(_require_real, low=-2.0, high=2.0),
    "frequency_penalty": partial(_require_real, low=-2.0, high=2.0),
    "logit_bias": _require_mapping,
    "seed": partial(_require_int, low=-(2**63), high=2**64 - 1),
    "n": partial(_require_int, low=1, high=MAX_COMPLETIONS),
    "logprobs": partial(_require_int, low=0, high=MAX_TOP_LOGPROBS),
    "prompt_logprobs": partial(_require_int, low=0, high=MAX_TOP_LOGPROBS),
    "prompt_logprobs_start": partial(_require_int, low=0),
    "ignore_eos": _require_bool,
    "json_object": _require_bool,
}
_CHECKS = [(each.name, each.default, _RANGES[each.name]) for each in fields(SamplingParams) if each.name in _RANGES]
"""Name, default (which needs no check) and check of each field that has a range."""
