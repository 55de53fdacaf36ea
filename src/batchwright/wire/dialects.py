"""Dialects: how an endpoint elsewhere wants OpenAI's bodies and keys, and how its answers become OpenAI's.

All other code uses OpenAI's bodies, whatever the endpoint expects. A dialect only translates; it decides and sends
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, cast
from urllib.parse import urlsplit

from batchwright.errors import InputError, InvalidRequest
from batchwright.request import Prompt
from batchwright.wire.anthropic_answers import MessageChunks, openai_body, openai_error, status_of_error
from batchwright.wire.anthropic_requests import CachedPrefix, cached_prefixes, messages_body
from batchwright.wire.error_bodies import status_of_kind
from batchwright.wire.requests import (
    CHAT_URL,
    CLASSIFIER_URLS,
    CLASSIFY_URL,
    COMPLETION_URL,
    EMBEDDINGS_URL,
    RESPONSES_URL,
)

Body: TypeAlias = dict[str, Any]

_ANTHROPIC_HOST = "api.anthropic.com"
_ANTHROPIC_VERSION = "2023-06-01"
_JINA_HOST = "api.jina.ai"
_AZURE_DOMAINS = (".openai.azure.com", ".cognitiveservices.azure.com", ".services.ai.azure.com")
"""Endings of the hosts of Azure OpenAI resources."""


class Dialect(Protocol):
    """The form of requests and answers of an endpoint."""

    @property
    def name(self) -> str:
        """Name of the dialect, as it is given to `dialect_for`."""

    @property
    def endpoints(self) -> Collection[str]:
        """OpenAI's endpoints whose calls it can express, such as `/v1/chat/completions`."""

    @property
    def models_path(self) -> str:
        """Path of the list of models, after the base URL; its `data` has objects with an `id`."""

    def path(self, endpoint: str) -> str:
        """Return the path after the base URL for calls of `endpoint`, which is one of `endpoints`."""

    def is_beside(self, path: str) -> bool:
        """Return whether `path` is beside `/v1`, not below it, if the base URL ends with `/v1`."""

    def headers(self, api_key: str | None) -> dict[str, str]:
        """Return the headers of each request. None: the endpoint needs no key."""

    def body(self, endpoint: str, body: Mapping[str, Any]) -> Body:
        """Return the body to send for OpenAI's `body`. Raises `InvalidRequest` for a field without a counterpart."""

    def cached_prefixes(self, body: Mapping[str, Any], prompt: Prompt) -> Sequence[CachedPrefix] | None:
        """Return the prefixes of a prompt of OpenAI's `body` that its provider is asked to cache, the shortest first.

        Each of them is found again only as a whole. None: the provider caches without being asked, and finds any prefix
        that prompts share. `prompt` is a text, token ids, or messages as they are sent.
        """

    def answer(self, answer: Body, created: int) -> Body:
        """Return OpenAI's body for an answer that came at the Unix second `created`; other objects unchanged."""

    def chunks(self, created: int) -> Callable[[Body], list[Body]]:
        """Return a function that turns the events of one stream, in order, into OpenAI's chunks."""

    def is_last(self, event: Mapping[str, Any]) -> bool:
        """Return whether `event` ends its stream. A stream may also end with `[DONE]`."""

    def error(self, error: Mapping[str, object]) -> dict[str, object]:
        """Return the error object of an answer in OpenAI's form: `message`, `type`, `param`, `code`."""

    def error_status(self, error: Mapping[str, object]) -> int | None:
        """Return the HTTP status of an error object, given as `error` returns it, that came with the status 200.

        Such an error comes within a stream, or instead of an answer. None: not known.
        """


