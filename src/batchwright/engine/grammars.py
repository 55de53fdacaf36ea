"""Grammars: constraints compiled for the tokens of a model, and matchers that say which tokens may come next.

llguidance does the work: it compiles schemas, expressions and grammars, and computes the masks of tokens, without the
interpreter's lock. A constraint is compiled once for all requests that share it.
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation, Overflow
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from batchwright.constraints import Constraint
from batchwright.errors import GenerationError, InvalidRequest, MissingExtra, shown
from batchwright.scheduling import Drafter, EndedAnswers
from batchwright.schemas import UnkeptSchema, kept, says_nothing

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

    from batchwright.engine.tokenizer import Tokenizer

Masks = npt.NDArray[np.int32]
"""Tokens that may come next, one bit per token: [rows, words]."""

_KEPT = 128
"""Number of forms that are kept: the most recently used."""
_MOST_FORCED = 16
"""Most tokens appended at once without being chosen: a block of the KV cache."""
_JSON: JsonCompileOptions = {
    "whitespace_flexible": False,
    "item_separator": ",",
    "key_separator": ":",
    "lenient": False,
    "coerce_one_of": False,
    "json_allowed_escapes": 'nrbtf\\"',
}
"""Options for compact JSON: a model that may write white space may never stop. Nothing is approximated.

