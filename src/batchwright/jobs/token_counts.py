"""Tokens of prompts, counted before anything is computed, or estimated where that is as good."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from batchwright.errors import BatchwrightError, InvalidRequest
from batchwright.request import Prompt
from batchwright.wire.chats import Chat
from batchwright.wire.requests import WHOLE_LENGTH

if TYPE_CHECKING:
    from batchwright.encoder.texts import TextTokenizer

_ALL_COUNTED = 4096
"""Prompts of a job whose tokens are all counted. Of a larger one, `_COUNTED` are, and others estimated from bytes."""
_COUNTED = 1024
_ROLES_KNOWN = 256
"""Sequences of roles that are remembered."""
BYTES_OF_A_TOKEN = 4
"""Bytes of a token id, and of English text that are about one token, for models whose tokenizer is elsewhere."""
_LARGEST_ID = 2 ** (8 * BYTES_OF_A_TOKEN) - 1
_SPECIAL_TOKENS = 8
"""Most tokens that an encoder puts around a text."""


class TokenCount(NamedTuple):
    """Tokens of a prompt."""

    tokens: int
    is_estimate: bool = False


def token_ids(prompt: Prompt) -> Sequence[int] | None:
    """Return the token ids that a prompt consists of; None if it is text or a chat."""
    return cast("Sequence[int]", prompt) if prompt and isinstance(prompt[0], int) else None


def bytes_of(prompt: Prompt) -> bytes:
    """Return a text or token ids as bytes, and of a chat all that is said in it."""
    if isinstance(prompt, str):
        return prompt.encode(errors="replace")
    if (ids := token_ids(prompt)) is not None:
        return array("I", [each & _LARGEST_ID for each in ids]).tobytes()
    said = (_content(cast("Mapping[str, Any]", message).get("content")) for message in prompt)
    return "".join(said).encode(errors="replace")


def _content(content: object) -> str:
    """Return the text of the content of a message, or of its parts; what is no text stays as it is written."""
    if isinstance(content, Sequence) and not isinstance(content, str):
        return "".join(map(_content, content))
    if isinstance(content, Mapping):
        for name in ("text", "content"):
            if name in content:
                return _content(content[name])
    return str(content)


def uncounted(prompt: Prompt, text: bytes) -> TokenCount:
    """Return the tokens of a prompt for a model whose tokenizer is elsewhere."""
    if (ids := token_ids(prompt)) is not None:
        return TokenCount(len(ids))
    return TokenCount(-(-len(text) // BYTES_OF_A_TOKEN), is_estimate=bool(text))


class _Counted:
    """Bytes and tokens of texts that were counted, from which the tokens of others are estimated."""

    def __init__(self, prompts: int) -> None:
        """`prompts`: about those of the job."""
        self._most = _ALL_COUNTED if prompts <= _ALL_COUNTED else _COUNTED
        self._texts = self._bytes = self._tokens = 0

    def add(self, text: bytes, tokens: int) -> None:
        self._texts += 1
        self._bytes += len(text)
        self._tokens += tokens

    def estimate(self, text: bytes) -> TokenCount | None:
        """The tokens of a text; None while they are to be counted, as too few were."""
        if self._texts < self._most or not self._bytes:
            return None
        return TokenCount(round(len(text) * self._tokens / self._bytes), is_estimate=True)


class PromptCounter:
    """Counts the tokens of prompts of a model that generates, or estimates them where there are many.

    `tokenizer`: that of the model; None if it is elsewhere. `context`: the most tokens of a prompt and its answer, if
    that is known. `lines`: those of the job.
    """

    def __init__(self, tokenizer: Any | None, context: int | None, lines: int) -> None:
        self._tokenizer, self._context = tokenizer, context
        self._counted = _Counted(lines)
        template = getattr(tokenizer, "chat_template", None)
        self._chats = None if template is None else _ChatTexts(template.render)

    def text_of(self, prompt: Prompt) -> bytes:
        """The text of a prompt, or its token ids, as bytes. Raises `InvalidRequest` for a chat that is refused."""
        if self._chats is None or isinstance(prompt, str) or token_ids(prompt) is not None:
            return bytes_of(prompt)
        return self._chats.text_of(cast("Chat", prompt)).encode(errors="replace")

    def count(self, prompt: Prompt, text: bytes, limit: int) -> TokenCount:
        """The tokens of a prompt, which are no estimate if with an answer of `limit` it may exceed the context.

        Raises `InvalidRequest` for one that the tokenizer refuses.
        """
        if self._tokenizer is None:
            return uncounted(prompt, text)
        # The tokenizer decides about an empty text, and checks ids.
        is_text = bool(text) and token_ids(prompt) is None
        fits = self._context is None or len(text) + limit < self._context
        if is_text and fits and (estimate := self._counted.estimate(text)) is not None:
            return estimate
        try:
            tokens = len(self._tokenizer.encode(prompt))
        except BatchwrightError:
            raise
        except Exception as error:  # a tokenizer is foreign code
            raise InvalidRequest(f"the tokenizer refuses the prompt: {error}", param="prompt") from error
        if is_text:
            self._counted.add(text, tokens)
        return TokenCount(tokens)

    def as_the_model_gets(self, prompt: Prompt) -> str | None:
        """The text of a prompt, chat template included; None if the model is elsewhere."""
        if self._tokenizer is None:
            return None
        text: str = self._tokenizer.decode(self._tokenizer.encode(prompt))
        return text


class TextCounter:
    """Counts the tokens of texts of an encoder for a job of `lines`, or estimates them where there are many."""

    def __init__(self, tokenizer: TextTokenizer, lines: int) -> None:
        self._tokenizer = tokenizer
        self._counted = _Counted(lines)

    def count(self, param: str, inputs: Sequence[Prompt], most_tokens: int | None) -> list[TokenCount]:
        """The tokens of the inputs in the field `param` of a line, cut to `most_tokens`, if that is not None.

        Raises what computing the line would raise for an input that is too long, or that the tokenizer refuses.
        """
        most = self._tokenizer.max_length if most_tokens == WHOLE_LENGTH else most_tokens
        self._tokenizer.require_room(most)
        counts = {place: self._estimated(each, most) for place, each in enumerate(inputs)}
        open_places = [place for place, count in counts.items() if count is None]
        found = self._tokenizer.encode_many([inputs[place] for place in open_places], most)
        for place, tokens in zip(open_places, found, strict=True):
            if isinstance(tokens, InvalidRequest):
                raise type(tokens)(f"{param}[{place}]: {tokens}", param=param) from tokens
            counts[place] = TokenCount(len(tokens))
            if isinstance(inputs[place], str) and (most is None or len(tokens) < most):
                self._counted.add(bytes_of(inputs[place]), len(tokens))
        return [count for count in counts.values() if count is not None]

    def _estimated(self, given: Prompt, most: int | None) -> TokenCount | None:
        """An estimate of the tokens of a text that is cut, or surely not too long; None if they are to be counted."""
        if not isinstance(given, str):
            return None
        text = bytes_of(given)
        if most is None and len(text) + _SPECIAL_TOKENS > self._tokenizer.max_length:
            return None
        estimate = self._counted.estimate(text)
        return estimate if estimate is None or most is None else estimate._replace(tokens=min(estimate.tokens, most))


class _ChatTexts:
    """Texts of chats. Those that differ in nothing but what is said are rendered once, around marks in its place.

    What a template leaves out of a text, such as spaces at its ends or thoughts of earlier answers, or refuses because
    of what it says, is not seen then.
    """

    def __init__(self, render: Callable[[Chat], str]) -> None:
        self._render = render
        self._around: dict[tuple[str, ...], list[str] | None] = {}
        """For each sequence of roles, what stands before, between and after the texts; None where that is not known."""

    def text_of(self, chat: Chat) -> str:
        """The text of a chat, up to where the answer begins. Raises `InvalidRequest` if the template refuses it."""
        if chat.tools or chat.options or chat.effort is not None or not all(map(_is_plain, chat)):
            return self._render(chat)
        roles = tuple(message["role"] for message in chat)
        if roles not in self._around:
            if len(self._around) >= _ROLES_KNOWN:
                return self._render(chat)
            self._around[roles] = self._parts(roles)
        if (parts := self._around[roles]) is None:
            return self._render(chat)
        contents = (message["content"] for message in chat)
        return parts[0] + "".join(text + after for text, after in zip(contents, parts[1:], strict=True))

    def _parts(self, roles: Sequence[str]) -> list[str] | None:
        marks = [f"<said {place}>" for place in range(len(roles))]
        try:
            rest = self._render(Chat({"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)))
        except InvalidRequest:
            return None
        parts = []
        for mark in marks:
            before, found, rest = rest.partition(mark)
            if not found or mark in rest:
                return None
            parts.append(before)
        return [*parts, rest]


def _is_plain(message: Mapping[str, Any]) -> bool:
    return len(message) == 2 and isinstance(message.get("content"), str) and "role" in message