@dataclass(frozen=True, slots=True)
class OpenAIDialect:
    """OpenAI's own form: bodies are sent and returned unchanged."""

    key_header: str | None = None
    """Header that carries the key alone, as Azure wants it. None: `Authorization: Bearer`."""
    classifies_below: bool = False
    """Whether its `/classify` is below its base URL, as at Jina, not beside `/v1`, as in vLLM and here."""

    name = "openai"
    endpoints = frozenset({CHAT_URL, COMPLETION_URL, EMBEDDINGS_URL, RESPONSES_URL}) | CLASSIFIER_URLS
    models_path = "/models"

    def path(self, endpoint: str) -> str:
        return endpoint.removeprefix("/v1")

    def is_beside(self, path: str) -> bool:
        return path == CLASSIFY_URL and not self.classifies_below

    def headers(self, api_key: str | None) -> dict[str, str]:
        if api_key is None:
            return {}
        return {"authorization": f"Bearer {api_key}"} if self.key_header is None else {self.key_header: api_key}

    def body(self, endpoint: str, body: Mapping[str, Any]) -> Body:
        return body if isinstance(body, dict) else dict(body)

    def cached_prefixes(self, body: Mapping[str, Any], prompt: Prompt) -> Sequence[CachedPrefix] | None:
        return None

    def answer(self, answer: Body, created: int) -> Body:
        return answer

    def chunks(self, created: int) -> Callable[[Body], list[Body]]:
        return lambda event: [event]

    def is_last(self, event: Mapping[str, Any]) -> bool:
        return False

    def error(self, error: Mapping[str, object]) -> dict[str, object]:
        return dict(error)

    def error_status(self, error: Mapping[str, object]) -> int | None:
        return status_of_kind(error)


@dataclass(frozen=True, slots=True)
class AnthropicDialect:
    """Anthropic's Messages API. A stream always ends with a chunk that has `usage`."""

    name = "anthropic"
    endpoints = frozenset({CHAT_URL})
    models_path = "/models?limit=1000"  # by default a page has 20

    def path(self, endpoint: str) -> str:
        return "/messages"

    def is_beside(self, path: str) -> bool:
        return False

    def headers(self, api_key: str | None) -> dict[str, str]:
        key = {} if api_key is None else {"x-api-key": api_key}
        return {"anthropic-version": _ANTHROPIC_VERSION, **key}

    def body(self, endpoint: str, body: Mapping[str, Any]) -> Body:
        return messages_body(body)

    def cached_prefixes(self, body: Mapping[str, Any], prompt: Prompt) -> Sequence[CachedPrefix] | None:
        return cached_prefixes(body, cast("Sequence[Mapping[str, Any]]", prompt))

    def answer(self, answer: Body, created: int) -> Body:
        return openai_body(answer, created) if answer.get("type") == "message" else answer

    def chunks(self, created: int) -> Callable[[Body], list[Body]]:
        return MessageChunks(created).of

    def is_last(self, event: Mapping[str, Any]) -> bool:
        return event.get("type") == "message_stop"

    def error(self, error: Mapping[str, object]) -> dict[str, object]:
        return openai_error(error)

    def error_status(self, error: Mapping[str, object]) -> int | None:
        return status_of_error(error)


OPENAI = OpenAIDialect()
ANTHROPIC = AnthropicDialect()
DIALECTS = (OPENAI.name, ANTHROPIC.name)


def dialect_for(name: str | None, address: str) -> Dialect:
    """Return the dialect called `name` or, if that is None, the dialect of an endpoint with this base URL.

    That is Anthropic's for Anthropic's own host, and OpenAI's for all others. Raises `InputError` for an unknown name.
    """
    host = (urlsplit(address).hostname or "").lower()
    if name is None:
        name = ANTHROPIC.name if host == _ANTHROPIC_HOST else OPENAI.name
    if name == ANTHROPIC.name:
        return ANTHROPIC
    if name == OPENAI.name:
        if host == _JINA_HOST:
            return OpenAIDialect(classifies_below=True)
        return OpenAIDialect("api-key") if is_azure(host) else OPENAI
    raise InputError(f"dialect={name!r}: must be one of {', '.join(DIALECTS)}")


def is_azure(host: str) -> bool:
    """Return whether `host` is that of an Azure OpenAI resource."""
    return host.lower().endswith(_AZURE_DOMAINS)


def require_endpoint(dialect: Dialect, endpoint: str) -> None:
    """Raise `InvalidRequest` unless calls of `endpoint` can be expressed in `dialect`."""
    if endpoint in dialect.endpoints:
        return
    hint = "; --chat makes plain prompts into chats" if endpoint == COMPLETION_URL else ""
    raise InvalidRequest(
        f"{endpoint} has no counterpart in the dialect {dialect.name}, which answers "
        f"{', '.join(sorted(dialect.endpoints))}{hint}",
        code="unsupported_url",
    )