Characters have one spelling: the name of a property written as \\u0061 would evade what its schema says of it.
"""
_NESTED = {
    "schemas": ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"),
    "schema": ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames"),
    "list": ("anyOf", "oneOf", "allOf", "prefixItems", "items"),
}
"""Keywords with schemas below them: by name, directly, and in a list."""
_MOST_OPTIONAL = 400
"""Most optional properties of an object: with 500, there are more possible continuations than llguidance follows."""
_STEPS_BEGUN = 4
"""Runs of forced tokens at the beginning of an answer that are tried to see whether it can begin."""
_REASON_SHOWN = 500
_EMBEDDED = re.compile(r"%json\s*(?=\{)")
_DECODER = json.JSONDecoder()
_MULTIPLE_OF = re.compile(r'"multipleOf"\s*:\s*([-+0-9.eE]+)')
_MOST_REMAINDERS = 50_000
"""Largest accepted common multiple of the values of `multipleOf`: it takes a second to compile."""
_DIGITS = 30
"""Most digits of a value that are examined: this many are too many in any case."""
_MOST_LOOKED_AT = 64
"""Parts of a schema that are compiled by themselves to find the one that is refused."""
_CHARACTERS_LOOKED_AT = 200_000
"""Characters of all of these, which take seconds to compile."""
_KEYWORDS = "Unimplemented keys:"
"""What llguidance says before keywords of a schema that it does not support."""
_ONE_OF = "oneOf constraints are not supported"
"""What it says of an unsupported `oneOf`, before advice for programs."""
_NOT_EXCLUSIVE = (
    "oneOf: its schemas cannot be distinguished, so that a value could satisfy several: use anyOf, or give each of "
    "them a type, a const or enum, or a required property with a const of its own"
)
_NOTHING_FOLLOWS = "NoExtension"
"""What it says if a grammar forbids every token: the rest cannot be written, such as a control character in JSON."""
_TOO_LARGE = "schema too large"
"""What it says if the work was too much, as it would be for each part again."""

_OF_PATTERN = re.compile(r"regex parse error:.*\nerror: ([^\n]+)", re.DOTALL)
_PICTURE = re.compile(r"\n *\d+ \| [^\n]*\n *\^ *$", re.MULTILINE)
"""The line of a grammar that a reason is about, with a mark below it."""


class Grammars:
    """Grammars of one model, whose logits have a value for each of `width` tokens. Any thread may use it."""

    def __init__(self, tokenizer: Tokenizer, width: int) -> None:
        self.tokenizer = tokenizer
        self._width = width
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._vocabulary: _Vocabulary | str | None = None
        """The tokens of the model, or why they are not available; None: not read yet."""
        self._forms: OrderedDict[Constraint, Form] = OrderedDict()

    def form(self, constraint: Constraint) -> Form:
        """Return the form of answers under a constraint, which is compiled already if others use it."""
        with self._lock:
            found = self._forms.setdefault(constraint, Form(constraint, self.read))
            self._forms.move_to_end(constraint)
            if len(self._forms) > _KEPT:
                self._forms.popitem(last=False)
        return found

    def matcher(self, constraint: Constraint) -> Matcher:
        """Return a matcher at the beginning of a text. Raises `InvalidRequest` if the constraint cannot be kept."""
        return self.form(constraint).matcher()

    def read(self) -> _Vocabulary | str:
        """Return the tokens of the model as grammars need them, or why they are not available; read only once."""
        # It takes a second, for which callers that ask for other forms do not wait.
        with self._reading:
            if self._vocabulary is None:
                self._vocabulary = _Vocabulary.of(self.tokenizer, self._width)
            return self._vocabulary


class Form:
    """A constraint for the tokens of a model, compiled once for all who hold it. Any thread may use it."""

    def __init__(self, constraint: Constraint, vocabulary: Callable[[], _Vocabulary | str]) -> None:
        self._constraint = constraint
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._start: Matcher | None = None
        self._refusal: str | None = None

    @property
    def is_compiled(self) -> bool:
        """Whether `matcher` returns, or raises, without waiting for anything to be compiled."""
        return self._start is not None or self._refusal is not None

    def compile(self) -> None:
        """Compile it unless that was done already; this takes a second at worst."""
        with self._lock:
            if self.is_compiled:
                return
            vocabulary = self._vocabulary()
            if isinstance(vocabulary, str):
                self._refusal = vocabulary
                return
            found, self._refusal = _compile(self._constraint, vocabulary)
            self._start = None if found is None else Matcher(found, vocabulary.ends)

    def matcher(self) -> Matcher:
        """Return a matcher at the beginning of a text. Raises `InvalidRequest` if the constraint cannot be kept."""
        self.compile()
        if self._start is None:
            kind = self._constraint.kind
            raise InvalidRequest(f"{kind}: {self._refusal}", param=kind)
        with self._lock:
            return self._start.copy()


class Matcher:
    """Position of one text in its grammar. Drafts, masks and forced tokens are for the one after the last `advance`."""

    def __init__(self, inner: LLMatcher, ends: frozenset[int]) -> None:
        self.inner = inner
        self.ends = ends
        """Tokens that end a text."""

    def copy(self) -> Matcher:
        """Return another matcher at the same position."""
        return Matcher(self.inner.deep_copy(), self.ends)

    @property
    def is_complete(self) -> bool:
        """Whether the text matches and nothing can follow it."""
        return self.inner.is_stopped() and not self.inner.is_error()

    @property
    def failure(self) -> GenerationError | None:
        """Why it cannot go on, None if it can: a grammar took more work than a step may, or has no continuation."""
        if not self.inner.is_error():
            return None
        reason = _first_line(self.inner.get_error())
        if reason.startswith(_NOTHING_FOLLOWS):
            return GenerationError("the answer cannot be ended: its grammar asks for what no text of JSON can be")
        return GenerationError(f"the answer's grammar takes too much work: {reason}")

    def advance(self, token: int) -> None:
        """Take the next token. Raises `GenerationError` for one that the grammar does not allow."""
        if not self.inner.consume_token(token):
            raise self.failure or GenerationError(f"token {token} is not allowed by the answer's grammar")

    def forced(self) -> list[int]:
        """Return the next tokens that are the only choice, at most as many as a block of the KV cache holds."""
        return self.inner.compute_ff_tokens()[:_MOST_FORCED]

    def allowed(self, tokens: Sequence[int]) -> int:
        """Return how many of `tokens` may come next, one after the other."""
        return self.inner.validate_tokens([*tokens])


class GrammarDrafter(Drafter):
    """Draft maker for a sequence with a grammar: it guesses only what the grammar allows."""

    def __init__(self, matcher: Matcher, ended: EndedAnswers | None = None) -> None:
        super().__init__(ended)
        self._matcher = matcher

    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        allowed = (drafts[: self._matcher.allowed(drafts)] for drafts in self.guesses(tokens, most))
        return next(filter(None, allowed), [])


class MaskMaker:
    """Maker of masks for the rows of a step, in parallel."""

    def __init__(self, width: int) -> None:
        self._words = -(-width // 32)
        self._executor: Any = None

    def masks(self, rows: Sequence[tuple[Matcher, Sequence[int]]]) -> Masks:
        """Return a mask for the token after each matcher's text and after each of its drafts, which it must allow."""
        from llguidance import LLExecutor
        from llguidance.numpy import (
            fill_next_token_bitmask_par,
            fill_next_token_bitmask_par_with_draft_tokens,
        )

        if self._executor is None:
            self._executor = LLExecutor()
        starts = np.cumsum([0, *(1 + len(drafts) for _, drafts in rows)])
        masks = np.zeros((int(starts[-1]), self._words), np.int32)
        placed = [
            (matcher.inner, int(start), [*drafts]) for start, (matcher, drafts) in zip(starts, rows, strict=False)
        ]
        if plain := [(inner, start) for inner, start, drafts in placed if not drafts]:
            fill_next_token_bitmask_par(self._executor, plain, masks)
        if drafting := [each for each in placed if each[2]]:
            fill_next_token_bitmask_par_with_draft_tokens(self._executor, drafting, masks)
        return masks


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The tokens of a model, in the form that llguidance takes."""

    tokenizer: LLTokenizer
    ends: frozenset[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, width: int) -> _Vocabulary | str:
        """Return the tokens of `tokenizer`, or why they are not available: it is not of the usual kind."""
        try:
            from llguidance import LLTokenizer
        except ModuleNotFoundError as error:
            raise MissingExtra.of_engine("an answer of a given form", error) from error
        written = tokenizer.as_json()
        if written is None:
            return "answers of a given form need a tokenizer with a tokenizer.json, which the model has not"
        try:
            found = LLTokenizer(written, n_vocab=width, eos_token=sorted(tokenizer.eos_token_ids) or None)
        except Exception as error:  # llguidance does not know this kind of tokenizer
            return f"answers of a given form are not possible with the model's tokenizer: {error}"
        return cls(found, tokenizer.eos_token_ids | frozenset(found.eos_tokens))


def _compile(constraint: Constraint, vocabulary: _Vocabulary) -> tuple[LLMatcher | None, str | None]:
    """Return the matcher of a constraint, or why there is none."""
    from llguidance import LLMatcher

    source, refusal = _readable(constraint)
    if source is None:
        return None, refusal
    matcher = LLMatcher(vocabulary.tokenizer, source, log_level=0, limits=_limits())
    if not matcher.is_error() and (refusal := _dead_end(matcher)) is None:
        return matcher, None
    if constraint.around and (own := _compile(replace(constraint, around=""), vocabulary)[1]) is not None:
        return None, own
    return None, refusal or _refusal_text(constraint, matcher.get_error())


@lru_cache(maxsize=1024)
def refusal_of(constraint: Constraint) -> str | None:
    """Return why no model can keep to a constraint, None if one may. Needs neither a model nor torch."""
    from llguidance import LLMatcher, LLTokenizer

    source, refusal = _readable(constraint)
    if source is None:
        return refusal
    matcher = LLMatcher(LLTokenizer("byte"), source, log_level=0, limits=_limits())
    return _refusal_text(constraint, matcher.get_error()) if matcher.is_error() else _dead_end(matcher)


def _readable(constraint: Constraint) -> tuple[str | None, str | None]:
    """Return a constraint as a grammar of llguidance, or why there is none."""
    if (too_much := _too_much(constraint)) is not None:
        return None, too_much
    try:
        return _source(constraint), None
    except UnkeptSchema as error:
        return None, str(error)
    except (ValueError, RecursionError) as error:
        return None, f"cannot be read: {error}"


def _dead_end(matcher: LLMatcher) -> str | None:
    """Return why no text can begin as a grammar requires, None if one can."""
    begun = matcher.deep_copy()
    for _ in range(_STEPS_BEGUN):
        forced = begun.compute_ff_tokens()
        if begun.is_stopped() and not begun.is_error():
            return None
        if not forced:
            begun.compute_logit_bias()
        elif begun.consume_tokens(forced):
            continue
        break
    if not begun.is_error():
        return None
    reason = _first_line(begun.get_error())
    if reason.startswith(_NOTHING_FOLLOWS):
        return "there is no text that it allows"
    return f"the beginning of an answer takes too much work: {reason}"


def _refusal_text(constraint: Constraint, reason: str) -> str:
    """Return the message about a constraint that llguidance refuses for this reason."""
    if constraint.kind == "regex" and (found := _OF_PATTERN.search(reason)):
        return f"{shown(constraint.text)} is no pattern: {found[1]}"
    if constraint.kind == "grammar" and "::=" in constraint.text:
        return f"rules are written as in Lark, `start: …`, not with ::= ({_shown(reason)})"
    if constraint.kind != "schema":
        return _shown(reason)
    place = _place(json.loads(constraint.text), reason)
    if reason.startswith(_ONE_OF):
        return f"{place} is not supported: {_NOT_EXCLUSIVE}"
    what = "has keywords that are not supported" if reason.startswith(_KEYWORDS) else "is not supported"
    return f"{place} {what}: {_shown(reason.removeprefix(_KEYWORDS))}"


def _source(constraint: Constraint) -> str:
    """Return the constraint as a grammar of llguidance. Raises ValueError for a schema that is nested too deep."""
    own = _own_source(constraint)
    if not constraint.around:
        return own
    inner = {"lark_grammar": own} if constraint.kind in ("choices", "grammar") else json.loads(own)["grammars"][0]
    return json.dumps({"grammars": [{"lark_grammar": constraint.around}, {**inner, "name": "answer"}]})


def _own_source(constraint: Constraint) -> str:
    """Return the source of the constraint alone, without what is around it."""
    from llguidance import LLMatcher

    match constraint.kind:
        case "json_object":
            return LLMatcher.grammar_from_json_schema('{"type":"object"}', overrides=_JSON)
        case "schema":
            return LLMatcher.grammar_from_json_schema(kept(json.loads(constraint.text)), overrides=_JSON)
        case "regex":
            return LLMatcher.grammar_from_regex(constraint.text)
        case "choices":
            texts = (
                json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") for text in json.loads(constraint.text)
            )
            return LLMatcher.grammar_from_lark("start: " + " | ".join(texts))
        case "grammar":
            return LLMatcher.grammar_from_lark(_with_kept_schemas(constraint.text))


def _with_kept_schemas(grammar: str) -> str:
    """Return a Lark grammar whose schemas, after `%json`, are compiled with the same options as those of requests.

    Schemas of tool calls have these options already.
    """
    found, end = [], 0
    for match in _EMBEDDED.finditer(grammar):
        try:
            schema, behind = _DECODER.raw_decode(grammar, match.end())
        except (ValueError, RecursionError):
            continue  # llguidance reports it, too, unless it is a literal of the grammar
        if isinstance(schema, dict) and not _is_bounded(schema.get("x-guidance")):
            found += [grammar[end : match.end()], json.dumps({**kept(schema), "x-guidance": _JSON})]
            end = behind
    return "".join([*found, grammar[end:]])


def _is_bounded(guidance: object) -> bool:
    """Whether the options for compiling a schema differ from ours at most in separators."""
    separators = {"item_separator", "key_separator"}
    return isinstance(guidance, dict) and all(
        guidance.get(name) == value for name, value in _JSON.items() if name not in separators
    )


def _limits() -> Any:
    """Return the limits of a grammar: tens of megabytes of memory, and some 10 ms for a mask."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=50_000, max_grammar_size=200_000, verbose_errors=False)


