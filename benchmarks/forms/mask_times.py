"""Masks of a library for grammars, in vLLM's environment, which has three: `Question` in, `Figures` out, as JSON."""

from __future__ import annotations

import importlib
import json
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

_PATIENCE_S = 20.0
"""Seconds for new schemas of one library, after which no further one is begun."""


class Question(TypedDict):
    library: str
    model: str
    """Folder with the tokenizer."""
    width: int
    """Logits of the model."""
    answered: str
    """Schema of the answers."""
    answers: list[list[int]]
    """Token ids, without those that end a text."""
    schemas: list[str]
    """Other schemas, for the time to the first mask."""


class Figures(TypedDict):
    version: str
    mask_us: list[float]
    """Microseconds of the mask before each token of the answers."""
    refused: int
    """Answers with a token that the library does not allow; masks before it are counted."""
    first_ms: list[float]
    """Milliseconds from a new schema to its first mask."""


class Place(ABC):
    """Place of a text in its grammar."""

    @abstractmethod
    def mask(self) -> None:
        """Fill the mask of the token that comes next."""

    @abstractmethod
    def accept(self, token: int) -> bool:
        """Take a token. Returns whether it is allowed."""


class Library(ABC):
    """A library with the tokens of a model, as vLLM sets it up, and compact JSON."""

    package: str

    @abstractmethod
    def compile(self, schema: str) -> Any:
        """Return what all texts with the schema share."""

    @abstractmethod
    def begin(self, compiled: Any) -> Place:
        """Return the beginning of a text."""


class _Guidance(Library):
    package = "llguidance"

    def __init__(self, tokenizer: Any, width: int) -> None:
        self._guidance: Any = importlib.import_module("llguidance")
        self._filling: Any = importlib.import_module("llguidance.torch")
        self._tokenizer = importlib.import_module("llguidance.hf").from_tokenizer(tokenizer, width)
        self._row = self._filling.allocate_token_bitmask(1, width)

    def compile(self, schema: str) -> Any:
        made = self._guidance.LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_flexible": False})
        return self._guidance.LLMatcher(self._tokenizer, made)

    def begin(self, compiled: Any) -> Place:
        return _GuidancePlace(compiled.deep_copy(), self._filling.fill_next_token_bitmask, self._row)


class _GuidancePlace(Place):
    def __init__(self, matcher: Any, fill: Any, row: Any) -> None:
        self._matcher, self._fill, self._row = matcher, fill, row

    def mask(self) -> None:
        self._fill(self._matcher, self._row, 0)

    def accept(self, token: int) -> bool:
        return bool(self._matcher.consume_token(token))


class _Xgrammar(Library):
    package = "xgrammar"

    def __init__(self, tokenizer: Any, width: int) -> None:
        self._xgrammar: Any = importlib.import_module("xgrammar")
        tokens = self._xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=width)
        self._compiler = self._xgrammar.GrammarCompiler(tokens, max_threads=8, cache_enabled=True)
        self._row = self._xgrammar.allocate_token_bitmask(1, width)

    def compile(self, schema: str) -> Any:
        return self._compiler.compile_json_schema(schema, any_whitespace=False, separators=(",", ":"))

    def begin(self, compiled: Any) -> Place:
        return _XgrammarPlace(self._xgrammar.GrammarMatcher(compiled), self._row)


class _XgrammarPlace(Place):
    def __init__(self, matcher: Any, row: Any) -> None:
        self._matcher, self._row = matcher, row

    def mask(self) -> None:
        self._matcher.fill_next_token_bitmask(self._row, 0)

    def accept(self, token: int) -> bool:
        return bool(self._matcher.accept_token(token))


class _Outlines(Library):
    package = "outlines_core"

    def __init__(self, tokenizer: Any, width: int) -> None:
        self._outlines: Any = importlib.import_module("outlines_core")
        utils: Any = importlib.import_module("vllm.v1.structured_output.utils")
        self._vocabulary = utils.get_outlines_vocabulary(tokenizer).inner
        torch: Any = importlib.import_module("torch")
        self._row = torch.full((-(-width // 32),), -1, dtype=torch.int32)

    def compile(self, schema: str) -> Any:
        pattern = self._outlines.json_schema.build_regex_from_schema(schema, whitespace_pattern="")
        return self._outlines.Index(pattern, self._vocabulary)

    def begin(self, compiled: Any) -> Place:
        return _OutlinesPlace(self._outlines.Guide(compiled), self._row)


class _OutlinesPlace(Place):
    def __init__(self, guide: Any, row: Any) -> None:
        self._guide, self._row = guide, row

    def mask(self) -> None:
        self._guide.write_mask_into(self._row.data_ptr(), self._row.numel(), self._row.element_size())

    def accept(self, token: int) -> bool:
        if not self._guide.accepts_tokens([token]):
            return False
        self._guide.advance(token)
        return True


LIBRARIES: dict[str, Callable[[Any, int], Library]] = {
    "llguidance": _Guidance,
    "xgrammar": _Xgrammar,
    "outlines-core": _Outlines,
}


def figures(question: Question) -> Figures:
    """Measure one library."""
    transformers: Any = importlib.import_module("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(question["model"])
    library = LIBRARIES[question["library"]](tokenizer, question["width"])
    mask_us, refused = _masks(library, question["answered"], question["answers"])
    version = importlib.import_module("importlib.metadata").version(library.package)
    return {
        "version": version,
        "mask_us": mask_us,
        "refused": refused,
        "first_ms": _first_masks(library, question["schemas"]),
    }


def _masks(library: Library, schema: str, answers: Sequence[Sequence[int]]) -> tuple[list[float], int]:
    compiled, found, refused = library.compile(schema), [], 0
    for answer in answers:
        place = library.begin(compiled)
        for token in answer:
            began = time.perf_counter()
            place.mask()
            found.append((time.perf_counter() - began) * 1e6)
            if not place.accept(token):
                refused += 1
                break
    return found, refused


def _first_masks(library: Library, schemas: Sequence[str]) -> list[float]:
    found: list[float] = []
    until = time.perf_counter() + _PATIENCE_S
    for schema in schemas:
        if found and time.perf_counter() > until:
            break
        began = time.perf_counter()
        library.begin(library.compile(schema)).mask()
        found.append((time.perf_counter() - began) * 1e3)
    return found


if __name__ == "__main__":
    print("\n" + json.dumps(figures(json.load(sys.stdin))))
