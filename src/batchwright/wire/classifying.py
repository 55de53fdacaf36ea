"""Bodies of requests for `/v1/rerank`, `/v1/score` and `/classify`, and of their answers.

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
    PAIR_FIELDS,
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
_SCORE_NAMES = _COMMON.union(*PAIR_FIELDS)
_CLASSIFY_NAMES = _COMMON | {"input"}
REFUSED: Mapping[str, tuple[object, ...]] = {
    "add_special_tokens": (True,),
    "chat_template_kwargs": ({},),
    "instruction": (),
    "max_tokens_per_doc": (0,),
    "max_tokens_per_query": (0,),
    "padding": ("do_not_pad",),
    "truncation_side": ("right",),
    "use_activation": (True,),
}
"""Fields of vLLM that are not supported, and their values that ask for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifierBody:
    """A body for a sequence classifier."""

    model: str | None
    inputs: tuple[str | tuple[str, str] | list[int], ...]
    """Texts, pairs of texts, or lists of token ids. At least one."""
    param: str
    """Name of the field whose parts are the inputs; of pairs, their second texts."""
    most_tokens: int | None
    """Tokens to which each input is cut; `WHOLE_LENGTH`: as many as the model takes; None: none is cut."""
    priority: int
    deadline: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PairsBody(ClassifierBody):
    """A body whose inputs are pairs of texts, for `/v1/score`."""

    first_param: str
    """Name of the field with the first texts."""
    first: tuple[str, ...]
    """One text for all pairs, or the first text of each."""
    second: tuple[str, ...]
    """The second text of each pair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankBody(PairsBody):
    """A body for `/v1/rerank`. Its inputs are pairs of the query and a document."""

    top_n: int
    return_documents: bool


def read_classifying(endpoint: str, body: Mapping[str, Any]) -> ClassifierBody:
    """Read a body for `endpoint`, one of `/v1/rerank`, `/v1/score` and `/classify`.

    For any JSON object, raises nothing but `InvalidRequest`, naming the field.
    """
    return {RERANK_URL: read_rerank, SCORE_URL: read_score, CLASSIFY_URL: read_classify}[endpoint](body)


def read_rerank(body: Mapping[str, Any]) -> RerankBody:
    """Read a body for `/v1/rerank`. Raises as `read_classifying` does."""
    check_names(body, frozenset(), _RERANK_NAMES, REFUSED)
    query = _text("query", required("query", body))
    given = required("documents", body)
    if not isinstance(given, (list, str)) or not given:
        raise InvalidRequest("documents must be a list of texts that is not empty", param="documents")
    given = [given] if isinstance(given, str) else given
    documents = tuple(_document(f"documents[{position}]", each) for position, each in enumerate(given))
    top_n = body.get("top_n")
    if top_n is not None and (type(top_n) is not int or not 0 <= top_n < 2**31):
        raise InvalidRequest(f"top_n={shown(top_n)}: must be a whole number, 0 for all of them", param="top_n")
    return RerankBody(
        inputs=tuple((query, document) for document in documents),
        param="documents",
        first_param="query",
        first=(query,),
        second=documents,
        top_n=min(top_n or len(documents), len(documents)),
        return_documents=flag("return_documents", body.get("return_documents")),
        **_common(body),
    )


def read_score(body: Mapping[str, Any]) -> PairsBody:
    """Read a body for `/v1/score`. Raises as `read_classifying` does."""
    check_names(body, frozenset(), _SCORE_NAMES, REFUSED)
    names = pair_fields(body)
    for name in sorted(frozenset[str]().union(*PAIR_FIELDS).difference(names)):
        if body.get(name) is not None:
            raise InvalidRequest(f"{name} is given beside {names[0]}: leave one of them out", param=name)
    first, second = (_texts(name, required(name, body)) for name in names)
    if len(first) not in (1, len(second)):
        raise InvalidRequest(
            f"{names[0]} has {len(first)} texts and {names[1]} {len(second)}: give one {names[0]} for all, or as many "
            "of both",
            param=names[0],
        )
    return PairsBody(
        inputs=tuple(zip(first * (len(second) if len(first) == 1 else 1), second, strict=True)),
        param=names[1],
        first_param=names[0],
        first=tuple(first),
        second=tuple(second),
        **_common(body),
    )


def pair_fields(body: Mapping[str, Any]) -> tuple[str, str]:
    """Return the names of the fields with the first and the second texts in a body for `/v1/score`."""
    given = [names for names in PAIR_FIELDS if any(body.get(name) is not None for name in names)]
    return max(given, key=lambda names: sum(body.get(name) is not None for name in names), default=PAIR_FIELDS[0])


def read_classify(body: Mapping[str, Any]) -> ClassifierBody:
    """Read a body for `/classify`. Raises as `read_classifying` does."""
    check_names(body, frozenset(), _CLASSIFY_NAMES, REFUSED)
    inputs = texts_or_tokens("input", required("input", body))
    if "" in inputs:
        raise InvalidRequest(f"input[{inputs.index('')}] is an empty text", param="input")
    return ClassifierBody(inputs=inputs, param="input", **_common(body))


def sent_inputs(endpoint: str, body: Mapping[str, Any]) -> list[str]:
    """Return the texts, or the pairs as one text each, of a body that is passed on to an endpoint elsewhere.

    Its other fields are left to the endpoint, as are inputs that are not texts, such as images, which count as empty.
    Raises `InvalidRequest` if an input is missing.
    """
    if endpoint == CLASSIFY_URL:
        return list(map(_sent_text, _listed_items(required("input", body))))
    names = ("query", "documents") if endpoint == RERANK_URL else pair_fields(body)
    first, second = (list(map(_sent_text, _listed_items(required(name, body)))) for name in names)
    pairs = zip(first * (len(second) if len(first) == 1 else 1), second, strict=False)
    return [" ".join(pair) for pair in pairs]


def _listed_items(value: object) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _sent_text(value: object) -> str:
    text = value.get("text") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else ""


def rerank_answer(key: str, model: str, body: RerankBody, scores: Sequence[float], tokens: int) -> Body:
    """Return the answer with the scores of all documents, best first, equal ones in their order."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    results: list[Body] = []
    for index in order[: body.top_n]:
        document = {"document": {"text": body.second[index]}} if body.return_documents else {}
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