def _too_much(constraint: Constraint) -> str | None:
    """Return why a constraint would take minutes to compile, None if it does not.

    Whether a number is a multiple of another is decided by its remainder: there is a state for each remainder, also of
    common multiples.
    """
    if constraint.kind not in ("schema", "grammar"):
        return None
    text = re.sub(r"\\u([0-9a-fA-F]{4})", lambda found: chr(int(found[1], 16)), constraint.text)
    common = 1
    for found in _MULTIPLE_OF.finditer(text):
        try:
            digits = Decimal(found[1]).normalize().as_tuple().digits[:_DIGITS]
        except (InvalidOperation, Overflow):
            continue  # it is refused since it is not a number
        common = math.lcm(common, int("".join(map(str, digits))) or 1)
        if common > _MOST_REMAINDERS:
            return f"multipleOf: values with a common multiple above {_MOST_REMAINDERS:,} (without zeros at its end)"
    return _too_optional(json.loads(constraint.text)) if constraint.kind == "schema" else None


def _too_optional(schema: Mapping[str, Any]) -> str | None:
    """Return which object of a schema has too many optional properties, None if none has.

    Any of them may come next, and llguidance follows 2,000 alternatives, of which each property needs several.
    """
    for where, part in _all_parts("#", schema):
        properties, required = part.get("properties"), part.get("required")
        if isinstance(properties, Mapping):
            needed = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
            optional = len(properties.keys() - needed)
            if optional > _MOST_OPTIONAL:
                return (
                    f"{where} has {optional:,} properties that are not required, the most is {_MOST_OPTIONAL:,}: "
                    "list those that each answer is to have in required"
                )
    return None


