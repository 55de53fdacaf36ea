"""Text to token ids and back, through the model's own tokenizer and chat template."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from batchwright.engine.long_texts import LongTexts
from batchwright.errors import ContextLengthExceeded, InvalidRequest
from batchwright.request import Prompt

_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "spiece.model")


class Tokenizer:
    """The tokenizer saved with a model; without one, prompts must be token ids and outputs have no text.

    `context`: tokens that the model takes at most. A text that cannot fit is refused before all of it is tokenized:
    megabytes take seconds, for which others would wait.
    """

    def __init__(self, folder: Path, vocab_size: int, *, context: int | None = None) -> None:
        self._vocab_size = vocab_size
        self._context = context
        self._inner: Any = None
        if any((folder / name).exists() for name in _FILES):
            from transformers import AutoTokenizer

            self._inner = AutoTokenizer.from_pretrained(folder, config=_named_by(folder), local_files_only=True)
        self._texts: dict[int, str] = {}
        """Of tokens that were asked for: log-probabilities name 21 of them for each one that is chosen."""
        backend = getattr(self._inner, "backend_tokenizer", None)
        self._plain = None if backend is None else _plain(self._inner, backend)
        self._long_texts = None if backend is None else LongTexts(backend)
        self.eos_token_ids = frozenset(token for token in _end_tokens(folder, self._inner) if token < vocab_size)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of `prompt`.

        Raises `InvalidRequest` when it gives none, or ids that the model does not have; `ContextLengthExceeded` when
        it is a text of more tokens than `context`; of a list of messages, and of token ids, whoever computes says it.
        """
        ids = self._encode_text(prompt) if isinstance(prompt, str) else self._encode_list(prompt)
        if not ids:
            raise InvalidRequest("prompt is empty: it gives no tokens", param="prompt")
        out_of_range = next((token for token in ids if not 0 <= token < self._vocab_size), None)
        if out_of_range is not None:
            raise InvalidRequest(
                f"prompt holds token id {out_of_range}: the model has ids 0 to {self._vocab_size - 1}", param="prompt"
            )
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids`, special tokens left out."""
        if self._inner is None:
            return ""
        text: str
        if self._plain is not None:
            text = self._plain.decode(token_ids, skip_special_tokens=True)
        else:
            text = self._inner.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def token_text(self, token_id: int) -> str:
        """Text of one token, special ones shown by name."""
        if self._inner is None:
            return ""
        text = self._texts.get(token_id)
        if text is None:
            self._texts[token_id] = text = str(self._inner.decode([token_id]))
        return text

    def _encode_text(self, prompt: str) -> list[int]:
        if self._inner is None:
            raise InvalidRequest("the model has no tokenizer: give the prompt as token ids", param="prompt")
        return self._tokenized(prompt)

    def _encode_list(self, prompt: Sequence[Any]) -> list[int]:
        if not prompt or not isinstance(prompt[0], Mapping):
            return [int(token) for token in prompt]
        if self._inner is None or self._inner.chat_template is None:
            raise InvalidRequest("the model has no chat template: give the prompt as text", param="messages")
        try:
            messages = _with_known_roles(prompt, self._inner.get_chat_template())
            text = self._inner.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # a template is a program of the model's maker and may raise anything
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
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
    """`backend` where `tokenizer` adds nothing to what that does, else None.

    For a short text, what transformers does around its backend takes three times as long as that itself.
    """
    from transformers import TokenizersBackend

    kind = type(tokenizer)
    if any(
        getattr(kind, name) is not getattr(TokenizersBackend, name) for name in ("__call__", "_encode_plus", "_decode")
    ):
        return None
    tokenizer("", verbose=False)  # leaves the backend as it is to be: without padding and truncation
    return backend


def _with_known_roles(messages: Sequence[Any], template: str) -> list[dict[str, Any]]:
    """Messages in which `developer`, the later name of `system`, is called so where the template does not name it."""
    known = "'developer'" in template or '"developer"' in template
    return [
        dict(message) if known or message["role"] != "developer" else {**message, "role": "system"}
        for message in messages
    ]


def _named_by(folder: Path) -> Any:
    """A config of the model that says no more than its type, or None for the whole one.

    transformers chooses the tokenizer's class by the folder's own word and the type of the model. Only where the folder
    does not name the class is that of the model's config asked, whose module takes more than a second to import.
    """
    try:
        named, model = (json.loads((folder / name).read_bytes()) for name in ("tokenizer_config.json", "config.json"))
    except (OSError, ValueError):
        return None
    if not named.get("tokenizer_class") or "auto_map" in named or not model.get("model_type"):
        return None
    from transformers import PreTrainedConfig

    told: dict[str, Any] = {"name_or_path": str(folder)}
    told |= {name: model[name] for name in ("model_type", "model_name", "tokenizer_class") if name in model}
    return PreTrainedConfig(**told)


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


_INCOMPLETE = "\ufffd"
_LONGEST_CHARACTER = 4
"""Bytes of a UTF-8 character, so also the most tokens that one is spread over."""


class IncrementalDetokenizer:
    """Feed it tokens, get the text that has become certain.

    A tokenizer decodes the same token differently after others (blanks, joined bytes), so the new text is the
    difference of two decodings that start at the same earlier token. Text that ends in an incomplete character is
    held back until the character is complete; bytes that can no longer become one are let go as U+FFFD.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._context = 0
        """Decoding starts here, so that the first undecided token is decoded in its context."""
        self._decided = 0
        """Text of the tokens before this has been given out,"""
        self._open = False
        """but for a last character that they only begin."""

    def push(self, tokens: Sequence[int]) -> str:
        """The text made certain by these tokens, which follow those given before."""
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
        """Where to cut, the text up to there, and whether its last token begins a character that is not in it.

        The cut is before the tokens that are no character yet; or, when every token ends within a character, within
        the last one.
        """
        for held in range(1, _LONGEST_CHARACTER):
            end = len(self._tokens) - held
            shorter = self._decode(self._tokens[self._context : end])
            if not shorter.endswith(_INCOMPLETE):
                return end, shorter, False
        whole = text[: -len(_INCOMPLETE)]
        if whole.endswith(_INCOMPLETE):  # bytes that are no character, not the beginning of one
            return len(self._tokens), text, False
        return len(self._tokens), whole, True
