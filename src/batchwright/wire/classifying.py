"""Bodies for `/v1/rerank`, `/v1/score` and `/classify`, and of their answers.

Their forms are those of vLLM and Text Embeddings Inference, which follow Jina's and Cohere's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchwright.errors import InvalidRequest, shown
from batchwright.wire.fields import check_names, deadline_seconds, priority_of
from batchwright.wire.requests import (
    CLASSIFY_URL,
    RERANK_URL,
    SCORE_URL,
    flag,
    most_tokens_of,
    read_model,
    required,
    texts_or_tokens,
)

Body = dict[str, Any]

_COMMON = frozenset({"priority", "deadline", "deadline_ms", "truncate_prompt_tokens"})
_RERANK_NAMES = _COMMON | {"query", "documents", "top_n", "return_documents"}
_SCORE_NAMES = _COMMON | {"text_1", "text_2"}
_CLASSIFY_NAMES = _COMMON | {"input"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifierBody:
    """A body for a sequence classifier."""

    model: str | None
    inputs: tuple[str | tuple[str, str] | list[int], ...]
    """Texts, pairs of texts, or lists of token ids. At least one."""
    most_tokens: int | None
    """Tokens to which each input is cut; `WHOLE_LENGTH`: as many as the model takes; None: none is cut."""
    priority: int
    deadline: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankBody(ClassifierBody):
    """A body for `/v1/rerank`. Its inputs are pairs of the query and a document."""

    documents: tuple[str, ...]
    top_n: int
    return_documents: bool


def read_classifying(endpoint: str, body: Mapping[str, Any]) -> ClassifierBody:
    """Read a body for `endpoint`, one of `/v1/rerank`, `/v1/score` and `/classify`.

    Raises `InvalidRequest`, naming the field, and nothing else, for any JSON object.
    """
    return {RERANK_URL: read_rerank, SCORE_URL: read_score, CLASSIFY_URL: read_classify}[endpoint](body)


def read_rerank(body: Mapping[str, Any]) -> RerankBody:
    """Read a body for `/v1/rerank`. Raises as `read_classifying`."""
    check_names(body, frozenset(), _RERANK_NAMES, {})
    query = _text("query", required("query", body))
    given = required("documents", body)
    if not isinstance(given, list) or not given:
        raise InvalidRequest("documents must be a list of texts that is not empty", param="documents")
    documents = tuple(_document(f"documents[{position}]", each) for position, each in enumerate(given))
    top_n = body.get("top_n")
    if top_n is not None and (type(top_n) is not int or not 0 < top_n < 2**31):
        raise InvalidRequest(f"top_n={shown(top_n)}: must be a whole number above 0", param="top_n")
    return RerankBody(
        inputs=tuple((query, document) for document in documents),
        documents=documents,
        top_n=min(top_n or len(documents), len(documents)),
        return_documents=flag("return_documents", body.get("return_documents")),
        **_common(body),
    )


def read_score(body: Mapping[str, Any]) -> ClassifierBody:
    """Read a body for `/v1/score`. Raises as `read_classifying`."""
    check_names(body, frozenset(), _SCORE_NAMES, {})
    first, second = (_texts(name, required(name, body)) for name in ("text_1", "text_2"))
    if len(first) not in (1, len(second)):
        raise InvalidRequest(
            f"text_1 has {len(first)} texts and text_2 {len(second)}: give one text_1 for all, or as many of both",
            param="text_1",
        )
    if len(first) == 1:
        first = first * len(second)
    return ClassifierBody(inputs=tuple(zip(first, second, strict=True)), **_common(body))


def read_classify(body: Mapping[str, Any]) -> ClassifierBody:
    """Read a body for `/classify`. Raises as `read_classifying`."""
    check_names(body, frozenset(), _CLASSIFY_NAMES, {})
    inputs = texts_or_tokens("input", required("input", body))
    if "" in inputs:
        raise InvalidRequest(f"input[{inputs.index('')}] is an empty text", param="input")
    return ClassifierBody(inputs=inputs, **_common(body))


def param_of(endpoint: str) -> str:
    """Return the field of a body whose parts are its inputs."""
    return {RERANK_URL: "documents", SCORE_URL: "text_2", CLASSIFY_URL: "input"}[endpoint]


def rerank_answer(key: str, model: str, body: RerankBody, scores: Sequence[float], tokens: int) -> Body:
    """Return the answer with the scores of all documents, best first, equal ones in their order."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    results: list[Body] = []
    for index in order[: body.top_n]:
        document = {"document": {"text": body.documents[index]}} if body.return_documents else {}
        results.append({"index": index, "relevance_score": scores[index], **document})
    return {"id": f"rerank-{key}", "model": model, "results": results, "usage": _usage(tokens)}


def score_answer(key: str, created: int, model: str, scores: Sequence[float], tokens: int) -> Body:
    """Return the answer with the score of each pair, in order."""
    data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
    return _listed(f"score-{key}", created, model, data, tokens)


def classify_answer(
    key: str, created: int, model: str, labels: Sequence[str], probabilities: Sequence[Sequence[float]], tokens: int
) -> Body:
    """Return the answer with the likeliest label of each input, and the probabilities of all labels, in order."""
    data = [
        {
            "index": index,
            "label": labels[max(range(len(each)), key=each.__getitem__)],
            "probs": list(each),
            "num_classes": len(labels),
        }
        for index, each in enumerate(probabilities)
    ]
    return _listed(f"classify-{key}", created, model, data, tokens)


def _listed(name: str, created: int, model: str, data: list[Body], tokens: int) -> Body:
    return {"id": name, "object": "list", "created": created, "model": model, "data": data, "usage": _usage(tokens)}


def _usage(tokens: int) -> Body:
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def _common(body: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model": read_model(body),
        "most_tokens": most_tokens_of(body),
        "priority": priority_of(body),
        "deadline": deadline_seconds(body),
    }


def _texts(name: str, value: object) -> list[str]:
    if isinstance(value, list) and value:
        return [_text(f"{name}[{position}]", each) for position, each in enumerate(value)]
    return [_text(name, value)]


def _document(where: str, value: object) -> str:
    return _text(where, value.get("text") if isinstance(value, Mapping) else value)


def _text(where: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{where}={shown(value)}: must be a text", param=where)
    if not value:
        raise InvalidRequest(f"{where} is an empty text", param=where)
    return value