def _place(schema: Mapping[str, Any], reason: str) -> str:
    """Return the JSON pointer to the innermost part of `schema` that is refused for this reason."""
    if reason.startswith(_KEYWORDS):
        keywords = frozenset(json.loads(reason.removeprefix(_KEYWORDS)))
        return next((where for where, part in _all_parts("#", schema) if keywords <= _saying(part)), "#")
    if reason.startswith(_TOO_LARGE):
        return "#"
    shared = {name: schema[name] for name in ("$defs", "definitions", "$schema") if name in schema}
    where, part = "#", schema
    # Each part may refer to all others.
    left = min(_MOST_LOOKED_AT, _CHARACTERS_LOOKED_AT // len(json.dumps(schema)))
    while True:
        for step, inner in _parts(part):
            left -= 1
            if left < 0:
                return where
            if _refusal({**shared, **inner}) == reason:
                where, part = f"{where}/{step}", inner
                break
        else:
            return where


def _saying(part: Mapping[str, Any]) -> set[str]:
    """Return the keywords of a part of a schema that restrict what is allowed."""
    return {keyword for keyword in part if not says_nothing(keyword, part)}


def _all_parts(where: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield `schema`, which is at `where`, and all schemas below it, with their locations."""
    yield where, schema
    for step, inner in _parts(schema):
        yield from _all_parts(f"{where}/{step}", inner)


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the schemas directly below `schema`, with their locations in it."""
    for kind, names in _NESTED.items():
        for name in names:
            below = schema.get(name)
            if kind == "schemas" and isinstance(below, Mapping):
                pairs: list[tuple[str, Any]] = [(f"{name}/{_escaped(key)}", each) for key, each in below.items()]
            elif kind == "list" and isinstance(below, list):
                pairs = [(f"{name}/{number}", each) for number, each in enumerate(below)]
            else:
                pairs = [(name, below)] if kind == "schema" else []
            yield from ((step, each) for step, each in pairs if isinstance(each, Mapping))


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _refusal(schema: Mapping[str, Any]) -> str | None:
    from llguidance import LLMatcher

    try:
        source = LLMatcher.grammar_from_json_schema(kept(schema), overrides=_JSON)
    except ValueError:
        return None
    failed, messages = LLMatcher.validate_grammar_with_warnings(source, None, limits=_limits())
    return messages[0] if failed else None


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _shown(reason: str) -> str:
    """Return a reason of llguidance on one line, without its excerpt of the grammar."""
    reason = _PICTURE.sub("", reason)
    text = " ".join(reason.replace("<non-verbose/>", "").split())
    return text if len(text) <= _REASON_SHOWN else f"{text[:_REASON_SHOWN]}…"
