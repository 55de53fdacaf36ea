"""Conversion of text to token ids and back, by the model's own tokenizer and chat template."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

from batchwright.engine.chat_template import ChatTemplate
from batchwright.engine.long_texts import LongTexts
from batchwright.errors import ContextLengthExceeded, InvalidRequest, UnsupportedModel
from batchwright.request import Prompt
from batchwright.wire.tool_calls.formats import closes_thought, opens_thought

_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "spiece.model")


class Tokenizer:
    """The tokenizer saved with a model; without one, prompts must be token ids and outputs have no text.

    `context` is the most tokens that the model takes. A text that cannot fit is refused before all of it is tokenized:
    megabytes take seconds, for which other requests would have to wait.
    """

    def __init__(self, folder: Path, vocab_size: int, *, context: int | None = None) -> None:
        self._vocab_size = vocab_size
        self._context = context
        self._inner: Any = None
        if any((folder / name).exists() for name in _FILES):
            try:
                self._inner = _loaded(folder)
            except ModuleNotFoundError:
                raise
            except Exception as error:  # transformers and tokenizers raise all sorts of errors
                reason = " ".join(str(error).split())[:_REASON_SHOWN]
                raise UnsupportedModel(
                    f"{folder}: its tokenizer (tokenizer.json and the files beside it) is missing, damaged or of an "
                    f"unknown kind: copy or fetch the model again ({reason})"
                ) from error
        self._texts: dict[int, str] = {}
        """Cached texts of tokens: log-probabilities need up to 21 of them for each chosen token."""
        backend = getattr(self._inner, "backend_tokenizer", None)
        self._plain = None if backend is None else _plain(self._inner, backend)
        self._long_texts = None if backend is None else LongTexts(backend)
        starts = (getattr(self._inner, f"{name}_token_id", None) for name in ("bos", "eos"))
        self.first_token_id: int | None = next((each for each in starts if each is not None), None)
        """Token that stands before a text whose first token is to have a probability; None if there is none."""
        self.eos_token_ids = frozenset(token for token in _end_tokens(folder, self._inner) if token < vocab_size)
        has_template = getattr(self._inner, "chat_template", None) is not None
        self.chat_template = ChatTemplate(self._inner) if has_template else None
        added: Mapping[str, int] = {} if self.chat_template is None else self._inner.get_added_vocab()
        markers = frozenset() if self.chat_template is None else self.chat_template.markers
        self.markers = {text: added[text] for text in sorted(markers) if text in added}
        """Ids of the tokens that mark tool calls and thoughts in answers, and so are part of their text."""
        special = _special_ids(self._inner) if self.markers else frozenset()
        self._unsaid = special.difference(self.markers.values()) if special & {*self.markers.values()} else None
        """Special tokens that are not part of texts. None: all special tokens."""

    @property
    def context(self) -> int | None:
        """Most tokens that the model takes; None if not specified."""
        return self._context

    @property
    def inner(self) -> Any:
        """The transformers tokenizer, for callers that need more of it; None if the model has none."""
        return self._inner

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of `prompt`.

        Raises `InvalidRequest` if there are none, or ids that the model does not have, and `ContextLengthExceeded` for
        a text that is certain to have more tokens than `context`; the caller must check other lengths.
        """
        if not isinstance(prompt, str):
            ids = self._encode_list(prompt)
        elif self._inner is None:
            raise InvalidRequest("the model has no tokenizer: give the prompt as token ids", param="prompt")
        else:
            ids = self._tokenized(prompt)
        if not ids:
            raise InvalidRequest("prompt is empty: it gives no tokens", param="prompt")
        out_of_range = next((token for token in ids if not 0 <= token < self._vocab_size), None)
        if out_of_range is not None:
            raise InvalidRequest(
                f"prompt holds token id {out_of_range}: the model has ids 0 to {self._vocab_size - 1}", param="prompt"
            )
        return ids

    def encode_bare(self, text: str) -> list[int]:
        """Return the token ids of `text` without the tokens that the tokenizer adds to a text, such as a first token.

        Raises `InvalidRequest` without a tokenizer.
        """
        if self._inner is None:
            raise InvalidRequest("the model has no tokenizer: give the text as token ids", param="prompt")
        return self._tokenized(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids` without special tokens, except those that mark tool calls and thoughts."""
        if self._inner is None:
            return ""
        skip = self._unsaid is None
        if self._unsaid is not None:
            token_ids = [token for token in token_ids if token not in self._unsaid]
        text: str
        if self._plain is not None:
            text = self._plain.decode(token_ids, skip_special_tokens=skip)
        else:
            text = self._inner.decode(token_ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        return text

    def opens_thought(self, prompt: Sequence[int]) -> bool:
        """Return whether the prompt ends within a thought, which the answer continues."""
        marks = None if self.chat_template is None else self.chat_template.thought_marks
        return marks is not None and opens_thought(self._end(prompt), marks)

    def closes_thought(self, prompt: Sequence[int]) -> bool:
        """Return whether the prompt ends after the thought of the answer, which then has none of its own."""
        marks = None if self.chat_template is None else self.chat_template.thought_marks
        return marks is not None and closes_thought(self._end(prompt), marks)

    def _end(self, prompt: Sequence[int]) -> str:
        return str(self._inner.decode(prompt[-_END_TOKENS:]))

    def token_text(self, token_id: int) -> str:
        """Return the text of one token; for a special token, its name."""
        if self._inner is None:
            return ""
        text = self._texts.get(token_id)
        if text is None:
            self._texts[token_id] = text = str(self._inner.decode([token_id]))
        return text

    def as_json(self) -> str | None:
        """Return the tokenizer as the text of a `tokenizer.json`; None if it has no such form."""
        backend = getattr(self._inner, "backend_tokenizer", None)
        if backend is None:
            return None
        if backend.padding is not None or backend.truncation is not None:
            backend = copy(backend)  # which takes longer than all the rest
            backend.no_padding()
            backend.no_truncation()
        text: str = backend.to_str()
        return text

    def _encode_list(self, prompt: Sequence[Any]) -> list[int]:
        if not prompt or not isinstance(prompt[0], Mapping):
            return [int(token) for token in prompt]
        if self.chat_template is None:
            raise InvalidRequest("the model has no chat template: give the prompt as text", param="messages")
        text = self.chat_template.render(prompt)
        return self._tokenized(text, add_special_tokens=False)

    def _tokenized(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        least = None
        if self._context is not None and self._long_texts is not None:
            least = self._long_texts.least_tokens(text, self._context)
        if least is not None:
            raise ContextLengthExceeded(
                f"a prompt of {len(text):,} characters has at least {least:,} tokens, which exceed the context of "
                f"{self._context} tokens: shorten the prompt"
            )
        ids: list[int]
        if self._plain is not None:
            ids = self._plain.encode(text, add_special_tokens=add_special_tokens).ids
        else:
            ids = self._inner(text, verbose=False, add_special_tokens=add_special_tokens)["input_ids"]
        return ids


def _plain(tokenizer: Any, backend: Any) -> Any:
    """Return `backend` if `tokenizer` adds nothing to it, else None.

    For a short text, transformers' code around the backend takes three times as long as the backend itself.
    """
    from transformers import TokenizersBackend

    kind = type(tokenizer)
    if any(
        getattr(kind, name) is not getattr(TokenizersBackend, name) for name in ("__call__", "_encode_plus", "_decode")
    ):
        return None
    tokenizer("", verbose=False)  # turns off the backend's padding and truncation
    return backend


def _special_ids(tokenizer: Any) -> frozenset[int]:
    added = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    return frozenset(added.union(tokenizer.all_special_ids))


def _loaded(folder: Path) -> Any:
    """Return the tokenizer in a folder. Raises whatever transformers and tokenizers raise.

    transformers chooses the tokenizer's class by the folder's tokenizer config and the type of the model. It needs the
    class of the model's config, whose module takes more than a second to import, only if the folder names no class;
    where the choice is certain, it does not need torch.
    """
    try:
        named, model = (json.loads((folder / name).read_bytes()) for name in ("tokenizer_config.json", "config.json"))
    except (OSError, ValueError):
        named, model = {}, {}
    stated_class, model_type = named.get("tokenizer_class"), model.get("model_type")
    if "auto_map" not in named and "model_name" not in model and (stated_class, model_type) in _GENERIC:
        from transformers import TokenizersBackend

        return TokenizersBackend.from_pretrained(folder, local_files_only=True)
    from transformers import AutoTokenizer, PreTrainedConfig

    config = None
    if stated_class and "auto_map" not in named and model_type:
        fields: dict[str, Any] = {"name_or_path": str(folder)}
        fields |= {name: model[name] for name in ("model_type", "model_name", "tokenizer_class") if name in model}
        config = PreTrainedConfig(**fields)
    return AutoTokenizer.from_pretrained(folder, config=config, local_files_only=True)


def _end_tokens(folder: Path, tokenizer: Any) -> frozenset[int]:
    ends: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if path.exists():
            value = json.loads(path.read_text()).get("eos_token_id")
            ends.update(value if isinstance(value, list) else [] if value is None else [value])
            if ends:
                break
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ends.add(tokenizer.eos_token_id)
    return frozenset(ends)


_GENERIC = frozenset({("TokenizersBackend", "llama"), ("PreTrainedTokenizerFast", "llama")})
"""Classes that tokenizer configs name, and types of models, for which transformers takes `TokenizersBackend`."""
_END_TOKENS = 16
"""Number of last tokens of a prompt in which a mark of a thought is looked for."""
_REASON_SHOWN = 200
"""Most characters of a library's error message that are shown."""
_INCOMPLETE = "\ufffd"
_LONGEST_CHARACTER = 4
"""Most bytes of a UTF-8 character, so also the most tokens that it is spread over."""


class IncrementalDetokenizer:
    """Conversion of a growing list of tokens to the text that has become certain, without partial characters.

    A tokenizer decodes a token differently depending on the tokens before it (blanks, joined bytes), so the new text is
    the difference of two decodings that start at the same earlier token. Text that ends in an incomplete character is
    held back until the character is complete; bytes that can no longer become one are returned as U+FFFD.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._context = 0
        """Index of the first token to decode, so that the first undecided token is decoded in its context."""
        self._decided = 0
        """Number of tokens whose text has been returned."""
        self._open = False
        """Whether those tokens end with the beginning of a character, which has not been returned."""

    def push(self, tokens: Sequence[int]) -> str:
        """Append these tokens, and return the text that has become certain."""
        self._tokens.extend(tokens)
        known = self._decode(self._tokens[self._context : self._decided])
        given = len(known) - self._open
        text = self._decode(self._tokens[self._context :])
        end, is_open = len(self._tokens), False
        if text.endswith(_INCOMPLETE):
            if end - self._decided <= 2 * _LONGEST_CHARACTER:
                return ""
            end, text, is_open = self._settle(text)
        self._context, self._decided, self._open = self._decided, end, is_open
        return text[given:]

    def _settle(self, text: str) -> tuple[int, str, bool]:
        """Return where to cut, the text up to there, and whether its last token begins a character that is not in it.

        The cut is before the tokens that do not form a character yet or, if every token ends within a character, in the
        last one.
        """
        for held in range(1, _LONGEST_CHARACTER):
            end = len(self._tokens) - held
            shorter = self._decode(self._tokens[self._context : end])
            if not shorter.endswith(_INCOMPLETE):
                return end, shorter, False
        whole = text[: -len(_INCOMPLETE)]
        if whole.endswith(_INCOMPLETE):  # bytes that are neither a character nor the beginning of one
            return len(self._tokens), text, False
        return len(self._tokens), whole, True
